"""Cut a worker's output into lines, and leave out the tracebacks that Ctrl-C causes.

`outputs` feeds the bytes of a pipe to a `LineSplitter`; whole lines come out, however the reads
were cut. It works on bytes and not on text: neither byte that ends a line occurs inside a UTF-8
character, so characters stay whole without decoding, and output that is not UTF-8 passes unchanged.

Once the launcher has interrupted the workers, `outputs` passes each worker's stderr through an
`InterruptFilter`: a person who interrupts a job knows why it ends. Files, and the last lines kept
for a report, still have everything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

LONGEST = 1 << 20
"""The number of bytes after which a line without an end is cut, so that memory stays bounded."""

_END = re.compile(rb"[\r\n]")


class Line(NamedTuple):
    """A line and what ended it: a newline, a carriage return (a progress bar), or nothing."""

    text: bytes
    end: bytes


class LineSplitter:
    """Splits one stream at every ``\\n`` and ``\\r``."""

    def __init__(self, longest: int = LONGEST) -> None:
        self._longest = longest
        self._parts: list[bytes] = []
        self._length = 0

    @property
    def pending(self) -> bytes:
        """The unfinished line."""
        if len(self._parts) > 1:
            self._parts = [b"".join(self._parts)]
        return self._parts[0] if self._parts else b""

    def feed(self, data: bytes) -> list[Line]:
        """Return the lines that ``data`` completes."""
        lines: list[Line] = []
        start = 0
        for match in _END.finditer(data):
            self._append(data[start : match.start()], lines)
            lines.append(Line(self._take(), match.group()))
            start = match.end()
        self._append(data[start:], lines)
        return lines

    def finish(self) -> list[Line]:
        """Return the last line, if the stream ended without ending it."""
        text = self._take()
        return [Line(text, b"")] if text else []

    def _append(self, data: bytes, lines: list[Line]) -> None:
        if data:
            self._parts.append(data)
            self._length += len(data)
        while self._length > self._longest:
            whole = self._take()
            cut = self._longest
            while cut > self._longest - 3 and whole[cut] & 0xC0 == 0x80:  # inside a character
                cut -= 1
            lines.append(Line(whole[:cut], b""))
            self._parts = [whole[cut:]]
            self._length = len(whole) - cut

    def _take(self) -> bytes:
        text = self.pending
        self._parts = []
        self._length = 0
        return text


_BEGIN = re.compile(rb"Traceback \(most recent call last\):")
_BEFORE = re.compile(rb"Exception ignored in|Process \S+:$")
_INSIDE = re.compile(rb"\s|$|During handling of |The above exception was ")
_EXPECTED = re.compile(rb"(\w+\.)*(KeyboardInterrupt|HorovodInternalError|PeerLostError)\b")
"""Errors that an interrupt causes: on the rank itself, or because a peer ended before it."""


class InterruptFilter:
    """Holds back the lines of a traceback until its last line shows which error it is."""

    def __init__(self) -> None:
        self._held: list[Line] = []
        self._in_traceback = False
        self._is_expected = False

    def feed(self, lines: Sequence[Line]) -> list[Line]:
        """Return the lines to show, in order."""
        shown: list[Line] = []
        for line in lines:
            text = line.text
            if _BEGIN.match(text):
                self._in_traceback = True
            elif self._held and _INSIDE.match(text):
                pass  # of a traceback, or perhaps what leads to the next one
            elif self._in_traceback:
                self._in_traceback = False
                self._is_expected = _EXPECTED.match(text) is not None
            else:
                shown += self.finish()
                if not _BEFORE.match(text):
                    shown.append(line)
                    continue
            self._held.append(line)
        return shown

    def finish(self) -> list[Line]:
        """Return the lines that are still held back, unless an interrupt explains them."""
        held, is_expected = self._held, self._is_expected and not self._in_traceback
        self._held, self._is_expected = [], False
        return [] if is_expected else held
