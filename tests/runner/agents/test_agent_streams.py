"""The bytes between an agent and the launcher, however they are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from horovod.runner.agents.agent_streams import (
    EVENT,
    MARK,
    STDERR,
    STDOUT,
    FrameReader,
    event_frame,
    output_frame,
)

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
