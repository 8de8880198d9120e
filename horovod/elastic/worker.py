"""The training loop's side of an elastic worker: agreeing on changes, and leaving when told to.

`horovod.common.elastic.run_fn` uses it through the bindings' ``elastic.run``. Decisions and
generations, on which it is built, are in `horovod.common.generations.membership`.

SIGTERM is a request to leave: the worker goes on until the next commit (or check), where all ranks
learn of it together; it then ends with exit code 0 and nothing is lost. If all workers are to leave
while others wait to join, they first form a generation with those, and leave at the commit after
that. The sender of the signal must wait until then: a worker that is killed before costs the others
the steps since the last commit, like any failure.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from horovod.common.elastic import Verdict
from horovod.common.exceptions import HorovodInternalError
from horovod.common.generations.membership import Membership, membership
from horovod.common.logging import get_logger
from horovod.common.reduce_op import Max
from horovod.engine.collective import Collective, Kind, Reduction
from horovod.engine.runtime import runtime

logger = get_logger(__name__)

_RANK_BITS = 32


class Worker:
    """This process in its elastic job; an `ElasticJob`."""

    def __init__(self, member: Membership) -> None:
        self._member = member

    def agree(self, notified: bool) -> Verdict:
        # One allreduce of the maximum tells each rank what any of them knows.
        generation, leaving = self._member.generation, self._member.leaving
        assert generation is not None, "the engine runs, so there is a generation"
        newest = self._member.newest.number
        vector = torch.tensor([newest, int(leaving), int(not leaving), int(notified)])
        _maximum(vector, "elastic.agree")
        generation.made_progress = True
        self._member.confirm_state()  # again, if the driver was out of reach
        newest, anybody_leaves, anybody_stays, anybody_notified = vector.tolist()
        outdated = newest > generation.decision.number
        if leaving and (anybody_stays or not outdated):
            return Verdict.LEAVE
        if outdated or anybody_leaves or anybody_notified:
            return Verdict.CHANGE
        return Verdict.STAY

    def newest_state(self, version: int) -> tuple[int, int]:
        # Usually rank 0, the oldest worker, has it, but that may have failed just before it got
        # the state. Version and rank travel in one number, of which the maximum is taken: the
        # highest version, and the lowest rank that has it.
        newest = torch.tensor([(version << _RANK_BITS) - runtime.topology.rank])
        _maximum(newest, "elastic.state")
        version = -(-int(newest) >> _RANK_BITS)
        return (version << _RANK_BITS) - int(newest), version

    def confirm_state(self) -> None:
        self._member.confirm_state()

    def leave(self) -> NoReturn:
        self._member.leave()

    def can_recover(self, error: HorovodInternalError) -> bool:
        can_recover = self._member.can_recover()
        generation = self._member.generation
        if generation is not None:  # other ranks may still wait for collectives of this one
            runtime.abort(f"rank {generation.topology.rank} goes back: {error}", generation)
            self._member.report_broken(generation, error)
        return can_recover

    def finish(self) -> None:
        self._member.finish()

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Let SIGTERM ask this worker to leave; SIGUSR1 too, if the program does not handle it."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may receive signals
            return
        global _handler_of_parent
        earlier = _handler_of_parent = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
        signal.signal(signal.SIGTERM, self._on_sigterm)
        is_free = signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        if is_free:  # a batch system's notice that the time is nearly over
            signal.signal(signal.SIGUSR1, self._on_sigterm)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, earlier)
            if is_free:
                signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            _handler_of_parent = None

    def _on_sigterm(self, number: int, _frame: Any) -> None:
        """Note that this worker was asked to leave."""
        if not self._member.leaving:
            self._member.leaving = True
            logger.warning(f"{signal.Signals(number).name}: leaving the job at the next commit")


_handler_of_parent: Any = None  # the handler of SIGTERM before ours, while ours is installed


def _after_fork_in_child() -> None:
    # A data loader's worker must end on SIGTERM. With our handler it would wait for a commit.
    if _handler_of_parent is not None:
        signal.signal(signal.SIGTERM, _handler_of_parent)


os.register_at_fork(after_in_child=_after_fork_in_child)


def this_worker() -> Worker | None:
    """Return this process as a worker of an elastic job; None if it is not in one."""
    member = membership()
    return None if member is None else Worker(member)


def _maximum(numbers: torch.Tensor, name: str) -> None:
    """Replace each number by the greatest that a rank has. Collective."""
    collective = Collective(Kind.ALLREDUCE, name, reduction=Reduction(Max))
    runtime.submit(collective, [numbers], [numbers], background=False).wait()
