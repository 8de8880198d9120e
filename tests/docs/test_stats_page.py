"""docs/stats.md names every number of `hvd.stats()` and every field of a report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import horovod.torch as hvd
from horovod.observe.statistics.reporter import report_key
from tests.docs.pages import blocks
from tests.observe.statistics.test_reporter import check_report, store_of
from tests.ranks import RankPool, start_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "stats.md"


def _table(heading: str) -> set[str]:
    """The names in the first column of the first table under a heading."""
    text = PAGE.read_text().partition(f"\n## {heading}\n")[2]
    rows = re.search(r"^\|---\|---\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert rows is not None
    cells = [line.split("|")[1] for line in rows[1].splitlines()]
    return set(re.findall(r"`(\w+)`", " ".join(cells)))


def numbers() -> dict[str, Any]:
    return hvd.stats()


def test_every_number_is_described(pool2: RankPool):
    assert _table("What the numbers mean") == set(pool2.run(numbers)[0])


def idle(rank: int, size: int) -> None:
    hvd.init()


def test_a_report_is_as_described():
    with start_ranks(idle, 1, env={"HOROVOD_STATS_INTERVAL": "60"}) as ranks:
        ranks.results()
        report = check_report(store_of(ranks).get(report_key(0, 0), 0))
    ((code, _),) = blocks(PAGE, "json")
    example = json.loads(code)
    assert set(example) == set(report)
    assert _table("Reports to the launcher") <= set(report) | {
        *("starting", "training", "ended"),
        *("since", "tensors", "source", "missing_ranks"),
    }
    assert len(example["steps"][0]) == 7


def test_the_line_at_the_end_is_as_shown():
    from horovod.observe.statistics.process import Statistics

    statistics = Statistics()
    for _ in range(3):
        statistics.end_step()
    ((shown, _),) = blocks(PAGE, "text")
    mask = re.compile(r"[\d.]+(e[+-]\d+)?")
    assert mask.sub("N", statistics.summary()) == mask.sub("N", shown.strip())
