#!/usr/bin/env python
"""What local steps and 8 bits are worth on slow links: speed, bytes, and what is learned.

Run by people. This process makes the hosts, starts the ranks in them
(`benchmarks.local_steps_rank`) and reports; see --help.
"""

from __future__ import annotations

import argparse
import csv
import json
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # measure this checkout, whatever else is installed

from benchmarks.network_hosts import UNLIMITED, Network, cores, missing, network  # noqa: E402
from benchmarks.processes import Commands, Group, group, limit, positive  # noqa: E402
from benchmarks.promises import aligned, warn_if_busy  # noqa: E402
from benchmarks.turns import HEAD_START  # noqa: E402

SPEED = ["plain", "ddp", "every", "local", "local fp8", "streaming", "streaming fp8"]
QUALITY = ["every", "every fp8", "average", "local", "local fp8", "streaming", "streaming fp8"]
FLAT = {"HOROVOD_CPU_OPERATIONS": "gloo"}  # although shared memory would do: bytes are to be coded


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sections", nargs="+", default=["speed", "allreduce", "quality"])
    parser.add_argument("--hosts", type=int, default=2, help="hosts, with one rank each (2)")
    parser.add_argument("--links", nargs="+", default=["1gbit", "100mbit/20ms"])
    parser.add_argument("--loopback", action="store_true", help="make no hosts, limit no links")
    parser.add_argument("--models", nargs="+", default=["mlp", "resnet18", "transformer"])
    parser.add_argument("--contenders", nargs="+", help="those of every section, if it has them")
    parser.add_argument("--local-steps", type=int, default=50, metavar="H")
    parser.add_argument("--fragments", type=int, default=2, metavar="P", help="of streaming (2)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (5)")
    parser.add_argument("--sizes", nargs="+", type=int, default=[16 << 20, 100 << 20])
    parser.add_argument("--tasks", nargs="+", default=["digits", "pictures", "text"])
    parser.add_argument("--steps", type=int, default=1000, help="steps of a training (1000)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each contender (3)")
    parser.add_argument("--timeout", type=positive, default=3600.0, metavar="SECONDS")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args(arguments)


class Bench:
    """Measures what the options name, and keeps a row for each number."""

    def __init__(self, options: argparse.Namespace, hosts: Network, folder: Path) -> None:
        self.options = options
        self.hosts = hosts
        self.folder = folder
        self.rows: list[dict[str, Any]] = []

    def _commands(self, **plan: Any) -> Commands:
        text = json.dumps({"bind": self.hosts.hosts == cores(), **plan})
        program = [sys.executable, "-m", "benchmarks.local_steps_rank", text]
        return self.hosts.commands(program, FLAT, per_host=1)

    def _output(self, name: str) -> Path:
        """The folder for what the ranks of a job print."""
        return self.folder / name.replace("/", " ")

    def _chosen(self, everybody: list[str]) -> list[str]:
        wanted = self.options.contenders
        return [one for one in everybody if wanted is None or one in wanted]

    def _take_turns(self, jobs: dict[str, Group], order: dict[str, Any]) -> dict[str, list[Any]]:
        """What the slowest rank of each contender found, and the waits of all its ranks.

        Between two synchronisations ranks drift apart, and whoever is early also waits for the
        others. The rank that is the last at a synchronisation, the one that waits least, waits for
        the link alone.
        """
        found: dict[str, list[Any]] = {name: [] for name in jobs}
        names = list(jobs)
        for _ in range(self.options.rounds):
            for name in names:
                start = time.monotonic() + HEAD_START
                answers = jobs[name].ask({**order, "start": start})
                slowest = max(answers, key=lambda answer: answer["ms"])
                waits = list(zip(*(answer["waits"] for answer in answers), strict=True))
                wait = max((max(each) for each in waits), default=0.0)
                link_wait = max((min(each) for each in waits), default=0.0)
                found[name].append({**slowest, "wait": wait, "link_wait": link_wait})
            names.append(names.pop(0))  # nobody is always the first
        return found

    def speed(self, link: str, model: str) -> None:
        """Contenders train the same model in turns of H steps, so that each has synchronised."""
        steps = self.options.local_steps
        titles = ["ms/step", "CPU ms/step", "speed", "bytes/step", "longest wait", "for the link"]
        titles.append("delay")
        table = [[f"{model}, {link}", *titles]]
        with ExitStack() as opened:
            jobs = {}
            for name in self._chosen(SPEED):
                plan = {"model": model, "contender": name, "local_steps": steps, "link": link}
                commands = self._commands(**plan, fragments=self.options.fragments)
                output = self._output(f"{name}, {model}, {link}")
                jobs[name] = opened.enter_context(group(commands, output))
            found = self._take_turns(jobs, {"do": "turn", "steps": steps})
        for name, turns in found.items():
            pairs = zip(found.get("plain", turns), turns, strict=True)
            ratio = median(plain["ms"] / own["ms"] for plain, own in pairs)
            ms, cpu, nbytes = (
                median(turn[key] for turn in turns) for key in ("ms", "cpu", "bytes")
            )
            longest = max(turn["wait"] for turn in turns)
            link_wait = max(turn["link_wait"] for turn in turns)
            table.append(
                [
                    name,
                    f"{ms:.2f}",
                    f"{cpu:.2f}",
                    f"{ratio:.2f}",
                    f"{nbytes:,.0f}",
                    f"{longest:.2f} steps",
                    f"{link_wait:.2f} steps",
                    f"{turns[0]['delay']} steps" if turns[0]["delay"] else "",
                ]
            )
            found_here = {"ms": ms, "cpu": cpu, "ratio": ratio, "bytes": nbytes, "wait": longest}
            found_here |= {"link wait": link_wait, "delay": turns[0]["delay"]}
            self._note("speed", link, model, name, **found_here)
        self._show(table)

    def allreduce(self, link: str) -> None:
        table = [[f"allreduce, {link}", "none", "bf16", "fp8", "int8", "fp8 against bf16"]]
        with group(self._commands(), self._output(f"allreduce, {link}")) as job:
            for nbytes in self.options.sizes:
                found: dict[str, list[float]] = {name: [] for name in table[0][1:5]}
                for _ in range(self.options.rounds + 1):
                    for name, times in found.items():
                        order = {"do": "allreduce", "contender": name, "nbytes": nbytes}
                        start = time.monotonic() + HEAD_START
                        answers = job.ask({**order, "start": start})
                        times.append(max(answer["ms"] for answer in answers))
                ms = {
                    name: median(times[1:]) for name, times in found.items()
                }  # the first warms up
                pairs = zip(found["bf16"][1:], found["fp8"][1:], strict=True)
                ratio = median(bf16 / fp8 for bf16, fp8 in pairs)
                times_text = [f"{value:.0f} ms" for value in ms.values()]
                table.append([f"{nbytes >> 20} MiB", *times_text, f"{ratio:.2f}x"])
                for name, value in ms.items():
                    self._note("allreduce", link, str(nbytes), name, ms=value, ratio=ratio)
        self._show(table)

    def quality(self, task: str) -> None:
        options = self.options
        titles = ["loss", "against every step", "accuracy", "difference", "accuracies"]
        table = [[f"{task}, H={options.local_steps}", *titles]]
        finals: dict[str, list[tuple[float, float]]] = {}  # loss and accuracy with each seed
        for name in self._chosen(QUALITY):
            with group(self._commands(), self._output(f"{name}, {task}")) as job:
                for seed in range(options.seeds):
                    order = {"do": "quality", "task": task, "contender": name, "seed": seed}
                    order |= {"local_steps": options.local_steps, "steps": options.steps}
                    curve = job.ask(order)[0]
                    finals.setdefault(name, []).append(curve[-1])
                    for point, (loss, accuracy) in enumerate(curve):
                        found = {"seed": seed, "point": point, "loss": loss, "accuracy": accuracy}
                        self._note("quality", "", task, name, **found)
        means = {
            name: tuple(mean(values) for values in zip(*found, strict=True))
            for name, found in finals.items()
        }
        usual_loss, usual = means.get("every", (float("nan"), float("nan")))
        for name, (loss, accuracy) in means.items():
            row = [name, f"{loss:.4f}", f"{100 * (loss / usual_loss - 1):+.1f} %"]
            row += [f"{100 * accuracy:.2f} %", f"{100 * (accuracy - usual):+.2f} %"]
            table.append([*row, " ".join(f"{100 * each:.1f}" for _, each in finals[name])])
        self._show(table)

    def _note(self, section: str, link: str, item: str, contender: str, **found: Any) -> None:
        where = {"section": section, "link": link, "item": item, "contender": contender}
        self.rows.append({**where, **found})

    def _show(self, table: list[list[str]]) -> None:
        print("\n" + "\n".join(aligned(table)) + "\n", flush=True)


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    without = "--loopback was given" if options.loopback else missing()
    links = [UNLIMITED] if without is not None else options.links
    warn_if_busy()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end with us
    with (
        tempfile.TemporaryDirectory() as folder,
        network(options.hosts, without) as hosts,
        limit(options.timeout),
    ):
        print(f"{options.hosts} hosts: {hosts.note}.", flush=True)
        bench = Bench(options, hosts, Path(folder))
        for link in links:
            hosts.limit(link)
            for model in options.models if "speed" in options.sections else []:
                bench.speed(link, model)
            if "allreduce" in options.sections:
                bench.allreduce(link)
        hosts.limit(UNLIMITED)
        for task in options.tasks if "quality" in options.sections else []:
            bench.quality(task)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "local_steps.csv"
    write_csv(bench.rows, path)
    print(f"Numbers: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
