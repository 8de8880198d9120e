"""However a stream is cut into reads, the same whole lines come out."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from horovod.runner.output.lines import Line, LineSplitter

texts = st.text(alphabet=st.one_of(st.sampled_from("\r\n aé€😀"), st.characters(codec="utf-8")))


def split(data: bytes, cuts: list[int], longest: int = 1 << 20) -> list[Line]:
    splitter = LineSplitter(longest)
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    lines = []
    for start, end in itertools.pairwise(places):
        lines += splitter.feed(data[start:end])
    return lines + splitter.finish()


@given(texts, st.lists(st.integers(min_value=0)))
def test_any_chunking_gives_the_same_lines(text: str, cuts: list[int]):
    data = text.encode()
    lines = split(data, cuts)
    assert lines == split(data, [])
    assert b"".join(line.text + line.end for line in lines) == data
    for line in lines:
        line.text.decode()  # no character was cut
        assert not {b"\r"[0], b"\n"[0]} & set(line.text)


@given(texts, st.lists(st.integers(min_value=0)), st.integers(4, 12))
def test_lines_without_end_are_cut_between_characters(text: str, cuts: list[int], longest: int):
    data = text.encode()
    lines = split(data, cuts, longest)
    assert lines == split(data, [], longest)
    assert b"".join(line.text + line.end for line in lines) == data
    for line in lines:
        line.text.decode()
        assert len(line.text) <= longest


def test_bytes_that_are_not_utf8_pass_unharmed():
    assert split(b"\xff\xfe\nlatin \xe9", [1, 5]) == [
        Line(b"\xff\xfe", b"\n"),
        Line(b"latin \xe9", b""),
    ]


def test_a_line_is_there_as_soon_as_its_end_is():
    splitter = LineSplitter()
    assert splitter.feed(b"half") == []
    assert splitter.pending == b"half"
    assert splitter.feed(b" 10%\r") == [Line(b"half 10%", b"\r")]
    assert splitter.feed(b"\n") == [Line(b"", b"\n")]
    assert splitter.finish() == []
