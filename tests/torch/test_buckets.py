"""A bucket by itself: what can be reduced as it is, what was changed meanwhile, how it ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from horovod.torch.gradients.buckets import Bucket


def _bucket(*shapes: tuple[int, ...]) -> Bucket:
    params = [Parameter(torch.zeros(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.ones_like(param)
    return Bucket("bucket", [(f"p{index}", param) for index, param in enumerate(params)])


def _first(bucket: Bucket) -> Any:
    return bucket.params[0][1]


def test_gradients_are_reduced_where_they_are():
    one, several = _bucket((2, 3)), _bucket((2, 3), (4,))
    (flat,) = one.gradients() or []
    assert flat.shape == (6,)
    assert flat.data_ptr() == _first(one).grad.data_ptr()
    found = several.gradients() or []
    assert [each.data_ptr() for each in found] == [p.grad.data_ptr() for _, p in several.params]


def _missing(param: Any) -> None:
    param.grad = None


def _sparse(param: Any) -> None:
    param.grad = param.grad.to_sparse()


def _of_another_type(param: Any) -> None:
    param.data = param.data.double()
    param.grad = torch.ones(2, 3, dtype=torch.float64)


def _laid_out_otherwise(param: Any) -> None:
    param.grad = torch.ones(3, 2).t()


def _with_a_graph(param: Any) -> None:
    param.grad.requires_grad_()


def _frozen(param: Any) -> None:
    param.requires_grad_(False)


@pytest.mark.parametrize(
    "change",
    [_missing, _sparse, _of_another_type, _laid_out_otherwise, _with_a_graph, _frozen],
)
def test_gradients_that_cannot_be_reduced_as_they_are(change: Any):
    bucket = _bucket((2, 3), (4,))
    change(_first(bucket))
    assert bucket.gradients() is None


@pytest.mark.parametrize("kind", ["types", "layouts"])
def test_parameters_that_differ_have_no_common_type(kind: str):
    other = torch.zeros(2, dtype=torch.float64) if kind == "types" else torch.zeros(2, 3).t()
    params = [("a", Parameter(torch.zeros(2))), ("b", Parameter(other))]
    assert Bucket("bucket", params[:1]).dtype is torch.float32
    assert Bucket("bucket", params).dtype is None


def test_a_gradient_that_the_program_changes_meanwhile():
    bucket = _bucket((2, 3), (4,))
    bucket.watch()
    for gradient in bucket.gradients() or []:
        gradient.mul_(2)  # the engine's changes do not count
    bucket.check_unchanged()
    _first(bucket).grad.mul_(2)
    with pytest.raises(RuntimeError, match="the gradient of 'p0' was changed between"):
        bucket.check_unchanged()


def test_everything_ends_and_the_first_failure_is_told():
    bucket = _bucket((2,))
    bucket.started, bucket.awaited = True, 0
    ended: list[str] = []

    def finish(name: str, fails: bool) -> None:
        ended.append(name)
        if fails:
            raise ValueError(name)

    for name, fails in (("a", False), ("b", True), ("c", True), ("d", False)):
        bucket.finishers.append(lambda name=name, fails=fails: finish(name, fails))
    assert str(bucket.settle()) == "b"
    assert ended == ["a", "b", "c", "d"]
    assert (bucket.started, bucket.awaited, bucket.finishers) == (False, 1, [])
    assert bucket.settle() is None
