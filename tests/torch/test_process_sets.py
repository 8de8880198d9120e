"""Process sets: static, dynamic, overlapping, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import horovod.torch as hvd
from tests.ranks import run_ranks


def _registered() -> dict[int, list[int]]:
    return hvd.mpi_ops._basics._get_process_set_ids_and_ranks()


def _static(rank: int, size: int) -> dict[str, Any]:
    even, odd = hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet(iter([3, 1]))
    last = hvd.ProcessSet([size - 1])
    assert (even.size(), even.rank(), even.process_set_id) == (None, None, None)
    hvd.init(process_sets=[even, odd, last])
    mine = even if rank % 2 == 0 else odd
    other = odd if mine is even else even
    with pytest.raises(ValueError, match="does not belong"):
        other.rank()
    with pytest.raises(ValueError, match="does not belong"):
        hvd.allreduce(torch.ones(1), process_set=other)
    with pytest.raises(ValueError, match="dynamic"):
        hvd.add_process_set([0, 1])
    with pytest.raises(ValueError, match="dynamic"):
        hvd.remove_process_set(even)
    assert hvd.remove_process_set(hvd.global_process_set) is False
    assert hvd.remove_process_set(hvd.ProcessSet([0])) is False
    value = torch.tensor([float(rank)])
    return {
        "ids": [even.process_set_id, odd.process_set_id, last.process_set_id],
        "registered": _registered(),
        "text": str(odd),
        "global": str(hvd.global_process_set),
        "place": (mine.rank(), mine.size(), mine.included(), other.included()),
        "sum": float(hvd.allreduce(value, op=hvd.Sum, process_set=mine)),
        "average": float(hvd.allreduce(value, process_set=mine)),
        "gathered": hvd.allgather(value, process_set=mine).tolist(),
        "root": float(hvd.broadcast(value, 2 + rank % 2, process_set=mine)),
        "swapped": hvd.alltoall(value.repeat(2), process_set=mine).tolist(),
        "scattered": hvd.reducescatter(value.repeat(2), op=hvd.Sum, process_set=mine).tolist(),
        "objects": hvd.allgather_object(rank, process_set=mine),
        "object": hvd.broadcast_object(rank, mine.ranks[-1], process_set=mine),
        "barrier": hvd.barrier(process_set=mine),
    }


def test_static_sets():
    for rank, seen in enumerate(run_ranks(_static, 4)):
        members = [0.0, 2.0] if rank % 2 == 0 else [1.0, 3.0]
        assert seen == {
            "ids": [1, 2, 3],
            "registered": {0: [0, 1, 2, 3], 1: [0, 2], 2: [1, 3], 3: [3]},
            "text": "ProcessSet(process_set_id=2, ranks=[1, 3], mpi_comm=None)",
            "global": "ProcessSet(process_set_id=0, ranks=[0, 1, 2, 3], mpi_comm=None)",
            "place": (rank // 2, 2, True, False),
            "sum": sum(members),
            "average": sum(members) / 2,
            "gathered": members,
            "root": members[1],
            "swapped": members,
            "scattered": [sum(members)],
            "objects": [int(member) for member in members],
            "object": int(members[1]),
            "barrier": None,
        }


def _bad_static_sets(rank: int, size: int) -> list[dict[int, list[int]]]:
    seen = []
    for bad, index in (
        ([hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 0])], 1),
        ([hvd.ProcessSet([0]), hvd.ProcessSet(range(size))], 1),
        ([hvd.ProcessSet([0, size])], 0),
        ([hvd.ProcessSet([-1, 0])], 0),
        ([hvd.ProcessSet([1, 1])], 0),
        ([hvd.ProcessSet([])], 0),
        ([[0, 1]], 0),
    ):
        with pytest.raises(ValueError, match=rf"process_sets\[{index}\]"):
            hvd.init(process_sets=bad)
        if isinstance(bad[0], hvd.ProcessSet):
            assert hvd.is_initialized()
            assert all(each.process_set_id is None for each in bad)
            assert _registered() == {0: list(range(size))}
    good = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[good])
    seen.append(_registered())
    if good.included():
        assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=good)) == 2.0
    assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == size
    hvd.shutdown()
    assert good.process_set_id is None
    with pytest.raises(ValueError, match="not initialised"):
        hvd.allreduce(torch.ones(1), process_set=good)
    hvd.init(process_sets=[hvd.ProcessSet([2])])
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(torch.ones(1), process_set=good)
    seen.append(_registered())
    return seen


def test_bad_static_sets_leave_a_working_job():
    world = [0, 1, 2]
    expected = [{0: world, 1: [0, 1]}, {0: world, 1: [2]}]
    assert run_ranks(_bad_static_sets, 3) == [expected] * 3


def _dynamic(rank: int, size: int) -> list[Any]:
    with pytest.raises(ValueError):
        hvd.add_process_set([0])
    hvd.init(process_sets="Dynamic")
    pair = hvd.add_process_set([1, 0])
    single = hvd.add_process_set(hvd.ProcessSet([2]))
    seen: list[Any] = [_registered(), pair.process_set_id, single.process_set_id]
    for bad in ([0, 1], range(size), [0, size], [0, 0], []):
        with pytest.raises(ValueError):
            hvd.add_process_set(bad)
    with pytest.raises(ValueError, match="integers"):
        hvd.add_process_set(["one"])
    with pytest.raises(ValueError):
        hvd.add_process_set(3)
    removed = hvd.remove_process_set(pair)
    seen += [removed, pair.process_set_id, hvd.remove_process_set(pair), str(pair)]
    with pytest.raises(ValueError, match="not registered"):
        hvd.barrier(process_set=pair)
    reused = hvd.add_process_set([1, 2])
    again = hvd.add_process_set(pair)
    seen += [reused.process_set_id, again is pair, pair.process_set_id, _registered()]
    if reused.included():
        assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=reused)) == 2.0
    return seen


def test_dynamic_sets():
    expected = [
        {0: [0, 1, 2], 1: [0, 1], 2: [2]},
        1,
        2,
        True,
        None,
        False,
        "ProcessSet(process_set_id=None, ranks=[0, 1], mpi_comm=None)",
        1,
        True,
        3,
        {0: [0, 1, 2], 1: [1, 2], 2: [2], 3: [0, 1]},
    ]
    assert run_ranks(_dynamic, 3) == [expected] * 3


def _overlapping(rank: int, size: int) -> list[float]:
    """Two sets that share rank 1, which submits to them in the order opposite to waiting."""
    left, right = hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])
    hvd.init(process_sets=[left, right])
    results = []
    for repetition in range(50):
        handles = []
        for process_set in (left, right) if repetition % 2 else (right, left):
            if process_set.included():
                # The same name is in flight in both sets, as different collectives.
                if process_set is left:
                    handles.append(
                        hvd.allreduce_async(
                            torch.ones(3), name="x", op=hvd.Sum, process_set=process_set
                        )
                    )
                else:
                    handles.append(
                        hvd.allgather_async(torch.ones(3), name="x", process_set=process_set)
                    )
        handles.append(hvd.allreduce_async(torch.ones(1), name="x", op=hvd.Sum))
        results.append(sum(float(hvd.synchronize(handle).sum()) for handle in reversed(handles)))
    return results


def test_overlapping_sets_in_different_orders():
    assert run_ranks(_overlapping, 3) == [[9.0] * 50, [15.0] * 50, [9.0] * 50]


def _blocked_set(rank: int, size: int) -> float:
    """A set whose other rank is late must not hold up the world."""
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    handle = None
    if rank == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="late", op=hvd.Sum, process_set=pair)
    total = sum(float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) for _ in range(20))
    if rank == 1:
        handle = hvd.allreduce_async(torch.ones(1), name="late", op=hvd.Sum, process_set=pair)
    return total + (float(hvd.synchronize(handle)) if handle is not None else 0.0)


def test_a_waiting_set_does_not_block_the_world():
    assert run_ranks(_blocked_set, 3) == [62.0, 62.0, 60.0]


def _gradients(rank: int, size: int) -> list[float]:
    pair = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[pair])
    if not pair.included():
        return []
    x = torch.ones(1, requires_grad=True)
    y = torch.ones(pair.rank() + 1, requires_grad=True)
    total = hvd.allreduce(x, op=hvd.Sum, process_set=pair).sum()
    total = total + hvd.allgather(y, process_set=pair).sum()
    total = total + hvd.broadcast(x, 2, process_set=pair).sum()
    total.backward()
    return [float(x.grad), *y.grad.tolist()]


def test_gradients_within_a_set():
    assert run_ranks(_gradients, 3) == [[2.0, 1.0], [], [3.0, 1.0, 1.0]]


def test_what_a_process_set_is_made_of():
    assert hvd.ProcessSet([2, 0, 1]).ranks == [0, 1, 2]
    assert hvd.ProcessSet(rank for rank in (3, 1)).ranks == [1, 3]
    for wrong in (3, None, ["a"], [1.5], "ab"):
        with pytest.raises(ValueError):
            hvd.ProcessSet(wrong)
