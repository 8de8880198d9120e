"""The launcher's stdout and stderr: the lines of all ranks, and its own messages.

`outputs` hands over the lines of every stream. Each goes out whole, behind its
``[rank]<stream>:``, in one write. A line ended by a carriage return is a progress bar: on a
terminal it stays at the bottom and is redrawn there, below the lines that scroll by. Elsewhere
lines end as they ended in the worker: with a newline, a carriage return or, for the last one,
nothing.

The launcher's own messages have colours where `is_colour_wanted` allows them. The meaning of a
message never rests on its colour alone, and what workers write is never coloured. On a terminal the
launcher's progress line replaces the bar while there is something to wait for.
"""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from horovod.runner.output.lines import Line


class Colour(str, Enum):
    """The kinds of messages, with the escape sequences that show them."""

    PLAIN = ""
    SPEAKER = "\x1b[36m"  # cyan: the name of the program that speaks
    FAINT = "\x1b[2m"
    GOOD = "\x1b[32m"
    ATTENTION = "\x1b[33m"  # something is waited for, or was ignored
    FAILURE = "\x1b[31m"
    FAILURE_TITLE = "\x1b[1;31m"


_END = "\x1b[0m"


def is_colour_wanted(fd: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether text that goes to this descriptor is coloured.

    It is on a terminal, unless that is a dumb one. NO_COLOR forbids colours if it is set and not
    empty. FORCE_COLOR asks for them elsewhere too, for logs that are shown with colours; empty and
    "0" do not.
    """
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return environ.get("TERM") != "dumb" and os.isatty(fd)


def paint(text: str, colour: Colour) -> str:
    """Return the text in that colour, which begins and ends on every line."""
    if colour is Colour.PLAIN:
        return text
    return "\n".join(
        f"{colour.value}{line}{_END}" if line.strip() else line for line in text.split("\n")
    )


_ERASE = b"\r\x1b[K"
_PLAIN = b"\x1b[0m"


@dataclass(eq=False)
class Source:
    """One stream of one rank."""

    rank: int
    stream: str  # "stdout" or "stderr"
    returned: bool = field(default=False, init=False)  # its last line ended in \r
    drawn: bool = field(default=False, init=False)  # something ended in \r since the last \n

    def line_prefix(self, timestamp: bool) -> bytes:
        """Return what goes before a line: rank and stream, after the time if `timestamp` is set."""
        when = time.asctime() if timestamp else ""
        return f"{when}[{self.rank}]<{self.stream}>:".encode()


class Console:
    """The launcher's stdout and stderr."""

    def __init__(
        self,
        stdout: int = 1,
        stderr: int = 2,
        *,
        timestamps: bool = False,
        speaker: str = "horovodrun",
    ) -> None:
        """Write to two descriptors.

        Args:
            stdout: The descriptor for the workers' stdout.
            stderr: The descriptor for the workers' stderr and the launcher's messages.
            timestamps: Whether each line of a worker begins with the time.
            speaker: The name before the launcher's own messages.
        """
        self._fds = {"stdout": stdout, "stderr": stderr}
        self._files = {name: _identity(fd) for name, fd in self._fds.items()}
        self._unfinished: dict[object, Source] = {}  # by file: the source of a line without an end
        self._terminals = {name for name, fd in self._fds.items() if os.isatty(fd)}
        self._coloured = {name for name, fd in self._fds.items() if is_colour_wanted(fd)}
        self._timestamps = timestamps
        self._speaker = speaker
        self._awaited = ""  # the launcher's progress line
        self._awaited_colour = Colour.ATTENTION
        self._shown = False  # whether a worker has written something
        self._bar: tuple[Source, bytes] | None = None
        self._drawn = False
        self._lost: set[str] = set()  # streams that cannot be written any more
        self.problem = ""  # the reason, unless it is just a reader that went away

    @property
    def broken(self) -> bool:
        """Whether output is lost: its reader, such as ``head``, went away, or a disk is full."""
        return bool(self._lost)

    @property
    def is_terminal(self) -> bool:
        return bool(self._terminals)

    @property
    def shows_progress(self) -> bool:
        """Whether `progress` appears anywhere."""
        return "stderr" in self._terminals

    @property
    def is_blank(self) -> bool:
        """Whether stderr is a terminal on which no worker has written so far."""
        return self.shows_progress and not self._shown

    @property
    def width(self) -> int:
        """Columns of the terminal."""
        for name in self._terminals:
            try:
                return os.get_terminal_size(self._fds[name]).columns or 80
            except OSError:
                pass
        return 80

    def show(self, source: Source, lines: Sequence[Line], pending: bytes = b"") -> None:
        """Show complete lines; ``pending`` is the start of the next one."""
        self._shown = self._shown or bool(lines)
        on_terminal = source.stream in self._terminals
        if not on_terminal:
            self._pass_on(source, lines)
            return
        out = bytearray()
        bar_before = self._bar
        for line in lines:
            source.returned = line.end == b"\r"
            if source.returned:
                source.drawn |= bool(line.text)
                if line.text:
                    self._set_bar(source, line.text)
                continue
            shown = line.text
            if self._bar is not None and self._bar[0] is source:
                shown = shown or self._bar[1]  # "\r\n": what was drawn stays
                self._bar = None
            if shown or not source.drawn:
                out += self._format(source, shown)
            source.drawn = False
        if pending and source.returned:
            self._set_bar(source, pending)
        if out or self._bar is not bar_before:
            self._write(source.stream, bytes(out))

    def _pass_on(self, source: Source, lines: Sequence[Line]) -> None:
        """Write a worker's lines, with prefixes, to a file or a pipe."""
        out = bytearray()
        for line in lines:
            file = self._files[source.stream]
            goes_on = self._unfinished.get(file) is source  # no other stream wrote in between
            if self._unfinished.pop(file, None) is not None and not goes_on:
                out += b"\n"
            ends_a_bar = source.returned and not line.text and line.end == b"\n"
            is_bare = goes_on or ends_a_bar or (not line.text and line.end == b"\r")
            out += line.text if is_bare else self._format(source, line.text)[:-1]
            out += line.end
            source.returned = line.end == b"\r"
            if not line.end:
                self._unfinished[file] = source
        if out:
            self._put(source.stream, bytes(out))

    def say(self, text: str, colour: Colour = Colour.PLAIN) -> None:
        """Write a message of the launcher itself to stderr."""
        speaker = self._paint("stderr", f"{self._speaker}:", Colour.SPEAKER)
        lines = [f"{speaker} {self._paint('stderr', line, colour)}\n" for line in text.splitlines()]
        self._write("stderr", "".join(lines).encode(errors="backslashreplace"))

    def progress(self, text: str, colour: Colour = Colour.ATTENTION) -> None:
        """Show what the launcher waits for, on one line that is redrawn; no text removes it."""
        if self.shows_progress and text != self._awaited:
            self._awaited, self._awaited_colour = text, colour
            self._write("stderr", b"")

    def answer(self, text: str) -> int:
        """Write what was asked for instead of a job to stdout, and return the exit status."""
        self._write("stdout", f"{text}\n".encode(errors="backslashreplace"))
        if self.problem:
            self.say(self.problem)
        return 1 if self.broken else 0

    def write_account(self, account: str) -> None:
        """Write the account of a failure (`report.describe_failure`) to stderr."""
        if account and "stderr" in self._coloured:
            title, table, rest = account.split("\n\n", 2)
            heading, rows = table.split("\n", 1)
            title, rows = paint(title, Colour.FAILURE_TITLE), paint(rows, Colour.FAILURE)
            account = f"{title}\n\n{paint(heading, Colour.FAINT)}\n{rows}\n\n{rest}"
        self._write("stderr", account.encode(errors="backslashreplace"))

    def _paint(self, stream: str, text: str, colour: Colour) -> str:
        return paint(text, colour) if stream in self._coloured else text

    def disable_bars(self) -> None:
        """Draw nothing at the bottom of the terminal any more, because somebody types there."""
        self._terminals.clear()

    def pass_through(self, stream: str, data: bytes) -> None:
        """Write bytes unchanged: the output of a rank that somebody is attached to."""
        self._write(stream, data)

    def finish(self) -> None:
        """Leave a bar that is still drawn where it is, and the cursor below it."""
        self.progress("")
        if self._bar is not None:
            source, text = self._bar
            self._bar = None
            self._write(source.stream, self._format(source, text))

    def _set_bar(self, source: Source, text: bytes) -> None:
        if self._bar is not None and self._bar[0].rank < source.rank:
            return  # of the bars of several ranks, the lowest rank's is shown
        self._bar = (source, text) if text.strip() else None

    def _format(self, source: Source, text: bytes) -> bytes:
        return b"%s%s\n" % (source.line_prefix(self._timestamps), text)

    def _write(self, stream: str, data: bytes) -> None:
        """Write whole lines; erase the bar before and draw it again after."""
        if stream in self._terminals:
            before = _ERASE if self._drawn else b""
            self._drawn = bool(self._awaited) or self._bar is not None
            data = before + data + self._draw()
        elif self._unfinished.pop(self._files[stream], None) is not None:
            data = b"\n" + data
        self._put(stream, data)

    def _put(self, stream: str, data: bytes) -> None:
        fd = self._fds[stream]
        view = memoryview(data)
        while view and stream not in self._lost:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:  # somebody made the shared terminal non-blocking
                select.select([], [fd], [])
            except OSError as error:
                self._lost.add(stream)
                if error.errno not in (errno.EPIPE, errno.EIO) and not self.problem:
                    self.problem = f"cannot write to {stream}: {error.strerror}"

    def _draw(self) -> bytes:
        columns = self.width - 1
        if self._awaited:
            line = f"{self._speaker}: {self._awaited}"[:columns]
            painted = self._paint("stderr", line, self._awaited_colour)
            return painted.encode(errors="backslashreplace")
        if self._bar is None:
            return b""
        source, text = self._bar
        whole = self._format(source, text).rstrip(b"\n").decode(errors="ignore")
        cut = whole[:columns]
        return cut.encode() + (_PLAIN if "\x1b" in cut else b"")


def _identity(fd: int) -> object:
    """Return a value that is equal for two descriptors of the same file or pipe."""
    try:
        found = os.fstat(fd)
    except OSError:  # our parent has started us with this descriptor closed
        return fd
    return found.st_dev, found.st_ino
