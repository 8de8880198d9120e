"""The report as one page for a browser, light and dark. Behind ``horovod.timeline report --html``.

Nothing in it comes from another host or needs a script, so it can be mailed and kept. Names come
from the files, which anybody may have written: all of them are escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from statistics import fmean, median

from horovod.timeline.advice import verdict
from horovod.timeline.amounts import milliseconds, percent, ranks_named, size_of, time_of
from horovod.timeline.analysis import Analysis
from horovod.timeline.faults import Advice
from horovod.timeline.splitting import PARTS
from horovod.timeline.step_chart import WORDS, long_steps, step_chart
from horovod.timeline.styles import CSS

MOST_ROWS = 20


def page(found: Analysis, advice: Sequence[Advice]) -> str:
    """The whole document."""
    body = "".join(_sections(found, advice))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Horovod timeline report</title><style>{CSS}</style></head>\n"
        f"<body><main>{body}</main></body></html>\n"
    )


def _sections(found: Analysis, advice: Sequence[Advice]) -> Iterator[str]:
    yield f"<header><h1>Timeline report</h1><p class=verdict>{escape(verdict(found))}</p></header>"
    if found.steps:
        yield _tiles(found)
    yield _advice(found, advice)
    if found.steps:
        yield _ranks(found)
        yield step_chart(found)
        yield long_steps(found)
        yield _slowest(found)
        yield _overlap(found)
    yield _awaited(found)
    yield _notes(found)


def _tiles(found: Analysis) -> str:
    hosts, total = len(set(found.hosts.values())), len(found.steps)
    slow = found.slow
    whom = "nobody" if slow is None else ranks_named(slow.ranks)
    often = "by more than chance" if slow is None else f"last in {slow.times_last} of {total} steps"
    waits = fmean(found.share(rank, "wait") for rank in found.ranks)
    tiles = [
        (str(len(found.hosts)), "ranks", f"on {hosts} host{'' if hosts == 1 else 's'}"),
        (str(len(found.steps)), "steps", found.steps_from.removeprefix("steps ")),
        (milliseconds(found.overall("duration")), "a step", "mean"),
        (f"{100 * waits:.0f} %", "waiting for others", "mean of the ranks"),
        (whom, "slower than others", often),
    ]
    if found.long.steps:
        lost = sum(each.excess for each in found.long.steps)
        count = f"{len(found.long.steps)} of {len(found.all_steps)} steps"
        tiles.append((percent(lost, found.run_time), "in long steps", f"of the run: {count}"))
    cells = "".join(
        f"<div><b>{escape(value)}</b><span>{escape(name)}</span><small>{escape(more)}</small></div>"
        for value, name, more in tiles
    )
    return f"<section class=tiles>{cells}</section>"


def _advice(found: Analysis, advice: Sequence[Advice]) -> str:
    if not advice:
        told = "Nothing: no part of the run besides compute is worth it." if found.steps else "-"
        return f"<section><h2>What to try first</h2><p>{told}</p></section>"
    cards = "".join(
        f"<li><h3>{escape(each.subject)}<em>{time_of(each.cost)}, "
        f"{percent(each.cost, found.run_time)} of the run</em></h3>"
        f"<p class=number>{escape(_sentence(each.number))}</p>"
        f"<p>{escape(_sentence(each.action))}</p></li>"
        for each in advice
    )
    return f"<section><h2>What to try first</h2><ol class=advice>{cards}</ol></section>"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _ranks(found: Analysis) -> str:
    longest = max(found.mean(rank, "duration") for rank in found.ranks)
    rows = []
    for rank in found.ranks:
        parts = "".join(
            f"<i class={part} style='width:{100 * found.mean(rank, part) / longest:.2f}%' "
            f"title='{part}: {milliseconds(found.mean(rank, part))}'></i>"
            for part in PARTS
        )
        cells = "".join(f"<td>{100 * found.share(rank, part):.1f} %</td>" for part in PARTS)
        rows.append(
            f"<tr><th>rank {rank}<small>{escape(found.hosts[rank])}</small></th>"
            f"<td class=bar><div>{parts}</div></td>"
            f"<td>{milliseconds(found.mean(rank, 'duration'))}</td>{cells}</tr>"
        )
    head = "".join(f"<th>{part}</th>" for part in PARTS)
    explained = "".join(
        f"<li><i class={part}></i><b>{part}</b> {WORDS[part]}</li>" for part in PARTS
    )
    return (
        f"<section><h2>Where a step goes</h2><ul class=explained>{explained}</ul>"
        f"<div class=scroll><table class=ranks><thead><tr><th>rank</th><th></th><th>step</th>{head}"
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _bar(kind: str, share: float) -> str:
    return f"<td class=bar><div><i class={kind} style='width:{100 * share:.1f}%'></i></div></td>"


def _slowest(found: Analysis) -> str:
    counts = found.slowest_counts
    total = len(found.steps)
    rows = []
    for rank, times in counts.most_common(MOST_ROWS):
        late = [step.lateness for step in found.steps if step.slowest == rank]
        rows.append(
            f"<tr><th>rank {rank}<small>{escape(found.hosts.get(rank, ''))}</small></th>"
            f"{_bar('late', times / total)}"
            f"<td>{times} of {total}</td><td>{milliseconds(median(late))}</td>"
            f"<td>{milliseconds(max(late))}</td></tr>"
        )
    nobody = total - sum(counts.values())
    told = f"In {nobody} of {total} steps nobody was late." if nobody else ""
    if counts and found.slow is None:
        told += " No rank was late more often than chance explains, by an amount that matters."
    told = f"<p>{told}</p>" if told else ""
    if not rows:
        return f"<section><h2>The slowest rank of a step</h2>{told}</section>"
    return (
        f"<section><h2>The slowest rank of a step</h2>{told}<div class=scroll><table>"
        f"<thead><tr><th>rank</th><th></th><th>steps</th><th>late by, median</th><th>at most</th>"
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _overlap(found: Analysis) -> str:
    achieved, possible = found.overlap_achieved, found.overlap_possible
    if achieved is None:
        return ""
    mark, told = "", "How much is possible is unknown: no backward pass was recorded."
    if possible is not None:
        mark = f"<b style='left:{100 * possible:.1f}%' title='possible'></b>"
        told = f"Backward is long enough to hide {100 * possible:.0f} % of them (the mark)."
    return (
        f"<section><h2>Overlap</h2><p>{100 * achieved:.0f} % of the reductions were hidden behind "
        f"compute. {told}</p>"
        f"<div class=gauge><i style='width:{100 * achieved:.1f}%'></i>{mark}</div>"
        f"<p class=quiet>{found.collectives_per_step:.1f} collectives in "
        f"{found.operations_per_step:.1f} operations, and {size_of(found.bytes_per_step)} in a "
        f"step, over {escape(', '.join(found.transports) or 'nothing')}.</p></section>"
    )


def _awaited(found: Analysis) -> str:
    rows = []
    most = max((row.spread for row in found.awaited), default=0.0) or 1.0
    for row in [each for each in found.awaited if each.waited > 0][:MOST_ROWS]:
        tensors = ""
        if row.tensors:
            names = escape(", ".join(row.tensors))
            count = f"{len(row.tensors)} tensor{'' if len(row.tensors) == 1 else 's'}"
            tensors = f"<details><summary>{count}</summary>{names}</details>"
        last = (
            "" if row.last_rank is None else f"rank {row.last_rank} ({100 * row.last_share:.0f} %)"
        )
        rows.append(
            f"<tr><th class=name>{escape(row.name)}{tensors}</th>"
            f"{_bar('wait', row.spread / most)}<td>{milliseconds(row.spread)}</td>"
            f"<td>{size_of(row.nbytes)}</td><td>{row.count}</td><td>{last}</td></tr>"
        )
    if not rows:
        return ""
    return (
        "<section><h2>Waited for longest</h2><p>From the first rank that submitted it to the last, "
        "on average.</p><div class=scroll><table class=awaited><thead>"
        "<tr><th>collective</th><th></th><th>first to last</th><th>size</th><th>times</th>"
        "<th>most often last</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _notes(found: Analysis) -> str:
    notes = [
        *found.notes,
        "A step lasts from the end of one exchange of gradients to the end of the next.",
        "Clocks of different hosts are compared by the moments in which ranks agreed on "
        "collectives; what remains is about the time of a message between them.",
    ]
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<section class=quiet><h2>Notes</h2><ul>{items}</ul></section>"
