"""What benchmarks/collectives.py shows: the tables, the requirements, the CSV and the plot."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeAlias

from benchmarks.promises import Requirement, aligned, figure, times_text

LABELS = {"ours": "Horovod", "gloo": "torch Gloo", "mpi": "Open MPI", "nccl": "torch NCCL"}
KIB, MIB = 1 << 10, 1 << 20
SMALL = "1,000 small"

Curve: TypeAlias = tuple[str, str, dict[int, list[float]]]  # colour, marker, samples of each size


@dataclass
class Duel:
    """The samples, in microseconds, of Horovod and a rival in the same processes."""

    allreduce: dict[int, dict[str, list[float]]]  # bytes -> contender -> samples
    many: dict[str, list[float]]  # of 1,000 small tensors; empty where they were left out

    def median(self, nbytes: int, contender: str) -> float:
        return median(self.allreduce[nbytes][contender])


@dataclass
class Run:
    """What one number of ranks gave."""

    size: int
    duels: dict[str, Duel] = field(default_factory=dict)  # by rival
    hosts: int = 1  # by their names
    gpu: str = ""  # its name, where tensors are on one

    @property
    def title(self) -> str:
        ranks = (
            f"{self.size} ranks on {self.hosts} hosts" if self.hosts > 1 else f"{self.size} ranks"
        )
        return f"{ranks}, {self.gpu}" if self.gpu else ranks

    @property
    def is_empty(self) -> bool:
        return not any(duel.allreduce for duel in self.duels.values())

    def times(self, rival: str) -> dict[int, tuple[float, float]]:
        """Bytes -> ours, theirs."""
        if rival not in self.duels:
            return {}
        duel = self.duels[rival]
        return {n: (duel.median(n, "ours"), duel.median(n, rival)) for n in duel.allreduce}


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
    """One line per size: for each rival ours, theirs, and how many times as long as ours."""
    header = ["size"]
    rows: dict[str, list[str]] = {}
    for rival, duel in run.duels.items():
        header += [LABELS["ours"], LABELS[rival], "theirs / ours"]
        found = {human(nbytes): pair for nbytes, pair in run.times(rival).items()}
        if duel.many:
            found[SMALL] = median(duel.many["ours"]), median(duel.many[rival])
        for size, (ours, theirs) in found.items():
            row = rows.setdefault(size, [size])
            row += [microseconds(ours), microseconds(theirs), times_text(theirs / ours)]
    title = f"{run.title}, float32 sum in place, microseconds (median of the slowest rank)"
    return "\n".join([title, "", *aligned([header, *rows.values()])])


def microseconds(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


# -- what the project promises -----------------------------------------------------------------


MOST_OF_SMALL = 1.3  # times torch's NCCL, at 4 B
LEVEL = 0.97  # times its speed, of larger tensors: what two runs of the same differ by


def requirements(results: Results, device: str) -> Iterator[Requirement]:
    """The promises that concern this device, on an otherwise idle machine."""
    if device == "cuda":
        for run in results.runs or [Run(2)]:
            yield from on_gpus(run)
    else:
        yield from on_cpus(results)


def on_gpus(run: Run) -> Iterator[Requirement]:
    """Against torch.distributed, which gives the same tensors to the same NCCL."""
    times = run.times("nccl")
    text = f"allreduce of 4 B, {run.title}: at most {MOST_OF_SMALL}x the time of torch's NCCL"
    if 4 in times:
        share = times[4][0] / times[4][1]
        yield Requirement(text, share <= MOST_OF_SMALL, times_text(share))
    else:
        yield Requirement(text, None, "not measured")
    text = f"from 1 MiB up, {run.title}: no slower than torch's NCCL ({LEVEL}x counts as level)"
    yield at_least(text, run, "nccl", LEVEL, MIB, 1 << 62)


def on_cpus(results: Results) -> Iterator[Requirement]:
    """All of them for two ranks on one host."""
    found = (run for run in results.runs if run.size == 2 and run.hosts == 1)
    run = next(found, Run(2))
    yield at_least("4x Gloo from 4 B to 64 KiB", run, "gloo", 4.0, 0, 64 * KIB)
    yield at_least("2.5x Gloo up to 16 MiB", run, "gloo", 2.5, 0, 16 * MIB)
    yield at_least("1.5x Gloo at 100 MiB", run, "gloo", 1.5, 100 * MIB, 100 * MIB)
    yield at_least("level with Open MPI from 1 MiB up", run, "mpi", 1.0, MIB, 1 << 62)
    yield behind_mpi(run)
    if "gloo" in run.duels and run.duels["gloo"].many:
        small = run.duels["gloo"].many
        ratio = median(small["gloo"]) / median(small["ours"])
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
    text: str, run: Run, rival: str, wanted: float, smallest: int, biggest: int
) -> Requirement:
    found = {
        nbytes: theirs / ours
        for nbytes, (ours, theirs) in run.times(rival).items()
        if smallest <= nbytes <= biggest
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
        nbytes: ours - theirs for nbytes, (ours, theirs) in run.times("mpi").items() if nbytes < MIB
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
        header = "section ranks rival bytes contender median_us p10_us p90_us samples times_ours"
        writer.writerow([*header.split(), "hosts", "gpu"])
        duels = [(run, *found) for run in results.runs for found in run.duels.items()]
        for run, rival, duel in duels:
            sections = [("allreduce", nbytes, found) for nbytes, found in duel.allreduce.items()]
            more = [("1000_small", "", duel.many)] if duel.many else []
            for section, nbytes, found in [*sections, *more]:
                for contender, samples in found.items():
                    ratio = median(samples) / median(found["ours"])
                    row = [*summary(samples), f"{ratio:.3f}", str(run.hosts), run.gpu]
                    writer.writerow([section, run.size, rival, nbytes, contender, *row])
        for section, ranks, samples in (
            ("import", 1, results.import_ms),
            ("init", 2, results.init_ms),
        ):
            if samples:
                row = summary([1000 * sample for sample in samples])
                writer.writerow([section, ranks, "", "", "ours", *row, "", 1, ""])


def summary(samples: list[float]) -> list[str]:
    cuts = quantiles(samples, n=10) if len(samples) > 1 else samples * 9
    values = (median(samples), cuts[0], cuts[-1])
    return [*(f"{value:.1f}" for value in values), str(len(samples))]


def draw_times(panel: Any, curves: dict[str, Curve]) -> None:
    """Time over size, both logarithmic; a curve for each label."""
    from matplotlib.ticker import FuncFormatter

    sizes: list[int] = []
    for label, (colour, marker, found) in curves.items():
        sizes = list(found)
        times = [median(samples) for samples in found.values()]
        panel.plot(sizes, times, color=colour, marker=marker, label=label)
        spread = [quantiles(samples, n=10) for samples in found.values()]
        low, high = [cuts[0] for cuts in spread], [cuts[-1] for cuts in spread]
        panel.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(sizes, [human(nbytes) for nbytes in sizes], rotation=45, ha="right")
    panel.minorticks_off()
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.grid(True, color="#dddddd", linewidth=0.6)
    panel.set_xlabel("tensor size")
    panel.set_ylabel("microseconds (median, band: 10 to 90 %)")


def write_plot(results: Results, path: Path) -> None:
    """One panel per number of ranks."""
    colours = {  # ours, theirs
        "gloo": ("#0b6e4f", "#c1440e"),
        "mpi": ("#64b58f", "#3a5ba0"),
        "nccl": ("#0b6e4f", "#c1440e"),
    }
    with figure(path, 1, len(results.runs), sharey=True) as panels:
        for panel, run in zip(panels[0], results.runs, strict=True):
            curves = {}
            for rival, duel in run.duels.items():
                for key, colour in zip(("ours", rival), colours[rival], strict=True):
                    label = f"Horovod (beside {LABELS[rival]})" if key == "ours" else LABELS[key]
                    found = {nbytes: samples[key] for nbytes, samples in duel.allreduce.items()}
                    curves[label] = (colour, "o" if key == "ours" else "s", found)
            draw_times(panel, curves)
            where = "" if run.hosts > 1 or run.gpu else " on one host"
            panel.set_title(f"Allreduce of float32, {run.title}{where}")
            panel.label_outer()
        panels[0][0].legend(frameon=False)
