"""Gradients of the collectives, by upstream's conventions (which are not the adjoints)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import horovod.torch as hvd
from tests.ranks import RankPool

SIZE = 3


def _gradients(function: Any, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """The gradients of function's results, weighted by 1, 2, ... on rank 0, 10 times on rank 1."""
    inputs = [torch.ones(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    results = function(*inputs)
    weight = 10.0 ** hvd.rank()
    loss = sum(
        (weight * torch.arange(1.0, 1 + r.numel(), dtype=r.dtype).view(r.shape) * r).sum()
        for r in results
    )
    loss.backward()
    return [tensor.grad for tensor in inputs]


def _allreduce(options: dict[str, Any]) -> list[torch.Tensor]:
    return _gradients(lambda x: [hvd.allreduce(x, name="x", **options)], (2, 2))


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, 111 / SIZE),
        ({"op": hvd.Average}, 111 / SIZE),
        ({"op": hvd.Sum}, 111),
        ({"op": hvd.Sum, "prescale_factor": 2.0, "postscale_factor": 0.25}, 55.5),
        ({"op": hvd.Sum, "compression": hvd.Compression.fp16}, 111),
    ],
)
def test_allreduce(pool3: RankPool, options: dict[str, Any], factor: float):
    expected = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64) * factor
    for (gradient,) in pool3.run(_allreduce, options):
        torch.testing.assert_close(gradient, expected)


def _grouped_allreduce() -> list[torch.Tensor]:
    counter = torch.tensor([1])

    def reduce(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        x, count, y = hvd.grouped_allreduce([x, counter, y], op=hvd.Sum)
        assert int(count) == SIZE
        assert not count.requires_grad
        return [x, y]

    return _gradients(reduce, (2,), (1,))


def test_grouped_allreduce_with_an_integer_member(pool3: RankPool):
    for first, second in pool3.run(_grouped_allreduce):
        assert first.tolist() == [111.0, 222.0]
        assert second.tolist() == [111.0]


def _unused_member() -> list[list[float]]:
    x, y = (torch.ones(1, requires_grad=True) for _ in range(2))
    reduced, _ = hvd.grouped_allreduce([x, y], op=hvd.Sum)
    reduced.sum().backward()
    return [x.grad.tolist(), y.grad.tolist()]


def test_a_member_of_a_group_that_the_loss_does_not_use(pool2: RankPool):
    assert pool2.run(_unused_member) == [[[2.0], [0.0]]] * 2


def _allgather(grouped: bool) -> list[list[float]]:
    rows = hvd.rank() + 1

    def gather(x: torch.Tensor, y: torch.Tensor) -> Any:
        if grouped:
            return hvd.grouped_allgather([x, y], name="pair")
        return [hvd.allgather(x, name="one"), hvd.allgather(y)]

    return [g.flatten().tolist() for g in _gradients(gather, (rows,), (1, 2))]


@pytest.mark.parametrize("grouped", [False, True])
def test_allgather_averages_and_keeps_own_rows(pool3: RankPool, grouped: bool):
    for rank, (uneven, even) in enumerate(pool3.run(_allgather, grouped)):
        first = [1.0, 2.0, 4.0][rank]
        assert uneven == pytest.approx([37 * (first + row) for row in range(rank + 1)])
        assert even == pytest.approx([37 * (2 * rank + 1.0), 37 * (2 * rank + 2.0)])


def _broadcast() -> list[float]:
    (gradient,) = _gradients(lambda x: [hvd.broadcast(x, 1, name="b")], (2,))
    return gradient.tolist()


def test_broadcast_averages_on_the_root(pool3: RankPool):
    assert pool3.run(_broadcast) == [[0.0, 0.0], pytest.approx([37.0, 74.0]), [0.0, 0.0]]


def _alltoall(unsent: int) -> list[float]:
    splits = [1, 2, 0]
    (gradient,) = _gradients(lambda x: [hvd.alltoall(x, splits)[0]], (3 + unsent,))
    return gradient.tolist()


@pytest.mark.parametrize("unsent", [0, 2])
def test_alltoall_sends_gradients_back(pool3: RankPool, unsent: int):
    nothing = [0.0] * unsent
    assert pool3.run(_alltoall, unsent) == [
        [1.0, 10.0, 20.0, *nothing],
        [2.0, 30.0, 40.0, *nothing],
        [3.0, 50.0, 60.0, *nothing],
    ]


def _alltoall_without_splits() -> list[float]:
    (gradient,) = _gradients(lambda x: [hvd.alltoall(x)], (3,))
    return gradient.tolist()


def test_alltoall_without_splits(pool3: RankPool):
    assert pool3.run(_alltoall_without_splits) == [[n, 10.0 * n, 100.0 * n] for n in (1, 2, 3)]


def _reducescatter(options: dict[str, Any], grouped: bool) -> list[float]:
    def scatter(x: torch.Tensor) -> Any:
        if grouped:
            return hvd.grouped_reducescatter([x], **options)
        return [hvd.reducescatter(x, **options)]

    (gradient,) = _gradients(scatter, (4,))
    return gradient.tolist()


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, 1.0),
        ({"op": hvd.Sum}, 3.0),
        ({"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 4.0}, 6.0),
        ({"op": hvd.Average, "prescale_factor": 0.5}, 0.5),
    ],
)
def test_reducescatter_gathers(pool3: RankPool, options, factor, grouped):
    gathered = [1.0, 2.0, 10.0, 100.0]  # two rows for rank 0
    expected = [[factor * value for value in gathered]] * 3
    assert pool3.run(_reducescatter, options, grouped) == expected


def _second_derivative() -> float:
    x = torch.tensor([3.0], requires_grad=True)
    loss = hvd.allreduce(x**3, op=hvd.Average).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    gradient.sum().backward()
    return float(x.grad)


def test_second_derivatives(pool2: RankPool):
    assert pool2.run(_second_derivative) == [18.0, 18.0]


def _without_gradient() -> list[bool]:
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        quiet = hvd.allreduce(x)
    return [
        quiet.requires_grad,
        hvd.synchronize(hvd.allreduce_async(x)).requires_grad,
        hvd.allreduce(torch.ones(2)).requires_grad,
        hvd.allreduce(x).requires_grad,
    ]


def test_only_what_needs_a_gradient_is_recorded(pool2: RankPool):
    assert pool2.run(_without_gradient) == [[False, False, False, True]] * 2
