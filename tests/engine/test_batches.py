"""Fusion plans, without any processes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from horovod.engine.collective import Collective, Kind, signature_of
from horovod.engine.execution.batches import plan
from horovod.engine.request import Request


def request(name: str, *tensors: torch.Tensor, kind: Kind = Kind.ALLREDUCE) -> Request:
    collective = Collective(kind, name)
    signature = signature_of(collective, name, tensors)
    return Request(None, collective, name, signature, tensors, tensors)


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.sampled_from([torch.float32, torch.int64]), st.booleans()),
        max_size=30,
    ),
    st.integers(0, 400),
)
def test_every_tensor_is_in_one_batch_and_batches_are_uniform_and_small(entries, threshold):
    requests = [
        request(
            str(index),
            torch.zeros(count, dtype=dtype),
            kind=Kind.ALLREDUCE if fusable else Kind.BROADCAST,
        )
        for index, (count, dtype, fusable) in enumerate(entries)
    ]
    batches = plan(requests, threshold, fuse_groups=True)
    planned = [r.name for batch in batches for r in (batch.requests or [batch.request])]
    assert sorted(planned) == sorted(r.name for r in requests)
    for batch in batches:
        assert len({tensor.dtype for tensor in batch.inputs}) <= 1
        assert batch.nbytes <= threshold or len([t for t in batch.inputs if t.numel()]) <= 1
        assert not batch.requests or batch.request.kind is Kind.ALLREDUCE


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(0, 2000))
def test_a_group_of_known_size_is_planned_like_any_other(counts, threshold):
    """One rank may know it and another not, and both must run the same batches."""
    group = request("group", *(torch.zeros(count) for count in counts))
    expected = plan([group], threshold, fuse_groups=True)
    group.nbytes = 4 * sum(counts)
    found = plan([group], threshold, fuse_groups=True)
    assert [list(map(id, b.inputs)) for b in found] == [list(map(id, b.inputs)) for b in expected]
    assert [b.requests for b in found] == [b.requests for b in expected]


def test_mixed_dtypes_fuse_across_each_other():
    requests = [
        request(str(i), torch.zeros(4, dtype=(torch.float32, torch.int32)[i % 2])) for i in range(6)
    ]
    assert len(plan(requests, 1 << 20, fuse_groups=True)) == 2


def test_a_threshold_of_zero_disables_fusion():
    requests = [request(str(i), torch.zeros(4)) for i in range(5)]
    assert len(plan(requests, 0, fuse_groups=True)) == 5


def test_groups_can_be_kept_to_themselves():
    requests = [request("a", torch.zeros(4), torch.zeros(2)), request("b", torch.zeros(4))]
    assert len(plan(requests, 1 << 20, fuse_groups=True)) == 1
    assert [len(b.inputs) for b in plan(requests, 1 << 20, fuse_groups=False)] == [2, 1]
