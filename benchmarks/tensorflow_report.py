"""What benchmarks/tensorflow.py compares, and how it shows it: table, promises, CSV and plot."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from benchmarks.promises import Requirement, times_text

RANKS = 2
LEAST_RATIO = 1.1  # of steps per second, ours over the strategy's
SAME_LOSS = 1e-3  # relative


@dataclass(frozen=True)
class Model:
    title: str
    batch: int  # of each rank


MODELS = {
    "mlp": Model("MLP 784-1024-1024-10, 1.9 M parameters", 64),
    "cnn": Model("MNIST CNN, 1.2 M parameters", 8),
}


@dataclass(frozen=True)
class Contender:
    """A way to train: in which processes, on how many ranks, and what it is measured against."""

    title: str
    group: str  # of processes: "keras3", "tf_keras" or "strategy"
    way: str  # "horovod", "plain" or "strategy"
    ranks: int
    alone: str  # the contender that is the same without the other ranks
    colour: str


CONTENDERS = {
    "horovod keras3": Contender(
        "Horovod, Keras 3", "keras3", "horovod", RANKS, "alone keras3", "#0b6e4f"
    ),
    "horovod tf_keras": Contender(
        "Horovod, tf-keras", "tf_keras", "horovod", RANKS, "alone tf_keras", "#5fad8c"
    ),
    "strategy": Contender(
        "MultiWorkerMirroredStrategy, tf-keras",
        "strategy",
        "strategy",
        RANKS,
        "alone tf_keras",
        "#c1440e",
    ),
    "plain keras3": Contender(
        "no communication, Keras 3", "keras3", "plain", RANKS, "alone keras3", "#9aa5b1"
    ),
    "plain tf_keras": Contender(
        "no communication, tf-keras", "tf_keras", "plain", RANKS, "alone tf_keras", "#c5ccd3"
    ),
    "alone keras3": Contender("one rank, Keras 3", "keras3", "plain", 1, "alone keras3", "#5c6670"),
    "alone tf_keras": Contender(
        "one rank, tf-keras", "tf_keras", "plain", 1, "alone tf_keras", "#7d8790"
    ),
}
OURS = [name for name, contender in CONTENDERS.items() if contender.way == "horovod"]


@dataclass
class Results:
    """Of one model: seconds per step by contender, one sample a turn, and first losses."""

    model: str
    seconds: dict[str, list[float]] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)

    def rate(self, contender: str) -> float:
        """Steps per second of a rank; of all ranks, since they go in step."""
        return 1.0 / median(self.seconds[contender])

    def ratio(self, contender: str) -> float:
        """The rate over that of the strategy."""
        return self.rate(contender) / self.rate("strategy")

    def efficiency(self, contender: str) -> float:
        """What a rank does among others over what it would do alone."""
        return self.rate(contender) / self.rate(CONTENDERS[contender].alone)

    def band(self, contender: str) -> tuple[float, float]:
        """The seconds per step between which 80 % of the turns are."""
        cuts = quantiles(self.seconds[contender], n=10, method="inclusive")
        return cuts[0], cuts[-1]

    def loss_difference(self, contender: str) -> float:
        reference = self.losses["strategy"]
        return abs(self.losses[contender] - reference) / abs(reference)


def table(results: Results) -> str:
    model = MODELS[results.model]
    header = ["", "steps/s", "ms/step", "x strategy", "efficiency", "loss"]
    rows = []
    for name, contender in CONTENDERS.items():
        row = [contender.title, f"{results.rate(name):.1f}", f"{1000 / results.rate(name):.2f}"]
        row.append(times_text(results.ratio(name)) if contender.way == "horovod" else "")
        row.append(f"{results.efficiency(name):.2f}" if contender.ranks > 1 else "")
        row.append(f"{results.losses[name]:.4f}" if contender.way != "plain" else "")
        rows.append(row)
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [
        "   ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in [header, *rows]
    ]
    turns = len(results.seconds["strategy"])
    title = (
        f"{model.title}; {RANKS} ranks with {model.batch} samples each; medians of {turns} turns"
    )
    return "\n".join([title, "", *lines])


def requirements(results: list[Results]) -> Iterator[Requirement]:
    """What the project promises, with how this run fared."""
    found = {result.model: result for result in results}
    for model, about in MODELS.items():
        for name in OURS:
            title = f"{about.title}, {CONTENDERS[name].title}"
            faster = f"{title}: at least {LEAST_RATIO}x the steps/s of MultiWorkerMirroredStrategy"
            if model not in found:
                yield Requirement(faster, None, "not measured")
                continue
            ratio = found[model].ratio(name)
            yield Requirement(faster, ratio >= LEAST_RATIO, times_text(ratio))
            difference = found[model].loss_difference(name)
            text = f"{title}: the same loss after the first turn"
            yield Requirement(text, difference < SAME_LOSS, f"{100 * difference:.4f} % apart")


# -- files -----------------------------------------------------------------------------------------


def write_csv(results: list[Results], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        header = "model batch contender ranks median_ms p10_ms p90_ms turns steps_per_s"
        writer.writerow([*header.split(), "times_strategy", "efficiency"])
        for result in results:
            for name, contender in CONTENDERS.items():
                seconds = [median(result.seconds[name]), *result.band(name)]
                values = [f"{1000 * value:.3f}" for value in seconds]
                row = [result.model, MODELS[result.model].batch, name, contender.ranks, *values]
                row += [len(result.seconds[name]), f"{result.rate(name):.2f}"]
                row.append(f"{result.ratio(name):.3f}")
                writer.writerow([*row, f"{result.efficiency(name):.3f}"])


def write_plot(results: list[Results], path: Path) -> None:
    """Bars of steps per second, with the middle 80 % of the turns, one panel per model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(results), figsize=(1.5 + 5.2 * len(results), 4.8), squeeze=False
    )
    for panel, result in zip(panels[0], results, strict=True):
        for place, (name, contender) in enumerate(CONTENDERS.items()):
            rate = result.rate(name)
            fast, slow = result.band(name)
            spread = [[rate - 1.0 / slow], [1.0 / fast - rate]]
            panel.barh(place, rate, color=contender.colour, xerr=spread, ecolor="#333333")
            panel.text(0.02 * rate, place, f"{rate:.0f}", va="center", color="white", fontsize=8)
        panel.set_yticks(range(len(CONTENDERS)), [c.title for c in CONTENDERS.values()], fontsize=8)
        panel.invert_yaxis()
        panel.set_title(MODELS[result.model].title, fontsize=9)
        panel.set_xlabel("steps per second (line: 10 % to 90 % of the turns)")
        panel.grid(True, axis="x", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
    for panel in panels[0][1:]:
        panel.set_yticklabels([])
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
