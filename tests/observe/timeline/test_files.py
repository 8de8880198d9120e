"""Files as kills, full disks and earlier versions leave them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.observe.timeline.files import load
from horovod.observe.timeline.recording import bytes_of, interpret, rank_in_name, read_recordings
from tests.effort import examples
from tests.observe.timeline.made import even


def test_an_intact_file(tmp_path):
    job = even()
    paths = job.write(tmp_path)
    assert load(paths[0]) == job.events(0)


@settings(max_examples=examples(60), deadline=None)
@given(share=st.floats(0.05, 1.0))
def test_a_file_cut_anywhere_keeps_what_is_complete(tmp_path_factory, share):
    folder = tmp_path_factory.mktemp("cut")
    job = even(5)
    (path, _) = job.write(folder)
    text = Path(path).read_text()
    Path(path).write_text(text[: max(300, int(len(text) * share))])
    found = load(path)
    assert found == job.events(0)[: len(found)]
    assert interpret(found).rank == 0


def test_a_file_of_another_program_with_an_object_around_its_events(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(
        json.dumps({"traceEvents": even().events(0), "displayTimeUnit": "ms"}, indent=2)
    )
    assert len(interpret(load(str(path))).collectives) == 20


def test_blocks_of_zeros_at_the_end_of_a_file_that_a_crashed_machine_left(tmp_path):
    path = even(3).write(tmp_path)[0]
    with open(path, "a", encoding="utf-8") as file:
        file.write("\0" * 4096)
    assert load(path) == even(3).events(0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is empty"),
        ("\0\0\0", "is empty"),
        ("hello", "not a timeline"),
        ('{"a": 1}', "not a timeline"),
        ("[1, 2]", "not a timeline"),
        ("[", "not a timeline"),
        ('[{"ph": "B", "ts": 1, "pid": 0}]', "not written by Horovod"),
    ],
)
def test_what_is_no_timeline(tmp_path, text, complaint):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint) as raised:
        read_recordings([str(path)])
    assert str(path) in str(raised.value)


def test_two_files_of_one_rank(tmp_path):
    path = even().write(tmp_path)[0]
    with pytest.raises(ValueError, match="both of rank 0"):
        read_recordings([path, path])


def test_no_file():
    with pytest.raises(ValueError, match="no timeline"):
        read_recordings([])


@pytest.mark.parametrize(
    ("path", "rank"),
    [("run.json", 5), ("a/run.rank7.json", 7), ("run.rank12", 12), ("rank3.json", 5)],
)
def test_the_rank_in_a_name(path, rank):
    assert rank_in_name(path, 5) == rank


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        ("float32", "[2, 3]", 24),
        ("bfloat16", "[5]", 10),
        ("uint8", "[31]", 31),
        ("bool", "[]", 1),
        ("float", "[4]", 16),
        ("what", "[4]", None),
        (None, "[4]", None),
        ("float32", None, None),
    ],
)
def test_the_bytes_of_a_tensor(dtype, shape, expected):
    assert bytes_of(dtype, shape) == expected


# As 0.28.1 writes it: no rank, ticks in the negotiation, a barrier without execution, and a last
# line that a kill has cut.
UPSTREAM = """[
{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros":170}},
{"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},
{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "DistributedOptimizer.grad"}},
{"name": "process_sort_index", "ph": "M", "pid": 1, "args": {"sort_index": 1}},
{"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 100, "pid": 1},
{"ph": "X", "name": "0", "ts": 100, "pid": 1, "dur": 0},
{"ph": "X", "name": "1", "ts": 400, "pid": 1, "dur": 0},
{"ph": "E", "ts": 410, "pid": 1},
{"ph": "B", "name": "ALLREDUCE", "ts": 420, "pid": 1},
{"ph": "B", "name": "MEMCPY_IN_FUSION_BUFFER", "ts": 421, "pid": 1},
{"ph": "E", "ts": 430, "pid": 1},
{"ph": "B", "name": "NCCL_ALLREDUCE", "ts": 430, "pid": 1},
{"ph": "E", "ts": 500, "pid": 1},
{"ph": "E", "ts": 510, "pid": 1, "args": {"dtype": "float32", "shape": "[10, 2]"}},
{"name": "process_name", "ph": "M", "pid": 2, "args": {"name": "barrier"}},
{"ph": "B", "name": "NEGOTIATE_BARRIER", "ts": 600, "pid": 2},
{"ph": "E", "ts": 700, "pid": 2},
{"ph": "i", "name": "CYCLE_START", "ts": 705, "s": "g"},
{"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 800, "pid": 1},
{"ph": "X", "name": "0", "ts": 8"""


def test_a_cut_file_of_upstreams(tmp_path):
    path = tmp_path / "timeline.json"
    path.write_text(UPSTREAM)
    (recording,) = read_recordings([str(path)])
    assert (recording.rank, recording.version, recording.clock) == (0, 1, None)
    assert recording.cycles == [705]
    first, barrier, cut = recording.collectives
    assert (first.submitted, first.agreed, first.started, first.ended) == (100, 410, 420, 510)
    assert first.ready == {0: 100, 1: 400}
    assert first.nbytes == 80
    assert [phase.what for phase in first.phases] == ["MEMCPY_IN_FUSION_BUFFER", "NCCL_ALLREDUCE"]
    assert (barrier.agreed, barrier.started, barrier.ended) == (700, None, None)
    assert (cut.submitted, cut.agreed) == (800, None)


def test_a_tick_that_is_written_when_the_name_is_in_use_again_belongs_to_the_one_before():
    events = even(2).events(0)
    tick = {"ph": "X", "name": "1", "dur": 0, "ts": 7, "pid": 1, "args": {"number": 0}}
    recording = interpret([*events, tick])
    assert [each.ready for each in recording.collectives] == [{1: 7}, {}]


def test_a_recording_that_begins_inside_of_a_collective():
    events = [e for e in even(2).events(0) if e.get("name") != "NEGOTIATE_ALLREDUCE"]
    recording = interpret(events)
    assert all(each.agreed is None for each in recording.collectives)
    assert [each.ended is not None for each in recording.collectives] == [True, True]
