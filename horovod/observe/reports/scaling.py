"""Report a scaling study: a table, a CSV file and a chart, beside a published run.

`horovod.runner.scaling` measures and calls it. Speed-up and efficiency are relative to the smallest
size:

strong  The work is the same at every size. Speed-up is the time of the smallest size / the time.
        Efficiency is the speed-up / the ratio of the numbers of ranks.
weak    Every rank has the same work at every size, so n ranks do n times as much. Efficiency is the
        work of a rank per second / the same at the smallest size. Speed-up is the efficiency * the
        ratio of the numbers of ranks. Work is counted in steps if all sizes report them, otherwise
        in runs of the command.
"""

from __future__ import annotations

import csv
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horovod.observe.reports.amounts import count_of

_PUBLISHED = ("seconds", "speedup", "efficiency")  # what is shown of a published run
_MODES = ("weak", "strong")
_MUCH = 0.2  # share of the median; if runs of one size differ by more, small differences are noise
_TOO_GOOD = 1.1  # efficiency above this needs an explanation, most often a wrong base


@dataclass(frozen=True)
class Run:
    """One run of the command."""

    ranks: int
    seconds: float
    steps_per_second: float | None = None  # of each rank


@dataclass(frozen=True, kw_only=True)
class Row(Run):
    """One size: the medians of its runs, with speed-up and efficiency."""

    speedup: float
    efficiency: float


def spread(runs: Sequence[Run]) -> float | None:
    """Return the spread of the times of one size, as a share of their median.

    Returns:
        None if there is only one run.
    """
    times = [run.seconds for run in runs]
    return (max(times) - min(times)) / statistics.median(times) if len(times) > 1 else None


@dataclass(frozen=True)
class Published:
    """Measurements of other people, or earlier ones."""

    name: str
    runs: Mapping[int, Run]
    strong: bool | None  # None: the file does not say


@dataclass
class Report:
    """The measurements so far."""

    strong: bool
    published: Published | None = None
    runs: dict[int, list[Run]] = field(default_factory=dict)  # by size
    failed: dict[int, str] = field(default_factory=dict)  # by size: how its run failed
    title: str = ""  # the title of the chart

    @property
    def mode(self) -> str:
        return _MODES[self.strong]

    @property
    def rows(self) -> dict[int, Row]:
        medians = {}
        for size, runs in self.runs.items():
            seconds = statistics.median(run.seconds for run in runs)
            steps = [run.steps_per_second for run in runs if run.steps_per_second]
            medians[size] = Run(size, seconds, statistics.median(steps) if steps else None)
        return rows_of(medians, self.strong)

    @property
    def published_rows(self) -> dict[int, Row]:
        found = self.published
        if found is None:
            return {}
        return rows_of(found.runs, self.strong if found.strong is None else found.strong)


def rows_of(medians: Mapping[int, Run], strong: bool) -> dict[int, Row]:
    """Return speed-up and efficiency of every size, relative to the smallest."""
    if not medians:
        return {}
    base = medians[min(medians)]
    rows = {}
    by_steps = counts_steps(medians, strong)
    for size, run in sorted(medians.items()):
        times_as_many = size / base.ranks
        if strong:
            speedup = base.seconds / run.seconds
            efficiency = speedup / times_as_many
        else:
            efficiency = base.seconds / run.seconds
            if by_steps:
                efficiency = (run.steps_per_second or 0.0) / (base.steps_per_second or 1.0)
            speedup = efficiency * times_as_many
        rows[size] = Row(**vars(run), speedup=speedup, efficiency=efficiency)
    return rows


def counts_steps(medians: Mapping[int, Run], strong: bool) -> bool:
    """Return whether efficiency is computed from steps per second, and not from times."""
    return not strong and all(each.steps_per_second for each in medians.values())


# -- a published run -------------------------------------------------------------------------------


def read_published(path: str) -> Published:
    """Read a CSV file with the columns ranks and seconds.

    It may have steps_per_second and mode (weak or strong) too, like the files of a study; other
    columns are ignored, and so are rows without a time.

    Raises:
        ValueError: If the file cannot be read; the message says what is wrong with it.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            names = [name.strip().lower() for name in reader.fieldnames or ()]
            reader.fieldnames = names
            missing = [name for name in ("ranks", "seconds") if name not in names]
            if missing:
                raise ValueError(
                    f"it has no column {' and no column '.join(missing)}; its first line must name "
                    f"the columns, such as ranks,seconds"
                )
            return _published(Path(path).stem, reader)
    except OSError as error:
        why = f"cannot read {path!r}: {error.strerror}"
    except (ValueError, csv.Error) as error:  # also where it is not text
        why = f"{path}: {error}"
    raise ValueError(why)


def _published(name: str, reader: csv.DictReader[str]) -> Published:
    runs: dict[int, Run] = {}
    modes = set()
    for line in reader:
        where = f"line {reader.line_num}"
        cells = {key: (value or "").strip() for key, value in line.items() if isinstance(key, str)}
        if not cells["seconds"]:
            continue
        ranks = _positive(cells["ranks"], f"{where}: ranks")
        if ranks != int(ranks):
            raise ValueError(f"{where}: ranks {cells['ranks']!r} is not a whole number")
        if int(ranks) in runs:
            raise ValueError(f"{where}: {int(ranks)} ranks for the second time")
        seconds = _positive(cells["seconds"], f"{where}: seconds")
        steps = cells.get("steps_per_second", "")
        rate = _positive(steps, f"{where}: steps_per_second") if steps else None
        runs[int(ranks)] = Run(int(ranks), seconds, rate)
        modes.add(cells.get("mode", ""))
    if not runs:
        raise ValueError("it has no rows")
    if len(modes) > 1 or not modes <= {"", *_MODES}:
        raise ValueError("its column mode must say weak, or strong, in all rows")
    (mode,) = modes
    return Published(name, runs, mode == "strong" if mode else None)


def _positive(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e12:
        raise ValueError(f"{what} {text!r} is not a number above 0")
    return value


# -- the table -------------------------------------------------------------------------------------


def table(report: Report, sizes: Sequence[int]) -> str:
    """Return the whole table for people, with a line that says what the numbers mean."""
    rows, published = report.rows, report.published_rows
    with_steps = any(row.steps_per_second for row in rows.values())
    with_spread = any(len(runs) > 1 for runs in report.runs.values())
    formats = {"seconds": ".2f", "steps_per_second": ".4g", "speedup": ".2f", "efficiency": ".0%"}
    if not with_steps:
        del formats["steps_per_second"]
    theirs = {name: formats[name] for name in _PUBLISHED}
    head = ["ranks", "time (s)", *["spread"] * with_spread, *["steps/s"] * with_steps]
    head += ["speed-up", "efficiency"]
    width = len(head)
    if published:
        head += ["time (s)", "speed-up", "efficiency"]
    lines = [head]
    for size in sorted({*sizes, *published}):
        cells = [str(size), *_cells(rows.get(size), formats, "-")]
        if size in report.failed and size not in rows:
            cells[1] = "failed"
        apart = spread(report.runs.get(size, ()))
        cells[2:2] = ["-" if apart is None else f"{apart:.0%}"] * with_spread
        lines.append(cells + (_cells(published.get(size), theirs, "-") if published else []))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    texts = []
    for line in lines:
        parts = [cell.rjust(size) for cell, size in zip(line, widths, strict=True)]
        left, right = "  ".join(parts[:width]), "  ".join(parts[width:])
        texts.append(f"{left}  |  {right}" if right else left)
    if published:
        texts.insert(0, f"{'this study'.ljust(len(left))}  |  {_title(report)}")
    return "\n".join(["", *(text.rstrip() for text in texts), "", _legend(report)])


def _cells(row: Row | None, formats: Mapping[str, str], missing: str) -> list[str]:
    """Return the numbers of a row in their formats, or what stands for a number that is missing."""
    values = [(getattr(row, name, None), how) for name, how in formats.items()]
    return [format(value, how) if value else missing for value, how in values]


def _title(report: Report) -> str:
    found = report.published
    assert found is not None
    mode = "" if found.strong is None else f" ({_MODES[found.strong]})"
    return f"{found.name}{mode}"


def _legend(report: Report) -> str:
    rows = report.rows
    base = min(rows)
    most = max(len(runs) for runs in report.runs.values())
    runs = f", medians of {most} runs" if most > 1 else ""
    basis = "by steps per second" if counts_steps(rows, report.strong) else "by time"
    told = (
        f"{report.mode} scaling{runs}; speed-up and efficiency relative to {ranks_of(base)}, "
        f"{basis}.\nThe time is that of the whole command."
    )
    return "\n".join([told, *_doubts(report)])


def _doubts(report: Report) -> list[str]:
    """Return reasons to doubt the numbers, a sentence each."""
    found = []
    if any(len(runs) == 1 for runs in report.runs.values()):
        found.append("One run of a size has no estimate of its error: --repeat 3 gives one.")
    worst = max(report.runs, key=lambda size: spread(report.runs[size]) or 0.0)
    if (spread(report.runs[worst]) or 0.0) >= _MUCH:
        times = sorted(run.seconds for run in report.runs[worst])
        found.append(
            f"The runs of {ranks_of(worst)} took {times[0]:.2f} to {times[-1]:.2f} s: something "
            f"else used the machine. Run it\nagain where nothing does, or more often (--repeat)."
        )
    above = [row.ranks for row in report.rows.values() if row.efficiency > _TOO_GOOD]
    if above:
        base = ranks_of(min(report.rows))
        found.append(
            f"Efficiency above {_TOO_GOOD:.0%} at {', '.join(map(ranks_of, above))}: more ranks do "
            f"not make each of them faster.\nMost often {base} had another load, fewer cores or "
            f"other work; see docs/scaling.md."
        )
    return found


def ranks_of(size: int) -> str:
    return count_of(size, "rank")


# -- files -----------------------------------------------------------------------------------------


def write_csv(report: Report, sizes: Sequence[int], path: str) -> str:
    """Write all numbers to a file, which replaces an older one.

    A later study compares itself with the file (``--scaling-published``).

    Returns:
        The reason if the file cannot be written; empty otherwise.
    """
    rows, published = report.rows, report.published_rows
    formats = {"seconds": ".3f", "steps_per_second": ".6g", "speedup": ".4f", "efficiency": ".4f"}
    theirs = {name: formats[name] for name in _PUBLISHED} if published else {}
    partial = f"{path}.partial"
    try:
        with open(partial, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            head = ["ranks", "mode", *formats, "runs", "spread_percent", "all_seconds"]
            writer.writerow(head + [f"published_{name}" for name in theirs])
            for size in sorted({*sizes, *published}):
                runs = report.runs.get(size, [])
                cells: list[Any] = [size, report.mode, *_cells(rows.get(size), formats, "")]
                apart = spread(runs)
                cells += [len(runs), "" if apart is None else f"{100 * apart:.1f}"]
                cells.append(" ".join(f"{run.seconds:.3f}" for run in runs))
                writer.writerow(cells + _cells(published.get(size), theirs, ""))
        os.replace(partial, path)
    except OSError as error:
        return f"cannot write {path}: {error.strerror}"
    return ""


def _errors(
    values: Sequence[float], runs: Sequence[Sequence[Run]], by_steps: bool
) -> list[list[float]]:
    """Return how far the worst and the best run of each size are below and above its value."""
    below, above = [], []
    for value, of_size in zip(values, runs, strict=True):
        rates = [(run.steps_per_second or 0.0) if by_steps else 1 / run.seconds for run in of_size]
        median = statistics.median(rates or [1.0])
        below.append(max(0.0, value * (1 - min(rates, default=median) / median)))
        above.append(max(0.0, value * (max(rates, default=median) / median - 1)))
    return [below, above]


def draw(report: Report, path: str) -> str:
    """Draw the chart; return the reason if it cannot be drawn."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import PercentFormatter
    except ImportError:
        return f"no {path}: it needs matplotlib, pip install matplotlib"
    series = {f"measured ({report.mode})": report.rows}
    if report.published is not None:
        series[_title(report)] = report.published_rows
    ranks = sorted({size for rows in series.values() for size in rows})
    by_steps = counts_steps(report.rows, report.strong)
    figure = Figure(figsize=(9.0, 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{report.title}: {report.mode} scaling" if report.title else "Scaling")
    left, right = figure.subplots(1, 2)
    right.axhline(1.0, linestyle="--", color="grey")
    label = "ideal"
    for base in sorted({min(rows) for rows in series.values()}):
        ideal = [size for size in ranks if size >= base]
        left.plot(ideal, [size / base for size in ideal], "--", color="grey", label=label)
        label = "_"  # matplotlib's name for what has no entry in the legend
    for (label, rows), marker in zip(series.items(), "os", strict=False):
        sizes = list(rows)
        runs = report.runs if rows is series[f"measured ({report.mode})"] else {}
        for axes, of in ((left, "speedup"), (right, "efficiency")):
            values = [getattr(row, of) for row in rows.values()]
            errors = _errors(values, [runs.get(size, ()) for size in sizes], by_steps)
            axes.errorbar(sizes, values, errors, marker=marker, label=label, capsize=3)
    for axes, what in ((left, "speed-up"), (right, "efficiency")):
        axes.set(xlabel="ranks", ylabel=what, xticks=ranks, ylim=(0, axes.get_ylim()[1] * 1.05))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    right.yaxis.set_major_formatter(PercentFormatter(1.0))
    left.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        return f"cannot write {path}: {error.strerror}"
    return ""
