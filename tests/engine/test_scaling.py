"""Average and scale factors, without any processes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from horovod.common.reduce_op import ReduceOp
from horovod.engine.collective import Reduction
from horovod.engine.execution.scaling import finish_, identity_like, scale_, sum_and_scale


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1), st.floats(-3, 3))
def test_integers_scale_in_double_precision_and_truncate(values, factor):
    tensor = torch.tensor(values, dtype=torch.int64)
    scale_(tensor, factor)
    assert tensor.tolist() == [int(value * factor) for value in values]


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1), st.integers(1, 200))
def test_integer_average_is_exact_division_toward_zero(values, size):
    tensor = torch.tensor(values, dtype=torch.int64)
    finish_(tensor, Reduction(ReduceOp.AVERAGE), size)
    assert tensor.tolist() == [abs(value) // size * (1 if value >= 0 else -1) for value in values]


def test_an_average_is_a_scaled_sum():
    assert sum_and_scale(Reduction(ReduceOp.AVERAGE, 1.0, 3.0), 4) == (ReduceOp.SUM, 0.75)
    assert sum_and_scale(Reduction(ReduceOp.MAX, 1.0, 3.0), 4) == (ReduceOp.MAX, 3.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.uint8, torch.bool])
@pytest.mark.parametrize(
    ("op", "combine"),
    [
        (ReduceOp.SUM, torch.add),
        (ReduceOp.PRODUCT, torch.mul),
        (ReduceOp.MIN, torch.minimum),
        (ReduceOp.MAX, torch.maximum),
    ],
)
def test_what_a_joined_rank_contributes_changes_nothing(dtype, op, combine):
    values = torch.tensor([0, 1, 100], dtype=dtype)
    nothing = torch.full((3,), identity_like(dtype, op), dtype=dtype)
    assert torch.equal(combine(values, nothing), values)
