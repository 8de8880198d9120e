"""Asynchronous operations: poll, synchronize, names, many at once, and their end."""

from __future__ import annotations

import pytest
import torch

import horovod.torch as hvd
from tests.ranks import RankPool, run_ranks


def _poll_and_synchronize() -> list[object]:
    seen: list[object] = []
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(3), name="polled", op=hvd.Sum)
        seen.append(isinstance(handle, int))
        seen.append(hvd.poll(handle))  # rank 1 submits only after the barrier
    hvd.barrier()
    if hvd.rank() == 1:
        handle = hvd.allreduce_async(torch.ones(3), name="polled", op=hvd.Sum)
    while not hvd.poll(handle):
        pass
    seen.append(float(hvd.synchronize(handle).sum()))
    seen.append(hvd.synchronize(handle))
    return seen


def test_poll_and_synchronize(pool2: RankPool):
    assert pool2.run(_poll_and_synchronize) == [[True, False, 6.0, None], [6.0, None]]


def _unknown_handles() -> object:
    handle = hvd.barrier() or hvd.allreduce_async(torch.ones(1))
    hvd.synchronize(handle)
    for stale in (handle, 123456789):
        with pytest.raises(ValueError, match="does not exist"):
            hvd.poll(stale)
    return hvd.synchronize(987654321)


def test_unknown_handles(pool2: RankPool):
    assert pool2.run(_unknown_handles) == [None, None]


def _many(count: int) -> bool:
    order = range(count) if hvd.rank() == 0 else range(count - 1, -1, -1)
    handles = {
        n: hvd.allreduce_async(torch.tensor([float(n)]), name=f"many {n}", op=hvd.Sum)
        for n in order
    }
    return all(float(hvd.synchronize(handles[n])) == 2.0 * n for n in range(count))


def test_many_requests_in_opposite_orders(pool2: RankPool):
    assert pool2.run(_many, 2_000) == [True, True]


def _same_order(count: int) -> float:
    handles = [hvd.allreduce_async_(torch.ones(1), op=hvd.Sum) for _ in range(count)]
    return sum(float(hvd.synchronize(handle)) for handle in handles)


def test_ten_thousand_unnamed_requests(pool2: RankPool):
    assert pool2.run(_same_order, 10_000) == [20_000.0] * 2


def _names(names: list[str]) -> list[float]:
    order = names if hvd.rank() == 0 else names[::-1]
    handles = {name: hvd.allreduce_async(torch.ones(1), name=name, op=hvd.Sum) for name in order}
    return [float(hvd.synchronize(handles[name])) for name in names]


def test_any_unicode_is_a_name(pool2: RankPool):
    names = [
        "",
        " ",
        ".",
        "a.b",
        "ünïcödé",
        "漢字",
        "👩‍🔬",
        "\x00",
        "\n",
        "%s{}",
        "x" * 10_000,
        "\u202e",
    ]
    assert pool2.run(_names, names) == [[2.0] * len(names)] * 2


def _mixed() -> list[float]:
    """Different collectives under one name, submitted in different orders, and a barrier."""
    submit = {
        "allreduce": lambda: hvd.allreduce_async(torch.ones(2), name="same", op=hvd.Sum),
        "allgather": lambda: hvd.allgather_async(torch.ones(2), name="same"),
        "broadcast": lambda: hvd.broadcast_async(torch.ones(2), 0, name="same"),
        "alltoall": lambda: hvd.alltoall_async(torch.ones(2), name="same"),
        "reducescatter": lambda: hvd.reducescatter_async(torch.ones(2), name="same", op=hvd.Sum),
    }
    order = sorted(submit, reverse=hvd.rank() == 1)
    handles = {kind: submit[kind]() for kind in order}
    hvd.barrier()
    results = {kind: hvd.synchronize(handle) for kind, handle in handles.items()}
    output, received = results.pop("alltoall")
    assert received.tolist() == [1, 1]
    return [float(output.sum()), *(float(results[kind].sum()) for kind in sorted(results))]


def test_different_collectives_in_different_orders(pool2: RankPool):
    # alltoall, allgather, allreduce, broadcast, reducescatter
    assert pool2.run(_mixed) == [[2.0, 4.0, 4.0, 2.0, 2.0]] * 2


def _lifetime() -> float:
    handle = hvd.allreduce_async(torch.full((1000,), 2.0), op=hvd.Sum)
    torch.full((1000,), 7.0)  # would reuse the memory of a temporary that was let go
    return float(hvd.synchronize(handle).sum())


def test_inputs_are_kept_alive(pool2: RankPool):
    assert pool2.run(_lifetime) == [4000.0, 4000.0]


def _across_shutdown(rank: int, size: int) -> list[object]:
    hvd.init()
    done = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
    while not hvd.poll(done):
        pass
    hvd.barrier()
    hanging = hvd.allreduce_async(torch.ones(1), name="only here") if rank == 0 else None
    hvd.init()  # changes nothing while running
    hvd.barrier()
    hvd.shutdown()
    seen: list[object] = [float(hvd.synchronize(done))]
    if hanging is not None:
        with pytest.raises(hvd.HorovodInternalError, match="shut down"):
            hvd.synchronize(hanging)
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce_async(torch.ones(1))
    hvd.init()
    again = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
    seen += [again == done, float(hvd.synchronize(again))]
    return seen


def test_handles_across_shutdown_and_init():
    assert run_ranks(_across_shutdown, 2) == [[2.0, True, 2.0]] * 2
