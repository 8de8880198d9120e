#!/usr/bin/env python
"""A long run of an elastic job over three hosts, whose ranks, hosts and links fail all the time.

The hosts are network name spaces of this machine with an sshd each (`tests.multihost.ssh_hosts`;
needs root, iproute2 and OpenSSH). The job, what is asked of it in the end and what follows it are
those of `elastic_chaos`. Faults are drawn from a seed: a rank is killed, all ranks of a host are
killed, a rank is stopped and goes on later, or a host's link loses everything for a while, too
short to be noticed or long enough that the host counts as lost.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # test this checkout, whatever else is installed

from benchmarks.elastic_chaos import (  # noqa: E402
    LIMITS,
    PATIENCE,
    RANK_PROGRAM,
    Job,
    check,
    leftovers,
)
from tests.multihost.ssh_hosts import SshHosts, available  # noqa: E402

KINDS = ("kill a rank", "kill a host", "stop a rank", "cut a link")
SHORT, LONG = (0.5, 2.0), (5.0, 9.0)  # seconds for which a rank is stopped or a link is down
KNOBS = LIMITS | {
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "4",
    "HOROVOD_FUSION_THRESHOLD": "30000",  # several buckets of so small a model
}
ENDING = 90.0  # seconds in which workers end that were cut off


@dataclass(frozen=True)
class Fault:
    """Something bad that happens to one rank or one host."""

    kind: str
    patient: bool  # only when the job has recovered from the last one
    pause: float  # seconds before
    seconds: float  # until it is over, if it ends
    lot: float  # whom it hits, as a part of those that are there


def draw(seed: int, pause: float) -> Iterator[Fault]:
    """Faults without end, every kind as often; the same for the same seed whatever the job does."""
    dice = random.Random(seed)
    while True:
        for kind in dice.sample(KINDS, len(KINDS)):
            patient, seconds = dice.random() < 0.7, dice.uniform(*dice.choice((SHORT, LONG)))
            yield Fault(kind, patient, dice.expovariate(1 / pause), seconds, dice.random())


class Chaos:
    """Brings the faults about."""

    def __init__(self, cluster: SshHosts, job: Job, runs: Callable[[], bool]) -> None:
        self.inflicted: Counter[str] = Counter()
        self._cluster = cluster
        self._job = job
        self._runs = runs

    def bring(self, fault: Fault) -> str:
        """Whom it hit; nobody if the job has nobody to spare."""
        time.sleep(fault.pause)
        self._await(fault.patient)
        if fault.kind == "cut a link":
            # The launcher is on the first host.
            host = 1 + int(fault.lot * (self._cluster.hosts.count - 1))
            victim = f"host{host}"
            self._cluster.hosts.cut(host)
            time.sleep(fault.seconds)
            self._cluster.hosts.heal(host)
        else:
            present = sorted(self._job.present())
            if len(present) < 2:
                return ""
            victim = present[int(fault.lot * len(present))]
            if fault.kind == "kill a host":
                victim = self._job.hosts[victim]
                workers = [w for w in present if self._job.hosts[w] == victim]
                if len(workers) == len(present):
                    return ""
            else:
                workers = [victim]
            for worker in workers:
                self._signal(worker, "SIGSTOP" if fault.kind == "stop a rank" else "SIGKILL")
            if fault.kind == "stop a rank":
                time.sleep(fault.seconds)
                self._signal(victim, "SIGCONT")
        self.inflicted[fault.kind] += 1
        return victim

    def _signal(self, worker: str, name: str) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._job.pids[worker], getattr(signal, name))

    def _await(self, formed: bool) -> None:
        deadline = time.monotonic() + PATIENCE
        while self._runs() and time.monotonic() < deadline:
            self._job.read()
            if (self._job.formed or not formed) and len(self._job.present()) > 1:
                return
            time.sleep(0.02)  # between looks at a file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-host", type=int, default=2, help="ranks on each host")
    parser.add_argument("--pause", type=float, default=1.5, help="mean seconds between faults")
    args = parser.parse_args()
    reason = available()
    if reason is not None:
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as cluster_place, tempfile.TemporaryDirectory() as place:
        cluster = SshHosts(Path(cluster_place))
        try:
            return run(args, cluster, Path(place))
        finally:
            cluster.close()


def run(args: argparse.Namespace, cluster: SshHosts, folder: Path) -> int:
    status = folder / "status"
    hosts = ",".join(f"host{host}:{args.per_host}" for host in range(cluster.hosts.count))
    command = ["-np", "2", "--min-np", "2", "-H", hosts, "--status-file", str(status)]
    command += ["--max-np", str(args.per_host * cluster.hosts.count)]
    command += ["--max-worker-failures", "1000000"]
    command += [sys.executable, RANK_PROGRAM, str(folder)]
    job, started = Job(status), time.monotonic()
    code: int | None = None
    with (folder / "log").open("w") as log:
        launcher = cluster.start(*command, env=KNOBS, output=log)
        try:
            chaos = Chaos(cluster, job, lambda: launcher.poll() is None)
            for fault in draw(args.seed, args.pause):
                if launcher.poll() is not None or chaos.inflicted.total() >= args.faults:
                    break
                victim = chaos.bring(fault)
                print(
                    f"{time.monotonic() - started:6.1f} s  {chaos.inflicted.total():3} faults  "
                    f"{fault.kind}: {victim or 'nobody to spare'}  members {len(job.present())}",
                    flush=True,
                )
            (folder / "stop").touch()
            with suppress(subprocess.TimeoutExpired):
                code = launcher.wait(600)
        finally:
            launcher.terminate()
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(30)
            launcher.kill()
            launcher.wait()
    deadline = time.monotonic() + ENDING
    while leftovers(folder) and time.monotonic() < deadline:
        time.sleep(0.1)  # between looks at processes
    job.read()
    text = (folder / "log").read_text()
    problems = check(code, text, folder)
    for pid in leftovers(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    print(
        f"{chaos.inflicted.total()} faults: {dict(chaos.inflicted)}; {job.events['decision']} "
        f"decisions, {job.events['formed']} worlds, {len(job.pids)} processes, "
        f"{time.monotonic() - started:.0f} s"
    )
    for problem in problems:
        print(f"PROBLEM: {problem}")
    if problems:
        Path(f"elastic_chaos_hosts_{args.seed}.log").write_text(text + "\n" + status.read_text())
    else:
        print("all well")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
