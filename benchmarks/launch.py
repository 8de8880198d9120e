"""How fast jobs start and end: horovodrun against torchrun, many ranks, many hosts.

    python benchmarks/launch.py

- start to exit of two ranks that only initialise: ``horovodrun -np 2`` with ``hvd.init()`` against
  ``torchrun --nproc-per-node 2`` with ``init_process_group("gloo")``, taking turns; medians and
  their ratio
- many ranks on this machine (32) that initialise, meet in a barrier and end
- many hosts (256) through a program that stands in for ssh and runs each host's agent here: from
  the command line until every host's worker has reported, with the launcher's threads and
  descriptors at that moment, and until everything is gone
- with ``--slurm NODES``, and nothing else: a Slurm with so many nodes on this machine
  (tests/slurm.py), and a job with two ranks on each against one with two ranks on one node, taking
  turns: from the command line until every rank has reported

``--check`` makes the exit status say whether the promises hold: no slower than torchrun, all ranks
and hosts come up and down, 256 hosts within 10 s, 8 nodes of Slurm within 1.5 times one.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.processes import environment

HOROVOD = "import horovod.torch as hvd; hvd.init()"
TORCH = "import torch.distributed as dist; dist.init_process_group('gloo')"
BARRIER = "import horovod.torch as hvd; hvd.init(); hvd.barrier(); hvd.shutdown()"
HOROVODRUN = [sys.executable, "-m", "horovod.runner"]
PROMISED_SECONDS = 10.0
PROMISED_RATIO = 1.5

STUB = """#!/bin/sh
while :; do
    case "$1" in
        -o|-p|-i) shift 2 ;;
        -T) shift ;;
        *) break ;;
    esac
done
shift 2
SSH_CONNECTION="127.0.0.1 40000 127.0.0.1 22" exec /bin/sh -c "$*"
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each launcher (7)")
    parser.add_argument("--ranks", type=int, default=32, help="ranks on this machine (32)")
    parser.add_argument("--hosts", type=int, default=256, help="hosts through the stand-in (256)")
    parser.add_argument("--slurm", type=int, metavar="NODES", help="measure nodes of a Slurm")
    parser.add_argument("--check", action="store_true", help="fail if a promise does not hold")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the first run")
    if options.slurm:
        return 0 if slurm_nodes(options.slurm, options.rounds) or not options.check else 1
    kept = [against_torchrun(options.rounds), many_ranks(options.ranks), many_hosts(options.hosts)]
    return 0 if all(kept) or not options.check else 1


def against_torchrun(rounds: int) -> bool:
    commands = {
        "horovodrun": [*HOROVODRUN, "-np", "2", sys.executable, "-c", HOROVOD],
        "torchrun": [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--no-python", sys.executable, "-c", TORCH),
        ],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(rounds + 1):
        for name, command in commands.items():
            begin = time.perf_counter()
            subprocess.run(command, env=environment(), check=True, capture_output=True, timeout=300)
            if turn:  # the first only fills the caches
                times[name].append(time.perf_counter() - begin)
    ours, theirs = (statistics.median(times[name]) for name in ("horovodrun", "torchrun"))
    for name, values in times.items():
        middle = statistics.median(values)
        print(
            f"{name:10}  {middle:6.2f} s  ({min(values):.2f} to {max(values):.2f}, {rounds} turns)"
        )
    print(f"torchrun / horovodrun: {theirs / ours:.2f}")
    return ours <= theirs


def many_ranks(count: int) -> bool:
    begin = time.perf_counter()
    done = subprocess.run(
        [*HOROVODRUN, "-np", str(count), sys.executable, "-c", BARRIER],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    seconds = time.perf_counter() - begin
    print(f"{count} ranks on this machine: {seconds:.1f} s, exit status {done.returncode}")
    if done.returncode:
        print(done.stderr[-3000:])
    return done.returncode == 0


def many_hosts(count: int) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        stub = Path(folder, "ssh")
        stub.write_text(STUB)
        stub.chmod(0o755)
        env = environment(PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
        begin = time.perf_counter()
        process = subprocess.Popen(
            [
                *(*HOROVODRUN, "-np", str(count), "-H", f"h[1-{count}]:1"),
                *("sh", "-c", "echo up; exec sleep 1000"),
            ],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        up = 0
        for line in process.stdout:
            up += line.endswith("<stdout>:up\n")
            if up == count:
                break
        started = time.perf_counter() - begin
        threads = len(os.listdir(f"/proc/{process.pid}/task")) if up == count else 0
        descriptors = len(os.listdir(f"/proc/{process.pid}/fd")) if up == count else 0
        begin = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=300)
        ended = time.perf_counter() - begin
    print(
        f"{up} of {count} hosts up after {started:.1f} s, gone {ended:.1f} s after the signal; "
        f"launcher: {threads} threads, {descriptors} descriptors"
    )
    if up < count:
        print(stderr[-3000:])
    return up == count and started < PROMISED_SECONDS


def slurm_nodes(count: int, rounds: int) -> bool:
    from tests.slurm import Slurm, available

    reason = available()
    if reason:
        raise SystemExit(reason)
    times: dict[int, list[float]] = {1: [], count: []}
    with Slurm(count) as cluster:
        env = cluster.environment(environment())
        for turn in range(rounds + 1):
            for nodes, values in times.items():
                seconds = until_all_report(nodes, env)
                if turn:
                    values.append(seconds)
    medians = {nodes: statistics.median(values) for nodes, values in times.items()}
    ratios = [many / one for one, many in zip(*times.values(), strict=True)]
    ratio = statistics.median(ratios)
    for nodes, values in times.items():
        plural = "" if nodes == 1 else "s"
        print(
            f"{2 * nodes:3} ranks on {nodes} node{plural} of Slurm: {medians[nodes]:.2f} s "
            f"({min(values):.2f} to {max(values):.2f}, {rounds} turns)"
        )
    print(f"{count} nodes / 1 node: {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return ratio <= PROMISED_RATIO


def until_all_report(nodes: int, env: dict[str, str]) -> float:
    """Seconds from the command line until both ranks of every node have said something."""
    job = ["salloc", "--quiet", f"--nodes={nodes}", "--ntasks-per-node=2"]
    # The launcher's clock begins when the job has its nodes: how long that takes is Slurm's matter.
    begun = ["sh", "-c", 'date +%s.%N; exec "$@"', "sh"]
    with subprocess.Popen(
        [*job, *begun, *HOROVODRUN, "sh", "-c", "echo up; exec sleep 1000"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        begin = float(process.stdout.readline())
        up = 0
        for line in process.stdout:
            up += line.endswith("<stdout>:up\n")
            if up == 2 * nodes:
                break
        seconds = time.time() - begin
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=300)
    if up < 2 * nodes:
        raise SystemExit(stderr[-3000:])
    return seconds


if __name__ == "__main__":
    sys.exit(main())
