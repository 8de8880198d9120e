"""Who is up and who is awaited, while a job starts or an elastic one forms anew.

`static_job` and the elastic driver call `Progress.update` about once a second with what they wait
for. On a terminal that is one line at the bottom that changes in place; in a file or a pipe a wait
is worth a line only when it is long. With --progress the line says how the job goes in between.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from horovod.runner.output.colours import Colour
from horovod.runner.output.console import Console
from horovod.runner.slots.hosts import Slot

TICK = 1.0
"""Seconds between two calls of `Progress.update`."""

_FIRST_DRAWN = 1.0
"""Seconds of waiting that nobody needs to hear about."""

_BETWEEN_LINES = 30.0
"""Seconds of waiting between two lines where there is no terminal."""

_NAMED = 4

_CALLED_INIT = re.compile(r"init1//identity/(\d+)")
"""What a rank writes to the store in its first ``hvd.init()``, before it waits for the others."""


class Progress:
    """What the launcher waits for, on its console; else how the job goes, where that is wanted."""

    def __init__(
        self,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        status: Callable[[], str | None] = lambda: None,
    ) -> None:
        """``status`` gives a line on how the job goes; see `JobWatcher.status`."""
        self._console = console
        self._clock = clock
        self._status = status
        self._since: float | None = None  # when this wait began
        self._told = 0.0

    def update(self, awaited: str) -> None:
        """``awaited`` for people; empty when there is nothing to wait for, which ends the wait."""
        now = self._clock()
        if not awaited:
            self._since = None
            self._show_status(now)
            return
        if self._since is None:
            self._since = self._told = now
        waited = now - self._since
        if self._console.shows_progress:
            if waited >= _FIRST_DRAWN:
                self._console.progress(f"{awaited} ({waited:.0f} s)")
        elif now - self._told >= _BETWEEN_LINES:
            self._told = now
            self._console.say(f"{awaited} (for {waited:.0f} s so far)", Colour.ATTENTION)

    @property
    def has_status(self) -> bool:
        """Whether there is something to show also when nobody is awaited."""
        return self._status() is not None

    def _show_status(self, now: float) -> None:
        line = self._status() or ""
        if self._console.shows_progress:
            self._console.progress(line, Colour.SPEAKER)
        elif line and now - self._told >= _BETWEEN_LINES:
            self._told = now
            self._console.say(line)


def some(names: Sequence[str]) -> str:
    """``a, b and c``, or the first few and how many more."""
    if len(names) > _NAMED:
        return f"{', '.join(names[:_NAMED])} and {len(names) - _NAMED} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


class Start:
    """How far the start of a static job has come; the job adds to the sets as it hears."""

    def __init__(self, slots: Sequence[Slot], hosts: Sequence[str], all_local: bool) -> None:
        self.up: set[str] = set()  # hosts whose agent runs
        self.connected: set[str] = set()  # hosts that have found the way to this machine
        self.started: set[int] = set()  # ranks
        self.in_init: set[int] = set()  # ranks that have called hvd.init()
        self.ended: set[int] = set()
        self._slots = slots
        self._hosts = hosts
        self._all_local = all_local

    def note_key(self, key: str) -> None:
        """A key of the job's store got a value; called in a thread of the store's server."""
        found = _CALLED_INIT.fullmatch(key)
        if found is not None:
            self.in_init.add(int(found[1]))

    @property
    def is_complete(self) -> bool:
        """Nobody is awaited any more."""
        ranks = {slot.rank for slot in self._slots}
        return ranks <= self.started and ranks <= self.in_init | self.ended

    def awaited(self, nothing_said: bool = False) -> str:
        """Who is awaited, for people; empty if nobody is.

        With ``nothing_said`` (by any rank) ranks that import their libraries are awaited, too.
        """
        hosts, size = len(self._hosts), len(self._slots)
        silent = [name for name in self._hosts if name not in self.up]
        if silent:
            return f"{hosts - len(silent)} of {hosts} hosts are up, waiting for {some(silent)}"
        seeking = [name for name in self._hosts if name not in self.connected]
        if seeking and not self._all_local:
            return f"all hosts are up, waiting for {some(seeking)} to connect to this machine"
        missing = [slot for slot in self._slots if slot.rank not in self.started]
        if missing:
            return f"{len(self.started)} of {size} ranks run, waiting for {self._some(missing)}"
        called = self.in_init - self.ended
        absent = [slot for slot in self._slots if slot.rank not in self.in_init | self.ended]
        if absent and not called and nothing_said:
            ranks = "1 rank" if size == 1 else f"{size} ranks"
            return f"starting {ranks}: no output and no hvd.init() so far"
        if not called or not absent:  # a script need not call it at all
            return ""
        return f"{len(called)} of {size} ranks are in hvd.init(), waiting for {self._some(absent)}"

    def _some(self, slots: Sequence[Slot]) -> str:
        where = "" if self._all_local else " on {}"
        return some([f"rank {slot.rank}{where.format(slot.hostname)}" for slot in slots])
