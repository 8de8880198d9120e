"""What benchmarks/training.py shows: the tables, the CSV and the plot."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.promises import aligned, figure, times_text
from benchmarks.training_models import WORKLOADS
from benchmarks.turns import Samples, doubt, interval, ratios

RESTLESS = 0.12  # unrest that idle cores do not show: two ranks had 0.03 to 0.09 there
UNREST = "Without communication the middle half of the turns lies apart by"
LABELS = {
    "plain": "no communication",
    "ours": "Horovod",
    "ours_next": "Horovod, next forward",
    "ours_bf16": "Horovod bf16",
    "ddp": "DDP",
    "ddp_bf16": "DDP bf16",
}
BRIEFLY = {
    "ours": "ours",
    "ours_next": "ours, next",
    "ours_bf16": "ours bf16",
    "ddp": "DDP",
    "ddp_bf16": "DDP bf16",
}
RIVALS = {"ours": "ddp", "ours_next": "ddp", "ours_bf16": "ddp_bf16"}  # whom each of ours meets
COLOURS = {
    "plain": "#9aa5b1",
    "ours": "#0b6e4f",
    "ours_next": "#39a978",
    "ours_bf16": "#8fd3b0",
    "ddp": "#c1440e",
    "ddp_bf16": "#e8956b",
}


@dataclass
class Run:
    """What one number of ranks gave: milliseconds per step, losses, peak mebibytes."""

    size: int
    speed: dict[str, Samples]  # of each model
    losses: dict[str, dict[str, Any]] = field(default_factory=dict)
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    bound: bool = False  # to one core each
    hosts: int = 1  # by their names
    gpu: str = ""  # its name, where they train on one

    @property
    def title(self) -> str:
        ranks = "1 rank" if self.size == 1 else f"{self.size} ranks"
        if self.hosts > 1:
            ranks += f" on {self.hosts} hosts"
        return f"{ranks} on a core each" if self.bound else ranks

    @property
    def contenders(self) -> list[str]:
        """Those that took part, in the order in which they are shown."""
        return [key for key in LABELS if any(key in found for found in self.speed.values())]

    @property
    def duels(self) -> list[tuple[str, str]]:
        """(theirs, ours) of the contenders that are compared."""
        keys = self.contenders
        return [(rival, key) for key, rival in RIVALS.items() if key in keys and rival in keys]

    def step(self, model: str, contender: str) -> float | None:
        samples = self.speed.get(model, {}).get(contender)
        return median(samples) if samples else None

    def ratio(self, model: str, over: str, under: str) -> float | None:
        """How many times as long as `under` the contender `over` takes."""
        samples = self.speed.get(model, {})
        known = over in samples and under in samples
        return median(ratios(samples, over, under)) if known else None

    def interval(self, model: str, over: str, under: str) -> tuple[float, float]:
        """Where that ratio lies, 19 times out of 20."""
        return interval(ratios(self.speed[model], over, under))

    def doubt(self, model: str, over: str, under: str) -> float:
        """By how much that ratio may be wrong."""
        return doubt(ratios(self.speed[model], over, under))

    def unrest(self, model: str) -> float:
        """How far apart the middle half of the turns without communication is, over their median.

        Such a turn is always the same work, so this is the machine's doing. 0 if there are none.
        """
        samples = self.speed[model].get("plain", [1.0])
        low, middle, high = quantiles(samples) if len(samples) > 1 else samples * 3
        return (high - low) / middle

    def same_losses(self, model: str) -> bool | None:
        found = self.losses.get(model)
        return None if not found else found["ours"] == found["ddp"]


@dataclass
class Results:
    runs: list[Run] = field(default_factory=list)

    def run(self, size: int, hosts: int = 1) -> Run:
        """That of so many ranks and hosts; an empty one where it was not made."""
        none = Run(size, {}, hosts=hosts)
        return next((run for run in self.runs if (run.size, run.hosts) == (size, hosts)), none)


def table(run: Run, device: str) -> str:
    """One line per model."""
    communicating = [key for key in run.contenders if key != "plain"]
    compared = communicating if "plain" in run.contenders else []
    header = ["model", *(f"{LABELS[key]} ms" for key in run.contenders)]
    header += [f"{LABELS[theirs]} / {BRIEFLY[ours]}" for theirs, ours in run.duels]
    header += [f"{BRIEFLY[key]} efficiency" for key in compared]
    header += [f"{LABELS[key]} MiB" for key in run.contenders if run.memory]
    header += ["losses as DDP's"] if run.losses else []
    rows = []
    for model in run.speed:
        row = [WORKLOADS[model].title]
        row += [fraction(run.step(model, key)) for key in run.contenders]
        row += [ratio_text(run, model, duel) for duel in run.duels]
        row += [fraction(run.ratio(model, "plain", key)) for key in compared]
        if run.memory:
            peaks = run.memory.get(model, {})
            row += [f"{peaks[key]:.0f}" if key in peaks else "-" for key in run.contenders]
        if run.losses:
            row.append({True: "bitwise", False: "NO", None: "-"}[run.same_losses(model)])
        rows.append(row)
    lines = aligned([header, *rows])
    restless = [
        f"{WORKLOADS[model].title} {100 * run.unrest(model):.0f} %"
        for model in run.speed
        if run.unrest(model) > RESTLESS
    ]
    if restless:
        lines += ["", f"This machine was not idle, expect other ratios from other runs. {UNREST}:"]
        lines += [", ".join(restless)]
    machine = f"{device} ({run.gpu})" if run.gpu else device
    return "\n".join([f"{run.title}, {machine}, milliseconds per step (median)", "", *lines])


def summary(run: Run, model: str) -> str:
    """What one model gave, in a line to be shown as soon as it is known."""
    steps = [f"{LABELS[key]} {fraction(run.step(model, key))}" for key in run.contenders]
    found = [f"{run.title}, {WORKLOADS[model].title}: {', '.join(steps)} ms a step"]
    found += [
        f"{LABELS[theirs]} / {BRIEFLY[ours]} {ratio_text(run, model, (theirs, ours))}"
        for theirs, ours in run.duels
    ]
    return "; ".join(found)


def ratio_text(run: Run, model: str, duel: tuple[str, str]) -> str:
    """A ratio with its doubt; on a GPU with its interval, which need not be symmetric."""
    ratio = run.ratio(model, *duel)
    if ratio is None:
        return "-"
    if run.gpu:
        return f"{times_text(ratio)} {interval_text(run.interval(model, *duel))}"
    return f"{times_text(ratio)} +-{run.doubt(model, *duel):.2f}"


def interval_text(bounds: tuple[float, float]) -> str:
    known = math.isfinite(bounds[0])
    return f"({bounds[0]:.2f} to {bounds[1]:.2f})" if known else "(too few turns for an interval)"


def fraction(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


# -- files -------------------------------------------------------------------------------------


COLUMNS = ["model", "contender", "median_ms", "p10_ms", "p25_ms", "p75_ms", "p90_ms"]
COLUMNS += ["samples", "times_ours", "peak_mib"]


def csv_rows(run: Run) -> Iterator[list[Any]]:
    """The COLUMNS of one run."""
    for model, found in run.speed.items():
        for contender, samples in found.items():
            cuts = quantiles(samples, n=20) if len(samples) > 1 else samples * 19
            values = (median(samples), cuts[1], cuts[4], cuts[14], cuts[17])
            times_ours = (
                f"{median(ratios(found, contender, 'ours')):.3f}" if "ours" in found else ""
            )
            peak = run.memory.get(model, {}).get(contender)
            row = [model, contender, *(f"{value:.3f}" for value in values)]
            yield [*row, len(samples), times_ours, "" if peak is None else f"{peak:.0f}"]


def write_csv(results: Results, path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["ranks", "hosts", "gpu", *COLUMNS])
        for run in results.runs:
            writer.writerows([run.size, run.hosts, run.gpu, *row] for row in csv_rows(run))


def draw_bars(panel: Any, run: Run) -> None:
    """The time of a step over that without communication, by model and contender.

    Where nobody was without communication it is over that of the first contender.
    """
    models, keys = list(run.speed), run.contenders
    base = keys[0]  # plain, if it took part
    width = 0.81 / len(keys)
    for place, key in enumerate(keys):
        heights = [run.ratio(model, key, base) or 0.0 for model in models]
        where = [index + width * (place - (len(keys) - 1) / 2) for index in range(len(models))]
        bars = panel.bar(where, heights, 0.92 * width, color=COLOURS[key], label=LABELS[key])
        steps = [run.step(model, key) or 0.0 for model in models]
        panel.bar_label(bars, [f"{step:.1f}" for step in steps], fontsize=7)
    panel.set_xticks(range(len(models)), [WORKLOADS[model].title for model in models], fontsize=8)
    panel.set_title(f"{run.title}\n(numbers: milliseconds per step)", fontsize=10)
    panel.set_ylabel(f"time of a step / {LABELS[base]}")
    panel.grid(True, axis="y", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)


def write_plot(results: Results, path: Path) -> None:
    """One panel per number of ranks."""
    with figure(path, 1, len(results.runs), sharey=True) as panels:
        for panel, run in zip(panels[0], results.runs, strict=True):
            draw_bars(panel, run)
            panel.label_outer()
        panels[0][0].legend(frameon=False)
