"""The bytes between an agent and the launcher, however they are cut."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.runner.agents.agent_streams import (
    EVENT,
    MARK,
    STDERR,
    STDOUT,
    CommandReader,
    FrameReader,
    command_frame,
    event_frame,
    output_frame,
    to_json,
)
from tests.effort import examples

FRAMES = st.lists(
    st.tuples(st.sampled_from([EVENT, STDOUT, STDERR]), st.integers(0, 2**32 - 1), st.binary())
)


@given(frames=FRAMES, noise=st.binary().filter(lambda b: MARK not in b + MARK[:-1]), data=st.data())
def test_frames_arrive_whole_behind_the_noise_of_a_shell(frames, noise: bytes, data):
    sent = noise + MARK
    expected = []
    for kind, worker, content in frames:
        if kind == EVENT:
            sent += event_frame(content)
            expected.append((EVENT, 0, content))
        else:
            sent += output_frame(kind, worker, content)
            expected.append((kind, worker, content))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=20)))
    reader = FrameReader()
    got = []
    for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        got += reader.feed(sent[start:end])
    assert got == expected
    assert reader.before == noise


def test_endless_noise_does_not_fill_the_memory():
    reader = FrameReader()
    for _ in range(100):
        assert reader.feed(b"x" * 10_000) == []
    assert len(reader.before) <= 4000
    assert reader.feed(MARK + event_frame(b"{}")) == [(EVENT, 0, b"{}")]


SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=9)
RECORDS = st.dictionaries(st.text(max_size=3), SCALARS | st.lists(SCALARS, max_size=3), max_size=3)


@settings(max_examples=examples(100))
@given(event=RECORDS)
def test_events_are_json(event):
    assert json.loads(to_json({"kind": event})) == {"kind": event}
    assert json.loads(to_json(tuple(event))) == list(event)


@settings(max_examples=examples(100))
@given(commands=st.lists(RECORDS, max_size=3), data=st.data())
def test_commands_arrive_whole(commands, data):
    sent = b"".join(map(command_frame, commands))
    cut = data.draw(st.integers(0, len(sent)))
    reader = CommandReader()
    assert reader.feed(sent[:cut]) + reader.feed(sent[cut:]) == commands
