"""horovodrun --plan: what a link allows, and which way is recommended."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.runner.options.arguments import parse_args
from horovod.runner.options.values import link, parameters
from horovod.runner.plan import (
    GOOD,
    WAYS,
    Link,
    PlannedJob,
    describe,
    planned_job,
    recommend,
    ways,
)
from tests.runner.horovodrun import run

EXAMPLE = ["--plan", "-np", "8", "--model-size", "124M", "--step-time", "0.3"]

jobs = st.builds(
    PlannedJob,
    parameters=st.floats(1e3, 1e12),
    step=st.floats(1e-3, 100),
    hosts=st.integers(1, 500),
    link=st.builds(Link, st.floats(0, 1), st.floats(1e5, 1e12)),
)


@given(jobs)
def test_the_first_way_that_is_fast_enough_is_recommended(job: PlannedJob):
    speeds = {way.title: way.speed(job) for way in ways(job)}
    assert all(0 < speed <= 1 for speed in speeds.values())
    chosen = recommend(job)
    if speeds[chosen.title] >= GOOD:
        before = ways(job)[: ways(job).index(chosen)]
        assert all(speeds[way.title] < GOOD for way in before)
    else:
        assert speeds[chosen.title] == max(speeds.values())
    assert chosen.arguments(job) in describe(job) or chosen is WAYS[0]


@given(jobs)
def test_fewer_bytes_are_never_slower(job: PlannedJob):
    every, bf16, fp8, local, local_fp8, streaming, streaming_fp8 = ways(job)
    for more, less in [(every, bf16), (bf16, fp8), (local, local_fp8), (streaming, streaming_fp8)]:
        assert less.sent(job) <= more.sent(job)
        assert less.speed(job) >= more.speed(job)


def test_numbers_are_those_of_the_link():
    # 25 million float32 parameters, 2 hosts: 100 MB leave each host, 0.8 s at 1 Gbit/s.
    job = PlannedJob(25e6, step=0.3, hosts=2, link=Link(0.01, 1e9 / 8))
    every, *_ = WAYS
    assert every.sent(job) == 100e6
    assert job.exchange(32) == pytest.approx(0.82)
    assert every.wait(job) == pytest.approx(0.82 - 0.2)
    local = next(way for way in WAYS if way.title == "local steps")
    assert local.speed(job) == pytest.approx(0.3 / (0.3 + 0.82 / 50))
    assert PlannedJob(25e6, 0.3, 1, job.link).exchange(32) == 0


@pytest.mark.parametrize(("step", "fragments", "delay"), [(0.030, 4, 20), (0.022, 2, 32)])
def test_a_fragment_gets_as_long_as_it_needs(step: float, fragments: int, delay: int):
    # Four fragments of 100 steps have 24 steps each: a step of 22 ms makes too little of that.
    job = PlannedJob(1.05e6, step, hosts=2, link=Link(0.02, 1e8 / 8))
    streaming = next(way for way in ways(job) if way.title == "streaming")
    assert (streaming.fragments, streaming.delay(job)) == (fragments, delay)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1Gbit/20ms", (0.02, 1.25e8)),
        ("100mbit", (0.0, 1.25e7)),
        ("2.5Gbit/s/50us", (50e-6, 3.125e8)),
    ],
)
def test_links(text: str, expected: tuple[float, float]):
    assert link(text) == pytest.approx(expected)


def test_parameters():
    assert [parameters(text) for text in ("350K", "124m", "7B", "5")] == [350e3, 124e6, 7e9, 5]


def test_hosts_count_not_their_slots():
    arguments = ["--plan", "-H", "a:4,b:4", "--model-size", "1M", "--step-time", "1"]
    assert planned_job(parse_args([*arguments, "--link", "1Gbit"])).hosts == 2


def test_the_command_prints_a_table_and_a_recommendation():
    found = run(*EXAMPLE, "--link", "1Gbit/20ms")
    assert found.returncode == 0, found.stderr
    assert (
        "124 million parameters, 0.3 s per step, 8 hosts, 1 Gbit/s, 20 ms one way" in found.stdout
    )
    assert "Recommended: hvd.DistributedOptimizer(..., local_steps=100" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (EXAMPLE, "argument --plan: --link is missing"),
        ([*EXAMPLE, "--link", "fast"], "'fast' is not a link such as"),
        (["--plan", "--model-size", "0M"], "'0M' is not a number of parameters"),
        (["--plan", "--step-time", "soon"], "'soon' is not a number of seconds"),
        (["-np", "2", "--link", "1Gbit", "true"], "argument --link: it belongs to --plan"),
        ([*EXAMPLE[:1], *EXAMPLE[3:], "--link", "1Gbit"], "with -np or -H"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        parse_args(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
