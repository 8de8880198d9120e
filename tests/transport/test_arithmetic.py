"""A process's own memory as arrays by address."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from horovod.transport.arithmetic import arrays_at
from tests.transport.cases import DTYPES

HALF = (torch.float16, torch.bfloat16)  # on which tensors do better


@given(
    dtype=st.sampled_from([dtype for dtype in DTYPES.values() if dtype not in HALF]),
    spans=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 10)), min_size=1, max_size=5),
)
def test_arrays_are_the_tensor(dtype: torch.dtype, spans: list[tuple[int, int]]):
    tensor = torch.arange(100).to(dtype)
    addresses = [tensor.data_ptr() + start * dtype.itemsize for start, _ in spans]
    arrays = arrays_at(dtype, addresses, [count for _, count in spans])
    assert arrays is not None
    expected = tensor.clone()
    for (start, count), array in zip(spans, arrays, strict=True):
        np.testing.assert_array_equal(array, tensor[start : start + count].numpy())
        assert array.flags.aligned
        array[:] = 1
        expected[start : start + count] = 1
    assert torch.equal(tensor, expected)


@pytest.mark.parametrize("dtype", HALF)
def test_no_arrays_of_what_tensors_do_better(dtype: torch.dtype):
    assert arrays_at(dtype, [torch.ones(3, dtype=dtype).data_ptr()], [3]) is None


def test_no_arrays_at_odd_addresses():
    memory = bytearray(41)
    tensor = torch.frombuffer(memory, dtype=torch.float32, offset=1, count=10)
    assert arrays_at(torch.float32, [tensor.data_ptr()], [10]) is None


def test_no_arrays_beyond_what_processes_are_given():
    assert arrays_at(torch.float32, [(1 << 48) - 4], [1]) is not None
    assert arrays_at(torch.float32, [(1 << 48) - 4], [2]) is None
    assert arrays_at(torch.float32, [1 << 52], [1]) is None
