"""The output of all workers: it goes to the console and to files, and a report gets the last lines.

`supervise` hands over what the agents send; jobs open one entry for each worker.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import BinaryIO

from horovod.runner.output.console import Console, Source
from horovod.runner.output.lines import InterruptFilter, Line, LineSplitter
from horovod.runner.output.report import Tail
from horovod.runner.output.watcher import JobWatcher

STREAMS = ("stdout", "stderr")


class _Stream:
    """One stream of one worker."""

    def __init__(self, worker: int, rank: int, stream: str, copy: BinaryIO | None) -> None:
        self.worker = worker
        self.source = Source(rank, stream)
        self.splitter = LineSplitter()
        self.tail = Tail()
        self.copy = copy
        self.interrupts = InterruptFilter()


class Outputs:
    """Distributes the output of all workers."""

    def __init__(
        self,
        console: Console,
        shown: Container[int] | None = None,
        attached: int | None = None,
        watcher: JobWatcher | None = None,
    ) -> None:
        """Prepare for the output of workers.

        Args:
            console: Where lines are shown.
            shown: The ranks whose lines are shown; all by default.
            attached: The rank to which somebody is attached. Its output is shown at once and
                unchanged.
            watcher: What else gets the lines.
        """
        self._console = console
        self._watcher = watcher
        self._attached = attached
        self._shown = shown
        self.interrupted = False  # whether the launcher has sent the workers SIGINT
        self._streams: dict[tuple[int, str], _Stream] = {}

    def open(self, worker: int, rank: int, copies: Mapping[str, BinaryIO]) -> None:
        """Expect output of a worker.

        Args:
            worker: The worker's id.
            rank: The rank that the console shows before its lines.
            copies: Files that get the same bytes, by the name of the stream.
        """
        for stream in STREAMS:
            self._streams[worker, stream] = _Stream(worker, rank, stream, copies.get(stream))

    def rename(self, worker: int, rank: int) -> None:
        """Show a worker's lines as those of another rank from now on."""
        for stream in STREAMS:
            self._streams[worker, stream].source.rank = rank

    def take(self, worker: int, stream: str, data: bytes) -> None:
        """Pass on bytes of a worker; empty data marks the end of the stream."""
        found = self._streams[worker, stream]
        if data and found.copy is not None:
            found.copy.write(data)
        if found.source.rank == self._attached:
            self._console.pass_through(stream, data)
        lines = found.splitter.feed(data) if data else found.splitter.finish()
        self._show(found, lines, is_last=not data)

    def tail(self, worker: int) -> list[str]:
        """Return the last lines that a worker wrote to stderr."""
        return self._streams[worker, "stderr"].tail.lines()

    def finish(self) -> None:
        """Show the unfinished lines of streams that have not ended."""
        for stream in self._streams.values():
            self._show(stream, stream.splitter.finish(), is_last=True)

    def _show(self, stream: _Stream, lines: list[Line], *, is_last: bool) -> None:
        stream.tail.add(lines)
        if self.interrupted and stream.source.stream == "stderr":
            lines = stream.interrupts.feed(lines)
            lines += stream.interrupts.finish() if is_last else []
        if lines and self._watcher is not None:
            source = stream.source
            self._watcher.output(stream.worker, source.rank, source.stream, lines)
        if stream.source.rank == self._attached:
            return
        if self._shown is None or stream.source.rank in self._shown:
            self._console.show(stream.source, lines, stream.splitter.pending)
