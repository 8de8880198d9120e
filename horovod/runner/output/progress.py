"""Show which hosts and ranks a job waits for, while it starts or an elastic job re-forms.

The job controller calls `Progress.update` twice a second and says what the job waits for. On a
terminal that is one line at the bottom, which is redrawn; in a file or a pipe only a long wait is
worth a line. With --progress the line otherwise says how the job goes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from horovod.common.topology import Slot
from horovod.observe.reports.amounts import count_of, join_words
from horovod.runner.output.console import Colour, Console

_FIRST_DRAWN = 1.0
"""Seconds of waiting before the first line: nobody needs to hear about shorter waits."""

_BETWEEN_LINES = 30.0
"""Seconds between two lines where there is no terminal."""

_NAMED = 4

_CALLED_INIT = re.compile(r"init1//identity/(\d+)")
"""The key that a rank writes to the store in its first ``hvd.init()``, before it waits for the
others."""


class Progress:
    """Shows on the console what the launcher waits for, or else how the job goes."""

    def __init__(
        self,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        status: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Prepare to show progress.

        Args:
            console: Where it is shown.
            clock: Returns the time in seconds.
            status: Returns a line on how the job goes; see `JobWatcher.status`.
        """
        self._console = console
        self._clock = clock
        self._status = status
        self._wait_start: float | None = None  # None: nothing is waited for
        self._last_line = 0.0  # when the last line was written, where there is no terminal

    def update(self, awaited: str) -> None:
        """Say what is waited for; an empty text ends the wait."""
        now = self._clock()
        if not awaited:
            self._wait_start = None
            self._show_status(now)
            return
        if self._wait_start is None:
            self._wait_start = self._last_line = now
        waited = now - self._wait_start
        if self._console.shows_progress:
            if waited >= _FIRST_DRAWN:
                self._console.progress(f"{awaited} ({waited:.0f} s)")
        elif now - self._last_line >= _BETWEEN_LINES:
            self._last_line = now
            self._console.say(f"{awaited} (for {waited:.0f} s so far)", Colour.ATTENTION)

    @property
    def has_status(self) -> bool:
        """Whether there is something to show even if nothing is waited for."""
        return self._status() is not None

    def _show_status(self, now: float) -> None:
        line = self._status() or ""
        if self._console.shows_progress:
            self._console.progress(line, Colour.SPEAKER)
        elif line and now - self._last_line >= _BETWEEN_LINES:
            self._last_line = now
            self._console.say(line)


def list_some(names: Sequence[str]) -> str:
    """Return ``a, b and c``, or the first few names and how many more there are."""
    return join_words(names, _NAMED)


class StartProgress:
    """The progress of the start of a job with fixed ranks. The job updates its sets of ranks."""

    def __init__(self, slots: Sequence[Slot], hosts: Sequence[str], all_local: bool) -> None:
        self.hosts_up: set[str] = set()  # hosts whose agent runs
        self.connected: set[str] = set()  # hosts that have found the way to this machine
        self.started: set[int] = set()  # ranks
        self.in_init: set[int] = set()  # ranks that have called hvd.init()
        self.ended: set[int] = set()
        self._slots = slots
        self._hosts = hosts
        self._all_local = all_local

    def note_key(self, key: str) -> None:
        """Take notice of a key that got a value. A thread of the store's server calls this."""
        found = _CALLED_INIT.fullmatch(key)
        if found is not None:
            self.in_init.add(int(found[1]))

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have started and have called ``hvd.init()`` or ended."""
        ranks = {slot.rank for slot in self._slots}
        return ranks <= self.started and ranks <= self.in_init | self.ended

    def describe_awaited(self, nothing_said: bool = False) -> str:
        """Return a line for people about what the job waits for; empty if for nothing.

        Args:
            nothing_said: Whether no rank has written anything. Then the line also says that ranks
                have not called ``hvd.init()``: they may still import their libraries.
        """
        hosts, size = len(self._hosts), len(self._slots)
        silent = [name for name in self._hosts if name not in self.hosts_up]
        if silent:
            return f"{hosts - len(silent)} of {hosts} hosts are up, waiting for {list_some(silent)}"
        seeking = [name for name in self._hosts if name not in self.connected]
        if seeking and not self._all_local:
            return f"all hosts are up, waiting for {list_some(seeking)} to connect to this machine"
        missing = [slot for slot in self._slots if slot.rank not in self.started]
        if missing:
            return (
                f"{len(self.started)} of {size} ranks run, waiting for {self._list_some(missing)}"
            )
        called = self.in_init - self.ended
        absent = [slot for slot in self._slots if slot.rank not in self.in_init | self.ended]
        if absent and not called and nothing_said:
            return f"starting {count_of(size, 'rank')}: no output and no hvd.init() so far"
        if not called or not absent:  # a script need not call it at all
            return ""
        others = self._list_some(absent)
        return f"{len(called)} of {size} ranks are in hvd.init(), waiting for {others}"

    def _list_some(self, slots: Sequence[Slot]) -> str:
        where = "" if self._all_local else " on {}"
        return list_some([f"rank {slot.rank}{where.format(slot.hostname)}" for slot in slots])
