"""Cutting parameters into slices: every element has one owner, and owners have equal shares."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.torch.optimizers.shards import GRAIN, Slice, cut, deal_out
from tests.effort import examples


@settings(max_examples=examples(200), deadline=None)
@given(counts=st.lists(st.integers(0, 1000), max_size=12), size=st.integers(1, 9))
def test_every_element_has_one_owner_and_shares_are_equal(counts: list[int], size: int):
    params = [torch.nn.Parameter(torch.empty(count)) for count in counts]
    slices = cut(params, size)
    assert [piece.owner for piece in slices] == sorted(piece.owner for piece in slices)
    for param in params:
        pieces = [piece for piece in slices if piece.param is param]
        edges = [0, *(piece.stop for piece in pieces)]
        assert [piece.start for piece in pieces] == edges[:-1]
        assert edges[-1] == param.numel()
        assert all(edge % GRAIN == 0 for edge in edges[1:-1])
        assert len({piece.owner for piece in pieces}) == len(pieces)
    for owner in range(size):
        share = sum(piece.stop - piece.start for piece in slices if piece.owner == owner)
        assert abs(share - sum(counts) / size) <= GRAIN + 1


@settings(max_examples=examples(200), deadline=None)
@given(
    counts=st.lists(st.lists(st.integers(0, 1000), max_size=8), min_size=1, max_size=3),
    size=st.integers(1, 9),
)
def test_whole_parameters_are_dealt_out_evenly(counts: list[list[int]], size: int):
    loads = [0] * size
    largest = 0
    for group in counts:
        params = [torch.nn.Parameter(torch.empty(count)) for count in group]
        before = list(loads)
        slices = deal_out(params, loads)
        assert sorted(map(id, (piece.param for piece in slices))) == sorted(
            id(param) for param in params if param.numel()
        )
        assert all(piece.is_whole for piece in slices)
        for owner in range(size):
            mine = sum(piece.param.nbytes for piece in slices if piece.owner == owner)
            assert loads[owner] == before[owner] + mine
        # Who gets a parameter has least, so nobody is ahead by more than one of them.
        largest = max([largest, *(param.nbytes for param in params)])
        assert max(loads) - min(loads) <= largest


def test_slices_are_views_in_the_order_of_memory():
    param = torch.nn.Parameter(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last))
    piece = Slice(param, 64, 192, 0)
    view = piece.of(param)
    assert view.data_ptr() == param.data_ptr() + 64 * 4
    assert piece.bytes_of(param).data_ptr() == view.data_ptr()
    state = torch.randn(2, 3, 8, 8)  # another layout
    expected = state.permute(0, 2, 3, 1).reshape(-1)[64:192]
    assert torch.equal(piece.of_state(state), expected)
    assert piece.of_state(state).untyped_storage().nbytes() == 128 * 4
    steps = torch.tensor(3.0)
    assert piece.of_state(steps) is steps
    assert piece.of_state("text") == "text"
    whole = Slice(param, 0, param.numel(), 0)
    assert whole.of_state(state) is state
    assert whole.of(param).shape == param.shape
