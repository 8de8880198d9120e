"""What benchmarks/scaling_model.py found: tables, CSV and plot."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median

from benchmarks.promises import aligned
from benchmarks.scaling_costs import LOOPBACK, Layout, Link, Machine, allreduce
from benchmarks.scaling_limits import Part, job_parts, step_parts
from benchmarks.scaling_measure import Training
from benchmarks.scaling_steps import NETWORKS, WAYS, Setting, efficiency, evenly, step
from horovod.runner import plan

HEADER = ["section", "name", "way", "link", "hosts", "ranks", "bytes", "predicted", "measured"]
STUDY = Layout(128, 4)  # the hosts of Horovod's published study, 512 GPUs


@dataclass(frozen=True)
class Check:
    """A prediction and what was measured: seconds."""

    title: str
    way: str
    ranks: int
    nbytes: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Of the prediction, over what was measured: 0 is right, -0.5 is half of it."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Efficiency:
    network: str
    link: Link
    layout: Layout
    way: str
    value: float


@dataclass
class Results:
    machine: Machine
    checks: list[Check] = field(default_factory=list)
    efficiencies: list[Efficiency] = field(default_factory=list)
    parts: dict[str, list[Part]] = field(default_factory=dict)


# -- predictions -------------------------------------------------------------------------------


def allreduce_check(ranks: int, nbytes: int, measured: float, machine: Machine) -> Check:
    cost = allreduce(nbytes, Layout(ranks, 1), LOOPBACK, machine, by_host=False)
    predicted = cost.seconds(max(1.0, ranks / machine.cores))
    return Check(f"allreduce of {human(nbytes)}", "flat", ranks, nbytes, predicted, measured)


def training_check(run: Training, bucket_bytes: float, machine: Machine) -> Check:
    way = "flat" if run.layout.per_host == 1 else "hierarchical"
    crowding = max(1.0, run.layout.size / machine.cores)
    setting = Setting(run.layout, LOOPBACK, machine, bucket_bytes, crowding, on_cores=True)
    predicted = step(evenly(run.sizes, run.plain), setting, way)
    title = f"step of {run.model} ({1000 * run.plain:.1f} ms alone)"
    return Check(title, way, run.layout.size, sum(run.sizes), predicted, run.ours)


def efficiencies(
    machine: Machine, links: Sequence[Link], layouts: Sequence[Layout], bucket_bytes: float
) -> list[Efficiency]:
    found = []
    for link in links:
        for name, network in NETWORKS.items():
            for layout in dict.fromkeys([*layouts, STUDY]):
                setting = Setting(layout, link, machine, bucket_bytes)
                for way in WAYS:
                    value = efficiency(network, setting, way)
                    found.append(Efficiency(name, link, layout, way, value))
    return found


def limits(
    machine: Machine, link: Link, layout: Layout, bucket_bytes: float
) -> dict[str, list[Part]]:
    """What takes how long in the largest job: for a step of ResNet-101, and beside steps."""
    network, setting = NETWORKS["resnet101"], Setting(layout, link, machine, bucket_bytes)
    found = {f"step, {way}": step_parts(network, setting, way) for way in ("flat", "hierarchical")}
    found["once, or when something is wrong"] = job_parts(network, setting)
    return found


# -- for people --------------------------------------------------------------------------------


def human(nbytes: float) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes:g} B"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows with columns aligned: the first to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "   ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


CONSTANTS = {
    "call": "us    CPU of a tiny allreduce through shared memory: Python",
    "message": "us    CPU to send a message and receive one (TCP, loopback)",
    "wake": "us    until a waiting rank goes on, beyond that CPU",
    "send_byte": "ns/B  CPU to send (TCP, loopback)",
    "receive_byte": "ns/B  CPU to receive",
    "add_byte": "ns/B  adding two arrays (numpy, float32)",
    "copy_byte": "ns/B  copying one",
    "shared_byte": "ns/B  CPU of an allreduce through shared memory, 2 ranks, 16 MiB",
    "store_request": "us    a request to the job's store",
    "store_byte": "ns/B  that the store serves",
    "cores": "      cores",
}
SCALES = {"us": 1e6, "ns": 1e9, "  ": 1.0}


def constants_table(machine: Machine) -> str:
    lines = ["Measured on this machine:"]
    for constant in fields(machine):
        text = CONSTANTS[constant.name]
        value = getattr(machine, constant.name) * SCALES[text[:2]]
        lines.append(f"  {constant.name:14s} {value:8.3g} {text}")
    return "\n".join(lines)


def checks_table(checks: Sequence[Check]) -> str:
    rows = [["", "ranks", "way", "predicted ms", "measured ms", "error"]]
    for check in checks:
        times = [f"{1000 * value:.3f}" for value in (check.predicted, check.measured)]
        rows.append(
            [check.title, str(check.ranks), check.way, *times, f"{100 * check.error:+.0f} %"]
        )
    lines = ["Prediction against measurement, all ranks on this machine:", "", columns(rows)]
    for kind, chosen in by_kind(checks):
        size = median(abs(check.error) for check in chosen)
        lines += ["", f"Median error of {kind}, either way: {100 * size:.0f} %"]
    return "\n".join(lines)


def by_kind(checks: Iterable[Check]) -> Iterator[tuple[str, list[Check]]]:
    kinds: dict[str, list[Check]] = {}
    for check in checks:
        kind = "allreduce" if check.title.startswith("allreduce") else "training steps"
        kinds.setdefault(kind, []).append(check)
    return iter(kinds.items())


def plans_table(link: Link, hosts: int) -> str:
    """What each way of sending less would make of the speed, by the model of horovodrun --plan."""
    rows = [[f"Sending less, {link.title}, {hosts} hosts", *(way.title for way in plan.WAYS)]]
    for network in NETWORKS.values():
        parameters = sum(piece.nbytes for piece in network.pieces()) / 4
        pipe = plan.Link(link.latency, link.bandwidth)
        job = plan.PlannedJob(parameters, network.compute, hosts, pipe)
        chosen = plan.recommend(job)
        speeds = [f"{100 * way.speed(job):.0f} %{' *' * (way == chosen)}" for way in plan.ways(job)]
        rows.append([network.title, *speeds])
    return "\n".join([*aligned(rows), "* recommended by horovodrun --plan"])


def efficiency_table(found: Sequence[Efficiency], link: Link) -> str:
    value = {(e.network, e.layout, e.way): e.value for e in found if e.link == link}
    layouts = list(dict.fromkeys(layout for _, layout, _ in value))
    names = list(dict.fromkeys(name for name, _, _ in value))
    header = ["ranks (hosts x ranks)"]
    header += [f"{way[:4]}." if way != "flat" else "flat" for _ in names for way in WAYS]
    rows = [header]
    for layout in layouts:
        row = [f"{layout.size} ({layout.hosts} x {layout.per_host})"]
        row += [f"{100 * value[name, layout, way]:.0f} %" for name in names for way in WAYS]
        rows.append(row)
    published = ["Horovod's study, 512"]
    for name in names:
        percent = NETWORKS[name].published
        published += ["-" if percent is None else f"{100 * percent:.0f} %", "", ""]
    titles = "; ".join(NETWORKS[name].title for name in names)
    return "\n".join(
        [
            f"Efficiency, {link.title}; three columns each for {titles}:",
            "",
            columns([*rows, published]),
        ]
    )


def limits_table(parts: dict[str, list[Part]], layout: Layout, link: Link) -> str:
    lines = [
        f"What takes how long with {layout.size} ranks on {layout.hosts} hosts, {link.title}, "
        "ResNet-101;",
        "each by itself, and most of it behind compute. Growth: times as long on twice the hosts.",
    ]
    for title, found in parts.items():
        rows = [[title, "ms", "growth", ""]]
        for part in found:
            rows.append(
                [
                    f"  {part.title}",
                    f"{1000 * part.seconds:.3f}",
                    f"{part.growth:.2f}",
                    part.verdict,
                ]
            )
        lines += ["", columns(rows)]
    return "\n".join(lines)


# -- files -------------------------------------------------------------------------------------


def write_csv(results: Results, path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER)
        for constant in fields(results.machine):
            value = getattr(results.machine, constant.name)
            writer.writerow(["constant", constant.name, "", "", "", "", "", "", value])
        for c in results.checks:
            row = ["check", c.title, c.way, LOOPBACK.title, "", c.ranks, c.nbytes]
            writer.writerow([*row, c.predicted, c.measured])
        for e in results.efficiencies:
            row = ["efficiency", e.network, e.way, e.link.title, e.layout.hosts, e.layout.size, ""]
            published = NETWORKS[e.network].published if e.layout == STUDY else None
            writer.writerow([*row, e.value, "" if published is None else published])
        for title, parts in results.parts.items():
            for part in parts:
                row = ["part", part.title, title, "", "", "", "", part.seconds, ""]
                writer.writerow(row)


def write_plot(results: Results, path: Path) -> None:
    """Predictions over measurements, and efficiency over ranks, a panel for each link."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    links = list(dict.fromkeys(e.link for e in results.efficiencies))
    figure, panels = pyplot.subplots(1, 1 + len(links), figsize=(5.6 * (1 + len(links)), 4.6))
    _plot_checks(panels[0], results.checks)
    for panel, link in zip(panels[1:], links, strict=True):
        _plot_efficiency(panel, [e for e in results.efficiencies if e.link == link])
        panel.set_title(f"predicted, {link.title}")
    for panel in panels:
        panel.grid(True, color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _plot_checks(panel, checks: Sequence[Check]) -> None:  # type: ignore[no-untyped-def]
    panel.set_title("this machine")
    panel.set_xlabel("measured ms")
    panel.set_ylabel("predicted ms")
    if not checks:
        panel.text(0.5, 0.5, "not measured", ha="center", transform=panel.transAxes)
        return
    for (kind, chosen), marker in zip(by_kind(checks), "os", strict=False):
        measured = [1000 * check.measured for check in chosen]
        panel.scatter(measured, [1000 * check.predicted for check in chosen], 18, marker=marker)
        panel.scatter(
            [], [], 18, color=panel.collections[-1].get_facecolor(), label=kind, marker=marker
        )
    every = [1000 * value for check in checks for value in (check.measured, check.predicted)]
    ends = [min(every), max(every)]
    panel.plot(ends, ends, color="#9aa5b1", linewidth=1, label="equal")
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.legend(frameon=False)


def _plot_efficiency(panel, found: Sequence[Efficiency]) -> None:  # type: ignore[no-untyped-def]
    colours = dict(zip(NETWORKS, ("#0b6e4f", "#1f5fa8", "#c1440e"), strict=True))
    styles = dict(zip(WAYS, (":", "--", "-"), strict=True))
    for name, colour in colours.items():
        for way, style in styles.items():
            line = [e for e in found if (e.network, e.way) == (name, way) and e.layout != STUDY]
            label = NETWORKS[name].title if way == WAYS[-1] else None
            xs, ys = [e.layout.size for e in line], [100 * e.value for e in line]
            panel.plot(xs, ys, style, color=colour, label=label, linewidth=1.4)
        percent = NETWORKS[name].published
        if percent is not None:
            panel.scatter([512], [100 * percent], 40, color=colour, marker="*", zorder=3)
    for way, style in styles.items():
        panel.plot([], [], style, color="#555555", label=way)
    panel.scatter([], [], 40, color="#555555", marker="*", label="Horovod's study")
    panel.set_xscale("log", base=2)
    ticks = sorted({e.layout.size for e in found})
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.set_ylim(0, 105)
    panel.set_xlabel("ranks")
    panel.set_ylabel("efficiency, %")
    panel.legend(frameon=False, fontsize=8, ncol=4, loc="upper center", bbox_to_anchor=(0.5, -0.13))
