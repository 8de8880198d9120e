"""Write the report as one page for a browser: ``horovod.timeline report --html``.

The page needs no script and nothing from another host, so it can be mailed and kept. Names come
from the files, which anybody may have written, so all of them are escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from itertools import pairwise
from statistics import fmean, median

from horovod.observe.reports.advice import verdict
from horovod.observe.reports.amounts import (
    count_of,
    milliseconds,
    ordinal,
    percent,
    ranks_named,
    size_of,
    time_of,
)
from horovod.observe.reports.analysis import Analysis
from horovod.observe.reports.losses import Advice, LongStep
from horovod.observe.reports.splitting import PARTS, StepSplit

MOST_ROWS = 20
MOST_COLUMNS = 160  # if there are more steps, several share a column
MOST_RANKS = 8  # ranks with a row below the chart

WIDE, HIGH, LEFT, ROW = 900.0, 200.0, 64.0, 16.0  # chart, its left margin, height of a row below
HEADROOM = 12.0  # above the highest bar

WORDS = {  # in the order of `PARTS`
    "compute": "the program runs: data, forward, backward, update",
    "negotiation": "all ranks are there, and have yet to agree",
    "wait": "another rank has not come yet",
    "reduction": "data is moved and reduced, and nothing hides it",
}


def page(analysis: Analysis, advice: Sequence[Advice]) -> str:
    """Return the whole document."""
    style = resources.files(__package__).joinpath("style.css").read_text("utf-8")
    body = "".join(_sections(analysis, advice))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Horovod timeline report</title><style>{style}</style></head>\n"
        f"<body class=report><main>{body}</main></body></html>\n"
    )


def _sections(analysis: Analysis, advice: Sequence[Advice]) -> Iterator[str]:
    """Yield the sections of the page."""
    summary = escape(verdict(analysis))
    yield f"<header><h1>Timeline report</h1><p class=verdict>{summary}</p></header>"
    if analysis.steps:
        yield _tiles(analysis)
    yield _advice(analysis, advice)
    if analysis.steps:
        yield _ranks(analysis)
        yield _step_chart(analysis)
        yield _long_steps(analysis)
        yield _slowest(analysis)
        yield _overlap(analysis)
    yield _awaited(analysis)
    yield _notes(analysis)


def _tiles(analysis: Analysis) -> str:
    """Return the section with the most important numbers."""
    hosts, total = analysis.num_hosts, len(analysis.steps)
    slow = analysis.slow_ranks
    whom = "nobody" if slow is None else ranks_named(slow.ranks)
    often = "by more than chance" if slow is None else f"last in {slow.times_last} of {total} steps"
    waits = fmean(analysis.share(rank, "wait") for rank in analysis.ranks)
    tiles = [
        (str(len(analysis.hosts)), "ranks", f"on {count_of(hosts, 'host')}"),
        (str(len(analysis.steps)), "steps", analysis.steps_from.removeprefix("steps ")),
        (milliseconds(analysis.overall("duration")), "a step", "mean"),
        (f"{100 * waits:.0f} %", "waiting for others", "mean of the ranks"),
        (whom, "slower than others", often),
    ]
    if analysis.long_steps.steps:
        lost = analysis.long_steps.excess()
        count = f"{len(analysis.long_steps.steps)} of {len(analysis.all_steps)} steps"
        tiles.append((percent(lost, analysis.run_time), "in long steps", f"of the run: {count}"))
    cells = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(name)}</span><small>{escape(more)}</small></div>"
        for value, name, more in tiles
    )
    return f"<section class='panel tiles'>{cells}</section>"


def _advice(analysis: Analysis, advice: Sequence[Advice]) -> str:
    """Return the section that says what to try first."""
    if not advice:
        told = "Nothing: no part of the run besides compute is worth it." if analysis.steps else "-"
        return _section("What to try first", f"<p>{told}</p>")
    cards = "".join(
        f"<li><h3>{escape(each.subject)}<em>{time_of(each.cost)}, "
        f"{percent(each.cost, analysis.run_time)} of the run</em></h3>"
        f"<p class=measured>{escape(_sentence(each.number))}</p>"
        f"<p>{escape(_sentence(each.action))}</p></li>"
        for each in advice
    )
    return _section("What to try first", f"<ol class=advice>{cards}</ol>")


def _sentence(text: str) -> str:
    """Return the text as a sentence: with a capital letter and a full stop."""
    return f"{text[0].upper()}{text[1:]}."


def _ranks(analysis: Analysis) -> str:
    """Return the section that shows what each rank does in a step."""
    longest = max(analysis.mean(rank, "duration") for rank in analysis.ranks)
    rows = []
    for rank in analysis.ranks:
        parts = "".join(
            f"<i class={part} style='width:{100 * analysis.mean(rank, part) / longest:.2f}%' "
            f"title='{part}: {milliseconds(analysis.mean(rank, part))}'></i>"
            for part in PARTS
        )
        shares = [f"{100 * analysis.share(rank, part):.1f} %" for part in PARTS]
        duration = milliseconds(analysis.mean(rank, "duration"))
        rows.append(_row(_rank_cell(analysis, rank), parts, duration, *shares))
    explained = "".join(
        f"<li><i class={part}></i><b>{part}</b> {WORDS[part]}</li>" for part in PARTS
    )
    table = _table(["rank", "", "step", *PARTS], rows, "ranks")
    return _section("Where a step goes", f"<ul class=explained>{explained}</ul>{table}")


def _long_steps(analysis: Analysis) -> str:
    """Return the section that lists the long steps; empty if there are none."""
    long = analysis.long_steps
    if not long.steps:
        return ""
    period = f", every {ordinal(long.period)} step" if long.period else ""
    lost = long.excess()
    told = (
        f"{len(long.steps)} of {len(analysis.all_steps)} steps{period}: {time_of(lost)} more than "
        f"usual steps, {percent(lost, analysis.run_time)} of the run."
    )
    longest = max(each.step.duration for each in long.steps)
    rows = []
    for each in long.steps[:MOST_ROWS]:
        bar = _bar("long", each.step.duration / longest)
        times = milliseconds(each.step.duration), milliseconds(each.excess)
        rows.append(_row(f"<th>{each.step.number}</th>", bar, *times, escape(each.reason)))
    table = _table(["step", "", "time", "more than usual", "what was long"], rows)
    more = len(long.steps) - MOST_ROWS
    rest = f"<p class=quiet>and {more} more</p>" if more > 0 else ""
    return _section("Long steps", f"<p>{escape(told)}</p>{table}{rest}")


def _slowest(analysis: Analysis) -> str:
    """Return the section about the ranks that were the slowest of a step."""
    counts = analysis.slowest_counts
    total = len(analysis.steps)
    rows = []
    for rank, times in counts.most_common(MOST_ROWS):
        late = analysis.lateness_of(rank)
        cells = f"{times} of {total}", milliseconds(median(late)), milliseconds(max(late))
        rows.append(_row(_rank_cell(analysis, rank), _bar("late", times / total), *cells))
    nobody = total - sum(counts.values())
    told = f"In {nobody} of {total} steps nobody was late." if nobody else ""
    if counts and analysis.slow_ranks is None:
        told += " No rank was late more often than chance explains, by an amount that matters."
    told = f"<p>{told}</p>" if told else ""
    head = ["rank", "", "steps", "late by, median", "at most"]
    return _section("The slowest rank of a step", told + (_table(head, rows) if rows else ""))


def _overlap(analysis: Analysis) -> str:
    """Return the section that says how much of the reductions is hidden."""
    achieved, possible = analysis.overlap_achieved, analysis.overlap_possible
    if achieved is None:
        return ""
    mark, told = "", "How much is possible is unknown: no backward pass was recorded."
    if possible is not None:
        mark = f"<b style='left:{100 * possible:.1f}%' title='possible'></b>"
        told = f"Backward is long enough to hide {100 * possible:.0f} % of them (the mark)."
    return _section(
        "Overlap",
        f"<p>{100 * achieved:.0f} % of the reductions were hidden behind compute. {told}</p>"
        f"<div class=gauge><i class=reduction style='width:{100 * achieved:.1f}%'></i>{mark}</div>"
        f"<p class=quiet>{analysis.collectives_per_step:.1f} collectives in "
        f"{analysis.operations_per_step:.1f} operations, and {size_of(analysis.bytes_per_step)} in "
        f"a step, over {escape(', '.join(analysis.transports) or 'nothing')}.</p>",
    )


def _awaited(analysis: Analysis) -> str:
    """Return the section about the collectives that ranks waited for longest."""
    rows = []
    most = max((row.spread for row in analysis.awaited_collectives), default=0.0) or 1.0
    for row in [each for each in analysis.awaited_collectives if each.waited > 0][:MOST_ROWS]:
        tensors = ""
        if row.tensors:
            names = escape(", ".join(row.tensors))
            count = count_of(len(row.tensors), "tensor")
            tensors = f"<details><summary>{count}</summary>{names}</details>"
        last = f"rank {row.last_rank} ({100 * row.last_share:.0f} %)"
        cells = milliseconds(row.spread), size_of(row.nbytes), str(row.count)
        name = f"<th class=long-name>{escape(row.name)}{tensors}</th>"
        bar = _bar("wait", row.spread / most)
        rows.append(_row(name, bar, *cells, "" if row.last_rank is None else last))
    if not rows:
        return ""
    head = ["collective", "", "first to last", "size", "times", "most often last"]
    told = "<p>From the first rank that submitted it to the last, on average.</p>"
    return _section("Waited for longest", told + _table(head, rows, "awaited"))


def _notes(analysis: Analysis) -> str:
    """Return the section with notes on what the files can tell."""
    notes = [
        *analysis.notes,
        "A step lasts from the end of one exchange of gradients to the end of the next.",
        "Clocks of different hosts are compared by the moments in which ranks agreed on "
        "collectives; what remains is about the time of a message between them.",
    ]
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<section class='panel quiet'><h2>Notes</h2><ul>{items}</ul></section>"


def _section(title: str, content: str) -> str:
    """Return a section of the page."""
    return f"<section class=panel><h2>{title}</h2>{content}</section>"


def _table(head: Sequence[str], rows: Sequence[str], kind: str = "") -> str:
    """Return a table in a box that scrolls; `kind` is its class in the style sheet."""
    cells = "".join(f"<th>{each}</th>" for each in head)
    opening = f"<table class={kind}>" if kind else "<table>"
    return (
        f"<div class=scroll>{opening}<thead><tr>{cells}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _row(head: str, bars: str, *cells: str) -> str:
    """Return a row of a table, whose second cell has bars."""
    rest = "".join(f"<td>{cell}</td>" for cell in cells)
    return f"<tr>{head}<td class=share><div>{bars}</div></td>{rest}</tr>"


def _rank_cell(analysis: Analysis, rank: int) -> str:
    """Return the first cell of the row of a rank."""
    return f"<th>rank {rank}<small>{escape(analysis.hosts.get(rank, ''))}</small></th>"


def _bar(kind: str, share: float) -> str:
    """Return a bar for a row."""
    return f"<i class={kind} style='width:{100 * share:.1f}%'></i>"


# -- the chart of steps ----------------------------------------------------------------------


def _step_chart(analysis: Analysis) -> str:
    """Return the chart of step times; below it are marks for long steps and the last ranks."""
    steps = analysis.all_steps
    count = min(len(steps), MOST_COLUMNS)
    bounds = [len(steps) * index // count for index in range(count + 1)]
    columns = [steps[first:end] for first, end in pairwise(bounds)]
    long = {each.step.number: each for each in analysis.long_steps.steps}
    usual = [[step for step in column if step.number not in long] for column in columns]
    bars = [{part: _mean_part(kept, part) for part in PARTS} for kept in usual]
    top = max(sum(bar.values()) for bar in bars) or 1.0
    width = (WIDE - LEFT) / len(columns)
    thick = width - 1.0 if width > 4 else width
    drawn = [_axis(top)]
    for index, (bar, column) in enumerate(zip(bars, columns, strict=True)):
        drawn += _column(bar, column, long, LEFT + index * width, thick, top)
    rows = [("long", set(long))] if long else []
    last = Counter(step.slowest for step in steps if step.slowest is not None)
    for rank, _ in last.most_common(MOST_RANKS):
        rows.append((f"rank {rank}", {each.number for each in steps if each.slowest == rank}))
    for line, (label, marked) in enumerate(rows):
        drawn += _marks(label, marked, columns, HIGH + 14 + line * ROW, width, thick)
    tall = HIGH + 14 + len(rows) * ROW + 18
    first, end = steps[0].number, steps[-1].number
    drawn.append(f"<text class=tick x={LEFT:.0f} y={tall - 3:.0f}>step {first}</text>")
    if end != first:
        drawn.append(f"<text class='tick end' x={WIDE:.0f} y={tall - 3:.0f}>step {end}</text>")
    words = WORDS | ({"long": "a step that is much longer than the others"} if long else {})
    keys = "".join(
        f"<span title='{escape(told)}'><i class={kind}></i>{kind}</span>"
        for kind, told in words.items()
    )
    below = " Below: the steps in which a rank was last." if last else ""
    cut = " Long steps go beyond the chart and are marked below it." if long else ""
    return _section(
        "Step by step",
        f"<p>Mean of the ranks.{cut}{below}</p><p class=legend>{keys}</p>"
        f"<svg viewBox='0 0 {WIDE:.0f} {tall:.0f}' role=img "
        f"aria-label='step time, split'>{''.join(drawn)}</svg>",
    )


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


def _marks(
    label: str,
    marked: set[int],
    columns: Sequence[Sequence[StepSplit]],
    y: float,
    width: float,
    thick: float,
) -> Iterator[str]:
    """Yield the marks of a row below the chart, for columns that have steps with these numbers."""
    yield f"<text class=axis x={LEFT - 8:.0f} y={y + 10:.0f}>{label}</text>"
    kind, words = ("long", "long") if label == "long" else ("late", "last")
    for index, steps in enumerate(columns):
        share = sum(step.number in marked for step in steps) / len(steps)
        if share:
            yield (
                f"<rect class={kind} x={LEFT + index * width:.2f} y={y:.0f} height={ROW - 4:.0f} "
                f"width={thick:.2f} opacity={share:.2f}><title>{words} in "
                f"{100 * share:.0f} % of step {_span(steps)}</title></rect>"
            )


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
