"""Jobs that train one model the way of one contender: how the training benchmarks start them.

`benchmarks.training` places their ranks on this host, `benchmarks.network` on several;
`benchmarks.lightning` has them train with a Trainer.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.processes import ROOT, Commands, Group, JobFailed, follow, group, limit
from benchmarks.training_report import LABELS
from benchmarks.turns import PRECISE, Pairs, Samples, race, timed_turn
from horovod.engine.execution.heap import KEPT, OWN_MAPPING
from horovod.runner.slots.worker_env import memory_variables

Place: TypeAlias = Callable[[list[str], Mapping[str, str]], Commands]
"""The program and more variables for it -> a command for each rank."""

LOSS_STEPS = 50
FAREWELL = 10.0  # seconds that a race leaves for its ranks to end within the job's timeout
COMPARED = ["ours", "ddp"]  # their losses, with each other
_KEPT_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(OWN_MAPPING), "MALLOC_TRIM_THRESHOLD_": str(KEPT)}
"""glibc's variables for what hvd.init() does: keep freed memory."""


def heap_variables(contender: str, same_heap: bool) -> dict[str, str]:
    """Ours get what horovodrun gives its workers; the others what comes to the same, if at all."""
    launchers = memory_variables(os.uname().machine, os.environ)
    if contender.startswith("ours"):
        return launchers
    return {**launchers, **_KEPT_HEAP} if same_heap else {}


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="horovod-benchmark-")


def all_ready(
    starting: Mapping[str, AbstractContextManager[Group]],
    running: ExitStack,
    deadline: float,
    *,
    at_once: bool,
) -> dict[str, Group]:
    """Start all contenders, and leave those out that fail: the others can be compared.

    Args:
        starting: The job of each contender.
        running: Ends those that are ready.
        deadline: Moment (`time.monotonic`) after which a failure is one of them all.
        at_once: Whether they start side by side. Who tunes itself needs quiet.
    """
    with ExitStack() as started:
        ends = {name: started.enter_context(ExitStack()) for name in starting}
        jobs: dict[str, Group] = {}
        if at_once:
            jobs = {name: ends[name].enter_context(job) for name, job in starting.items()}
        ready, failure = {}, None
        for name, start in starting.items():
            job = jobs[name] if at_once else ends[name].enter_context(start)
            try:
                job.await_ready()
            except JobFailed as error:
                ends[name].__exit__(type(error), error, error.__traceback__)  # ends all its ranks
                failure = error
                if time.monotonic() > deadline:
                    raise
                print(f"{error.code}\n", file=sys.stderr, flush=True)
            else:
                ready[name] = job
        if not ready and failure is not None:
            raise failure
        running.push(started.pop_all())
        return ready


@dataclass
class Jobs:
    """Starts the ranks of one setting."""

    place: Place
    plan: Mapping[str, Any]  # what ranks are told beside section, model and contender
    seconds: float  # most time for a race
    timeout: float  # until it is given up
    advance: Callable[[str], None]
    program: Sequence[str] = (str(ROOT / "benchmarks" / "training_rank.py"),)  # a rank's
    knobs: Callable[[str], Mapping[str, str]] = lambda contender: {}
    precise: float = PRECISE  # doubt about a ratio that ends a race, over the ratio
    is_simultaneous: bool = False  # start all contenders at once: right where none tunes itself

    def speed(self, model: str, contenders: list[str], pairs: Pairs) -> Samples:
        """Milliseconds per step of each contender: a sample a turn, that of the slowest rank.

        A contender that fails to start is left out.
        """
        return self._race(model, contenders, pairs, with_memory=False)[0]

    def speed_and_memory(
        self, model: str, contenders: list[str], pairs: Pairs
    ) -> tuple[Samples, dict[str, float]]:
        """The same, and the most mebibytes that a rank of each contender had on its device."""
        return self._race(model, contenders, pairs, with_memory=True)

    def _race(
        self, model: str, contenders: list[str], pairs: Pairs, *, with_memory: bool
    ) -> tuple[Samples, dict[str, float]]:
        deadline = time.monotonic() + self.timeout - FAREWELL
        with ExitStack() as running:
            running.enter_context(limit(self.timeout))
            folder = running.enter_context(temporary_folder())
            starting = {
                name: group(
                    self._commands("speed", model, name),
                    Path(folder, f"speed of {model}, {LABELS[name]}"),
                    ready=False,
                )
                for name in contenders
            }
            jobs = all_ready(starting, running, deadline, at_once=self.is_simultaneous)
            samples = race(
                {name: partial(timed_turn, job) for name, job in jobs.items()},
                [pair for pair in pairs if set(pair) <= jobs.keys()],
                self.seconds,
                precise=self.precise,
                deadline=deadline,
            )
            asked = jobs.items() if with_memory else ()
            peaks = {name: max(job.ask("memory")) for name, job in asked}
        self.advance(f"speed, {model} done")
        return samples, peaks

    def losses(self, model: str) -> dict[str, list[Any]]:
        if self.is_simultaneous:
            return self._found("losses", model, COMPARED)
        return {one: self.found("losses", model, one) for one in COMPARED}

    def found(self, section: str, model: str, contender: str) -> list[Any]:
        """What each rank found in another section."""
        return self._found(section, model, [contender])[contender]

    def _found(self, section: str, model: str, contenders: list[str]) -> dict[str, list[Any]]:
        """The same for contenders that run side by side."""
        with temporary_folder() as folder:
            commands: Commands = []
            files: dict[str, list[Path]] = {}
            names = []
            for one in contenders:
                result = Path(folder, f"result of {one}")
                started = self._commands(section, model, one, str(result))
                files[one] = [Path(f"{result}.{rank}") for rank in range(len(started))]
                names += [f"{LABELS[one]}'s rank {rank}" for rank in range(len(started))]
                commands += started
            whose = " and ".join(LABELS[one] for one in contenders)
            output = Path(folder, f"{section} of {model}, {whose}")
            follow(commands, output, self.timeout, lambda _: None, names)
            found = {
                one: [json.loads(file.read_text()) for file in results]
                for one, results in files.items()
            }
        for one in contenders:
            self.advance(f"{section}, {model}, {LABELS[one]} done")
        return found

    def _commands(self, section: str, model: str, contender: str, result: str = "") -> Commands:
        plan = {
            **self.plan,
            "section": section,
            "model": model,
            "contender": contender,
            "steps": LOSS_STEPS,
            "result": result,
        }
        program = [sys.executable, *self.program, json.dumps(plan)]
        return self.place(program, self.knobs(contender))
