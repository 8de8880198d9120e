"""Ranks that wait for each other for ever raise at once; where one may still come, they wait."""

from __future__ import annotations

import re
import threading

import pytest
import torch

import horovod.torch as hvd
from tests.ranks import RankPool


def _crosswise() -> str:
    names = ["first", "second"] if hvd.rank() == 0 else ["second", "first"]
    with pytest.raises(hvd.HorovodInternalError) as caught:
        _ = [hvd.allreduce(torch.ones(2), name=name) for name in names]
    hvd.barrier()  # what was not in the way goes on
    return str(caught.value)


def test_blocking_calls_in_opposite_order(pool2: RankPool):
    texts = pool2.run(_crosswise)
    assert texts[0] == texts[1]
    assert re.search(
        r"rank 0 waits for allreduce 'first' \(.*test_deadlock.py:\d+\); "
        r"rank 1 waits for allreduce 'second' \(.*test_deadlock.py:\d+\)",
        texts[0],
    )
    assert "in the same order on all ranks, or submit them with their _async forms" in texts[0]


def _waiting_for_handles() -> str:
    rank = hvd.rank()
    early = hvd.allreduce_async(torch.ones(2), name=f"of rank {rank}")
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.synchronize(early) if rank else hvd.barrier()
    if rank == 0:
        assert hvd.poll(early) is False  # nobody waited for it: it is still to come
        handle = early
    hvd.allreduce(torch.ones(1), name="rank 0 has looked")
    if rank != 0:
        handle = hvd.allreduce_async(torch.ones(2), name="of rank 0")
    hvd.synchronize(handle)
    return str(caught.value)


def test_handles_and_other_operations(pool3: RankPool):
    texts = pool3.run(_waiting_for_handles)
    assert len(set(texts)) == 1
    assert "rank 0 waits for barrier" in texts[0]
    assert "rank 1 waits for allreduce 'of rank 1'" in texts[0]
    assert "rank 2 waits for allreduce 'of rank 2'" in texts[0]


def _another_thread_comes() -> list[float]:
    """Rank 0 waits for 'a', and only then another of its threads submits 'b', as rank 1 waits for.

    The queues are compared again and again meanwhile, by all ranks.
    """
    if hvd.rank() == 1:
        return [hvd.allreduce(torch.ones(1), name=name).item() for name in "ba"]
    results = {}
    waits = threading.Event()

    def submit() -> None:
        waits.wait()
        results["b"] = hvd.allreduce(torch.ones(1), name="b").item()

    thread = threading.Thread(target=submit)
    thread.start()
    handle = hvd.allreduce_async(torch.ones(1), name="a")
    threading.Timer(0.3, waits.set).start()
    results["a"] = hvd.synchronize(handle).item()
    thread.join()
    return [results["b"], results["a"]]


def test_a_thread_that_may_still_submit_is_waited_for(pool2: RankPool):
    assert pool2.run(_another_thread_comes) == [[1.0, 1.0], [1.0, 1.0]]
