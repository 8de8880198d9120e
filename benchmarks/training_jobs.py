"""Jobs that train one model the way of one contender: how the training benchmarks start them.

`benchmarks.training` places their ranks on this host, `benchmarks.network` on several;
`benchmarks.lightning` has them train with a Trainer.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.processes import ROOT, Commands, follow, group, limit
from benchmarks.training_report import LABELS
from benchmarks.turns import Pairs, Samples, race, timed_turn
from horovod.engine.heap import KEPT, OWN_MAPPING
from horovod.runner.slots.worker_env import memory_variables

Place: TypeAlias = Callable[[list[str], Mapping[str, str]], Commands]
"""The program and more variables for it -> a command for each rank."""

LOSS_STEPS = 50
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

    def speed(self, model: str, contenders: list[str], pairs: Pairs) -> Samples:
        """Milliseconds per step of each contender: a sample a turn, that of the slowest rank."""
        with ExitStack() as running:
            running.enter_context(limit(self.timeout))
            folder = running.enter_context(temporary_folder())
            turns = {}
            for name in contenders:  # one after the other: who tunes itself needs quiet
                output = Path(folder, f"speed of {model}, {LABELS[name]}")
                job = running.enter_context(group(self._commands("speed", model, name), output))
                turns[name] = partial(timed_turn, job)
            samples = race(turns, pairs, self.seconds)
        self.advance(f"speed, {model} done")
        return samples

    def losses(self, model: str) -> dict[str, list[Any]]:
        return {one: self.found("losses", model, one) for one in COMPARED}

    def found(self, section: str, model: str, contender: str) -> list[Any]:
        """What each rank found in another section."""
        with temporary_folder() as folder:
            result = Path(folder, "result")
            commands = self._commands(section, model, contender, str(result))
            output = Path(folder, f"{section} of {model}, {LABELS[contender]}")
            follow(commands, output, self.timeout, lambda _: None)
            ranks = range(len(commands))
            found = [json.loads(Path(f"{result}.{rank}").read_text()) for rank in ranks]
        self.advance(f"{section}, {model}, {LABELS[contender]} done")
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
