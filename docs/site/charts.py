"""Draws the charts of the benchmarks page and of the README from benchmarks/README.md.

    python docs/site/charts.py

writes docs/assets/charts: each chart for light and for dark pages. Run it when a measurement
changes; a test fails while the files are stale. No number comes from anywhere else.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "benchmarks" / "README.md"
TARGET = ROOT / "docs" / "assets" / "charts"

COLOURS = {  # those of the timeline's report
    "light": {"ink": "#1b1f27", "quiet": "#5d6675", "line": "#d5d9e0", "ours": "#1f8a8a"},
    "dark": {"ink": "#e8eaee", "quiet": "#9aa4b2", "line": "#3a424e", "ours": "#35b3ae"},
}
COLOURS["light"] |= {"other": "#a9b6c9", "third": "#e58a1f"}
COLOURS["dark"] |= {"other": "#61708a", "third": "#f2a23d"}

WIDTH = 720


# -- reading ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ratio:
    """How many times as fast Horovod is, with the interval that was measured, if one was."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None


def tables(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """The header and the rows of every Markdown table."""
    for found in re.finditer(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        header, _, *rows = (
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in found[0].strip().split("\n")
        )
        yield header, rows


def rows_of(text: str, *columns: str) -> list[list[str]]:
    """The rows of the first table whose header begins with these columns."""
    for header, rows in tables(text):
        if header[: len(columns)] == list(columns):
            return rows
    raise ValueError(f"there is no table with the columns {columns}")


def ratio(label: str, cell: str) -> Ratio:
    """Read "1.95 ± 0.03", "2.22 (2.16 to 2.31)" or "2.72"."""
    value, *rest = (float(number) for number in re.findall(r"\d+(?:\.\d+)?", cell))
    if "±" in cell:
        return Ratio(label, value, value - rest[0], value + rest[0])
    return Ratio(label, value, *rest)


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def found(text: str, pattern: str) -> float:
    """The one number that the sentence has."""
    (match,) = re.findall(pattern, text)
    return float(match)


# -- drawing ---------------------------------------------------------------------------------


@dataclass
class Drawing:
    """A chart that grows downwards. Colours are names, which a page's scheme fills in."""

    title: str
    height: float = 0
    parts: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        ink: str = "ink",
        anchor: str = "start",
        more: str = "",
    ) -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" fill="{{{ink}}}" text-anchor="{anchor}" {more}>'
            f"{html.escape(words)}</text>"
        )

    def rule(self, x1: float, y1: float, x2: float, y2: float, ink: str, width: float = 1) -> None:
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke="{{{ink}}}" stroke-width="{width}"/>'
        )

    def bar(self, x: float, y: float, width: float, height: float, ink: str) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" rx="3" '
            f'fill="{{{ink}}}"/>'
        )

    def svg(self, scheme: str) -> str:
        inside = "\n".join(self.parts)
        for name, colour in COLOURS[scheme].items():
            inside = inside.replace(f"{{{name}}}", colour)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height:.0f}" '
            f'width="{WIDTH}" height="{self.height:.0f}" role="img" '
            'font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif" '
            f'font-size="14">\n<title>{html.escape(self.title)}</title>\n{inside}\n</svg>\n'
        )


def ratios(title: str, peer: str, groups: Sequence[tuple[str, Sequence[Ratio]]]) -> Drawing:
    """Bars to the right; 1, the speed of the peer, is a line through all of them."""
    drawing = Drawing(title)
    left, right, row = 190.0, WIDTH - 70.0, 24.0
    most = math.ceil(max(r.high or r.value for _, group in groups for r in group) * 2) / 2
    scale = (right - left) / most
    y = 34.0
    for name, group in groups:
        if name:
            drawing.text(0, y + 15, name, more='font-weight="600"')
            y += row
        first = y
        for each in group:
            drawing.text(left - 12, y + 15, each.label, "quiet", "end")
            drawing.bar(left, y + 3, each.value * scale, 16, "ours")
            end = each.value
            if each.low is not None and each.high is not None:
                drawing.rule(
                    left + each.low * scale, y + 11, left + each.high * scale, y + 11, "ink"
                )
                end = each.high
            drawing.text(left + max(end, each.value) * scale + 8, y + 15.5, f"{each.value:.2f}")
            y += row
        drawing.rule(left + scale, first - 1, left + scale, y - 1, "ink", 1.5)
        y += 8
    drawing.text(left + scale, 18, f"1 = {peer}", "quiet", "middle")
    drawing.height = y
    return drawing


def pairs(title: str, names: tuple[str, str], rows: Sequence[tuple[str, str, str]]) -> Drawing:
    """Two bars for each row: seconds of Horovod, and of the other."""
    drawing = Drawing(title)
    left, row = 190.0, 22.0
    most = max(number(cell) for _, *cells in rows for cell in cells)
    scale = (WIDTH - 80.0 - left) / most
    y = _legend(drawing, {names[0]: "ours", names[1]: "other"}, left) + 10
    for label, *cells in rows:
        for index, line in enumerate(label.split("\n")):
            drawing.text(left - 12, y + 17 + 17 * index, line, "quiet", "end")
        for cell, ink in zip(cells, ("ours", "other"), strict=True):
            drawing.bar(left, y + 3, max(2.0, number(cell) * scale), 16, ink)
            drawing.text(left + number(cell) * scale + 8, y + 15.5, f"{cell} s")
            y += row
        y += 12
    drawing.height = y
    return drawing


def curves(
    title: str, sizes: Sequence[str], series: dict[str, tuple[str, list[str]]], *, peer: str = ""
) -> Drawing:
    """Microseconds over sizes, both logarithmic: series by name, with colour and values.

    With a `peer` the values are ratios, and 1, the line of the peer, is drawn through them.
    """
    drawing = Drawing(title)
    left, right, height = 70.0, WIDTH - 20.0, 240.0
    names = {peer: "ours"} if peer else {}
    names |= {name: ink for name, (ink, _) in series.items()}
    top = _legend(drawing, names, left) + 14
    values = [number(cell) for _, cells in series.values() for cell in cells]
    least, most = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    step = (right - left - 40) / (len(sizes) - 1)

    def place(value: float) -> float:
        return top + height * (most - math.log10(value)) / (most - least)

    for power in range(least, most + 1):
        y = place(10.0**power)
        is_peer = bool(peer) and power == 0
        drawing.rule(left, y, right, y, "ours" if is_peer else "line", 2.5 if is_peer else 1)
        label = f"{10.0**power:g}" if peer else _time(power)
        drawing.text(left - 10, y + 5, label, "quiet", "end")
    for index, size in enumerate(sizes):
        x = left + 20 + index * step
        drawing.text(x, top + height + 22, size, "quiet", "middle", 'font-size="13"')
    for ink, cells in series.values():
        points = [(left + 20 + i * step, place(number(cell))) for i, cell in enumerate(cells)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        drawing.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{{{ink}}}" stroke-width="2.5"/>'
        )
        drawing.parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{{{ink}}}"/>' for x, y in points
        ]
    drawing.height = top + height + 34
    return drawing


def _legend(drawing: Drawing, names: dict[str, str], left: float) -> float:
    x = left
    for name, ink in names.items():
        drawing.bar(x, 4, 14, 14, ink)
        drawing.text(x + 20, 16, name, "quiet")
        x += 50 + 7.5 * len(name)
    return 22.0


def _time(power: int) -> str:
    """A power of ten of microseconds, in words."""
    value = 10**power
    for limit, unit in ((1_000_000, "s"), (1_000, "ms"), (1, "µs")):
        if value >= limit:
            return f"{value // limit} {unit}"
    return f"{value:g} µs"


# -- the charts ------------------------------------------------------------------------------


def charts(text: str) -> dict[str, Drawing]:
    """All charts by their names, from the text of benchmarks/README.md."""
    steps = rows_of(text, "model", "no communication", "Horovod", "DDP", "DDP / ours")
    short = ("MLP", "MNIST CNN", "transformer", "ResNet-18")
    torch = [ratio(name, row[4]) for name, row in zip(short, steps, strict=True)]
    trainer = rows_of(text, "model", "no communication", '`"horovod"`', '`"ddp"`')
    lightning = [ratio(row[0].partition(",")[0], row[4]) for row in trainer]
    fit = rows_of(text, "model", "Horovod, Keras 3", "Horovod, tf-keras", "strategy")
    keras = [ratio(row[0].partition(",")[0], row[4]) for row in fit]
    compiled = rows_of(text, "step", "no communication", "Horovod", "the framework's own")
    names = ("JAX, MLP", "JAX, transformer", "MXNet, MLP")
    others = [ratio(name, row[4]) for name, row in zip(names, compiled, strict=True)]
    links = rows_of(text, "link", "MLP 1.9 M", "transformer 1.1 M", "ResNet-18")
    hosts = [
        (
            f"{row[0]} link" if row[0] == "unlimited" else row[0],
            [ratio(m, cell) for m, cell in zip((*short[:1], *short[2:]), row[1:4], strict=True)],
        )
        for row in links
    ]
    local = rows_of(text, "size", "Horovod", "Gloo", "Gloo / ours", "Horovod", "Open MPI")
    network = rows_of(text, "size", "Horovod", "torch Gloo", "Gloo / ours")
    started = found(text, r"through `hvd.init\(\)` to the end in\s+(\S+) s")
    torchrun = found(text, r"`init_process_group\(\"gloo\"\)` in (\S+) s;")
    resumed = found(text, r"next step after (\S+) s \(median")
    restarted = found(text, r"`torchrun --max-restarts` needs (\S+) s,")
    return {
        "overview": ratios(
            "How many times as fast as the framework's own a training step is",
            "the framework's own",
            [
                ("PyTorch, against DDP with Gloo", torch),
                ('Lightning, against strategy="ddp"', lightning),
                ("Keras, against MultiWorkerMirroredStrategy", keras),
                ("JAX, against jax.distributed; MXNet, against dist_sync", others),
            ],
        ),
        "training": ratios("A training step against DDP, two ranks", "DDP", [("", torch)]),
        "hosts": ratios("A training step against DDP, two hosts", "DDP", hosts),
        "collectives": curves(
            "How many times as long as Horovod's an allreduce of two ranks on one host takes",
            [row[0] for row in local],
            {
                "Gloo": ("other", [row[3] for row in local]),
                "Open MPI": ("third", [row[6] for row in local]),
            },
            peer="Horovod",
        ),
        "network": curves(
            "An allreduce between two hosts",
            [row[0] for row in network],
            {
                "Horovod": ("ours", [row[1] for row in network]),
                "torch Gloo": ("other", [row[2] for row in network]),
            },
        ),
        "starting": pairs(
            "Starting a job, and going on after a rank was killed",
            ("Horovod", "torchrun"),
            [
                ("start and end\nof two ranks", f"{started:.2f}", f"{torchrun:.2f}"),
                ("next step after\none of four is killed", f"{resumed:.2f}", f"{restarted:.2f}"),
            ],
        ),
    }


def files() -> dict[str, str]:
    """What TARGET must hold: file names and contents."""
    return {
        f"{name}-{scheme}.svg": chart.svg(scheme)
        for name, chart in charts(SOURCE.read_text(encoding="utf-8")).items()
        for scheme in COLOURS
    }


if __name__ == "__main__":
    TARGET.mkdir(parents=True, exist_ok=True)
    for file_name, content in files().items():
        (TARGET / file_name).write_text(content, encoding="utf-8")
