"""Cutting a worker's output into lines.

`supervise` feeds what it reads from a pipe; whole lines come out, however the reads were cut.
Bytes, not text: neither byte that ends a line occurs inside a UTF-8 character, so characters stay
whole without decoding, and output that is not UTF-8 passes unharmed.
"""

from __future__ import annotations

import re
from typing import NamedTuple

LONGEST = 1 << 20
"""Bytes after which a line without an end is cut, so that memory stays bounded."""

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
        """The lines that ``data`` completes."""
        lines: list[Line] = []
        start = 0
        for match in _END.finditer(data):
            self._append(data[start : match.start()], lines)
            lines.append(Line(self._take(), match.group()))
            start = match.end()
        self._append(data[start:], lines)
        return lines

    def finish(self) -> list[Line]:
        """The last line, where the stream ended without ending it."""
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
