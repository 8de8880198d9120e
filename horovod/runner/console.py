"""What the person at the terminal, or the log file, sees of all ranks.

`supervise` hands over the lines of every stream. Each goes out whole, behind its
``[rank]<stream>:``, in one write. A line ended by a carriage return is a progress bar: on a
terminal it stays at the bottom and is redrawn in place, below the lines that scroll by;
elsewhere it becomes a line like any other.
"""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from horovod.runner.lines import Line

_ERASE = b"\r\x1b[K"
_PLAIN = b"\x1b[0m"


@dataclass(eq=False)
class Source:
    """One stream of one rank."""

    rank: int
    stream: str  # "stdout" or "stderr"
    returned: bool = field(default=False, init=False)  # its last line ended in \r
    drawn: bool = field(default=False, init=False)  # something ended in \r since the last \n

    @property
    def prefix(self) -> bytes:
        return b"[%d]<%s>:" % (self.rank, self.stream.encode())


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
        self._fds = {"stdout": stdout, "stderr": stderr}
        self._terminals = {name for name, fd in self._fds.items() if os.isatty(fd)}
        self._timestamps = timestamps
        self._speaker = speaker
        self._bar: tuple[Source, bytes] | None = None
        self._drawn = False
        self.broken = False
        """A reader of our output went away, such as ``head`` or a closed terminal."""

    @property
    def is_terminal(self) -> bool:
        return bool(self._terminals)

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
        on_terminal = source.stream in self._terminals
        out = bytearray()
        bar_before = self._bar
        for line in lines:
            source.returned = line.end == b"\r"
            if source.returned:
                source.drawn |= bool(line.text)
                if line.text and on_terminal:
                    self._set_bar(source, line.text)
                elif line.text.strip():
                    out += self._format(source, line.text)
                continue
            shown = line.text
            if self._bar is not None and self._bar[0] is source:
                shown = shown or self._bar[1]  # "\r\n": what was drawn stays
                self._bar = None
            if shown or not source.drawn:
                out += self._format(source, shown)
            source.drawn = False
        if on_terminal and pending and source.returned:
            self._set_bar(source, pending)
        if out or self._bar is not bar_before:
            self._write(source.stream, bytes(out))

    def say(self, text: str) -> None:
        """A message of the launcher itself, on stderr."""
        self._write(
            "stderr",
            "".join(f"{self._speaker}: {line}\n" for line in text.splitlines()).encode(
                errors="backslashreplace"
            ),
        )

    def write(self, text: str) -> None:
        """Text for stderr as it is."""
        self._write("stderr", text.encode(errors="backslashreplace"))

    def finish(self) -> None:
        """Leave a bar that is still drawn where it is, and the cursor below it."""
        if self._bar is not None:
            source, text = self._bar
            self._bar = None
            self._write(source.stream, self._format(source, text))

    def _set_bar(self, source: Source, text: bytes) -> None:
        if self._bar is not None and self._bar[0].rank < source.rank:
            return  # bars of several ranks: the lowest rank's is shown
        self._bar = (source, text) if text.strip() else None

    def _format(self, source: Source, text: bytes) -> bytes:
        stamp = time.asctime().encode() if self._timestamps else b""
        return b"%s%s%s\n" % (stamp, source.prefix, text)

    def _write(self, stream: str, data: bytes) -> None:
        """Write whole lines, taking the bar away before and drawing it again after."""
        if stream in self._terminals:
            before = _ERASE if self._drawn else b""
            self._drawn = self._bar is not None
            data = before + data + self._draw()
        fd = self._fds[stream]
        view = memoryview(data)
        while view and not self.broken:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:  # somebody made the shared terminal non-blocking
                select.select([], [fd], [])
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.EIO):
                    raise
                self.broken = True

    def _draw(self) -> bytes:
        if self._bar is None:
            return b""
        source, text = self._bar
        columns = self.width - 1
        whole = self._format(source, text).rstrip(b"\n").decode(errors="ignore")
        cut = whole[:columns]
        return cut.encode() + (_PLAIN if "\x1b" in cut else b"")
