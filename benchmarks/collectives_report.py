"""What benchmarks/collectives.py shows: the tables, the requirements, the CSV and the plot."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from benchmarks.promises import Requirement, times_text

LABELS = {"ours": "Horovod", "gloo": "torch Gloo", "mpi": "Open MPI"}
KIB, MIB = 1 << 10, 1 << 20


@dataclass
class Run:
    """The samples, in microseconds, of one number of ranks."""

    size: int
    allreduce: dict[int, dict[str, list[float]]]  # bytes -> contender -> samples
    many: dict[str, list[float]]

    def of(self, nbytes: int, contender: str) -> float | None:
        samples = self.allreduce.get(nbytes, {}).get(contender)
        return median(samples) if samples else None

    def ratio(self, nbytes: int, contender: str) -> float | None:
        """How many times as long as ours the contender takes."""
        ours, theirs = self.of(nbytes, "ours"), self.of(nbytes, contender)
        return theirs / ours if ours and theirs else None


@dataclass
class Results:
    runs: list[Run] = field(default_factory=list)
    import_ms: list[float] = field(default_factory=list)
    init_ms: list[float] = field(default_factory=list)


def human(nbytes: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def table(run: Run) -> str:
    """One line per size, microseconds and how many times as long as ours the others take."""
    present = [key for key in LABELS if any(key in found for found in run.allreduce.values())]
    others = [key for key in present if key != "ours"]
    header = ["size", *(LABELS[key] for key in present), *(f"{LABELS[k]} / ours" for k in others)]
    rows = []
    for nbytes in run.allreduce:
        times = [run.of(nbytes, key) for key in present]
        ratios = [run.ratio(nbytes, key) for key in others]
        rows.append([human(nbytes), *map(microseconds, times), *map(times_text, ratios)])
    many = {key: median(samples) for key, samples in run.many.items()}
    if many:
        rows.append(
            [
                "1,000 small",
                *(microseconds(many.get(key)) for key in present),
                *(times_text(many[key] / many["ours"]) for key in others),
            ]
        )
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [
        "   ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [header, *rows]
    ]
    title = f"{run.size} ranks, float32 sum in place, microseconds (median of the slowest rank)"
    return "\n".join([title, "", *lines])


def microseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


# -- what the project promises -----------------------------------------------------------------


def requirements(results: Results) -> Iterator[Requirement]:
    """The promises, all of them for two ranks on an otherwise idle machine."""
    run = next((run for run in results.runs if run.size == 2), Run(2, {}, {}))
    yield at_least("4x Gloo from 4 B to 64 KiB", run, "gloo", 4.0, 0, 64 * KIB)
    yield at_least("2.5x Gloo up to 16 MiB", run, "gloo", 2.5, 0, 16 * MIB)
    yield at_least("1.5x Gloo at 100 MiB", run, "gloo", 1.5, 100 * MIB, 100 * MIB)
    yield at_least("level with Open MPI from 1 MiB up", run, "mpi", 1.0, MIB, 1 << 62)
    yield behind_mpi(run)
    if "gloo" in run.many:
        ratio = median(run.many["gloo"]) / median(run.many["ours"])
        yield Requirement(
            "1,000 small async at least 5x as fast as 1,000 blocking Gloo calls",
            ratio >= 5,
            f"{ratio:.1f}x",
        )
    else:
        yield Requirement("1,000 small async at least 5x Gloo", None, "not measured")
    yield below("import horovod.torch adds less than 150 ms", results.import_ms, 150)
    yield below("init() of 2 ranks under 500 ms beyond import torch", results.init_ms, 500)


def at_least(
    text: str, run: Run, contender: str, wanted: float, smallest: int, biggest: int
) -> Requirement:
    found = {
        nbytes: ratio
        for nbytes in run.allreduce
        if smallest <= nbytes <= biggest and (ratio := run.ratio(nbytes, contender)) is not None
    }
    if not found:
        return Requirement(text, None, "not measured")
    worst = min(found, key=lambda nbytes: found[nbytes])
    return Requirement(
        text, found[worst] >= wanted, f"lowest {found[worst]:.2f}x at {human(worst)}"
    )


def behind_mpi(run: Run) -> Requirement:
    text = "at most 80 microseconds behind Open MPI below 1 MiB"
    found = {
        nbytes: ours - theirs
        for nbytes in run.allreduce
        if nbytes < MIB
        and (ours := run.of(nbytes, "ours")) is not None
        and (theirs := run.of(nbytes, "mpi")) is not None
    }
    if not found:
        return Requirement(text, None, "not measured")
    worst = max(found, key=lambda nbytes: found[nbytes])
    return Requirement(text, found[worst] <= 80, f"most {found[worst]:.0f} at {human(worst)}")


def below(text: str, samples: list[float], limit: float) -> Requirement:
    if not samples:
        return Requirement(text, None, "not measured")
    return Requirement(text, median(samples) < limit, f"{median(samples):.0f} ms")


# -- files -------------------------------------------------------------------------------------


def write_csv(results: Results, path: Path) -> None:
    """One line per measurement, so that a spreadsheet or pandas can pivot it as it likes."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        header = "section ranks bytes contender median_us p10_us p90_us samples times_ours"
        writer.writerow(header.split())
        for run in results.runs:
            sections = [("allreduce", nbytes, found) for nbytes, found in run.allreduce.items()]
            for section, nbytes, found in [*sections, ("1000_small", "", run.many)]:
                for contender, samples in found.items():
                    ratio = median(samples) / median(found["ours"])
                    row = [*summary(samples), f"{ratio:.3f}"]
                    writer.writerow([section, run.size, nbytes, contender, *row])
        for section, ranks, samples in (
            ("import", 1, results.import_ms),
            ("init", 2, results.init_ms),
        ):
            if samples:
                row = summary([1000 * sample for sample in samples])
                writer.writerow([section, ranks, "", "ours", *row, ""])


def summary(samples: list[float]) -> list[str]:
    cuts = quantiles(samples, n=10) if len(samples) > 1 else samples * 9
    values = (median(samples), cuts[0], cuts[-1])
    return [*(f"{value:.1f}" for value in values), str(len(samples))]


def write_plot(results: Results, path: Path) -> None:
    """Time over size, both logarithmic, one panel per number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    styles = {"ours": ("#0b6e4f", "o"), "gloo": ("#c1440e", "s"), "mpi": ("#3a5ba0", "^")}
    figure, panels = pyplot.subplots(
        1, len(results.runs), figsize=(6.2 * len(results.runs), 4.6), sharey=True, squeeze=False
    )
    for panel, run in zip(panels[0], results.runs, strict=True):
        sizes = list(run.allreduce)
        for key, (colour, marker) in styles.items():
            points = [(n, value) for n in sizes if (value := run.of(n, key)) is not None]
            if not points:
                continue
            panel.plot(*zip(*points, strict=True), color=colour, marker=marker, label=LABELS[key])
            found = [run.allreduce[nbytes][key] for nbytes, _ in points]
            spread = [quantiles(samples, n=10) for samples in found]
            panel.fill_between(
                [nbytes for nbytes, _ in points],
                [cuts[0] for cuts in spread],
                [cuts[-1] for cuts in spread],
                color=colour,
                alpha=0.15,
                linewidth=0,
            )
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(sizes, [human(nbytes) for nbytes in sizes], rotation=45, ha="right")
        panel.minorticks_off()
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        panel.grid(True, color="#dddddd", linewidth=0.6)
        panel.set_title(f"Allreduce of float32, {run.size} ranks on one host")
        panel.set_xlabel("tensor size")
    panels[0][0].set_ylabel("microseconds (median, band: 10 to 90 %)")
    panels[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
