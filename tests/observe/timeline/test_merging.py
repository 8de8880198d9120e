"""One trace of several ranks' files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.observe.timeline.clocks import align
from horovod.observe.timeline.merging import TraceSlice, arrange_rows, merge, merged_events
from horovod.observe.timeline.recorder import Timeline, path_of_rank
from horovod.observe.timeline.recording import interpret
from tests.effort import examples
from tests.observe.timeline.made import ROW, Clock, MadeJob, even, with_slow_rank
from tests.observe.timeline.test_files import UPSTREAM
from tests.observe.timeline.trace_rules import check


def read(path) -> list[dict]:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def names(events, what) -> list[str]:
    return [event["args"]["name"] for event in events if event["name"] == what]


def test_hosts_are_processes_and_ranks_are_threads():
    job = even(3, 4, hosts=["a", "b", "a", "b"], clocks={"b": Clock(1e9)})
    events = merged_events(align(job.recordings()))
    check(events)
    assert names(events, "process_name") == ["host a", "host b"]
    host = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "thread_name"}
    assert {rank: host[f"rank {rank}"] for rank in range(4)} == {0: 1, 1: 2, 2: 1, 3: 2}


def test_a_slice_tells_the_bucket_and_who_came_last():
    events = merged_events(align(with_slow_rank(4).recordings()))
    whole = next(event for event in events if event["name"] == ROW)
    assert whole["args"] == {
        "dtype": "float32",
        "count": 2,
        "bytes": 4_000_000,
        "tensors": "b, a",
    }
    negotiation = next(event for event in events if event["name"] == "NEGOTIATE_ALLREDUCE")
    assert negotiation["args"]["last rank"] == 1
    assert negotiation["args"]["later than the others by ms"] == 5.0
    assert negotiation["args"]["ready"].endswith("rank 1 +5.000 ms")


def test_arrows_lead_from_the_last_rank_to_all_others():
    events = merged_events(align(with_slow_rank(4, ranks=3).recordings()))
    begins = [event for event in events if event["ph"] == "s"]
    ends = [event for event in events if event["ph"] == "f"]
    assert len(begins) == len(ends) == 4 * 2
    assert {event["tid"] // 1000 for event in begins} == {1}
    assert {event["tid"] // 1000 for event in ends} == {0, 2}


@settings(max_examples=examples(30), deadline=None)
@given(
    data=st.data(),
    ranks=st.integers(1, 4),
    steps=st.integers(1, 8),
    offset=st.integers(-(10**9), 10**9),
)
def test_any_job_makes_a_valid_trace(data, ranks, steps, offset):
    times = st.floats(0, 1e5)
    compute = data.draw(
        st.lists(st.lists(times, min_size=ranks, max_size=ranks), min_size=steps, max_size=steps)
    )
    reduction = data.draw(st.lists(times, min_size=steps, max_size=steps))
    hosts = data.draw(st.lists(st.sampled_from("abc"), min_size=ranks, max_size=ranks))
    job = MadeJob(compute, reduction, hosts=hosts, clocks={"b": Clock(offset), "c": Clock(3.5)})
    cut = [
        interpret(job.events(r)[: data.draw(st.integers(4, 4 + 9 * steps))]) for r in range(ranks)
    ]
    check(merged_events(align(cut)))


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=30), st.booleans())
def test_placing_loses_nothing_and_cuts_nothing(drawn, nested):
    slices = [TraceSlice("", began, began + length) for began, length in drawn]
    rows = arrange_rows(slices, nested)
    assert sorted((s.began, s.ended) for row in rows for s in row) == sorted(
        (s.began, s.ended) for s in slices
    )
    for row in rows:
        for index, one in enumerate(row):
            for other in row[index + 1 :]:
                inside = other.ended <= one.ended
                assert other.began >= one.ended or (nested and inside)


def test_several_collectives_at_a_time_are_in_rows_of_their_own():
    recorder_events = even(1).events(0)
    other = [dict(e) for e in recorder_events if e.get("pid") == 1]
    for event in other:
        event["pid"] = 9
        if event["ph"] == "M":
            event["args"] = {"name": "allreduce.other"}
    events = merged_events(align([interpret([*recorder_events, *other])]))
    check(events)
    rows = {e["tid"] for e in events if e["name"] in (ROW, "allreduce.other")}
    assert len(rows) == 2


def test_real_files_and_their_cycles(tmp_path):
    base = str(tmp_path / "run.json")
    for rank in range(3):
        recorder = Timeline(base, rank, mark_cycles=True, size=3, host="a")
        recorder.mark_cycle()
        recorder.negotiate_start("x", "allreduce")
        recorder.negotiate_end("x", set_id=0, number=0)
        recorder.start("x", "allreduce")
        with recorder.activity("x", "GLOO_ALLREDUCE"):
            pass
        recorder.end("x", [torch.empty(2, 3)])
        recorder.close()
    assert merge([path_of_rank(base, rank) for rank in range(3)], str(tmp_path / "all.json")) == 3
    events = read(tmp_path / "all.json")
    check(events)
    assert sum(event["name"] == "CYCLE_START" for event in events) == 3
    assert sum(event["name"] == "x" for event in events) == 3


def test_a_collective_that_never_ended_is_shown_as_such(tmp_path):
    path = tmp_path / "timeline.json"
    path.write_text(UPSTREAM)
    merge([str(path)], str(tmp_path / "all.json"))
    events = read(tmp_path / "all.json")
    check(events)
    (cut,) = [event for event in events if event.get("args", {}).get("unfinished")]
    assert cut["name"] == "DistributedOptimizer.grad (unfinished)"
    ready = [e["args"] for e in events if e["name"] == "NEGOTIATE_ALLREDUCE" and "args" in e]
    assert ready[0]["last rank"] == 1


def test_files_of_an_earlier_version_take_the_rank_from_the_name(tmp_path):
    for name in ("run.json", "run.rank7.json"):
        (tmp_path / name).write_text(UPSTREAM)
    paths = [str(tmp_path / "run.json"), str(tmp_path / "run.rank7.json")]
    merge(paths, str(tmp_path / "out.json"))
    found = names(read(tmp_path / "out.json"), "thread_name")
    assert {"rank 0", "rank 7"} <= set(found)


def test_what_makes_no_sense_is_refused_before_anything_is_written(tmp_path):
    good = even(2).write(tmp_path)[0]
    out = str(tmp_path / "out.json")
    with pytest.raises(ValueError, match="both an input and the output"):
        merge([good], good)
    with pytest.raises(ValueError, match="both of rank 0"):
        merge([good, good], out)
    assert not Path(out).exists()
    merge([good], out)
    with pytest.raises(ValueError, match="merged already"):
        merge([out], str(tmp_path / "twice.json"))
