#!/usr/bin/env python
"""How long a job stands still when a worker is killed: ours against torchrun --max-restarts.

Run by people, and with --check by whoever guards the project's promises. This process starts the
jobs, kills workers of `benchmarks.elastic_rank` and reads what they note; see --help.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # measure this checkout, whatever else is installed

from benchmarks.processes import Progress, environment, processes  # noqa: E402

SIZE = 4
RANK_PROGRAM = str(ROOT / "benchmarks" / "elastic_rank.py")
PATIENCE = 120.0  # seconds; a job that needs longer to recover is taken to hang
MOST_MEDIAN, MOST_WORST = 2.0, 5.0  # seconds, promised for the survivors

DESCRIPTION = f"""\
{SIZE} ranks on this machine train the digits CNN; one at random is killed with SIGKILL, again and
again. Measured from the kill to the next step that all survivors complete together ("at 3"), and
from the moment the replacement has started and imported its modules to the next step of all
("at 4"; includes waiting for the next commit, every 10 batches). torchrun restarts all ranks from
a checkpoint written every 10 batches; from the kill to the next step of all, and the time that
`import torch` takes alone is given beside it.
"""

T = TypeVar("T")


def wait_for(look: Callable[[], T | None], what: str) -> T:
    deadline = time.monotonic() + PATIENCE
    while (found := look()) is None:
        if time.monotonic() > deadline:
            sys.exit(f"\nno {what} within {PATIENCE:g} s")
        time.sleep(0.005)
    return found


class Journals:
    """What the ranks of a job have noted: time and size of every step, by process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[int, int] = {}
        self.steps: dict[int, list[tuple[float, int]]] = {}

    def read(self) -> None:
        for path in self._folder.iterdir():
            pid = int(path.name)
            with path.open() as file:
                file.seek(self._offsets.get(pid, 0))
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._offsets[pid] = self._offsets.get(pid, 0) + len(whole)
            for line in whole.splitlines():
                moment, size = line.split()
                self.steps.setdefault(pid, []).append((float(moment), int(size)))

    def first(self, pid: int, after: float, size: int) -> float | None:
        return next((t for t, n in self.steps.get(pid, ()) if t > after and n == size), None)

    def all_stepped(self, after: float, size: int, besides: int | None = None) -> float | None:
        """When `size` processes had completed a step together after a moment."""
        self.read()
        found = [self.first(pid, after, size) for pid in self.steps if pid != besides]
        moments = [moment for moment in found if moment is not None]
        return max(moments) if len(moments) >= size else None

    def alive(self, after: float) -> list[int]:
        return [pid for pid, steps in self.steps.items() if steps and steps[-1][0] > after]


def events(path: Path, kind: str) -> list[dict[str, float]]:
    if not path.exists():
        return []
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [event for line in lines if (event := json.loads(line))["event"] == kind]


def measure_ours(kills: int, dice: random.Random, progress: Progress) -> list[tuple[float, float]]:
    """For each kill: seconds until the survivors, and until all ranks, step again."""
    with tempfile.TemporaryDirectory() as place:
        folder, status = Path(place) / "steps", Path(place) / "status"
        folder.mkdir()
        options = ["-np", str(SIZE), "--min-np", "2", "--max-np", str(SIZE)]
        options += ["-H", f"localhost:{SIZE}", "--max-worker-failures", "1000000"]
        rank = [sys.executable, RANK_PROGRAM, "horovod", str(folder)]
        command = [sys.executable, "-m", "horovod.runner", *options]
        command += ["--status-file", str(status), *rank]
        journals, results = Journals(folder), []
        with processes([(command, environment())], stdout=subprocess.DEVNULL, stderr=sys.stderr):
            wait_for(lambda: journals.all_stepped(0.0, SIZE), "first step")
            for _ in range(kills):
                time.sleep(dice.uniform(0.5, 1.5))
                journals.read()
                victim = dice.choice(journals.alive(time.time() - 0.4))
                ready = len(events(status, "ready"))
                killed = time.time()
                os.kill(victim, signal.SIGKILL)
                smaller = wait_for(
                    lambda t=killed, v=victim: journals.all_stepped(t, SIZE - 1, v),  # type: ignore[misc]
                    "step of the survivors",
                )
                came = wait_for(
                    lambda n=ready: (events(status, "ready")[n:] or [None])[0],  # type: ignore[misc]
                    "replacement",
                )["time"]
                whole = wait_for(
                    lambda t=killed: journals.all_stepped(t, SIZE),  # type: ignore[misc]
                    "step of all ranks",
                )
                results.append((smaller - killed, whole - came))
                progress.advance("ours")
        return results


def measure_torchrun(kills: int, dice: random.Random, progress: Progress) -> list[float]:
    """For each kill: seconds until all ranks step again."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "steps"
        folder.mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(SIZE), "--max-restarts", "1000000"]
        command += [RANK_PROGRAM, "torchrun", str(folder)]
        journals, results = Journals(folder), []
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with processes([(command, environment())], **quiet):
            wait_for(lambda: journals.all_stepped(0.0, SIZE), "first step")
            for _ in range(kills):
                time.sleep(dice.uniform(0.5, 1.5))
                journals.read()
                victim = dice.choice(journals.alive(time.time() - 0.4))
                old = set(journals.steps)
                killed = time.time()
                os.kill(victim, signal.SIGKILL)

                def stepped(after: float = killed, before: set[int] = old) -> float | None:
                    journals.read()
                    found = [journals.first(p, after, SIZE) for p in journals.steps.keys() - before]
                    moments = [moment for moment in found if moment is not None]
                    return max(moments) if len(moments) == SIZE else None

                results.append(wait_for(stepped, "step after the restart") - killed)
                progress.advance("torchrun")
        return results


def import_seconds() -> float:
    """What `import torch` takes when as many processes do it at once as ranks start."""
    program = "import time; t = time.time(); import torch; print(time.time() - t)"
    commands = [([sys.executable, "-c", program], environment())] * SIZE
    with processes(commands, stdout=subprocess.PIPE) as running:
        return statistics.median(float(process.communicate()[0]) for process in running)


def line(name: str, seconds: list[float]) -> str:
    return (
        f"{name:34} median {statistics.median(seconds):6.2f} s   worst {max(seconds):6.2f} s"
        f"   of {len(seconds)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, help="for each contender (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="which ranks, and when")
    parser.add_argument("--only-ours", action="store_true", help="leave torchrun out")
    parser.add_argument("--csv", type=Path, help="also write every measurement to this file")
    parser.add_argument("--check", action="store_true", help="status 1 when a promise is missed")
    args = parser.parse_args()

    progress = Progress(args.kills * (1 if args.only_ours else 2))
    ours = measure_ours(args.kills, random.Random(args.seed), progress)
    theirs: list[float] = []
    if not args.only_ours:
        theirs = measure_torchrun(args.kills, random.Random(args.seed), progress)
    progress.clear()
    at_3, at_4 = [a for a, _ in ours], [b for _, b in ours]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end")
    print(line("ours, survivors at 3", at_3))
    print(line("ours, at 4 with the replacement", at_4))
    if theirs:
        print(line("torchrun --max-restarts, all at 4", theirs))
        print(f"{'import torch alone, 4 at once':34} median {import_seconds():6.2f} s")
        ratio = statistics.median(theirs) / statistics.median(at_3)
        print(f"after a kill, torchrun stands still {ratio:.1f} times as long as ours")
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["contender", "kill", "seconds_to_step_of_survivors", "seconds_at_4"])
            for number, (small, whole) in enumerate(ours):
                writer.writerow(["ours", number, f"{small:.4f}", f"{whole:.4f}"])
            for number, seconds in enumerate(theirs):
                writer.writerow(["torchrun", number, "", f"{seconds:.4f}"])
    missed = statistics.median(at_3) > MOST_MEDIAN or max(at_3) > MOST_WORST
    missed |= statistics.median(at_4) > MOST_MEDIAN or max(at_4) > MOST_WORST
    if missed:
        print(f"missed: median {MOST_MEDIAN:g} s, worst {MOST_WORST:g} s", file=sys.stderr)
    return int(args.check and missed)


if __name__ == "__main__":
    sys.exit(main())
