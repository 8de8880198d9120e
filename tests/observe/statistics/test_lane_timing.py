"""Times of a step on a lane: what is made of the marks, and what the timeline gets of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from horovod.observe.statistics.device_clock import Mark
from horovod.observe.statistics.lane_timing import Anchor, LaneTiming, StepRecorder, TimedReduction
from horovod.observe.timeline.recorder import Timeline
from horovod.observe.timeline.recording import interpret

CPU = torch.device("cpu")


def mark(at: float) -> Mark:
    """A moment of a device whose clock shows seconds."""
    made = Mark(CPU)
    made._time = at
    return made


def step(
    first: float, asked: float, waited: float, reductions: list[tuple[float, float]]
) -> LaneTiming:
    """A step whose gradients came from `first` to `asked`; it had all results at `waited`."""
    timing = LaneTiming(CPU)
    timing._first, timing._asked = mark(first), mark(asked)
    for number, (ready, ended) in enumerate(reductions, 1):
        timing._reductions.append(
            TimedReduction(f"bucket {number}", 4000, torch.float32, mark(ready), mark(ended))
        )
    timing._waits.append((mark(asked), mark(waited)))
    timing.complete()
    return timing


def test_what_the_program_did_not_wait_for_was_hidden() -> None:
    # The second reduction could not begin before the first had ended.
    timing = step(first=1.0, asked=2.0, waited=2.5, reductions=[(1.25, 1.75), (1.5, 2.5)])
    took, hidden = timing.seconds()
    assert took == pytest.approx(0.5 + 0.75)
    assert hidden == pytest.approx(1.25 - 0.5)
    assert timing.backward() == pytest.approx(1.0)
    assert timing.measure() == (pytest.approx(1.25), pytest.approx(1.0))


def test_a_library_that_tells_nothing() -> None:
    """Then what was waited for is all that is known."""
    timing = step(1.0, 2.0, 2.5, [])
    timing._reductions.append(TimedReduction("bucket", 4, torch.float32, mark(1.5), None))
    assert timing.seconds() == (pytest.approx(0.5), 0.0)


def test_a_step_that_is_not_complete_is_not_over() -> None:
    timing = LaneTiming(CPU)
    assert not timing.is_over()
    timing.complete()
    assert timing.is_over()


def test_the_timeline_has_steps_and_buckets_by_the_devices_clock(tmp_path: Path) -> None:
    timeline = Timeline(
        str(tmp_path / "run.json"), 0, False, 2, "host", {"allreduce.bucket 1": ["a", "b"]}
    )
    recorder = StepRecorder("optimizer", CPU)
    start = Anchor(CPU)._mark._time  # the clock of this host
    recorder._anchor = Anchor(CPU)
    for number in range(3):
        began = start + number
        times = [(began + 0.25, began + 0.5), (began + 0.375, began + 0.75)]
        recorder.add(timeline, number + 1, step(began + 0.125, began + 0.5, began + 0.875, times))
    timeline.close()
    recording = interpret(json.loads((tmp_path / "run.json").read_text()))
    (steps,) = recording.steps.values()
    (backwards,) = recording.backwards.values()
    assert [each.number for each in steps] == [2, 3]
    for span in steps:
        assert span.ended - span.began == pytest.approx(1e6, abs=2)
    for span in backwards:
        assert span.ended - span.began == pytest.approx(375_000, abs=2)
    assert [each.ended - each.began for each in recording.waits] == pytest.approx([375_000] * 3)
    assert [each.name for each in recording.collectives] == [
        "allreduce.bucket 1",
        "allreduce.bucket 2",
    ] * 3
    assert recording.collectives[0].about["tensors"] == "a, b"
    for first, second in zip(recording.collectives[::2], recording.collectives[1::2], strict=True):
        assert first.nbytes == second.nbytes == 4000
        assert first.ended is not None
        assert first.started is not None
        assert second.started is not None
        assert first.ended - first.started == pytest.approx(250_000, abs=2)
        assert second.started == pytest.approx(first.ended, abs=2), "it waited for the first"
        assert second.submitted < second.started
        assert [phase.what for phase in first.phases] == ["NCCL_ALLREDUCE"]
        assert first.is_direct
        assert first.met == first.ended
    assert all(each.ran is None and each.starved is None for each in steps)
