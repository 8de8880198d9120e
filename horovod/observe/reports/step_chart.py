"""Draw the chart of steps and list the long steps: two sections of the report's `page`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import pairwise
from statistics import fmean

from horovod.observe.reports.amounts import milliseconds, ordinal, percent, time_of
from horovod.observe.reports.analysis import Analysis
from horovod.observe.reports.long_steps import LongStep
from horovod.observe.reports.splitting import PARTS, StepSplit

MOST_COLUMNS = 160  # if there are more steps, several share a column
MOST_ROWS = 20
MOST_RANKS = 8  # ranks with a row below the chart

WIDE, HIGH, LEFT, ROW = 900.0, 200.0, 64.0, 16.0  # chart, its left margin, height of a row below
HEADROOM = 12.0  # above the highest bar

WORDS = {
    "compute": "the program runs: data, forward, backward, update",
    "negotiation": "all ranks are there, and have yet to agree",
    "wait": "another rank has not come yet",
    "reduction": "data is moved and reduced, and nothing hides it",
}


def step_chart(analysis: Analysis) -> str:
    """Return the chart of step times; below it are marks for long steps and the last ranks."""
    columns = _columns(analysis.all_steps)
    long = {each.step.number: each for each in analysis.long_steps.steps}
    usual = [[step for step in steps if step.number not in long] for steps in columns]
    bars = [{part: _mean_part(kept, part) for part in PARTS} for kept in usual]
    top = max(sum(bar.values()) for bar in bars) or 1.0
    width = (WIDE - LEFT) / len(columns)
    gap = 1.0 if width > 4 else 0.0
    drawn = [_axis(top)]
    for index, (bar, steps) in enumerate(zip(bars, columns, strict=True)):
        drawn += _column(bar, steps, long, LEFT + index * width, width - gap, top)
    rows: list[tuple[str, str, list[float]]] = []
    if long:
        rows.append(("long", "long", _shares(columns, analysis.long_steps.numbers)))
    last = Counter(step.slowest for step in analysis.all_steps if step.slowest is not None)
    for rank, _ in last.most_common(MOST_RANKS):
        late = [step.number for step in analysis.all_steps if step.slowest == rank]
        rows.append((f"rank {rank}", "late", _shares(columns, late)))
    for line, (label, kind, shares) in enumerate(rows):
        drawn += _row(label, kind, shares, columns, HIGH + 14 + line * ROW, width, gap)
    tall = HIGH + 14 + len(rows) * ROW + 18
    first, end = columns[0][0].number, columns[-1][-1].number
    drawn.append(f"<text class=tick x={LEFT:.0f} y={tall - 3:.0f}>step {first}</text>")
    if end != first:
        drawn.append(f"<text class='tick end' x={WIDE:.0f} y={tall - 3:.0f}>step {end}</text>")
    below = " Below: the steps in which a rank was last." if last else ""
    cut = " Long steps go beyond the chart and are marked below it." if long else ""
    return (
        f"<section class=panel><h2>Step by step</h2><p>Mean of the ranks.{cut}{below}</p>"
        f"{_legend(has_long=bool(long))}"
        f"<svg viewBox='0 0 {WIDE:.0f} {tall:.0f}' role=img "
        f"aria-label='step time, split'>{''.join(drawn)}</svg></section>"
    )


def long_steps(analysis: Analysis) -> str:
    """Return the section that lists the long steps; empty if there are none."""
    long = analysis.long_steps
    if not long.steps:
        return ""
    period = f", every {ordinal(long.period)} step" if long.period else ""
    lost = sum(each.excess for each in long.steps)
    told = (
        f"{len(long.steps)} of {len(analysis.all_steps)} steps{period}: {time_of(lost)} more than "
        f"usual steps, {percent(lost, analysis.run_time)} of the run."
    )
    rows = "".join(_long_row(each, analysis) for each in long.steps[:MOST_ROWS])
    more = len(long.steps) - MOST_ROWS
    rest = f"<p class=quiet>and {more} more</p>" if more > 0 else ""
    return (
        f"<section class=panel><h2>Long steps</h2><p>{escape(told)}</p>"
        f"<div class=scroll><table><thead><tr>"
        f"<th>step</th><th></th><th>time</th><th>more than usual</th><th>what was long</th></tr>"
        f"</thead><tbody>{rows}</tbody></table></div>{rest}</section>"
    )


def _long_row(each: LongStep, analysis: Analysis) -> str:
    """Return the row of a long step."""
    share = each.step.duration / max(one.step.duration for one in analysis.long_steps.steps)
    return (
        f"<tr><th>{each.step.number}</th>"
        f"<td class=share><div><i class=long style='width:{100 * share:.1f}%'></i></div></td>"
        f"<td>{milliseconds(each.step.duration)}</td><td>{milliseconds(each.excess)}</td>"
        f"<td>{escape(each.reason)}</td></tr>"
    )


def _legend(*, has_long: bool) -> str:
    """Return the meaning of the colours."""
    words = {**WORDS, "long": "a step that is much longer than the others"}
    shown = [*PARTS, *(["long"] if has_long else [])]
    keys = "".join(
        f"<span title='{escape(words[kind])}'><i class={kind}></i>{kind}</span>" for kind in shown
    )
    return f"<p class=legend>{keys}</p>"


def _columns(steps: Sequence[StepSplit]) -> list[Sequence[StepSplit]]:
    """Divide the steps into columns of the chart."""
    count = min(len(steps), MOST_COLUMNS)
    bounds = [len(steps) * index // count for index in range(count + 1)]
    return [steps[a:b] for a, b in pairwise(bounds)]


def _column(
    bar: dict[str, float],
    steps: Sequence[StepSplit],
    long: dict[int, LongStep],
    x: float,
    width: float,
    top: float,
) -> Iterator[str]:
    """Yield one bar of the chart; a column that has only long steps reaches the top."""
    told = [f"step {_span(steps)}"]
    told += [f"{part} {milliseconds(value)}" for part, value in bar.items() if value]
    told += [f"long: {milliseconds(s.duration)}" for s in steps if s.number in long]
    yield f"<g><title>{escape(', '.join(told))}</title>"
    parts = [(part, (HIGH - HEADROOM) * value / top) for part, value in bar.items() if value]
    if all(step.number in long for step in steps):
        parts = [("long", HIGH - HEADROOM / 2)]
    y = HIGH
    for kind, tall in parts:
        y -= tall
        yield f"<rect class={kind} x={x:.2f} y={y:.2f} width={width:.2f} height={tall:.2f}></rect>"
    yield "</g>"


def _row(
    label: str,
    kind: str,
    shares: Sequence[float],
    columns: Sequence[Sequence[StepSplit]],
    y: float,
    width: float,
    gap: float,
) -> Iterator[str]:
    """Yield the marks of a row below the chart, for the columns whose share is above 0."""
    yield f"<text class=axis x={LEFT - 8:.0f} y={y + 10:.0f}>{label}</text>"
    words = "long" if kind == "long" else "last"
    for index, (share, steps) in enumerate(zip(shares, columns, strict=True)):
        if share:
            yield (
                f"<rect class={kind} x={LEFT + index * width:.2f} y={y:.0f} height={ROW - 4:.0f} "
                f"width={width - gap:.2f} opacity={share:.2f}><title>{words} in "
                f"{100 * share:.0f} % of step {_span(steps)}</title></rect>"
            )


def _shares(columns: Sequence[Sequence[StepSplit]], numbers: Iterable[int]) -> list[float]:
    """Return, for each column, the share of its steps that have one of these numbers."""
    marked = set(numbers)
    return [sum(step.number in marked for step in steps) / len(steps) for steps in columns]


def _mean_part(steps: Sequence[StepSplit], part: str) -> float:
    """Return the mean time of a part of these steps, over all ranks."""
    values = [split.part(part) for step in steps for split in step.ranks.values()]
    return fmean(values) if values else 0.0


def _span(steps: Sequence[StepSplit]) -> str:
    """Return the numbers of some steps, as text."""
    first, last = steps[0].number, steps[-1].number
    return str(first) if first == last else f"{first} to {last}"


def _axis(top: float) -> str:
    """Return the vertical axis, which ends at `top` microseconds."""
    lines = []
    for share in (0.0, 0.5, 1.0):
        y = HIGH - (HIGH - HEADROOM) * share
        lines.append(f"<line x1={LEFT:.0f} x2={WIDE:.0f} y1={y:.1f} y2={y:.1f}></line>")
        told = milliseconds(top * share) if share else "0"
        lines.append(f"<text class=axis x={LEFT - 8:.0f} y={y + 4:.1f}>{told}</text>")
    return "".join(lines)
