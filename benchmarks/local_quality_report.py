"""What benchmarks/local_quality.py shows: a table of final losses, and the curves as a picture."""

from __future__ import annotations

import html
from statistics import mean
from typing import Any, TypeAlias

from benchmarks.promises import aligned

Run: TypeAlias = dict[str, Any]  # configuration, seed, curve (step, validation loss), seconds

LABELS = {
    "every": "every step",
    "local": "local steps",
    "streaming": "streaming",
    "fp8": "local steps, fp8",
}
COLOURS = {"every": "#1b1f27", "local": "#1f8a8a", "streaming": "#e58a1f", "fp8": "#6a5acd"}
QUIET, LINE = "#5d6675", "#d5d9e0"
WIDTH, HEIGHT = 720, 340
CURVES = (60, 430)  # from left to right: where the curves are, and beside them the ends
ENDS = (490, 700)
TOP, BOTTOM = 40, 290


def finals(runs: list[Run]) -> dict[str, dict[int, float]]:
    """The losses by configuration and seed, at the last step that the runs have in common.

    That is the end, unless some were ended early. Those that have not come half as far as the
    longest do not count.
    """
    if not runs:
        return {}
    longest = max(run["curve"][-1][0] for run in runs)
    counted = [run for run in runs if 2 * run["curve"][-1][0] >= longest]
    last = min(run["curve"][-1][0] for run in counted)
    found: dict[str, dict[int, float]] = {}
    for run in counted:
        found.setdefault(run["configuration"], {})[run["seed"]] = dict(run["curve"])[last]
    return {name: found[name] for name in LABELS if name in found}


def changes(runs: list[Run]) -> dict[str, dict[int, float]]:
    """By how much each final loss differs from that of every-step training with the same seed."""
    losses = finals(runs)
    usual = losses.get("every", {})
    return {
        name: {seed: loss / usual[seed] - 1 for seed, loss in each.items() if seed in usual}
        for name, each in losses.items()
    }


def table(runs: list[Run]) -> str:
    """Final validation losses, and how they compare with every-step training."""
    against = changes(runs)
    rows = [["", "loss", "against every step", "seeds", "seconds"]]
    for name, losses in finals(runs).items():
        change = f"{100 * mean(against[name].values()):+.2f} %" if against[name] else "-"
        seconds = [run["seconds"] for run in runs if run["configuration"] == name]
        texts = " ".join(f"{loss:.4f}" for _, loss in sorted(losses.items()))
        average = f"{mean(losses.values()):.4f}"
        rows.append([LABELS[name], average, change, texts, f"{mean(seconds):.0f}"])
    return "\n".join(aligned(rows))


def mean_curves(runs: list[Run]) -> dict[str, list[tuple[int, float]]]:
    """Each configuration's curve, averaged over seeds where all of them have come so far."""
    found: dict[str, list[tuple[int, float]]] = {}
    for name in LABELS:
        curves = [dict(run["curve"]) for run in runs if run["configuration"] == name]
        shared = set.intersection(*(set(curve) for curve in curves)) if curves else set()
        if shared:
            found[name] = [(step, mean(curve[step] for curve in curves)) for step in sorted(shared)]
    return found


def picture(runs: list[Run]) -> str:
    """An SVG: the curves on the left, and on the right how far each end is from the usual one."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="Verdana, DejaVu Sans, sans-serif" font-size="11">',
        "<title>Validation loss of every-step training and of local steps</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        *_curves(mean_curves(runs)),
        *_ends(changes(runs)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _curves(curves: dict[str, list[tuple[int, float]]]) -> list[str]:
    if not curves:
        return []
    last = max(step for curve in curves.values() for step, _ in curve)
    losses = sorted(loss for curve in curves.values() for _, loss in curve)
    # The first steps would press all that matters into a corner.
    low, high = losses[0], losses[len(losses) * 9 // 10]
    left, right = CURVES

    def place(step: int, loss: float) -> tuple[float, float]:
        height = min(1.0, (loss - low) / (high - low or 1.0))
        return left + (right - left) * step / last, BOTTOM - (BOTTOM - TOP) * height

    parts = [_text((left + right) / 2, 22, "validation loss, average of the seeds")]
    for share in range(5):
        loss = low + (high - low) * share / 4
        y = place(0, loss)[1]
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="{LINE}"/>')
        parts.append(_text(left - 6, y + 4, f"{loss:.2f}", "end", QUIET))
        step = last * share // 4
        x = place(step, low)[0]
        parts.append(_text(x, BOTTOM + 18, f"{step:,}", "middle", QUIET))
    parts.append(_text((left + right) / 2, BOTTOM + 36, "steps", "middle", QUIET))
    for index, (name, curve) in enumerate(curves.items()):
        points = [place(step, loss) for step, loss in curve if loss <= high]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        colour = COLOURS[name]
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = TOP + 14 + 18 * index
        parts.append(f'<path d="M{right - 140} {y - 4}h20" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(right - 114, y, LABELS[name], "start"))
    return parts


def _ends(differences: dict[str, dict[int, float]]) -> list[str]:
    shown = {name: each for name, each in differences.items() if name != "every" and each}
    if not shown:
        return []
    most = max(0.015, *(abs(value) for each in shown.values() for value in each.values()))
    left, right = ENDS
    middle, scale = (TOP + BOTTOM) / 2, (BOTTOM - TOP) / 2 / (1.1 * most)
    band = 0.01 * scale
    parts = [
        _text((left + right) / 2, 22, "last loss against every step"),
        f'<rect x="{left}" y="{middle - band:.1f}" width="{right - left}" '
        f'height="{2 * band:.1f}" fill="{LINE}" opacity="0.5"/>',
        f'<path d="M{left} {middle}H{right}" stroke="{QUIET}"/>',
    ]
    for value in (-0.01, 0.0, 0.01):
        y = middle - value * scale + 4
        parts.append(_text(left - 6, y, f"{100 * value:+.0f} %", "end", QUIET))
    for index, (name, each) in enumerate(shown.items()):
        x = left + (right - left) * (index + 0.5) / len(shown)
        colour = COLOURS[name]
        parts += [
            f'<circle cx="{x:.1f}" cy="{middle - value * scale:.1f}" r="4" fill="{colour}"/>'
            for value in each.values()
        ]
        parts.append(_text(x, BOTTOM + 18 + 16 * (index % 2), LABELS[name], "middle", colour))
    return parts


def _text(x: float, y: float, text: str, anchor: str = "middle", colour: str = "#1b1f27") -> str:
    escaped = html.escape(text)
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escaped}</text>'
