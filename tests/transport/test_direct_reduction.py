"""How several tensors are shared out among ranks, and what of their memory a block is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.transport import arithmetic
from horovod.transport.arithmetic import tensor_operands
from horovod.transport.network.direct_reduction import Memory, share_blocks
from tests.effort import examples

counts = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 3_000)), min_size=1, max_size=6)
widths = st.sampled_from([1, 2, 4, 8, 16])
ranks = st.integers(1, 12)
blocks = st.one_of(st.integers(1, 300), st.integers(1, 20_000))


@settings(max_examples=examples(200), deadline=None)
@given(counts, widths, ranks, blocks)
def test_every_element_is_in_one_block_in_order(
    lengths: list[int], width: int, size: int, block: int
):
    plan = share_blocks(lengths, width, size, block)
    assert len(plan) == size
    elements = [
        (part.tensor, part.start + offset)
        for shares in plan
        for each in shares
        for part in each.spans
        for offset in range(part.elements)
    ]
    assert elements == [(t, e) for t, length in enumerate(lengths) for e in range(length)]


@settings(max_examples=examples(200), deadline=None)
@given(counts, widths, ranks, blocks)
def test_blocks_say_what_they_hold_and_keep_to_the_limit(
    lengths: list[int], width: int, size: int, block: int
):
    for shares in share_blocks(lengths, width, size, block):
        for each in shares:
            held = [part.elements for part in each.spans]
            assert min(held) > 0
            assert each.edges == [sum(held[:place]) for place in range(len(held) + 1)]
            assert each.nbytes == sum(held) * width
            assert each.nbytes <= max(block, width)


@given(counts, widths, ranks, blocks)
def test_nobody_gets_more_than_its_share(lengths: list[int], width: int, size: int, block: int):
    """Shares end at cache lines, so that is how much more than an equal share one may be."""
    line = max(1, 64 // width)
    for shares in share_blocks(lengths, width, size, block):
        most = -(-sum(lengths) // size)
        assert sum(each.edges[-1] for each in shares) < most + line


@pytest.mark.parametrize("own", [True, False], ids=["own memory", "by torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64])
def test_buffers_and_operands_are_the_tensors_memory(
    dtype: torch.dtype, own: bool, monkeypatch: pytest.MonkeyPatch
):
    if not own:
        monkeypatch.setattr(arithmetic, "_all_memory", lambda _: None)
    tensors = [
        torch.arange(7).view(7).to(dtype),
        torch.ones(2, 5).to(dtype),
        torch.ones(1).to(dtype),
    ]
    memory = Memory(tensors)
    plan = share_blocks([7, 10, 1], dtype.itemsize, 2, 48)
    content = b"".join(tensor.view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
    found = b""
    for block in (block for shares in plan for block in shares):
        buffers = memory.buffers(block)
        assert sum(len(buffer) for buffer in buffers) == block.nbytes
        found += b"".join(np.asarray(buffer).tobytes() for buffer in buffers)
        for operand, part in zip(memory.operands(block), block.spans, strict=True):
            assert len(operand) == part.elements
            operand *= 0
    assert found == content
    assert not any(tensor.any() for tensor in tensors), "operands were copies"
    for operand in tensor_operands(tensors):
        operand += 1
    assert all((tensor == 1).all() for tensor in tensors)
