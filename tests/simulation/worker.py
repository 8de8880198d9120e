"""A worker of a simulated job: the real membership and training loop, with a small model.

The model is a chain of digests: a step makes of it a digest of itself, the step's number and the
samples that the ranks contributed. So two ranks have the same model only if they took the same
steps, and a step that was lost or taken twice shows. Collectives go through the job's store.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import simulated  # what the simulation offers

from horovod.common.elastic import ObjectState, Verdict, run_fn
from horovod.common.exceptions import HorovodInternalError
from horovod.common.generation import Generation
from horovod.common.membership import Membership, membership

_SILENCE = 20.0  # seconds after which a peer counts as lost
_MEETING = 60.0

_member: Membership | None = None
_exchanges = 0


def member() -> Membership:
    assert _member is not None
    return _member


def generation() -> Generation:
    found = member().generation
    if found is None:
        raise HorovodInternalError("the generation is gone")
    return found


def exchange(value: Any) -> list[Any]:
    """Collective: give all ranks everybody's value."""
    global _exchanges
    _exchanges += 1
    here = generation()
    topology = here.topology
    try:
        here.set(f"x/{_exchanges}/{topology.rank}", json.dumps(value).encode())
        keys = [f"x/{_exchanges}/{rank}" for rank in range(topology.size)]
        found = [json.loads(here.get(key, _SILENCE)) for key in keys]
    except TimeoutError as error:
        raise HorovodInternalError(f"a peer is silent: {error}") from error
    except OSError as error:
        raise HorovodInternalError(f"the store is gone: {error}") from error
    simulated.collective(here.decision.number, here._prefix, _exchanges, found)
    return found


def init() -> None:
    def meet() -> None:
        global _exchanges
        _exchanges = 0
        here = generation()
        here.set(f"here/{here.topology.rank}", b"")
        for rank in range(here.topology.size):
            here.get(f"here/{rank}", _MEETING)
        here.mark_formed()
        simulated.formed(here.decision.number, here.topology.rank, here.topology.size)

    try:
        member().form(meet, _MEETING)
    except OSError as error:
        raise HorovodInternalError(f"the store is gone: {error}") from error


def reset() -> None:
    if member().generation is not None:
        generation().close()
    init()


class Job:
    """What the training loop needs of the job."""

    def agree(self, notified: bool) -> Verdict:
        here, leaving = generation(), member().leaving
        answers = exchange([member().newest.number, leaving])
        here.made_progress = True
        changed = max(number for number, _ in answers) > here.decision.number
        if leaving and not (changed and all(leaves for _, leaves in answers)):
            return Verdict.LEAVE
        return Verdict.CHANGE if changed or any(leaves for _, leaves in answers) else Verdict.STAY

    def newest_state(self, version: int) -> tuple[int, int]:
        versions = exchange(version)
        return versions.index(max(versions)), max(versions)

    def leave(self) -> NoReturn:
        member().leave()

    def can_recover(self, error: HorovodInternalError) -> bool:
        if member().generation is not None:
            member().report_broken(generation(), error)
        return member().can_recover()

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        def on_sigterm(*_: object) -> None:
            member().leaving = True

        signal.signal(signal.SIGTERM, on_sigterm)
        yield
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def finish(self) -> None:
        member().finish()


class State(ObjectState):
    """A state that tells the simulation what was committed."""

    def on_commit(self) -> None:
        simulated.committed(self._version, self.step)


def train(state: State) -> None:
    simulated.begins(state._version, state.step)
    plan = simulated.plan
    while state.step < plan.steps:
        time.sleep(plan.pace * simulated.jitter())
        ranks = exchange([generation().topology.rank, state.step, state.model])
        simulated.check_alike(ranks)
        state.model = simulated.digest(state.model, state.step)
        state.step += 1
        if state.step % plan.commit_every == 0:
            state.commit()


def main() -> None:
    """Train to the end."""
    global _member
    _member = membership()
    init()
    state = State(
        lambda value, root_rank=0: exchange(value)[root_rank],
        lambda: generation().topology.rank,
        step=0,
        model="",
    )
    run_fn(train, reset, Job)(state)
    simulated.finished(state.step, state.model)
