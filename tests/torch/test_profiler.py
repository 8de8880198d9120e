"""Collectives are seen by torch.profiler, and at log level debug in the log."""

from __future__ import annotations

import re

import torch
from torch.profiler import profile

import horovod.torch as hvd
from horovod.engine.collective import Collective, Kind
from horovod.engine.request import Request
from horovod.observe.statistics.ranges import describe
from tests.ranks import RankPool, check_times, start_ranks


def _profiled() -> list[str]:
    watched = hvd.rank() == 0  # the others need not know
    with profile() if watched else torch.no_grad() as recorded:
        hvd.allreduce(torch.ones(4), name="blocking")
        hvd.synchronize(hvd.allreduce_async(torch.ones(8), name="asynchronous"))
        hvd.grouped_allreduce([torch.ones(2), torch.ones(3)], name="group")
        hvd.allgather(torch.ones(4), name="gathered")
        hvd.broadcast(torch.ones(4), 0, name="sent")
        hvd.alltoall(torch.ones(2), name="exchanged")
        hvd.reducescatter(torch.ones(2), name="scattered")
        hvd.barrier()
    if not watched:
        return []
    return [event.name for event in recorded.events() if event.name.startswith("Horovod")]


def test_operations_are_ranges_with_names_and_bytes(pool2: RankPool):
    def check(found: list[list[str]]) -> None:
        names, nothing = found
        assert nothing == []
        # What a background thread runs, which torch does not record, is seen where it is waited
        # for; so not at all if the thread is done by then.
        names = [name.replace("HorovodWait: asyn", "HorovodAllreduce: asyn") for name in names]
        assert list(dict.fromkeys(names)) == [
            "HorovodAllreduce: blocking, 16 bytes",
            "HorovodAllreduce: asynchronous, 32 bytes",
            "HorovodGroupedAllreduce: group, 20 bytes",
            "HorovodAllgather: gathered, 16 bytes",
            "HorovodBroadcast: sent, 16 bytes",
            "HorovodAlltoall: exchanged, 8 bytes",
            "HorovodReducescatter: scattered, 8 bytes",
            "HorovodBarrier: noname, 0 bytes",
        ]

    check_times(lambda: pool2.run(_profiled), check)


def test_fused_requests_share_a_range():
    requests = [
        Request(None, Collective(Kind.ALLREDUCE, name), f"allreduce.{name}", b"", [torch.ones(1)])
        for name in "abc"
    ]
    assert describe(requests, 12) == "HorovodAllreduce: a and 2 more, 12 bytes"


def _reduce(rank: int, size: int) -> None:
    hvd.init()
    for _ in range(2):
        hvd.allreduce(torch.ones(4), name="loss")


def test_log_level_debug_has_a_line_for_each_operation():
    with start_ranks(_reduce, 2, env={"HOROVOD_LOG_LEVEL": "debug"}) as ranks:
        ranks.results()
        for rank in range(2):
            lines = re.findall(
                r"allreduce\.loss: 16 bytes through SHM in [\d.]+ ms \(.*test_profiler\.py:\d+\)",
                ranks.output(rank),
            )
            assert len(lines) == 2, ranks.output(rank)
