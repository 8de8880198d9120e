"""What a terminal, and what a file, gets to see."""

from __future__ import annotations

import os
import pty
import select
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.runner.output.console import Console, Source
from horovod.runner.output.lines import LineSplitter

ERASE = "\r\x1b[K"


class Screen:
    """A console and the far end of what it writes to."""

    def __init__(self, far: int, near: int) -> None:
        self.far = far
        self.console = Console(near, near)
        self.splitters: dict[Source, LineSplitter] = {}

    def feed(self, source: Source, text: str) -> None:
        splitter = self.splitters.setdefault(source, LineSplitter())
        self.console.show(source, splitter.feed(text.encode()), splitter.pending)

    def finish(self, source: Source) -> None:
        """The stream ends."""
        splitter = self.splitters.setdefault(source, LineSplitter())
        self.console.show(source, splitter.finish())

    def seen(self, last: str) -> str:
        """What came through since, up to and including ``last``."""
        text = ""
        while not text.endswith(last):
            ready, _, _ = select.select([self.far], [], [], 10)
            assert ready, f"expected {last!r} at the end of {text!r}"
            text += os.read(self.far, 1 << 16).decode().replace("\r\n", "\n")
        return text


@pytest.fixture
def terminal() -> Iterator[Screen]:
    far, near = pty.openpty()
    yield Screen(far, near)
    os.close(far)
    os.close(near)


@pytest.fixture
def pipe() -> Iterator[Screen]:
    far, near = os.pipe()
    yield Screen(far, near)
    os.close(far)
    os.close(near)


def test_lines_of_several_ranks_stay_whole(pipe: Screen):
    first, second = Source(0, "stdout"), Source(1, "stderr")
    pipe.feed(first, "half ")
    pipe.feed(second, "other\n")
    pipe.feed(first, "whole\n\n")
    expected = "[1]<stderr>:other\n[0]<stdout>:half whole\n[0]<stdout>:\n"
    assert pipe.seen(expected) == expected


def test_in_a_file_lines_end_as_they_did_in_the_worker(pipe: Screen):
    bar = Source(0, "stderr")
    pipe.feed(bar, "\r 10%\r 20%\r    \r100%\n\ndone\r")
    pipe.feed(bar, "\nend\nno end")
    pipe.finish(bar)
    assert os.read(pipe.far, 1 << 16) == (
        b"\r[0]<stderr>: 10%\r[0]<stderr>: 20%\r[0]<stderr>:    \r[0]<stderr>:100%\n[0]<stderr>:\n"
        b"[0]<stderr>:done\r\n[0]<stderr>:end\n[0]<stderr>:no end"
    )


def test_a_line_without_an_end_gets_one_only_if_something_follows(pipe: Screen):
    first, second = Source(0, "stdout"), Source(1, "stdout")
    pipe.feed(first, "first")
    pipe.finish(first)
    pipe.feed(second, "second\n")
    pipe.feed(second, "third")
    pipe.finish(second)
    pipe.console.say("over")
    assert os.read(pipe.far, 1 << 16) == (
        b"[0]<stdout>:first\n[1]<stdout>:second\n[1]<stdout>:third\nhorovodrun: over\n"
    )


def test_a_line_that_is_too_long_goes_on_without_a_second_prefix(pipe: Screen):
    source, other = Source(0, "stdout"), Source(1, "stdout")
    pipe.splitters[source] = LineSplitter(longest=4)
    pipe.feed(source, "abcdefghij\n")
    pipe.feed(source, "klmnop")
    pipe.feed(other, "x\n")
    pipe.feed(source, "q\n")
    assert os.read(pipe.far, 1 << 16) == (
        b"[0]<stdout>:abcdefghij\n[0]<stdout>:klmn\n[1]<stdout>:x\n[0]<stdout>:opq\n"
    )


@given(st.lists(st.text(alphabet="\r\n ab", max_size=6), max_size=6))
def test_without_the_prefixes_a_file_has_what_the_worker_wrote(pieces: list[str]):
    far, near = os.pipe()
    try:
        screen, source = Screen(far, near), Source(0, "stdout")
        for piece in pieces:
            screen.feed(source, piece)
        screen.finish(source)
        os.close(near)
        near = -1
        seen = os.read(far, 1 << 16)
    finally:
        os.close(far)
        if near >= 0:
            os.close(near)
    assert seen.replace(b"[0]<stdout>:", b"") == "".join(pieces).encode()


def test_on_a_terminal_a_bar_is_redrawn_below_the_other_lines(terminal: Screen):
    bar, other = Source(0, "stderr"), Source(1, "stdout")
    terminal.feed(bar, "\r 10%")
    terminal.feed(bar, "\r 20%")
    terminal.seen(f"{ERASE}[0]<stderr>: 20%")
    terminal.feed(other, "hello\n")
    redrawn = f"{ERASE}[1]<stdout>:hello\n[0]<stderr>: 20%"
    assert terminal.seen(redrawn) == redrawn
    terminal.feed(bar, "\r100%\n")
    terminal.seen(f"{ERASE}[0]<stderr>:100%\n")
    terminal.feed(other, "bye\n")
    assert terminal.seen("bye\n") == "[1]<stdout>:bye\n"


def test_a_bar_that_is_wiped_away_disappears(terminal: Screen):
    bar = Source(0, "stderr")
    terminal.feed(bar, "\r 10%\r     \r")
    terminal.feed(bar, "next\n")
    terminal.seen("[0]<stderr>:next\n")
    assert terminal.console._bar is None


def test_carriage_return_and_newline_keep_what_was_drawn(terminal: Screen):
    bar = Source(0, "stdout")
    terminal.feed(bar, "50%\r")
    terminal.feed(bar, "\n")
    terminal.console.finish()
    terminal.seen(f"{ERASE}[0]<stdout>:50%\n")


def test_of_several_bars_the_lowest_ranks_is_shown(terminal: Screen):
    zero, one = Source(0, "stderr"), Source(1, "stderr")
    terminal.feed(one, "one\r")
    terminal.feed(zero, "zero\r")
    terminal.feed(one, "one again\r")
    terminal.console.finish()
    assert "one again" not in terminal.seen("[0]<stderr>:zero\n")


def test_a_bar_never_wraps(terminal: Screen):
    bar = Source(0, "stderr")
    terminal.feed(bar, "x" * 5000 + "\r")
    terminal.feed(bar, "y\n")
    drawn, _, _ = terminal.seen("y\n").partition(ERASE)
    assert len(drawn) == terminal.console.width - 1


def test_bytes_pass_as_they_are(pipe: Screen):
    source = Source(3, "stdout")
    pipe.console.show(source, LineSplitter().feed("é€\n".encode() + b"\xff\n"))
    assert os.read(pipe.far, 100) == "[3]<stdout>:é€\n[3]<stdout>:".encode() + b"\xff\n"


def test_a_reader_that_went_away_is_noticed(tmp_path):
    far, near = os.pipe()
    os.close(far)
    console = Console(near, near)
    console.say("nobody hears this")
    os.close(near)
    assert console.broken
