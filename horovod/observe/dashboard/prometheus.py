"""Write the board in Prometheus' text format, which `server` serves at ``/metrics``.

Names and labels are documented in docs/dashboard.md and used by examples/monitoring/grafana.json; a
test compares the three.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from horovod.observe.dashboard.board import Board
from horovod.observe.dashboard.reports import COUNTERS, GAUGES, TRANSPORTS
from horovod.observe.dashboard.stragglers import REASONS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Samples = Sequence[tuple[Mapping[str, str], float]]
"""The values of one name, each with its labels."""


def render(board: Board, now: float | None = None) -> str:
    """Return the text that a scrape gets."""
    now = time.time() if now is None else now
    lines: list[str] = []
    for name, kind, meaning, samples in _metrics(board, now):
        if samples:
            lines += [f"# HELP horovod_{name} {meaning}", f"# TYPE horovod_{name} {kind}"]
        for labels, value in samples:
            inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
            where = f"{{{inside}}}" if inside else ""
            lines.append(f"horovod_{name}{where} {value!r}")
    return "\n".join(lines) + "\n"


def _metrics(board: Board, now: float) -> Iterator[tuple[str, str, str, Samples]]:
    """Yield each name with its kind, "counter" or "gauge", its meaning and its samples."""
    job = {
        "ranks": ("Ranks of the job.", len(board.ranks)),
        "generation": ("Generation of an elastic job; 0 in a fixed one.", board.generation),
        "job_start_time_seconds": ("When the job began, since the epoch.", board.started),
        "job_ended": ("1 after the job's end.", int(board.ended is not None)),
    }
    for name, (meaning, value) in job.items():
        yield name, "gauge", meaning, [({}, value)]
    totals = [({"kind": kind}, number) for kind, number in sorted(board.events.totals.items())]
    yield "events_total", "counter", "What happened, by kind.", totals
    metrics = [({"name": name}, value) for name, value in board.metrics.latest().items()]
    yield "metric", "gauge", "The last value that the script logged under a name.", metrics
    ranks = [({"rank": str(each.rank), "host": each.host}, each) for each in board.ranks.values()]
    up = [(labels, int(r.state in ("training", "waiting", "slow"))) for labels, r in ranks]
    yield "rank_up", "gauge", "1 for a rank that reports.", up
    meaning = f"1 for a rank that holds the others up; reason is one of {', '.join(REASONS)}."
    slow = [({**labels, "reason": r.finding.kind}, 1) for labels, r in ranks if r.finding]
    yield "rank_straggler", "gauge", meaning, slow
    reports = [(labels, r.report, r.heard) for labels, r in ranks if r.report is not None]
    ages = [(labels, round(max(now - heard, 0.0), 3)) for labels, _, heard in reports]
    yield "report_age_seconds", "gauge", "Seconds since a rank's last report.", ages

    def values(key: str, **more: str) -> Samples:
        return [({**at, **more}, r.stats[key]) for at, r, _ in reports if key in r.stats]

    for key, meaning in COUNTERS.items():
        yield f"{key}_total", "counter", meaning, values(key)
    for key, meaning in GAUGES.items():
        yield key, "gauge", meaning, values(key)
    moved = [each for key, name in TRANSPORTS.items() for each in values(key, transport=name)]
    yield "bytes_moved_total", "counter", "Bytes moved, by transport.", moved


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
