"""A job under horovodrun whose workers are killed, one after the other: for benchmarks/elastic.py.

`kills` starts the job and reports every kill: how long the survivors stood still, whether they kept
their processes, and how long the replacement kept the others waiting. A job that does not go on is
ended, and the caller may start another.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.elastic_chaos import Job
from benchmarks.elastic_journals import Journals
from benchmarks.processes import ROOT, JobFailed, environment, processes

RANK_PROGRAM = str(ROOT / "benchmarks" / "elastic_rank.py")
LOOK = 0.005  # seconds between looks at files
LAST_LINES = 40  # of a job's output, shown when it does not go on

T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """The job, and the time that it may take over things."""

    size: int
    arguments: tuple[str, ...] = ()  # more for `elastic_rank`
    variables: Mapping[str, str] | None = None  # more for the launcher, and so for workers
    pause: tuple[float, float] = (0.5, 1.5)  # seconds before a kill, drawn between these
    start_limit: float = 120.0  # until the first step
    step_limit: float = 120.0  # from a kill to the next step of the survivors
    join_limit: float = 120.0  # from then to a step with the replacement


@dataclass(frozen=True)
class Kill:
    """What one kill cost."""

    size: int  # ranks before
    survivors: float | None  # seconds to the next step of all survivors; None if there was none
    joined: float | None  # from the replacement's readiness to the next step of all ranks
    lost: tuple[int, ...] = ()  # survivors whose processes ended as well
    problem: str = ""  # why the job was given up


def wait_for(look: Callable[[], T | None], seconds: float) -> T | None:
    """What `look` finds, as soon as it finds something; None after that many seconds."""
    deadline = time.monotonic() + seconds
    while (found := look()) is None and time.monotonic() < deadline:
        time.sleep(LOOK)
    return found


def kills(setting: Setting, dice: random.Random, log: Path) -> Generator[Kill, None, None]:
    """Kill workers at random, without end, until the job does not recover.

    The job ends with the generator. What it prints is appended to `log`. Raises `JobFailed` if it
    does not even begin.
    """
    with tempfile.TemporaryDirectory(prefix="horovod-benchmark-") as place:
        folder, status = Path(place, "steps"), Path(place, "status")
        folder.mkdir()
        size = str(setting.size)
        command = [sys.executable, "-m", "horovod.runner", "-np", size, "--min-np", "2"]
        command += ["--max-np", size, "-H", f"localhost:{size}"]
        command += ["--max-worker-failures", "1000000", "--status-file", str(status)]
        command += [sys.executable, RANK_PROGRAM, "horovod", str(folder), *setting.arguments]
        environ = environment(**(setting.variables or {}))
        try:
            with (
                log.open("a") as sink,
                processes([(command, environ)], stdout=sink, stderr=subprocess.STDOUT) as (job,),
            ):
                yield from _Killing(setting, dice, folder, status, log).kills()
                for _ in range(2):  # it hangs: the second one kills the workers at once
                    job.send_signal(signal.SIGTERM)
                    time.sleep(0.5)
        finally:
            _end_leftovers(folder)


class _Killing:
    """Kills the workers of one job that runs."""

    def __init__(
        self, setting: Setting, dice: random.Random, folder: Path, status: Path, log: Path
    ) -> None:
        self._setting = setting
        self._dice = dice
        self._status = status
        self._journals = Journals(folder)
        self._job = Job(status)
        self._log = log

    def kills(self) -> Iterator[Kill]:
        setting, journals = self._setting, self._journals
        began = wait_for(lambda: journals.all_stepped(0.0, setting.size), setting.start_limit)
        if began is None:
            raise JobFailed(f"\nno first step within {setting.start_limit:g} s. {self._said()}")
        problem = ""
        while not problem:
            time.sleep(self._dice.uniform(*setting.pause))
            kill = self._kill_one()
            problem = kill.problem
            if problem:
                print(f"\n{problem}. {self._said()}\n", file=sys.stderr, flush=True)
            yield kill

    def _kill_one(self) -> Kill:
        setting, journals = self._setting, self._journals
        self._look()
        members = self._members()
        if len(members) < setting.size:
            problem = f"only {len(members)} of {setting.size} processes were left to be killed"
            return Kill(setting.size, None, None, problem=problem)
        victim = self._dice.choice(members)
        survivors = [pid for pid in members if pid != victim]
        attempts, ready = journals.attempts(), len(ready_moments(self._status))
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        stepped = wait_for(lambda: self._stepped(survivors, attempts), setting.step_limit)
        lost = self._gone(survivors)
        if stepped is None:
            stuck = f"no step of the survivors within {setting.step_limit:g} s of a kill"
            return Kill(setting.size, None, None, lost, stuck)
        if len(lost) == len(survivors):
            return Kill(setting.size, None, None, lost, "all survivors have ended after a kill")
        whole = wait_for(lambda: journals.whole_again(attempts, setting.size), setting.join_limit)
        lost = self._gone(survivors)
        if whole is None:
            alone = f"no step of {setting.size} ranks within {setting.join_limit:g} s of a kill"
            return Kill(setting.size, stepped - killed, None, lost, alone)
        came = max(ready_moments(self._status)[ready:], default=killed)
        return Kill(setting.size, stepped - killed, whole - came, lost)

    def _look(self) -> None:
        self._journals.read()
        self._job.read()

    def _members(self) -> list[int]:
        """The processes that train together now."""
        steps, gone = self._journals.steps, self._gone(self._journals.steps)
        return [p for p in steps if p not in gone and steps[p][-1].size == self._setting.size]

    def _gone(self, pids: Iterable[int]) -> tuple[int, ...]:
        """Those of these processes that have ended, as the launcher saw it."""
        ended = {self._job.pids[worker] for worker in self._job.gone if worker in self._job.pids}
        return tuple(pid for pid in pids if pid in ended)

    def _stepped(self, survivors: list[int], attempts: dict[int, int]) -> float | None:
        """When all survivors that have not ended had gone on; 0 if all have ended."""
        self._look()
        gone = self._gone(survivors)
        left = [self._journals.next_step(pid, attempts) for pid in survivors if pid not in gone]
        moments = [moment for moment in left if moment is not None]
        return max(moments, default=0.0) if len(moments) == len(left) else None

    def _said(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return "\n".join(["The job's last lines:", "", *lines])


def ready_moments(status: Path) -> list[float]:
    """When workers were ready to join, one after the other."""
    if not status.exists():
        return []
    lines = [line for line in status.read_text().splitlines(keepends=True) if line.endswith("\n")]
    events = [json.loads(line) for line in lines]
    return [event["time"] for event in events if event["event"] == "ready"]


def _end_leftovers(folder: Path) -> None:
    """End what is left of the job: its ranks, known by the folder that only they were given."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if os.fsencode(folder) in (entry / "cmdline").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
