"""The timeline's files: their events, and that they are always loadable."""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.observe.timeline import recorder as timeline
from horovod.observe.timeline.files import load
from horovod.observe.timeline.recorder import ThreadTimes, Timeline, path_of_rank, thread_times
from tests.effort import examples


def read(path: str | Path) -> list[dict]:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def one_allreduce(recorder: Timeline, name: str) -> None:
    recorder.negotiate_start(name, "allreduce")
    recorder.rank_ready(name, 0, time.perf_counter(), 0)
    recorder.rank_ready(name, 1, time.perf_counter(), 0)
    recorder.negotiate_end(name)
    recorder.start(name, "allreduce")
    with recorder.activity(name, "MEMCPY_IN_FUSION_BUFFER"):
        pass
    with recorder.activity(name, "GLOO_ALLREDUCE"):
        pass
    recorder.end(name, [torch.empty(2, 3)])


def test_one_collective_has_upstreams_events(tmp_path):
    recorder = Timeline(str(tmp_path / "t.json"), rank=0)
    one_allreduce(recorder, "grad.0")
    recorder.close()
    events = read(tmp_path / "t.json")
    start, sort, name, name_sort, *rest = events
    assert (start["ph"], start["name"], start["pid"]) == ("M", "process_name", 0)
    assert isinstance(start["args"]["start_time_since_epoch_in_micros"], int)
    assert (sort["ph"], sort["name"], sort["pid"]) == ("M", "process_sort_index", 0)
    assert name == {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "grad.0"}}
    assert (name_sort["name"], name_sort["args"]) == ("process_sort_index", {"sort_index": 1})
    assert [(event["ph"], event.get("name")) for event in rest] == [
        ("B", "NEGOTIATE_ALLREDUCE"),
        ("X", "0"),
        ("X", "1"),
        ("E", None),
        ("B", "ALLREDUCE"),
        ("B", "MEMCPY_IN_FUSION_BUFFER"),
        ("E", None),
        ("B", "GLOO_ALLREDUCE"),
        ("E", None),
        ("E", None),
    ]
    assert {event["pid"] for event in rest} == {1}
    assert all(event["dur"] == 0 for event in rest if event["ph"] == "X")
    assert rest[-1]["args"] == {"dtype": "float32", "shape": "[2, 3]"}
    stamps = [event["ts"] for event in rest]
    assert stamps == sorted(stamps)
    assert all(isinstance(stamp, int) and stamp >= 0 for stamp in stamps)


def test_a_step_tells_for_how_long_its_thread_ran_and_was_starved(tmp_path, monkeypatch):
    told = iter([ThreadTimes(1.0, 0.5), ThreadTimes(1.25, 0.625), None, ThreadTimes(9.0, 9.0)])
    monkeypatch.setattr(timeline, "thread_times", lambda: next(told))
    recorder = Timeline(str(tmp_path / "t.json"), rank=0, fusion_threshold=77)
    now = time.perf_counter()
    recorder.step("opt", 1, now, (now, now))
    recorder.step("opt", 2, now, (now, now))
    recorder.step("opt", 3, now, (now, now), ended=now)  # a device's: the thread's do not count
    recorder.step("opt", 4, now, (now, now))
    recorder.step("opt", 5, now, (now, now))
    recorder.close()
    events = read(tmp_path / "t.json")
    steps = [event["args"] for event in events if event["name"] == "STEP"]
    assert steps[1] == {"step": 2, "ran": 250_000, "starved": 125_000}
    assert [each for each in steps if "ran" in each] == [steps[1]]
    assert events[0]["args"]["fusion_threshold"] == 77
    assert events[0]["args"]["cores"] == sorted(os.sched_getaffinity(0))


@pytest.mark.skipif(thread_times() is None, reason="this kernel does not count")
def test_a_thread_that_sleeps_neither_runs_nor_starves():
    before = thread_times()
    began = time.perf_counter()
    time.sleep(0.05)
    after, lasted = thread_times(), time.perf_counter() - began
    assert 0 <= after.ran - before.ran + after.starved - before.starved < lasted


def test_each_tensor_is_a_process_of_its_own(tmp_path):
    recorder = Timeline(str(tmp_path / "t.json"), rank=0)
    for name in ("a", "b", "a"):
        one_allreduce(recorder, name)
    recorder.close()
    named = [e for e in read(tmp_path / "t.json") if e.get("name") == "process_name" and e["pid"]]
    assert [(event["pid"], event["args"]["name"]) for event in named] == [(1, "a"), (2, "b")]


def test_an_activity_ends_when_it_fails(tmp_path):
    recorder = Timeline(str(tmp_path / "t.json"), rank=0)
    with pytest.raises(KeyError), recorder.activity("a", "QUEUE"):
        raise KeyError
    recorder.close()
    assert [event["ph"] for event in read(tmp_path / "t.json")[4:]] == ["B", "E"]


def test_an_end_without_result_and_a_torch_dtype(tmp_path):
    torch = pytest.importorskip("torch")
    recorder = Timeline(str(tmp_path / "t.json"), rank=0)
    recorder.end("a")
    recorder.end("a", [torch.empty((), dtype=torch.bfloat16)])
    recorder.close()
    without, with_result = read(tmp_path / "t.json")[4:]
    assert "args" not in without
    assert with_result["args"] == {"dtype": "bfloat16", "shape": "[]"}


@pytest.mark.parametrize("wanted", [True, False])
def test_cycles_are_marked_only_when_asked_for(tmp_path, wanted):
    recorder = Timeline(str(tmp_path / "t.json"), rank=0, mark_cycles=wanted)
    recorder.mark_cycle()
    recorder.close()
    marks = [event for event in read(tmp_path / "t.json") if event["ph"] == "i"]
    assert [(mark["name"], mark["s"]) for mark in marks] == [("CYCLE_START", "g")] * wanted


@pytest.mark.parametrize(
    ("path", "rank", "expected"),
    [
        ("/a.b/run.json", 0, "/a.b/run.json"),
        ("/a.b/run.json", 12, "/a.b/run.rank12.json"),
        ("/a.b/run", 1, "/a.b/run.rank1"),
    ],
)
def test_the_file_of_a_rank(path, rank, expected):
    assert path_of_rank(path, rank) == expected


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(st.text(max_size=300), min_size=1, max_size=40))
def test_any_name_survives_and_the_file_is_complete_after_every_event(tmp_path_factory, names):
    path = tmp_path_factory.mktemp("names") / "t.json"
    recorder = Timeline(str(path), rank=0)
    for count, name in enumerate(names, 1):
        recorder.start(name, "broadcast")
        events = read(path)
        assert sum(event["ph"] == "B" for event in events) == count
    recorder.close()
    named = [e["args"]["name"] for e in events if e["name"] == "process_name" and e["pid"]]
    assert named == list(dict.fromkeys(names))


def test_a_name_longer_than_a_page(tmp_path):
    recorder = Timeline(str(tmp_path / "t.json"), rank=0)
    one_allreduce(recorder, "x" * 10_000)
    recorder.close()
    assert read(tmp_path / "t.json")[2]["args"]["name"] == "x" * 10_000


def test_no_event_straddles_a_page(tmp_path):
    recorder = Timeline(str(tmp_path / "t.json"), rank=0)
    for index in range(300):
        one_allreduce(recorder, f"tensor {index % 7}")
    recorder.close()
    data = (tmp_path / "t.json").read_bytes()
    assert len(data) > 20 * timeline.PAGE
    for cut in range(timeline.PAGE, len(data), timeline.PAGE):
        (tmp_path / "cut.json").write_bytes(data[:cut])
        assert load(str(tmp_path / "cut.json"))


def test_threads_do_not_tear_each_others_events(tmp_path):
    recorder = Timeline(str(tmp_path / "t.json"), rank=0, mark_cycles=True)

    def record(index: int) -> None:
        for _ in range(200):
            one_allreduce(recorder, f"thread {index}")
            recorder.mark_cycle()

    threads = [threading.Thread(target=record, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    events = read(tmp_path / "t.json")
    assert len(events) == 2 + 4 * 2 + 4 * 200 * 11
    # "X": ranks that were ready, at a time that the caller knows.
    timed = [event["ts"] for event in events if "ts" in event and event["ph"] != "X"]
    assert timed == sorted(timed)


def test_events_after_close_are_dropped(tmp_path):
    recorder = Timeline(str(tmp_path / "t.json"), rank=0)
    recorder.close()
    before = (tmp_path / "t.json").read_bytes()
    one_allreduce(recorder, "late")
    recorder.close()
    assert (tmp_path / "t.json").read_bytes() == before


ENDLESS = """
import sys
from horovod.observe.timeline.recorder import Timeline
recorder = Timeline(sys.argv[1], rank=0)
for index in range(10**9):
    with recorder.activity(f"tensor {index % 100}", "QUEUE"):
        pass
    if index == 500:
        print("running", flush=True)
"""


def test_a_killed_rank_leaves_a_loadable_file(tmp_path):
    path = tmp_path / "t.json"
    for _ in range(3):
        command = [sys.executable, "-c", ENDLESS, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
            threading.Event().wait(random.uniform(0, 0.02))  # a different point each time
            process.kill()
        assert len(load(str(path))) > 1000


# -- a failing disk --------------------------------------------------------------------------


class Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What the timeline warned of, however the loggers above it are set up."""
    collector = Collector()
    timeline.log.addHandler(collector)
    yield collector.messages
    timeline.log.removeHandler(collector)


def test_a_missing_folder_is_reported_once_and_breaks_nothing(tmp_path, warnings):
    recorder = Timeline(str(tmp_path / "absent" / "t.json"), rank=3)
    one_allreduce(recorder, "a")
    recorder.close()
    (message,) = warnings
    assert "t.rank3.json" in message
    assert "No such file" in message


def test_a_full_device_is_reported_once_and_breaks_nothing(warnings):
    recorder = Timeline("/dev/full", rank=0)
    one_allreduce(recorder, "a")
    recorder.mark_cycle()
    recorder.close()
    (message,) = warnings
    assert "No space left" in message


def test_what_was_recorded_before_the_disk_filled_up_stays(tmp_path, warnings):
    path = tmp_path / "t.json"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    recorder = Timeline(str(path), rank=0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        for _ in range(100):
            one_allreduce(recorder, "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    one_allreduce(recorder, "a")
    assert len(warnings) == 1
    assert len(read(path)) > 50
    assert os.path.getsize(path) <= 10_000
