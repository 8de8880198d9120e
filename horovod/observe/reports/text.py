"""Write the report as text for a terminal. ``horovod.timeline report`` prints it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from statistics import median

from horovod.observe.reports.advice import verdict
from horovod.observe.reports.amounts import count_of, milliseconds, percent, size_of, time_of
from horovod.observe.reports.analysis import Analysis
from horovod.observe.reports.losses import Advice
from horovod.observe.reports.splitting import PARTS
from horovod.observe.timeline.recorder import shortened

WIDTH = 100
MOST_ROWS = 10
MOST_RANKS = 32


def report(analysis: Analysis, advice: Sequence[Advice]) -> str:
    """Return the report, with a line end after each line."""
    return "\n".join([*_lines(analysis, advice), ""])


def _lines(analysis: Analysis, advice: Sequence[Advice]) -> Iterator[str]:
    """Yield the lines of the report."""
    ranks, hosts = len(analysis.hosts), analysis.num_hosts
    steps = count_of(len(analysis.steps), "step")
    yield f"{count_of(ranks, 'rank')} on {count_of(hosts, 'host')}, {steps}"
    if analysis.steps_from:
        yield f"Steps: {analysis.steps_from}, from the end of one exchange to the end of the next"
    yield from _wrapped(verdict(analysis))
    for note in analysis.notes:
        yield from _wrapped(f"Note: {note}")
    if analysis.steps:
        yield from _split_table(analysis)
        yield from _long_steps(analysis)
        yield from _slowest(analysis)
        yield from _overlap(analysis)
    yield from _awaited_table(analysis)
    yield ""
    yield "What to try first"
    if not advice:
        yield (
            "  nothing: no part of the run besides compute is worth it" if analysis.steps else "  -"
        )
    for number, each in enumerate(advice, 1):
        cost = f"{time_of(each.cost)}, {percent(each.cost, analysis.run_time)} of the run"
        yield from _wrapped(f"{number}. {each.subject} ({cost}): {each.number}.", "  ", "     ")
        yield from _wrapped(f"{each.action}.", "     ", "     ")


def _split_table(analysis: Analysis) -> Iterator[str]:
    """Yield the table of what each rank does in a step."""
    yield ""
    yield "Where a step goes (mean)"
    yield f"  {'rank':<20} {'step':>9}" + "".join(f" {part:>12}" for part in PARTS)
    for rank in analysis.ranks[:MOST_RANKS]:
        name = f"{rank} ({analysis.hosts[rank]})"
        cells = "".join(f" {100 * analysis.share(rank, part):10.1f} %" for part in PARTS)
        yield f"  {name:<20.20} {milliseconds(analysis.mean(rank, 'duration')):>9}{cells}"
    if len(analysis.ranks) > MOST_RANKS:
        yield f"  and {len(analysis.ranks) - MOST_RANKS} more ranks: see the page (--html)"


def _long_steps(analysis: Analysis) -> Iterator[str]:
    """Yield the list of long steps, if there are any."""
    long = analysis.long_steps
    if not long.steps:
        return
    yield ""
    lost = long.excess()
    yield (
        f"Long steps: {len(long.steps)} of {len(analysis.all_steps)}, {time_of(lost)} more than "
        f"usual ones, {percent(lost, analysis.run_time)} of the run"
    )
    for each in long.steps[:MOST_ROWS]:
        yield f"  step {each.step.number}: {milliseconds(each.step.duration)}, {each.reason}"
    if len(long.steps) > MOST_ROWS:
        yield f"  and {len(long.steps) - MOST_ROWS} more"


def _slowest(analysis: Analysis) -> Iterator[str]:
    """Yield the list of ranks that were the slowest of a step."""
    yield ""
    yield "The slowest rank of a step"
    counts = analysis.slowest_counts
    for rank, times in counts.most_common(MOST_ROWS):
        late = analysis.lateness_of(rank)
        yield (
            f"  rank {rank}: {times} of {len(analysis.steps)} steps, later than the others by "
            f"{milliseconds(median(late))} (median), {milliseconds(max(late))} at most"
        )
    nobody = len(analysis.steps) - sum(counts.values())
    if nobody:
        yield f"  nobody late: {nobody} of {len(analysis.steps)} steps"
    if counts and analysis.slow_ranks is None:
        yield "  no rank was late more often than chance explains, by an amount that matters"


def _overlap(analysis: Analysis) -> Iterator[str]:
    """Yield how much of the reductions is hidden, and what a step exchanges."""
    achieved, possible = analysis.overlap_achieved, analysis.overlap_possible
    if achieved is None:
        return
    told = "unknown (no backward pass was recorded)"
    if possible is not None:
        told = f"up to {100 * possible:.0f} %, by the length of backward"
    yield ""
    hidden = f"{100 * achieved:.0f} % of the reductions hidden behind compute"
    yield f"Overlap: {hidden}; possible: {told}"
    yield (
        f"In a step: {analysis.collectives_per_step:.1f} collectives in "
        f"{analysis.operations_per_step:.1f} operations, "
        f"{size_of(analysis.bytes_per_step)}, over {', '.join(analysis.transports) or 'nothing'}"
    )


def _awaited_table(analysis: Analysis) -> Iterator[str]:
    """Yield the list of collectives that ranks waited for longest."""
    rows = [row for row in analysis.awaited_collectives if row.waited > 0][:MOST_ROWS]
    if not rows:
        return
    yield ""
    yield "Waited for longest (first to last rank, mean)"
    for row in rows:
        tensors = (
            f"; {count_of(len(row.tensors), 'tensor')}: {shortened(row.tensors)}"
            if row.tensors
            else ""
        )
        last = f", last: rank {row.last_rank} ({100 * row.last_share:.0f} %)"
        yield from _wrapped(
            f"{milliseconds(row.spread):>9}  {row.name} ({size_of(row.nbytes)}, {row.count} times)"
            f"{last if row.last_rank is not None else ''}{tensors}",
            "  ",
            " " * 13,
        )


def _wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    """Break a text into lines; `first` and `rest` indent the first line and the others."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False
    )
