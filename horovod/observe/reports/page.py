"""Write the report as one page for a browser: ``horovod.timeline report --html``.

The page needs no script and nothing from another host, so it can be mailed and kept. Names come
from the files, which anybody may have written, so all of them are escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from statistics import fmean, median

from horovod.observe.reports.advice import verdict
from horovod.observe.reports.amounts import (
    count_of,
    milliseconds,
    percent,
    ranks_named,
    size_of,
    time_of,
)
from horovod.observe.reports.analysis import Analysis
from horovod.observe.reports.faults import Advice
from horovod.observe.reports.splitting import PARTS
from horovod.observe.reports.step_chart import WORDS, long_steps, step_chart
from horovod.observe.reports.styles import style_sheet

MOST_ROWS = 20


def page(analysis: Analysis, advice: Sequence[Advice]) -> str:
    """Return the whole document."""
    body = "".join(_sections(analysis, advice))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Horovod timeline report</title><style>{style_sheet()}</style></head>\n"
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
        yield step_chart(analysis)
        yield long_steps(analysis)
        yield _slowest(analysis)
        yield _overlap(analysis)
    yield _awaited(analysis)
    yield _notes(analysis)


def _tiles(analysis: Analysis) -> str:
    """Return the section with the most important numbers."""
    hosts, total = len(set(analysis.hosts.values())), len(analysis.steps)
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
        lost = sum(each.excess for each in analysis.long_steps.steps)
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
        return f"<section class=panel><h2>What to try first</h2><p>{told}</p></section>"
    cards = "".join(
        f"<li><h3>{escape(each.subject)}<em>{time_of(each.cost)}, "
        f"{percent(each.cost, analysis.run_time)} of the run</em></h3>"
        f"<p class=measured>{escape(_sentence(each.number))}</p>"
        f"<p>{escape(_sentence(each.action))}</p></li>"
        for each in advice
    )
    return f"<section class=panel><h2>What to try first</h2><ol class=advice>{cards}</ol></section>"


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
        cells = "".join(f"<td>{100 * analysis.share(rank, part):.1f} %</td>" for part in PARTS)
        rows.append(
            f"<tr><th>rank {rank}<small>{escape(analysis.hosts[rank])}</small></th>"
            f"<td class=share><div>{parts}</div></td>"
            f"<td>{milliseconds(analysis.mean(rank, 'duration'))}</td>{cells}</tr>"
        )
    head = "".join(f"<th>{part}</th>" for part in PARTS)
    explained = "".join(
        f"<li><i class={part}></i><b>{part}</b> {WORDS[part]}</li>" for part in PARTS
    )
    return (
        f"<section class=panel><h2>Where a step goes</h2><ul class=explained>{explained}</ul>"
        f"<div class=scroll><table class=ranks><thead><tr><th>rank</th><th></th><th>step</th>{head}"
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _bar(kind: str, share: float) -> str:
    """Return a cell of a table with a bar."""
    return f"<td class=share><div><i class={kind} style='width:{100 * share:.1f}%'></i></div></td>"


def _slowest(analysis: Analysis) -> str:
    """Return the section about the ranks that were the slowest of a step."""
    counts = analysis.slowest_counts
    total = len(analysis.steps)
    rows = []
    for rank, times in counts.most_common(MOST_ROWS):
        late = [step.lateness for step in analysis.steps if step.slowest == rank]
        rows.append(
            f"<tr><th>rank {rank}<small>{escape(analysis.hosts.get(rank, ''))}</small></th>"
            f"{_bar('late', times / total)}"
            f"<td>{times} of {total}</td><td>{milliseconds(median(late))}</td>"
            f"<td>{milliseconds(max(late))}</td></tr>"
        )
    nobody = total - sum(counts.values())
    told = f"In {nobody} of {total} steps nobody was late." if nobody else ""
    if counts and analysis.slow_ranks is None:
        told += " No rank was late more often than chance explains, by an amount that matters."
    told = f"<p>{told}</p>" if told else ""
    if not rows:
        return f"<section class=panel><h2>The slowest rank of a step</h2>{told}</section>"
    return (
        f"<section class=panel><h2>The slowest rank of a step</h2>{told}<div class=scroll><table>"
        f"<thead><tr><th>rank</th><th></th><th>steps</th><th>late by, median</th><th>at most</th>"
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _overlap(analysis: Analysis) -> str:
    """Return the section that says how much of the reductions is hidden."""
    achieved, possible = analysis.overlap_achieved, analysis.overlap_possible
    if achieved is None:
        return ""
    mark, told = "", "How much is possible is unknown: no backward pass was recorded."
    if possible is not None:
        mark = f"<b style='left:{100 * possible:.1f}%' title='possible'></b>"
        told = f"Backward is long enough to hide {100 * possible:.0f} % of them (the mark)."
    return (
        f"<section class=panel><h2>Overlap</h2><p>{100 * achieved:.0f} % of the reductions were "
        f"hidden behind compute. {told}</p>"
        f"<div class=gauge><i class=reduction style='width:{100 * achieved:.1f}%'></i>{mark}</div>"
        f"<p class=quiet>{analysis.collectives_per_step:.1f} collectives in "
        f"{analysis.operations_per_step:.1f} operations, and {size_of(analysis.bytes_per_step)} in "
        f"a step, over {escape(', '.join(analysis.transports) or 'nothing')}.</p></section>"
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
        last = (
            "" if row.last_rank is None else f"rank {row.last_rank} ({100 * row.last_share:.0f} %)"
        )
        rows.append(
            f"<tr><th class=long-name>{escape(row.name)}{tensors}</th>"
            f"{_bar('wait', row.spread / most)}<td>{milliseconds(row.spread)}</td>"
            f"<td>{size_of(row.nbytes)}</td><td>{row.count}</td><td>{last}</td></tr>"
        )
    if not rows:
        return ""
    return (
        "<section class=panel><h2>Waited for longest</h2><p>From the first rank that submitted it "
        "to the last, on average.</p><div class=scroll><table class=awaited><thead>"
        "<tr><th>collective</th><th></th><th>first to last</th><th>size</th><th>times</th>"
        "<th>most often last</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


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
