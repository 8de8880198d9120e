"""What ranks report is checked, cut and never trusted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.observe.dashboard.reports import parse_key, parse_report
from tests.observe.dashboard.simulated import SimulatedJob


def parse(**changes: Any):
    job = SimulatedJob(2)
    job.run(3)
    return parse_report(0, 1, job.encoded(1, **changes))


def test_a_report_is_read():
    report = parse()
    assert (report.rank, report.generation, report.size, report.host) == (1, 0, 2, "node00")
    assert report.stats["steps"] == 3
    assert [step.number for step in report.steps] == [1, 2, 3]
    step = report.steps[0]
    assert step.total == pytest.approx(step.compute + step.wait + step.exposed)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("stats/0/3", (0, 3)),
        ("stats/12/255", (12, 255)),
        ("stats/0", None),
        ("stats/a/3", None),
        ("stats/0/-3", None),
        ("stats/0/3/x", None),
        ("stats/0/99999999", None),
        ("stats/0/٣", None),
        ("elastic/ready/w1", None),
    ],
)
def test_only_keys_of_reports_are_taken(key: str, expected: object):
    assert parse_key(key) == expected


@pytest.mark.parametrize(
    "content",
    [b"", b"no json", b"[]", b"null", b'{"version": 2}', b"[" * 100_000, b"\xff\xfe", b" " * 2**21],
)
def test_what_is_no_report_is_dropped(content: bytes):
    assert parse_report(0, 0, content) is None


def test_wrong_parts_cost_only_themselves():
    report = parse(
        host=["a"],
        pid="x",
        state={"a": 1},
        stats={"steps": "many", "wait_seconds": True, "queue_length": 4, "own": 3},
        steps=[["a"], [1, 2], None, [1, 2, 0.5, 0.1, -1, 0, 0], [7, 8.0, 1, 0, 0, 0, 0]],
        waiting=[1],
        metrics={"loss": [[1, None], [2, "x"], [3, 0.5]], "other": 3},
    )
    assert (report.host, report.pid, report.state) == ("", 0, "training")
    assert report.stats == {"queue_length": 4}
    assert [step.number for step in report.steps] == [7]
    assert report.waiting is None
    assert report.metrics == {"loss": ((3.0, 0.5),)}


def test_rank_and_generation_are_those_of_the_key():
    content = json.dumps({"version": 1, "rank": 77, "generation": 5}).encode()
    report = parse_report(0, 1, content)
    assert (report.rank, report.generation) == (1, 0)


def test_numbers_that_are_not_finite_are_dropped():
    content = b'{"version": 1, "stats": {"steps": NaN, "queue_length": 1e999, "buckets": 2}}'
    assert parse_report(0, 0, content).stats == {"buckets": 2}
    content = b'{"version": 1, "pid": 1' + b"0" * 400 + b"}"
    assert parse_report(0, 0, content).pid == 0


def test_a_difference_of_clocks_may_be_a_little_below_zero():
    report = parse(steps=[[1, 2.0, 0.5, 0.1, -1e-18, 0.1, 0.0]])
    assert report.steps[0].wait == 0


def test_sizes_are_bounded():
    report = parse(
        host="h" * 10_000,
        steps=[[n, 1.0, 1, 0, 0, 0, 0] for n in range(1000)],
        waiting={"since": 1, "tensors": ["t" * 999] * 99, "missing_ranks": [1], "source": "s"},
        metrics={f"m{n}": [[step, 1.0] for step in range(250)] for n in range(99)},
    )
    assert len(report.host) == 300
    assert [step.number for step in report.steps][-1] == 999
    assert len(report.steps) == 50
    assert len(report.waiting.tensors) == 8
    assert len(report.metrics) == 32
    assert len(report.metrics["m0"]) == 200


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        ([0, 1, 8], {0, 1, 8}),
        ([], set()),
        ([1, -3, 2.5, "x", None, True, 1 << 40], {1}),
        ("0-3", set()),
        (3, set()),
        (list(range(1 << 15)), set()),
    ],
)
def test_the_cores_of_a_rank(cores: Any, expected: set[int]):
    assert parse(cores=cores).cores == expected


def test_control_characters_do_not_come_through():
    assert parse(host="a\n\x1b[31mb\x00").host == "a  [31mb "


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)
FIELDS = (
    "stats",
    "steps",
    "waiting",
    "metrics",
    "host",
    "pid",
    "time",
    "state",
    "size",
    "cores",
    "steps_before",
)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_whatever_a_rank_writes_is_read_or_dropped(fields: dict[str, Any]):
    report = parse_report(0, 0, json.dumps({"version": 1, **fields}).encode())
    assert report is not None
