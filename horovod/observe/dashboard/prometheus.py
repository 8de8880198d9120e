"""Write the board in Prometheus' text format, which `server` serves at ``/metrics``.

Names and labels are documented in docs/dashboard.md and used by examples/monitoring/grafana.json; a
test compares the three.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from horovod.observe.dashboard.board import Board
from horovod.observe.dashboard.rank import Rank
from horovod.observe.dashboard.reports import COUNTERS, GAUGES, TRANSPORTS
from horovod.observe.dashboard.stragglers import REASONS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


Samples = Sequence[tuple[Mapping[str, str], float]]
"""The values of one name, each with its labels."""


def render(board: Board, now: float | None = None) -> str:
    """Return the text that a scrape gets."""
    now = time.time() if now is None else now
    return "\n".join([*_of_job(board), *_of_ranks(board.ranks.values(), now)]) + "\n"


def _describe(name: str, kind: str, meaning: str, samples: Samples) -> Iterator[str]:
    """Yield the lines of all samples of one name; its kind is "counter" or "gauge"."""
    if samples:
        yield f"# HELP {name} {meaning}"
        yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"{name}{{{inside}}} {value!r}" if inside else f"{name} {value!r}"


def _of_job(board: Board) -> Iterator[str]:
    gauges = {
        "ranks": ("Ranks of the job.", len(board.ranks)),
        "generation": ("Generation of an elastic job; 0 in a fixed one.", board.generation),
        "job_start_time_seconds": ("When the job began, since the epoch.", board.started),
        "job_ended": ("1 after the job's end.", int(board.ended is not None)),
    }
    for name, (meaning, value) in gauges.items():
        yield from _describe(f"horovod_{name}", "gauge", meaning, [({}, value)])
    yield from _describe(
        "horovod_events_total",
        "counter",
        "What happened, by kind.",
        [({"kind": kind}, number) for kind, number in sorted(board.events.totals.items())],
    )
    yield from _describe(
        "horovod_metric",
        "gauge",
        "The last value that the script logged under a name.",
        [({"name": name}, value) for name, value in board.metrics.latest().items()],
    )


def _of_ranks(ranks: Iterable[Rank], now: float) -> Iterator[str]:
    ranks = list(ranks)
    yield from _describe(
        "horovod_rank_up",
        "gauge",
        "1 for a rank that reports.",
        [(_labels(r), int(r.state in ("training", "waiting", "slow"))) for r in ranks],
    )
    yield from _describe(
        "horovod_rank_straggler",
        "gauge",
        f"1 for a rank that holds the others up; reason is one of {', '.join(REASONS)}.",
        [
            ({**_labels(rank), "reason": rank.finding.kind}, 1)
            for rank in ranks
            if rank.finding is not None
        ],
    )
    heard = [rank for rank in ranks if rank.report is not None]
    yield from _describe(
        "horovod_report_age_seconds",
        "gauge",
        "Seconds since a rank's last report.",
        [(_labels(rank), round(max(now - rank.heard, 0.0), 3)) for rank in heard],
    )
    for key, meaning in COUNTERS.items():
        yield from _describe(f"horovod_{key}_total", "counter", meaning, _samples(heard, key))
    for key, meaning in GAUGES.items():
        yield from _describe(f"horovod_{key}", "gauge", meaning, _samples(heard, key))
    yield from _describe(
        "horovod_bytes_moved_total",
        "counter",
        "Bytes moved, by transport.",
        [
            ({**labels, "transport": transport}, value)
            for key, transport in TRANSPORTS.items()
            for labels, value in _samples(heard, key)
        ],
    )


def _samples(ranks: Iterable[Rank], key: str) -> Samples:
    found: list[tuple[Mapping[str, str], float]] = []
    for rank in ranks:
        stats = rank.report.stats if rank.report is not None else {}
        if key in stats:
            found.append((_labels(rank), stats[key]))
    return found


def _labels(rank: Rank) -> dict[str, str]:
    return {"rank": str(rank.rank), "host": rank.host}


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
