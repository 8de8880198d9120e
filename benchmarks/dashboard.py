#!/usr/bin/env python
"""What a page that somebody looks at costs a job: steps with --dashboard against steps without.

Run by people, and with --check by whoever guards the project's promises. The ranks are
`benchmarks.dashboard_rank`; see --help.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # measure this checkout, whatever else is installed

from benchmarks.processes import environment, positive  # noqa: E402
from benchmarks.promises import Requirement, aligned, all_met, warn_if_busy  # noqa: E402
from benchmarks.training_models import WORKLOADS  # noqa: E402
from benchmarks.turns import HEAD_START, Samples, interval, race, ratios  # noqa: E402

MOST = 0.01  # of a step: less cannot be told from nothing
WIDEST = 0.04  # of the interval, to say anything
PAIRS = [("on", "off")]
MODELS = ["mlp", "cnn"]
TURN = 1.5  # seconds on an idle machine: long enough for a report to fall into each
_LINK = re.compile(r"dashboard: (http://\S+)/\?token=(\S+)")
_PATIENCE = 300.0

DESCRIPTION = """\
Compare training steps of a job with a dashboard, whose page is open, to those of the same job
without, on this machine.

Each job has a horovodrun and ranks of its own; one takes a turn of steps while the other sleeps,
and a turn is long enough to have a report in it. OMP_NUM_THREADS is 1. A sample is a turn of the
slowest rank, a ratio that of two turns that follow each other; the result is the median with the
interval that has it 19 times out of 20.
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--np", type=int, default=2, metavar="N", help="number of ranks (2)")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS, help="(all)")
    parser.add_argument(
        "--seconds", type=positive, default=120.0, help="of each measurement (120)", metavar="S"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 when a promise is missed or not measured"
    )
    return parser.parse_args(arguments)


class Job:
    """A horovodrun whose ranks wait for orders."""

    def __init__(self, folder: Path, name: str, size: int, model: str) -> None:
        self._output = folder / f"{name}.txt"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / name))
        listener.listen(size)
        listener.settimeout(_PATIENCE)
        steps = round(TURN / 0.1 * WORKLOADS[model].turn)
        command = [sys.executable, "-m", "horovod.runner", "-np", str(size)]
        command += ["--dashboard", ":0"] if name == "on" else []
        command += [sys.executable, "-m", "benchmarks.dashboard_rank", str(folder / name), model]
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [*command, str(steps)],
                cwd=ROOT,
                env=environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            self._links = [listener.accept()[0].makefile("rw") for _ in range(size)]
        except TimeoutError:
            self.process.terminate()
            sys.exit(f"the ranks did not start:\n{self._output.read_text()}")
        finally:
            listener.close()
        for link in self._links:
            json.loads(link.readline())

    @property
    def address(self) -> tuple[str, str]:
        """Where the page is, and its token."""
        found = _LINK.search(self._output.read_text())
        assert found is not None, self._output.read_text()
        return found[1], found[2]

    def turn(self) -> float:
        begin = json.dumps(time.monotonic() + HEAD_START)
        for link in self._links:
            print(begin, file=link, flush=True)
        return max(float(json.loads(link.readline())) for link in self._links)

    def close(self) -> None:
        for link in self._links:
            link.close()
        self.process.wait(_PATIENCE)


def look(address: str, token: str, ended: threading.Event, seen: list[int]) -> None:
    """What an open page does."""
    since = 0
    with contextlib.suppress(OSError):  # the job has ended
        while not ended.is_set():
            request = urllib.request.Request(
                f"{address}/changes?since={since}",
                headers={"Authorization": f"Bearer {token}", "Accept-Encoding": "gzip"},
            )
            with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
                since = json.loads(gzip.decompress(answer.read()))["version"]
            seen.append(since)


def measure(size: int, model: str, seconds: float) -> tuple[Samples, int]:
    """The turns of both, and how often the page has got something new."""
    ended, seen = threading.Event(), list[int]()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        jobs = {}
        for name in ("off", "on"):
            jobs[name] = Job(Path(folder), name, size, model)
            stack.callback(jobs[name].close)
        page = threading.Thread(target=look, args=(*jobs["on"].address, ended, seen), daemon=True)
        page.start()
        samples = race({name: job.turn for name, job in jobs.items()}, PAIRS, seconds)
        ended.set()
    page.join(_PATIENCE)
    return samples, len(seen)


def requirements(found: dict[str, tuple[Samples, int]]) -> Iterator[Requirement]:
    for name, (samples, seen) in found.items():
        low, high = interval(ratios(samples, "on", "off"))
        text = f"an open page costs no more than {100 * MOST:g} % of a step that can be told"
        spread = f"{100 * (low - 1):+.2f} to {100 * (high - 1):+.2f} %"
        met = low < 1 + MOST
        known = not met or high - low < WIDEST  # on a busy machine nothing can be told at all
        yield Requirement(f"{text} ({WORKLOADS[name].title})", met if known else None, spread)
        yield Requirement(f"the page was alive ({WORKLOADS[name].title})", seen > 2, f"{seen} news")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    warn_if_busy()
    found = {name: measure(options.np, name, options.seconds) for name in options.models}
    rows = [["", "step", "page / none", "95 %", "turns", "news"]]
    for name, (samples, seen) in found.items():
        values = ratios(samples, "on", "off")
        low, high = interval(values)
        rows.append(
            [
                WORKLOADS[name].title,
                f"{1e3 * median(samples['off']):.2f} ms",
                f"{median(values):.4f}",
                f"{low:.4f} to {high:.4f}",
                str(len(values)),
                str(seen),
            ]
        )
    print(f"\n{options.np} ranks, with an open page against without a dashboard\n")
    print("\n".join(aligned(rows)) + "\n")
    met = all_met(requirements(found))
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
