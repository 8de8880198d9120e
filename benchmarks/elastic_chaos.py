#!/usr/bin/env python
"""A long run of an elastic job under faults: trains the digits, and counts what it survives.

Faults are drawn from a seed (kind, number of victims at once, moment), so that a run can be
repeated. Afterwards all ranks must have ended with the same model, its accuracy must be that of an
undisturbed run, every epoch must have seen every sample, and nothing may be left behind.

Faults of the moment "any" come from outside, whatever the victims are doing. For the others the
victims get an order, a file that they look for when they get there (`elastic_chaos_rank`): in a
step, in the middle of a commit, or while they meet and give each other the state. For the last two
another worker is killed first, so that the fault hits a job that recovers already. The last fault
of all is a worker that ends early with status 0: from then on nobody is replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # test this checkout, whatever else is installed

import psutil  # noqa: E402

from benchmarks.gpus import gpus_for  # noqa: E402
from benchmarks.processes import environment, processes  # noqa: E402

RANK_PROGRAM = str(ROOT / "benchmarks" / "elastic_chaos_rank.py")
KINDS = {  # and how often
    "SIGKILL": 8,
    "SIGSEGV": 3,
    "SIGTERM": 2,
    "SIGSTOP": 2,
    "exception": 3,
    "hold": 3,  # the interpreter's lock, for 10 s
    "slow": 2,  # does nothing for longer than the stall limit, but its threads run
}
MOMENTS = {"any": 6, "training": 2, "rendezvous": 2, "sync": 2, "commit": 3}
RECOVERING = ("rendezvous", "sync")
FROM_OUTSIDE = ("SIGKILL", "SIGSEGV", "SIGTERM", "SIGSTOP", "hold")
LIMITS = {
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "1",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3",
    "HOROVOD_ELASTIC_ANSWER_TIMEOUT": "5",
}
PATIENCE = 120.0  # seconds that a job may take to get where the next fault finds it


@dataclass(frozen=True)
class Fault:
    """Something bad that happens to one or two workers."""

    kind: str
    moment: str
    many: int
    patient: bool  # only when the job has recovered from the last one
    pause: float  # seconds before
    lots: tuple[float, ...]  # which workers it hits, as parts of those that are there


def draw(seed: int, pause: float) -> Iterator[Fault]:
    """Faults without end, the same for the same seed whatever the job does."""
    dice = random.Random(seed)
    while True:
        kind = dice.choices(list(KINDS), list(KINDS.values()))[0]
        moment = dice.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        if moment == "any" and kind not in FROM_OUTSIDE:
            moment = "training"
        many = 2 if dice.random() < 0.2 else 1
        patient = dice.random() < 0.7 or moment in RECOVERING
        if kind == "exception":
            many, patient = 1, True  # errors of all workers end a job, rightly
        lots = tuple(dice.random() for _ in range(3))
        yield Fault(kind, moment, many, patient, dice.expovariate(1 / pause), lots)


class Job:
    """What is known of the job from its status file."""

    def __init__(self, status: Path) -> None:
        self._path = status
        self._offset = 0
        self.pids: dict[str, int] = {}
        self.hosts: dict[str, str] = {}
        self.members: list[str] = []
        self.formed = False
        self.gone: dict[str, str] = {}  # and how
        self.events: Counter[str] = Counter()

    def read(self) -> None:
        if not self._path.exists():
            return
        with self._path.open() as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            event = json.loads(line)
            self.events[event["event"]] += 1
            if event["event"] == "started":
                self.pids[event["worker"]] = event["pid"]
                self.hosts[event["worker"]] = event["host"]
            elif event["event"] == "decision":
                self.members, self.formed = list(event["workers"]), False
            elif event["event"] == "formed":
                self.formed = True
            elif event["event"] in ("exited", "failed"):
                self.gone.setdefault(event["worker"], event.get("how", "exited"))

    def present(self) -> list[str]:
        return [worker for worker in self.members if worker not in self.gone]


class Chaos:
    """Brings the faults about."""

    def __init__(self, folder: Path, job: Job, runs: Callable[[], bool]) -> None:
        self.inflicted: Counter[str] = Counter()
        self.held: list[str] = []  # the workers that held the lock
        self._raising = ""  # the last worker that was to raise an exception
        self._folder = folder
        self._job = job
        self._runs = runs

    @property
    def missed(self) -> int:
        """Orders that were not carried out, or not yet."""
        return len(list(self._folder.glob("order.*")))

    @property
    def count(self) -> int:
        """The faults that really happened."""
        return self.inflicted.total() - self.missed

    def bring(self, fault: Fault) -> None:
        time.sleep(fault.pause)
        if fault.kind == "exception":
            self._await_exception()
        trigger = fault.moment in RECOVERING
        self._await(fault.patient, fault.many + 2 * trigger)  # one has to be left to recover
        candidates, victims = self._candidates(), []
        for lot in fault.lots[: fault.many + trigger]:
            if candidates:
                victims.append(candidates.pop(int(lot * len(candidates))))
        for worker in victims[: fault.many]:
            self._inflict(fault, worker)
        for worker in victims[fault.many :]:
            self._signal(worker, "SIGKILL")

    def _await_exception(self) -> None:
        """Wait until the last worker that was to raise an exception is gone.

        If all workers that there are raise one, the job ends, rightly.
        """
        deadline = time.monotonic() + PATIENCE
        while self._runs() and self._raising in self._job.present():
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)  # between looks at a file
            self._job.read()

    def end_one_early(self) -> None:
        """Somebody ends as if it were done, while the others go on."""
        while self._runs() and not self.inflicted["exit 0"]:
            self._await(True, 2)
            worker = next(iter(self._candidates()), None)
            if worker is None:
                continue
            order = self._order(worker, "training", "exit 0")
            while self._runs() and order.exists() and worker in self._job.present():
                time.sleep(0.02)  # between looks at files
                self._job.read()
            self.inflicted["exit 0"] += not order.exists()
            order.unlink(missing_ok=True)

    def _candidates(self) -> list[str]:
        """Workers in the job that have nothing before them yet."""
        return [worker for worker in self._job.present() if not self._order_of(worker).exists()]

    def _await(self, formed: bool, many: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while self._runs() and time.monotonic() < deadline:
            self._job.read()
            if (self._job.formed or not formed) and len(self._candidates()) >= many:
                return
            time.sleep(0.02)  # between looks at a file

    def _inflict(self, fault: Fault, worker: str) -> None:
        if fault.kind == "hold":
            self.held.append(worker)
        elif fault.kind == "exception":
            self._raising = worker
        if fault.moment == "any":
            self._signal(worker, fault.kind)
        else:
            self._order(worker, fault.moment, fault.kind)
            self.inflicted[fault.kind] += 1

    def _signal(self, worker: str, kind: str) -> None:
        try:
            # The rank program holds the lock when it gets SIGUSR1.
            number = signal.SIGUSR1 if kind == "hold" else getattr(signal, kind)
            os.kill(self._job.pids[worker], number)
            self.inflicted[kind] += 1
        except ProcessLookupError:
            pass

    def _order(self, worker: str, moment: str, kind: str) -> Path:
        order = self._order_of(worker)
        unfinished = order.with_name(f"new.{order.name}")
        unfinished.write_text(json.dumps([moment, kind]))
        unfinished.rename(order)
        return order

    def _order_of(self, worker: str) -> Path:
        return self._folder / f"order.{self._job.pids[worker]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--np", type=int, default=4)
    parser.add_argument("--pause", type=float, default=1.5, help="mean seconds between faults")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(cpu)")
    parser.add_argument(
        "--seconds", type=float, default=inf, help="no further faults after (never)"
    )
    args = parser.parse_args()
    # Without MPS, under which a process that is killed may take others along.
    with tempfile.TemporaryDirectory() as place, gpus_for(args.device, args.np, False) as gpus:
        folder = Path(place)
        status, stop = folder / "status", folder / "stop"
        command = [sys.executable, "-m", "horovod.runner", "-np", "2", "--min-np", "2"]
        command += ["--max-np", str(args.np), "-H", f"localhost:{args.np}"]
        command += ["--max-worker-failures", "1000000", "--status-file", str(status)]
        command += [sys.executable, RANK_PROGRAM, str(folder)]
        if args.device == "cuda":
            command += ["cuda", "shared"] if gpus.are_shared(args.np) else ["cuda"]
        job, started = Job(status), time.monotonic()
        with (
            (folder / "log").open("w") as log,
            processes([(command, environment(**LIMITS))], stdout=log, stderr=log) as (process,),
        ):
            chaos = Chaos(folder, job, lambda: process.poll() is None)
            for fault in draw(args.seed, args.pause):
                is_over = time.monotonic() > started + args.seconds
                if process.poll() is not None or chaos.count >= args.faults - 1 or is_over:
                    break
                chaos.bring(fault)
                print(
                    f"{time.monotonic() - started:6.1f} s  {chaos.count:3} faults  "
                    f"{fault.kind} x{fault.many} ({fault.moment})  members {len(job.present())}",
                    flush=True,
                )
            chaos.end_one_early()
            stop.touch()
            try:
                code = process.wait(600)
            except subprocess.TimeoutExpired:
                code = None
        job.read()
        text = (folder / "log").read_text()
        problems = check(code, text, folder)
        replaced = [w for w in chaos.held if job.gone.get(w, "").startswith("did not react")]
        print(
            f"{chaos.count} faults, and {chaos.missed} whose victims died before: "
            f"{dict(chaos.inflicted)}; {len(replaced)} of {len(chaos.held)} workers that held the "
            f"lock were given up; {job.events['decision']} decisions, {job.events['formed']} "
            f"worlds, {len(job.pids)} processes, {time.monotonic() - started:.0f} s"
        )
        for problem in problems:
            print(f"PROBLEM: {problem}")
        if problems:
            Path(f"elastic_chaos_{args.seed}.log").write_text(text + "\n" + status.read_text())
        else:
            print("all well")
        return int(bool(problems))


def check(code: int | None, text: str, folder: Path) -> list[str]:
    problems = []
    if code != 0:
        problems.append(f"horovodrun ended with {code}: {text[-2000:]}")
    ends = [json.loads(path.read_text()) for path in folder.glob("end.*")]
    if not ends or len({end["digest"] for end in ends}) != 1:
        problems.append(f"the models differ: {[end['digest'][:8] for end in ends]}")
    if any(end["accuracy"] < 0.95 for end in ends):
        problems.append(f"accuracy {[end['accuracy'] for end in ends]}")
    for epoch, missing in {epoch: n for end in ends for epoch, n in end["missing"].items()}.items():
        if missing:
            problems.append(f"epoch {epoch} lacks {missing} samples")
    if left := leftovers(folder):
        problems.append(f"processes of the job are left: {left}")
    return problems


def leftovers(folder: Path) -> list[int]:
    """Return the processes that belong to the job, by the folder that they were given.

    A long run starts so many that their numbers come again for processes of somebody else's.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and str(folder) in process.cmdline():
                found.append(process.pid)
    return found


if __name__ == "__main__":
    sys.exit(main())
