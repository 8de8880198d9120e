#!/usr/bin/env python
"""How long a job stands still when a worker is killed: ours against torchrun --max-restarts.

Run by people, and with --check by whoever guards the project's promises. This process starts the
jobs, kills workers of `benchmarks.elastic_rank` and reads what they note; see --help.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # measure this checkout, whatever else is installed

from benchmarks.elastic_journals import Journals  # noqa: E402
from benchmarks.elastic_kills import RANK_PROGRAM, Kill, Setting, kills, wait_for  # noqa: E402
from benchmarks.gpus import Gpus, gpus_for  # noqa: E402
from benchmarks.parts import Parts, add_limit_option  # noqa: E402
from benchmarks.processes import Progress, environment, positive, processes  # noqa: E402
from benchmarks.promises import Requirement, all_met  # noqa: E402

SIZES = {"cpu": [4], "cuda": [3, 4]}
KILLS = {"cpu": 20, "cuda": 50}
STEP_LIMIT = {"cpu": 120.0, "cuda": 20.0}
PATIENCE = 120.0  # seconds; a torchrun that needs longer to recover is taken to hang
MOST_JOBS = 4  # jobs that are started with a number of ranks: after three that hang it is enough
MOST_MEDIAN = {"cpu": 2.0, "cuda": 1.0}  # seconds, promised for the survivors
MOST_WORST = {"cpu": 5.0, "cuda": 3.0}

DESCRIPTION = """\
Ranks on this machine train the digits CNN; one at random is killed with SIGKILL, again and again.
Measured from the kill to the next step that all survivors complete together ("at 3" of 4 ranks),
and from the moment the replacement has started and imported its modules to the next step of all
("at 4"; includes waiting for the next commit, every 10 batches). torchrun restarts all ranks from a
checkpoint written every 10 batches; from the kill to the next step of all, and the time that
`import torch` takes alone is given beside it.

On cuda the ranks share a GPU where there are fewer than ranks, each with a NCCL_HOSTID of its own;
without MPS, under which a killed process may take others along. A kill after which no step follows
within --kill-limit counts as a hang: that job is ended and another one started. torchrun is left
out there.
"""
EPILOG = """\
examples:
  python benchmarks/elastic.py
  python benchmarks/elastic.py --device cuda --np 3 4 --kills 50 --limit 570
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(cpu)")
    parser.add_argument(
        "--np", type=ranks, nargs="+", metavar="N", help="numbers of ranks (4; on cuda 3 4)"
    )
    parser.add_argument(
        "--kills",
        type=int,
        metavar="N",
        help="of each contender, shared out among the numbers of ranks (20; on cuda 50)",
    )
    parser.add_argument(
        "--kill-limit",
        type=positive,
        metavar="S",
        help="seconds after a kill without a step that count as a hang (120; on cuda 20)",
    )
    parser.add_argument("--seed", type=int, default=0, help="which ranks, and when")
    parser.add_argument("--only-ours", action="store_true", help="leave torchrun out")
    parser.add_argument(
        "--mps", action="store_true", help="on cuda, start MPS although it may spread a kill"
    )
    parser.add_argument("--csv", type=Path, help="also write every measurement to this file")
    parser.add_argument("--log", type=Path, help="keep what our jobs print in this file")
    parser.add_argument("--check", action="store_true", help="status 1 when a promise is missed")
    add_limit_option(parser)
    options = parser.parse_args(arguments)
    options.np = options.np or SIZES[options.device]
    options.kills = options.kills or KILLS[options.device]
    options.kill_limit = options.kill_limit or STEP_LIMIT[options.device]
    return options


def ranks(text: str) -> int:
    if not text.isdigit() or int(text) < 3:
        raise argparse.ArgumentTypeError(f"{text!r}: two ranks have to be left after a kill")
    return int(text)


def shares(total: int, parts: int) -> list[int]:
    """`total` in so many nearly equal shares, the larger ones first."""
    return [total // parts + (number < total % parts) for number in range(parts)]


def setting_of(size: int, options: argparse.Namespace, gpus: Gpus) -> Setting:
    """Our job with that many ranks."""
    if not gpus.count:
        return Setting(size, step_limit=options.kill_limit)
    is_shared = gpus.are_shared(size)
    return Setting(
        size,
        ("cuda", "shared") if is_shared else ("cuda",),
        gpus.mps if is_shared else {},
        pause=(0.2, 0.8),
        start_limit=90.0,
        step_limit=options.kill_limit,
        join_limit=60.0,
    )


class Bench:
    """Kills workers of our jobs, and shows what each kill cost as soon as that is known."""

    def __init__(self, options: argparse.Namespace, gpus: Gpus, progress: Progress) -> None:
        self.parts = Parts(math.inf, options.limit)
        self._options = options
        self._gpus = gpus
        self._progress = progress

    def measure(self, size: int, count: int, log: Path, found: list[Kill]) -> None:
        """Add `count` kills of one of `size` ranks, or as many as there is time for, to `found`."""
        dice = random.Random(self._options.seed)
        for _ in range(MOST_JOBS):
            name = f"{size} ranks, kills {len(found) + 1} to {count}"
            begun = self.parts.attempt(name, lambda _: self._one_job(size, count, dice, log, found))
            if not begun or len(found) == count:
                return
        self.parts.missing.append(f"{size} ranks, kills {len(found) + 1} to {count}")

    def _one_job(
        self, size: int, count: int, dice: random.Random, log: Path, found: list[Kill]
    ) -> bool:
        setting = setting_of(size, self._options, self._gpus)
        with closing(kills(setting, dice, log)) as killing:
            for kill in killing:
                found.append(kill)
                self._progress.advance(f"{size} ranks, ours")
                if self._gpus.count:
                    print(f"{size} ranks, kill {len(found)}: {told(kill)}", flush=True)
                if len(found) == count or self.parts.left <= 0:
                    break
        return True


def told(kill: Kill) -> str:
    """One kill, for people."""
    words = [f"{seconds_text(kill.survivors)} to the next step of the survivors"]
    if kill.joined is not None:
        words.append(f"{kill.joined:.2f} s until its replacement, once ready, took part")
    if kill.lost:
        words.append(f"ENDED TOO: processes {', '.join(map(str, kill.lost))}")
    return "; ".join([*words, kill.problem] if kill.problem else words)


def seconds_text(seconds: float | None) -> str:
    return "never" if seconds in (None, math.inf) else f"{seconds:.2f} s"


def measure_torchrun(size: int, count: int, dice: random.Random, progress: Progress) -> list[float]:
    """For each kill: seconds until all ranks step again."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "steps"
        folder.mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(size), "--max-restarts", "1000000"]
        command += [RANK_PROGRAM, "torchrun", str(folder)]
        journals, results = Journals(folder), []
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with processes([(command, environment())], **quiet):
            if wait_for(lambda: journals.all_stepped(0.0, size), PATIENCE) is None:
                sys.exit(f"\nno first step under torchrun within {PATIENCE:g} s")
            for _ in range(count):
                time.sleep(dice.uniform(0.5, 1.5))
                journals.read()
                victim = dice.choice(journals.alive(time.time() - 0.4))
                old = set(journals.steps)
                killed = time.time()
                os.kill(victim, signal.SIGKILL)

                def stepped(after: float = killed, before: set[int] = old) -> float | None:
                    journals.read()
                    found = [journals.first(p, after, size) for p in journals.steps.keys() - before]
                    moments = [moment for moment in found if moment is not None]
                    return max(moments) if len(moments) == size else None

                moment = wait_for(stepped, PATIENCE)
                if moment is None:
                    sys.exit(f"\nno step after the restart of torchrun within {PATIENCE:g} s")
                results.append(moment - killed)
                progress.advance("torchrun")
        return results


def import_seconds(size: int) -> float:
    """What `import torch` takes when as many processes do it at once as ranks start."""
    program = "import time; t = time.time(); import torch; print(time.time() - t)"
    commands = [([sys.executable, "-c", program], environment())] * size
    with processes(commands, stdout=subprocess.PIPE) as running:
        return statistics.median(float(process.communicate()[0]) for process in running)


# -- what there is to say ----------------------------------------------------------------------


def line(name: str, seconds: list[float]) -> str:
    if not seconds:
        return f"{name:34} not measured"
    return (
        f"{name:34} median {statistics.median(seconds):6.2f} s   worst {max(seconds):6.2f} s"
        f"   of {len(seconds)}"
    )


def table(size: int, found: list[Kill], most: float) -> Iterator[str]:
    """The kills among `size` ranks; those that took more than `most` seconds one by one."""
    yield line(f"ours, survivors at {size - 1}", stood(found))
    joined = [kill.joined for kill in found if kill.joined is not None]
    yield line(f"ours, at {size} with the replacement", joined)
    for number, kill in enumerate(found, 1):
        if kill.survivors is None or kill.survivors > most or kill.lost or kill.problem:
            yield f"  kill {number} of {len(found)}: {told(kill)}"


def stood(found: list[Kill]) -> list[float]:
    """Seconds for which survivors stood still, where they did go on."""
    return [kill.survivors for kill in found if kill.survivors is not None]


def requirements(found: list[Kill], device: str) -> Iterator[Requirement]:
    """The promises, for all kills together; one without a step after it took for ever."""
    times = [math.inf if kill.survivors is None else kill.survivors for kill in found]
    where = " or ".join(str(size) for size in sorted({kill.size for kill in found})) or "the"
    text = f"{len(found)} kills of one of {where} ranks, to the next step of the survivors: "
    for kind, most, measured in (
        ("median", MOST_MEDIAN[device], statistics.median(times) if times else None),
        ("worst", MOST_WORST[device], max(times, default=None)),
    ):
        met = None if measured is None else measured <= most
        said = "not measured" if measured is None else seconds_text(measured)
        yield Requirement(f"{text}{kind} at most {most:g} s", met, said)
    hangs = [kill for kill in found if kill.problem]
    lost = sum(len(kill.lost) for kill in found)
    known = bool(found) or None
    yield Requirement("no kill leaves the job hanging", known and not hangs, f"{len(hangs)} did")
    yield Requirement(
        "survivors keep their processes", known and not lost, f"{lost} processes ended"
    )


def write_csv(path: Path, ours: list[Kill], theirs: list[float]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        columns = ["seconds_to_step_of_survivors", "seconds_of_all", "processes_lost", "problem"]
        writer.writerow(["contender", "ranks", "kill", *columns])
        for number, kill in enumerate(ours):
            times = ["" if t is None else f"{t:.4f}" for t in (kill.survivors, kill.joined)]
            writer.writerow(["ours", kill.size, number, *times, len(kill.lost), kill.problem])
        for number, seconds in enumerate(theirs):
            writer.writerow(["torchrun", "", number, "", f"{seconds:.4f}", "", ""])


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    on_cpu = options.device == "cpu"
    with_torchrun = on_cpu and not options.only_ours
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end with us
    progress = Progress(options.kills * (2 if with_torchrun else 1))
    counts = dict(zip(options.np, shares(options.kills, len(options.np)), strict=True))
    ours: dict[int, list[Kill]] = {}
    theirs: dict[int, list[float]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="horovod-benchmark-") as folder,
        gpus_for(options.device, max(options.np), options.mps) as gpus,
    ):
        bench = Bench(options, gpus, progress)
        for size, count in counts.items():
            ours[size] = []
            try:
                bench.measure(size, count, options.log or Path(folder, "log"), ours[size])
            finally:  # also when we are told to end
                progress.clear()
                for text in table(size, ours[size], MOST_WORST[options.device]):
                    print(text, flush=True)
    for size, count in counts.items() if with_torchrun else ():
        theirs[size] = measure_torchrun(size, count, random.Random(options.seed), progress)
        progress.clear()
        print(line(f"torchrun --max-restarts, all at {size}", theirs[size]))
        print(f"{f'import torch alone, {size} at once':34} median {import_seconds(size):6.2f} s")
        if times := stood(ours[size]):
            ratio = statistics.median(theirs[size]) / statistics.median(times)
            print(f"after a kill, torchrun stands still {ratio:.1f} times as long as ours")
    print(
        f"{gpus.name or 'no GPU'}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end"
    )
    everything = [kill for found in ours.values() for kill in found]
    if options.csv:
        write_csv(options.csv, everything, [t for found in theirs.values() for t in found])
    met = all_met(requirements(everything, options.device))
    bench.parts.explain()
    return 1 if bench.parts.missing or (options.check and not met) else 0


if __name__ == "__main__":
    sys.exit(main())
