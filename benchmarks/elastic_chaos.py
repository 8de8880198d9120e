#!/usr/bin/env python
"""A long run of an elastic job under faults: trains the digits, and counts what it survives.

Faults are drawn from a seed (kind, number of victims at once, moment), so that a run can be
repeated. Afterwards all ranks must have ended with the same model, its accuracy must be that of an
undisturbed run, every epoch must have seen every sample, and nothing may be left behind.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # test this checkout, whatever else is installed

from benchmarks.processes import environment, processes  # noqa: E402

RANK_PROGRAM = str(ROOT / "benchmarks" / "elastic_chaos_rank.py")
FAULTS = ("SIGKILL", "SIGSEGV", "SIGTERM", "SIGSTOP", "exception")
WEIGHTS = (8, 3, 2, 1, 3)


class Job:
    """What is known of the job from its status file."""

    def __init__(self, status: Path) -> None:
        self._path = status
        self._offset = 0
        self.pids: dict[str, int] = {}
        self.members: list[str] = []
        self.formed = False
        self.gone: set[str] = set()
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
            elif event["event"] == "decision":
                self.members, self.formed = list(event["workers"]), False
            elif event["event"] == "formed":
                self.formed = True
            elif event["event"] in ("exited", "failed"):
                self.gone.add(event["worker"])

    def victims(self) -> list[str]:
        return [worker for worker in self.members if worker not in self.gone]


def inflict(fault: str, pid: int) -> None:
    try:
        # The rank program raises an exception in its next step when it gets SIGUSR1.
        os.kill(pid, signal.SIGUSR1 if fault == "exception" else getattr(signal, fault))
    except ProcessLookupError:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--np", type=int, default=4)
    parser.add_argument("--pause", type=float, default=1.5, help="mean seconds between faults")
    args = parser.parse_args()
    dice = random.Random(args.seed)
    kinds: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        status, stop = folder / "status", folder / "stop"
        command = [sys.executable, "-m", "horovod.runner", "-np", "2", "--min-np", "2"]
        command += ["--max-np", str(args.np), "-H", f"localhost:{args.np}"]
        command += ["--max-worker-failures", "1000000", "--status-file", str(status)]
        command += [sys.executable, RANK_PROGRAM, str(folder)]
        env = environment(
            HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="5",
            HOROVOD_STALL_CHECK_TIME_SECONDS="2",
            HOROVOD_ELASTIC_ANSWER_TIMEOUT="10",
        )
        job, started = Job(status), time.monotonic()
        with (
            (folder / "log").open("w") as log,
            processes([(command, env)], stdout=log, stderr=log) as (process,),
        ):
            while sum(kinds.values()) < args.faults and process.poll() is None:
                time.sleep(dice.expovariate(1 / args.pause))
                job.read()
                many = 2 if dice.random() < 0.2 else 1
                # Some faults hit a job that is about to recover from another.
                patient = dice.random() < 0.7
                fault = dice.choices(FAULTS, WEIGHTS)[0]
                if fault == "exception":
                    many, patient = 1, True  # errors of all workers end a job, rightly
                deadline = time.monotonic() + 120
                while (patient and not job.formed) or len(job.victims()) < many:
                    if process.poll() is not None or time.monotonic() > deadline:
                        break
                    time.sleep(0.05)
                    job.read()
                for worker in dice.sample(job.victims(), min(many, len(job.victims()))):
                    inflict(fault, job.pids[worker])
                    kinds[fault] += 1
                print(
                    f"{time.monotonic() - started:6.1f} s  {sum(kinds.values()):3} faults  "
                    f"{fault} x{many}  members {len(job.victims())}",
                    flush=True,
                )
            stop.touch()
            try:
                code = process.wait(600)
            except subprocess.TimeoutExpired:
                code = None
        job.read()
        text = (folder / "log").read_text()
        problems = check(code, text, folder, job)
        print(
            f"{dict(kinds)}; {job.events['decision']} decisions, "
            f"{job.events['formed']} worlds, {len(job.pids)} processes, "
            f"{time.monotonic() - started:.0f} s"
        )
        for problem in problems:
            print(f"PROBLEM: {problem}")
        if problems:
            Path(f"elastic_chaos_{args.seed}.log").write_text(text + "\n" + status.read_text())
        else:
            print("all well")
        return int(bool(problems))


def check(code: int | None, text: str, folder: Path, job: Job) -> list[str]:
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
    left = [pid for pid in job.pids.values() if os.path.exists(f"/proc/{pid}")]
    if left:
        problems.append(f"processes are left: {left}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
