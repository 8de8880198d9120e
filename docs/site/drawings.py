"""Draws the two pictures of an allreduce for docs/concepts.md.

    python docs/site/drawings.py

writes docs/assets/drawings, each for light and for dark pages; a test fails while they are stale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from charts import COLOURS, ROOT, WIDTH, Drawing

TARGET = ROOT / "docs" / "assets" / "drawings"
SMALL = 'font-size="12.5"'


def arrow(drawing: Drawing, x1: float, y1: float, x2: float, y2: float, ink: str) -> None:
    """A line with a point at its end."""
    length = math.hypot(x2 - x1, y2 - y1)
    dx, dy = (x2 - x1) / length, (y2 - y1) / length
    drawing.rule(x1, y1, x2 - 6 * dx, y2 - 6 * dy, ink, 2)
    left = f"{x2 - 9 * dx - 5 * dy:.1f},{y2 - 9 * dy + 5 * dx:.1f}"
    right = f"{x2 - 9 * dx + 5 * dy:.1f},{y2 - 9 * dy - 5 * dx:.1f}"
    drawing.parts.append(f'<polygon points="{x2:.1f},{y2:.1f} {left} {right}" fill="{{{ink}}}"/>')


def frame(drawing: Drawing, x: float, y: float, width: float, height: float) -> None:
    drawing.parts.append(
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="8" '
        'fill="none" stroke="{line}" stroke-width="1.5"/>'
    )


def slices(drawing: Drawing, x: float, y: float, sums: Sequence[bool], size: float) -> None:
    """A rank's tensor, cut into slices; those that are summed over all ranks stand out."""
    for index, is_summed in enumerate(sums):
        drawing.bar(x + index * (size + 3), y, size, size, "ours" if is_summed else "other")


def ring() -> Drawing:
    """Four ranks in a ring: at the start, after the first round of passing on, and at the end."""
    drawing = Drawing("Ring allreduce with four ranks", height=292)
    captions = (
        ("Every rank has gradients", "of its own, in 4 slices"),
        ("After 3 steps each rank has", "the sum of one slice"),
        ("After 3 more steps all ranks", "have all sums"),
    )
    panel = WIDTH / 3
    for number, caption in enumerate(captions):
        left = number * panel + 14
        corners = [(left, 44.0), (left + 116, 44.0), (left + 116, 158.0), (left, 158.0)]
        for rank, (x, y) in enumerate(corners):
            own = [number == 2 or (number == 1 and index == rank) for index in range(4)]
            drawing.text(x + 38, y - 8, f"rank {rank}", "quiet", "middle", SMALL)
            slices(drawing, x, y, own, 16)
        if number < 2:  # at the end nothing moves
            arrow(drawing, left + 80, 52, left + 110, 52, "third")
            arrow(drawing, left + 154, 70, left + 154, 134, "third")
            arrow(drawing, left + 110, 166, left + 80, 166, "third")
            arrow(drawing, left + 38, 134, left + 38, 70, "third")
        for line, words in enumerate(caption):
            drawing.text(left + 96, 216 + 18 * line, words, anchor="middle", more=SMALL)
    _key(drawing, 272, "slice of one rank", "slice summed over all ranks")
    return drawing


def hierarchical() -> Drawing:
    """Two hosts with two ranks each: inside the hosts, between them, inside again."""
    drawing = Drawing("Hierarchical allreduce with two hosts of two ranks", height=308)
    captions = (
        ("1. Inside each host: rank i", "adds up part i"),
        ("2. Between the hosts: the sums", "of part i cross the network"),
        ("3. Inside each host: ranks", "share the results"),
    )
    panel = WIDTH / 3
    for number, caption in enumerate(captions):
        left = number * panel + 10
        for host in range(2):
            top = 22.0 + 106 * host
            frame(drawing, left, top, 200, 84)
            drawing.text(left + 100, top + 46, f"host {host}", "quiet", "middle", SMALL)
            for local in range(2):
                x = left + 16 + 120 * local
                label = top + (76 if host else 20)  # on the side where no arrow crosses it
                drawing.text(x + 24, label, f"rank {2 * host + local}", "quiet", "middle", SMALL)
                sums = [number == 2 or (number == 1 and part == local) for part in range(2)]
                slices(drawing, x, top + 30, sums, 22)
            if number != 1:
                arrow(drawing, left + 76, top + 58, left + 124, top + 58, "third")
                arrow(drawing, left + 124, top + 68, left + 76, top + 68, "third")
        if number == 1:
            for local in range(2):
                x = left + 28 + 144 * local
                arrow(drawing, x - 5, 80, x - 5, 152, "third")
                arrow(drawing, x + 5, 152, x + 5, 80, "third")
        for line, words in enumerate(caption):
            drawing.text(left + 100, 238 + 18 * line, words, anchor="middle", more=SMALL)
    _key(drawing, 288, "part of one rank", "part summed over all ranks")
    return drawing


def _key(drawing: Drawing, y: float, plain: str, summed: str) -> None:
    x = 190.0
    for words, ink in ((plain, "other"), (summed, "ours")):
        drawing.bar(x, y, 14, 14, ink)
        drawing.text(x + 20, y + 12, words, "quiet", more=SMALL)
        x += 50 + 6.8 * len(words)


def files() -> dict[str, str]:
    """What TARGET must hold: file names and contents."""
    drawings = {"ring": ring(), "hierarchical": hierarchical()}
    return {
        f"{name}-{scheme}.svg": drawing.svg(scheme)
        for name, drawing in drawings.items()
        for scheme in COLOURS
    }


if __name__ == "__main__":
    TARGET.mkdir(parents=True, exist_ok=True)
    for name, content in files().items():
        (TARGET / name).write_text(content, encoding="utf-8")
