"""broadcast in all its forms."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import horovod.torch as hvd
from tests.effort import examples
from tests.ranks import RankPool
from tests.torch.reference import Case, every_dtype, layouts, shapes

FORMS = {
    "broadcast": hvd.broadcast,
    "broadcast_async": lambda *a: hvd.synchronize(hvd.broadcast_async(*a)),
    "broadcast_": hvd.broadcast_,
    "broadcast_async_": lambda *a: hvd.synchronize(hvd.broadcast_async_(*a)),
}


def _broadcast(form: str, case: Case, root: int, name: str | None) -> torch.Tensor:
    tensor = case.tensor(hvd.rank())
    before = tensor.clone()
    result = FORMS[form](tensor, root, name)
    if form.endswith("_"):
        assert result is tensor
    else:
        assert torch.equal(tensor, before)
    return result.clone()


@given(
    dtype=every_dtype,
    shape=shapes,
    layout=layouts,
    form=st.sampled_from(sorted(FORMS)),
    root=st.integers(0, 2),
    name=st.none() | st.text(),
)
@settings(max_examples=examples(150), deadline=None)
def test_everybody_gets_the_roots_tensor(pool3: RankPool, dtype, shape, layout, form, root, name):
    case = Case(dtype, shape, layout, seed=3)
    for result in pool3.run(_broadcast, form, case, root, name):
        torch.testing.assert_close(result, case.tensor(root), rtol=0, atol=0)


def _into_parameters() -> float:
    parameter = torch.nn.Parameter(torch.full((2, 3), float(hvd.rank())))
    assert hvd.broadcast_(parameter.t(), 1) is not None
    return float(parameter.detach().sum())


def test_a_transposed_view_of_a_parameter_in_place(pool2: RankPool):
    assert pool2.run(_into_parameters) == [6.0, 6.0]
