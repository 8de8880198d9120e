"""What benchmarks/training.py shows: the tables, the requirements, the CSV and the plot."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.promises import Requirement, aligned, figure, times_text
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

    @property
    def title(self) -> str:
        ranks = "1 rank" if self.size == 1 else f"{self.size} ranks"
        return f"{ranks} on a core each" if self.bound else ranks

    @property
    def contenders(self) -> list[str]:
        """Those that took part, in the order in which they are shown."""
        found = next(iter(self.speed.values()), {})
        return [key for key in LABELS if key in found]

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

        Such a turn is always the same work, so this is the machine's doing.
        """
        samples = self.speed[model]["plain"]
        low, middle, high = quantiles(samples) if len(samples) > 1 else samples * 3
        return (high - low) / middle

    def same_losses(self, model: str) -> bool | None:
        found = self.losses.get(model)
        return None if not found else found["ours"] == found["ddp"]


@dataclass
class Results:
    runs: list[Run] = field(default_factory=list)

    def run(self, size: int) -> Run:
        return next((run for run in self.runs if run.size == size), Run(size, {}))


def table(run: Run, device: str) -> str:
    """One line per model."""
    communicating = [key for key in run.contenders if key != "plain"]
    header = ["model", *(f"{LABELS[key]} ms" for key in run.contenders)]
    header += [f"{LABELS[theirs]} / {BRIEFLY[ours]}" for theirs, ours in run.duels]
    header += [f"{BRIEFLY[key]} efficiency" for key in communicating]
    header += [f"{LABELS[key]} MiB" for key in run.contenders if run.memory]
    header += ["losses as DDP's"] if run.losses else []
    rows = []
    for model in run.speed:
        row = [WORKLOADS[model].title]
        row += [f"{run.step(model, key):.2f}" for key in run.contenders]
        row += [
            f"{times_text(run.ratio(model, *duel))} +-{run.doubt(model, *duel):.2f}"
            for duel in run.duels
        ]
        row += [fraction(run.ratio(model, "plain", key)) for key in communicating]
        if run.memory:
            row += [f"{run.memory[model][key]:.0f}" for key in run.contenders]
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
    return "\n".join([f"{run.title}, {device}, milliseconds per step (median)", "", *lines])


def fraction(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


# -- what the project promises -----------------------------------------------------------------

SPEED = {"mlp": 1.6, "cnn": 1.2, "transformer": 1.3, "resnet18": 1.3}
EFFICIENCY = {"mlp": 0.82, "cnn": 0.95, "transformer": 0.82, "resnet18": 0.90}
SPEED_OF_EIGHT = {"mlp": 1.7, "cnn": 1.7}


def requirements(results: Results, device: str) -> Iterator[Requirement]:
    """The promises that concern this device."""
    one, two, eight = results.run(1), results.run(2), results.run(8)
    if device == "cpu":
        for model, wanted in SPEED.items():
            yield faster(f"{wanted}x DDP", two, model, wanted)
        for model, wanted in EFFICIENCY.items():
            found = two.ratio(model, "plain", "ours")
            text = f"{WORKLOADS[model].title}, 2 ranks: efficiency of at least {wanted}"
            yield Requirement(text, met(found, wanted), fraction(found))
        for model in SPEED:
            yield lighter(two, model)
            yield same_losses(two, model)
        if eight.speed:
            for model, wanted in SPEED_OF_EIGHT.items():
                yield faster(f"{wanted}x DDP", eight, model, wanted)
    for model in one.speed or (SPEED if device == "cpu" else ("resnet50", "gpt2")):
        found = one.ratio(model, "ours", "plain")
        text = f"{WORKLOADS[model].title}, 1 rank: within 2 % of the plain optimizer"
        percent = "not measured" if found is None else f"{100 * (found - 1):+.1f} %"
        yield Requirement(text, None if found is None else found <= 1.02, percent)


def faster(text: str, run: Run, model: str, wanted: float) -> Requirement:
    found = run.ratio(model, "ddp", "ours")
    title = f"{WORKLOADS[model].title}, {run.title}: at least {text}"
    return Requirement(title, met(found, wanted), times_text(found))


def lighter(run: Run, model: str) -> Requirement:
    text = f"{WORKLOADS[model].title}, {run.size} ranks: peak memory no more than DDP's"
    peaks = run.memory.get(model)
    if not peaks:
        return Requirement(text, None, "not measured")
    ours, ddp = round(peaks["ours"]), round(peaks["ddp"])  # they differ by more between runs
    return Requirement(text, ours <= ddp, f"{ours} MiB against {ddp}")


def same_losses(run: Run, model: str) -> Requirement:
    same = run.same_losses(model)
    text = f"{WORKLOADS[model].title}, {run.title}: losses bitwise equal to DDP's"
    return Requirement(text, same, {True: "yes", False: "no", None: "not measured"}[same])


def met(found: float | None, wanted: float) -> bool | None:
    return None if found is None else found >= wanted


# -- files -------------------------------------------------------------------------------------


COLUMNS = ["model", "contender", "median_ms", "p10_ms", "p25_ms", "p75_ms", "p90_ms"]
COLUMNS += ["samples", "times_ours", "peak_mib"]


def csv_rows(run: Run) -> Iterator[list[Any]]:
    """The COLUMNS of one run."""
    for model, found in run.speed.items():
        for contender, samples in found.items():
            cuts = quantiles(samples, n=20) if len(samples) > 1 else samples * 19
            values = (median(samples), cuts[1], cuts[4], cuts[14], cuts[17])
            ratio = median(ratios(found, contender, "ours"))
            peak = run.memory.get(model, {}).get(contender)
            row = [model, contender, *(f"{value:.3f}" for value in values)]
            yield [*row, len(samples), f"{ratio:.3f}", "" if peak is None else f"{peak:.0f}"]


def write_csv(results: Results, path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["ranks", *COLUMNS])
        for run in results.runs:
            writer.writerows([run.size, *row] for row in csv_rows(run))


def draw_bars(panel: Any, run: Run) -> None:
    """The time of a step over that without communication, by model and contender."""
    models, keys = list(run.speed), run.contenders
    width = 0.81 / len(keys)
    for place, key in enumerate(keys):
        heights = [run.ratio(model, key, "plain") or 0.0 for model in models]
        where = [index + width * (place - (len(keys) - 1) / 2) for index in range(len(models))]
        bars = panel.bar(where, heights, 0.92 * width, color=COLOURS[key], label=LABELS[key])
        steps = [run.step(model, key) or 0.0 for model in models]
        panel.bar_label(bars, [f"{step:.1f}" for step in steps], fontsize=7)
    panel.set_xticks(range(len(models)), [WORKLOADS[model].title for model in models], fontsize=8)
    panel.set_title(f"{run.title}\n(numbers: milliseconds per step)", fontsize=10)
    panel.set_ylabel("time of a step / without communication")
    panel.grid(True, axis="y", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)


def write_plot(results: Results, path: Path) -> None:
    """One panel per number of ranks."""
    with figure(path, 1, len(results.runs), sharey=True) as panels:
        for panel, run in zip(panels[0], results.runs, strict=True):
            draw_bars(panel, run)
            panel.label_outer()
        panels[0][0].legend(frameon=False)
