"""Leaves out the tracebacks with which ranks answer Ctrl-C: who interrupts a job knows why it ends.

`outputs` passes a worker's stderr through a filter of its own once the launcher has interrupted the
workers. Files, and the last lines kept for a report, still have everything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from horovod.runner.output.lines import Line

_BEGIN = re.compile(rb"Traceback \(most recent call last\):")
_BEFORE = re.compile(rb"Exception ignored in|Process \S+:$")
_INSIDE = re.compile(rb"\s|$|During handling of |The above exception was ")
_EXPECTED = re.compile(rb"(\w+\.)*(KeyboardInterrupt|HorovodInternalError|PeerLostError)\b")
"""What an interrupt raises: on the rank itself, or because a peer has ended before this one."""


class InterruptFilter:
    """Holds the lines of a traceback back until its last line shows what it is about."""

    def __init__(self) -> None:
        self._held: list[Line] = []
        self._in_traceback = False
        self._is_expected = False

    def feed(self, lines: Sequence[Line]) -> list[Line]:
        """The lines to show, in their order."""
        shown: list[Line] = []
        for line in lines:
            text = line.text
            if _BEGIN.match(text):
                self._in_traceback = True
                self._held.append(line)
            elif self._in_traceback and _INSIDE.match(text):
                self._held.append(line)
            elif self._in_traceback:
                self._in_traceback = False
                self._is_expected = _EXPECTED.match(text) is not None
                self._held.append(line)
            elif self._held and _INSIDE.match(text):  # perhaps what leads to the next traceback
                self._held.append(line)
            else:
                shown += self.finish()
                (self._held if _BEFORE.match(text) else shown).append(line)
        return shown

    def finish(self) -> list[Line]:
        """What is still held back, unless an interrupt explains it."""
        held, is_expected = self._held, self._is_expected and not self._in_traceback
        self._held, self._is_expected = [], False
        return [] if is_expected else held
