"""A worker for tests of the driver: the real protocol and training loop, but no torch.

So a worker starts in a fraction of a second. Its collectives go through the job's store. A step
adds 1 to the state's value, so that afterwards the value must equal the number of steps, whatever
happened in between. The argument is a JSON object:

- steps, commit_every: how long to train. pace: seconds for each step.
- faults: {"w1": ["step", 5, "SIGKILL"]}: in that phase (init, meet, sync, step, commit, last: at
  the end of training, end: after it), when the worker has been there so many times, it gets that
  signal, or it raises ("raise"), ends ("exit 0"), or does nothing for some seconds ("slow 3"), or
  even holds the interpreter's lock meanwhile ("hold 10").
- host_faults: the same for all workers of a host.
- size: also go on until there are so many ranks. largest: until so many have once met. until: until
  that file is there (in a job of one rank: others may see it a step later).
- silence: seconds after which a peer counts as lost.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from horovod.common.elastic import ObjectState, Verdict, run_fn
from horovod.common.exceptions import HorovodInternalError
from horovod.common.generations.generation import Generation
from horovod.common.generations.membership import membership
from tests.elastic.holding import hold_the_lock

PLAN = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
ME = os.environ["HOROVOD_WORKER_ID"]
member = membership()
assert member is not None
visits: dict[str, int] = {}
exchanges = 0
sizes: list[int] = []  # of the generations that this process has formed with others


def pass_through(phase: str) -> None:
    """Where faults happen."""
    visits[phase] = visits.get(phase, 0) + 1
    host_faults = PLAN.get("host_faults", {}).get(os.environ["HOROVOD_HOSTNAME"])
    where, when, what = PLAN.get("faults", {}).get(ME) or host_faults or (None, 0, "")
    if (where, when) != (phase, visits[phase]):
        return
    print(f"{ME} {what} at {phase} {when}", flush=True)
    if what == "raise":
        raise RuntimeError(f"an error of {ME}")
    if what == "exit 0":
        sys.exit(0)
    kind, _, seconds = what.partition(" ")
    if kind == "slow":
        time.sleep(int(seconds))
    elif kind == "hold":
        hold_the_lock(int(seconds))
    else:
        os.kill(os.getpid(), getattr(signal, what))


def generation() -> Generation:
    assert member is not None
    if member.generation is None:
        raise HorovodInternalError("the generation is gone")
    return member.generation


def exchange(value: Any) -> list[Any]:
    """Collective: everybody's value."""
    global exchanges
    exchanges += 1
    here = generation()
    topology = here.topology
    here.set(f"x/{exchanges}/{topology.rank}", json.dumps(value).encode())
    try:
        silence = PLAN.get("silence", 20)
        keys = [f"x/{exchanges}/{rank}" for rank in range(topology.size)]
        return [json.loads(here.get(key, silence)) for key in keys]
    except TimeoutError as error:
        raise HorovodInternalError(f"a peer is silent: {error}") from error


def init() -> None:
    def meet() -> None:
        global exchanges
        exchanges = 0
        pass_through("meet")
        here = generation()
        here.set(f"here/{here.topology.rank}", b"")
        for rank in range(here.topology.size):
            here.get(f"here/{rank}", 60)
        here.mark_formed()
        sizes.append(here.topology.size)

    assert member is not None
    member.form(meet, 60)


def shutdown() -> None:
    assert member is not None
    if member.generation is not None:
        member.generation.close()


class Job:
    """What the loop needs of the job."""

    def agree(self, notified: bool) -> Verdict:
        assert member is not None
        here, leaving = generation(), member.leaving
        answers = exchange([member.newest.number, leaving])
        here.made_progress = True
        changed = max(number for number, _ in answers) > here.decision.number
        if leaving and not (changed and all(a for _, a in answers)):
            return Verdict.LEAVE
        return Verdict.CHANGE if changed or any(a for _, a in answers) else Verdict.STAY

    def newest_state(self, version: int) -> tuple[int, int]:
        versions = exchange(version)
        return versions.index(max(versions)), max(versions)

    def confirm_state(self) -> None:
        assert member is not None
        member.confirm_state()

    def leave(self) -> NoReturn:
        assert member is not None
        member.leave()

    def can_recover(self, error: HorovodInternalError) -> bool:
        assert member is not None
        if member.generation is not None:
            member.report_broken(member.generation, error)
        return member.can_recover()

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        def on_sigterm(*_: object) -> None:
            assert member is not None
            member.leaving = True

        signal.signal(signal.SIGTERM, on_sigterm)
        yield
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def finish(self) -> None:
        assert member is not None
        member.finish()


def broadcast(value: Any, root_rank: int = 0) -> Any:
    pass_through("sync")
    return exchange(value)[root_rank]


def reset() -> None:
    shutdown()
    init()


def say(text: str) -> None:
    topology = generation().topology
    place = f"rank {topology.rank} size {topology.size} local rank {topology.local_rank}"
    print(f"{text} worker {ME} {place}", flush=True)


def train(state: ObjectState) -> None:
    say(f"begin at {state.step}")
    wanted = PLAN.get("size")
    until = PLAN.get("until")
    while (
        state.step < PLAN.get("steps", 10)
        or (until and not os.path.exists(until))
        or max(sizes, default=0) < PLAN.get("largest", 0)
        or (wanted and generation().topology.size != wanted)
    ):
        pass_through("step")
        time.sleep(PLAN.get("pace", 0.01))
        state.value += sum(exchange(1)) / generation().topology.size
        state.step += 1
        if state.step % PLAN.get("commit_every", 2) == 0:
            pass_through("commit")
            state.commit()
    pass_through("last")


pass_through("init")
init()
state = ObjectState(broadcast, lambda: generation().topology.rank, step=0, value=0)
run_fn(train, reset, Job)(state)
pass_through("end")
say(f"end {state.step} {state.value:g}")
