"""What benchmarks/network.py shows: settings, the tables, the CSV and the plot."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.collectives_report import draw_times, human, microseconds
from benchmarks.network_hosts import UNLIMITED
from benchmarks.promises import aligned, figure, times_text
from benchmarks.training_models import WORKLOADS
from benchmarks.training_report import COLUMNS, Run, csv_rows, draw_bars
from benchmarks.turns import Samples, doubt, interval, ratios

LABELS = {"ours": "Horovod", "gloo": "torch Gloo"}
LOOKS = {"ours": ("#0b6e4f", "o"), "gloo": ("#c1440e", "s")}  # colour and marker


@dataclass(frozen=True)
class Setting:
    """Hosts, the ranks on each, and the link between them."""

    hosts: int
    per_host: int
    link: str = UNLIMITED

    @property
    def size(self) -> int:
        return self.hosts * self.per_host

    @property
    def title(self) -> str:
        if self.hosts == 1:
            return f"{self.size} ranks, all over TCP"
        ranks = "1 rank" if self.per_host == 1 else f"{self.per_host} ranks"
        return f"{self.hosts} hosts, {ranks} each, {self.link} link"


@dataclass
class Training(Run):
    """A run between hosts."""

    setting: Setting = Setting(2, 1)

    @property
    def title(self) -> str:
        return f"{self.setting.title}, a core each" if self.bound else self.setting.title

    def most(self, model: str) -> float | None:
        """How many times as fast as DDP the best could be, all types as they are.

        A step takes no less than its computing, nor than the link for the gradients: between two
        hosts each sends as many bytes as there are. None where the link has no rate.
        """
        plain, theirs = self.step(model, "plain"), self.step(model, "ddp")
        setting = self.setting
        if setting.hosts != 2 or setting.link == UNLIMITED or plain is None or theirs is None:
            return None
        nbytes = sum(param.nbytes for param in WORKLOADS[model].model().parameters())
        return theirs / max(plain, 8000 * nbytes / bits_per_second(setting.link))


def bits_per_second(link: str) -> float:
    """The rate of a link such as 1gbit, as `tc` understands it."""
    number, unit = re.fullmatch(r"([\d.]+)([kmg])bit", link).groups()  # type: ignore[union-attr]
    return float(number) * {"k": 1e3, "m": 1e6, "g": 1e9}[unit]


@dataclass
class Calls:
    """Microseconds of an allreduce."""

    setting: Setting
    samples: dict[int, Samples] = field(default_factory=dict)  # by bytes

    def ratio(self, nbytes: int) -> float:
        """How many times as long as ours torch's Gloo takes."""
        return median(ratios(self.samples[nbytes], "gloo", "ours"))

    def interval(self, nbytes: int) -> tuple[float, float]:
        return interval(ratios(self.samples[nbytes], "gloo", "ours"))


@dataclass
class Starts:
    """Milliseconds from a common moment until the slowest rank has loaded, and has started."""

    size: int
    samples: dict[str, dict[str, list[float]]]  # contender -> load, start

    def median(self, contender: str, what: str) -> float:
        return median(self.samples[contender][what])


@dataclass
class Results:
    training: list[Training] = field(default_factory=list)
    calls: list[Calls] = field(default_factory=list)
    starts: list[Starts] = field(default_factory=list)

    def trained(self, setting: Setting) -> Training:
        none = Training(setting.size, {}, setting=setting)
        return next((run for run in self.training if run.setting == setting), none)

    def called(self, setting: Setting) -> Calls:
        return next((run for run in self.calls if run.setting == setting), Calls(setting))


def losses_table(run: Training) -> str:
    """Where nothing but the losses was compared."""
    words = {True: "bitwise DDP's", False: "NOT DDP's", None: "-"}
    lines = [f"{WORKLOADS[model].title}: {words[run.same_losses(model)]}" for model in run.losses]
    return "\n".join([f"{run.title}: losses of plain SGD", "", *lines])


def calls_table(run: Calls) -> str:
    """One line per size."""
    rows = [["size", LABELS["ours"], LABELS["gloo"], "theirs / ours"]]
    for nbytes, found in run.samples.items():
        row = [human(nbytes), *(microseconds(median(found[key])) for key in LABELS)]
        wrong = doubt(ratios(found, "gloo", "ours"))
        rows.append([*row, f"{times_text(run.ratio(nbytes))} +-{wrong:.2f}"])
    title = f"{run.setting.title}: float32 sum in place, microseconds (median of the slowest rank)"
    return "\n".join([title, "", *aligned(rows)])


def starts_table(found: list[Starts]) -> str:
    """One line per number of ranks."""
    rows = [["ranks", "import horovod.torch", "hvd.init()", "torch Gloo", "theirs / ours"]]
    for one in found:
        load, ours, gloo = (
            one.median("ours", "load"),
            one.median("ours", "start"),
            one.median("gloo", "start"),
        )
        rows.append([str(one.size), *(f"{value:,.0f}" for value in (load, ours, gloo))])
        rows[-1].append(times_text(gloo / ours))
    title = "Start after `import torch`, milliseconds until the slowest rank is done (median)"
    note = "torch Gloo: init_process_group and the first barrier. The ratio leaves the import out."
    return "\n".join([title, "", *aligned(rows), "", note])


# -- files -------------------------------------------------------------------------------------


def write_csv(results: Results, path: Path) -> None:
    """Milliseconds in all sections; `item` is a model, or bytes, or what was done."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["section", "hosts", "per_host", "link", "item", *COLUMNS[1:-1]])
        for run in results.training:
            place = [run.setting.hosts, run.setting.per_host, run.setting.link]
            writer.writerows(["training", *place, *row[:-1]] for row in csv_rows(run))
        for section, place, item, found in _other_sections(results):
            run = Run(0, {item: found})
            writer.writerows([section, *place, *row[:-1]] for row in csv_rows(run))


def _other_sections(results: Results) -> Iterator[tuple[str, list[Any], str, Samples]]:
    for calls in results.calls:
        place = [calls.setting.hosts, calls.setting.per_host, calls.setting.link]
        for nbytes, found in calls.samples.items():
            milliseconds = {key: [us / 1000 for us in taken] for key, taken in found.items()}
            yield "allreduce", place, str(nbytes), milliseconds
    for starts in results.starts:
        for what in ("load", "start"):
            found = {key: taken[what] for key, taken in starts.samples.items()}
            yield "init", [1, starts.size, UNLIMITED], what, found


def write_plot(results: Results, path: Path) -> None:
    """Training, allreduce and the start of jobs below each other, a panel for each setting."""
    rows: list[list[Callable[[Any], None]]] = [
        [partial(draw_bars, run=run) for run in results.training if run.speed],
        [partial(_draw_calls, run=run) for run in results.calls],
        [partial(_draw_starts, found=results.starts)] if results.starts else [],
    ]
    rows = [row for row in rows if row] or [[]]
    with figure(path, len(rows), max(1, *(len(row) for row in rows))) as panels:
        for line, drawings in zip(panels, rows, strict=True):
            for panel in line[len(drawings) :]:
                panel.set_axis_off()
            for panel, draw in zip(line, drawings, strict=False):
                draw(panel)
            if drawings:
                line[0].legend(frameon=False)


def _draw_starts(panel: Any, found: list[Starts]) -> None:
    for place, key in enumerate(LABELS):
        where = [index + 0.4 * (place - 0.5) for index in range(len(found))]
        heights = [one.median(key, "start") for one in found]
        panel.bar(where, heights, 0.37, color=LOOKS[key][0], label=LABELS[key])
    panel.set_xticks(range(len(found)), [f"{one.size} ranks" for one in found])
    panel.set_ylabel("milliseconds")
    panel.set_title("hvd.init(); init_process_group and a barrier")


def _draw_calls(panel: Any, run: Calls) -> None:
    draw_times(
        panel,
        {
            LABELS[key]: (*look, {nbytes: found[key] for nbytes, found in run.samples.items()})
            for key, look in LOOKS.items()
        },
    )
    panel.set_title(f"Allreduce, {run.setting.title}")
