"""Notices that ranks wait for each other for ever.

A channel asks `is_stuck` when its ranks compare their queues and find nothing to run. If every rank
is stuck, nothing can change any more, and all of them raise (`negotiation`). Where another thread
may still submit what is missing, this is not certain: then the stall inspector warns later.
"""

from __future__ import annotations

import concurrent.futures.thread
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from horovod.engine.request import Request
from horovod.observe.statistics.compilations import difference_hint
from horovod.transport.base import Group

# Threads of this package, and of libraries that training scripts often use: they never submit.
_OURS = ("horovod-", "hvd-")
_OTHERS = (
    "TMonitor",  # tqdm
    "QueueFeederThread",  # multiprocessing
    "_pin_memory_loop",  # torch's DataLoader
    "_AsyncWriterThread",  # tensorboard
    "_monitor_loop",
    "_read_thread",  # torch.compile's, up to torch 2.4
    "pydevd",
)
_POOL_LOOP = concurrent.futures.thread._worker.__code__


def is_stuck(queue: Sequence[Request]) -> bool:
    """Return whether the only thread that can submit anything waits for a request in the queue."""
    if not any(request.waiting for request in queue):
        return False
    threads = [thread for thread in threading.enumerate() if _may_submit(thread)]
    if len(threads) != 1 or type(threads[0]) is threading._DummyThread:
        return False
    return all(request.thread == threads[0].ident for request in queue)


def _may_submit(thread: threading.Thread) -> bool:
    names = (thread.name, type(thread).__name__)
    is_known = any(known in name for known in _OTHERS for name in names)
    return not (thread.name.startswith(_OURS) or is_known or _is_idle(thread))


def _is_idle(thread: threading.Thread) -> bool:
    """Return whether a thread of a ThreadPoolExecutor waits until another gives it something to do.

    torch.compile leaves such threads behind.
    """
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code is _POOL_LOOP


def describe_deadlock(waiting: Sequence[Mapping[str, Mapping[str, Any]]], group: Group) -> str:
    """Return who waits for what, from which line, and what to do.

    `waiting` is what each rank waits for. Ranks that wait at the same line are named together.
    """
    alike: dict[tuple[str, str, str], list[int]] = {}
    for rank, entries in enumerate(waiting):
        for name, entry in entries.items():
            kind, _, label = name.partition(".")
            alike.setdefault((kind, label, entry["source"]), []).append(group.global_ranks[rank])
    parts = []
    for (kind, label, source), ranks in alike.items():
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:6]))}"
        more = " ..." if len(ranks) > 6 else ""
        parts.append(
            f"{who}{more} wait{'s' if len(ranks) == 1 else ''} for {kind} {label!r} ({source})"
        )
    counts = {
        group.global_ranks[rank]: entry["graphs"]
        for rank, entries in enumerate(waiting)
        for entry in entries.values()
    }
    return (
        f"deadlock: every rank waits for an operation that the others have not submitted, and "
        f"cannot submit while they wait: {'; '.join(parts)}. Call blocking operations in the same "
        f"order on all ranks, or submit them with their _async forms before waiting for any"
        f"{difference_hint(counts)}"
    )
