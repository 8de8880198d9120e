"""The output of all workers: it goes to the console and to files, and a report gets the last lines.

`supervise` hands over what the agents send; jobs open one entry for each worker.
"""

from __future__ import annotations

import os
from collections.abc import Container
from contextlib import ExitStack
from typing import BinaryIO

from horovod.runner.output.console import Console, Source
from horovod.runner.output.lines import InterruptFilter, Line, LineSplitter
from horovod.runner.output.report import LaunchError, Tail
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
        directory: str | None = None,
    ) -> None:
        """Prepare for the output of workers.

        Args:
            console: Where lines are shown.
            shown: The ranks whose lines are shown; all by default.
            attached: The rank to which somebody is attached. Its output is shown at once and
                unchanged.
            watcher: What else gets the lines.
            directory: A folder for files that get the same bytes; none by default.
        """
        self._console = console
        self._watcher = watcher
        self._attached = attached
        self._shown = shown
        self.interrupted = False  # whether the launcher has sent the workers SIGINT
        self._directory = directory
        self._files = ExitStack()
        self._streams: dict[tuple[int, str], _Stream] = {}

    def open(self, worker: int, rank: int, folder: str = "") -> None:
        """Expect output of a worker.

        Args:
            worker: The worker's id.
            rank: The rank that the console shows before its lines.
            folder: The folder, in the directory of the files, for this worker.

        Raises:
            LaunchError: If its files cannot be written.
        """
        for stream in STREAMS:
            copy = self._open_file(folder, stream) if self._directory is not None else None
            self._streams[worker, stream] = _Stream(worker, rank, stream, copy)

    def _open_file(self, folder: str, stream: str) -> BinaryIO:
        path = os.path.join(self._directory or "", folder, stream)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            return self._files.enter_context(open(path, "wb", buffering=0))
        except OSError as error:
            raise LaunchError(
                f"argument --output-filename: cannot write {error.filename!r}: {error.strerror}",
                status=2,
            ) from None

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
        """Return the last lines that a worker wrote to stderr; none if it was not expected."""
        found = self._streams.get((worker, "stderr"))
        return [] if found is None else found.tail.lines()

    def log(self, worker: int) -> str | None:
        """Return the file that has all of a worker's stderr, if there is one."""
        found = self._streams.get((worker, "stderr"))
        return found.copy.name if found is not None and found.copy is not None else None

    def close(self) -> None:
        """Close the files."""
        self._files.close()

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
