"""Watching a running job: forward output, notice the first failure, obey signals.

`launch` calls `supervise` once the workers are started. One thread, one selector over the
workers' pipes, the guard's events and the signals: it sleeps until something happens.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

from horovod.runner.console import Console, Source
from horovod.runner.lines import Line, LineSplitter
from horovod.runner.report import Exit, Outcome, Tail, first_to_fail
from horovod.runner.workers import Workers, kill_groups

FAILURE_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for the other ranks after one has failed."""

INTERRUPT_GRACE = 30.0
"""The same after Ctrl-C or SIGTERM: time to write a checkpoint."""

_CHUNK = 1 << 16


class _Stream:
    """One pipe of one worker."""

    def __init__(self, fd: int, rank: int, stream: str, copy: BinaryIO | None) -> None:
        self.fd = fd
        self.source = Source(rank, stream)
        self.splitter = LineSplitter()
        self.tail = Tail()
        self.copy = copy


class Supervisor:
    """Drives one job from "started" to "nothing left"."""

    def __init__(
        self,
        workers: Workers,
        console: Console,
        copies: dict[tuple[int, str], BinaryIO],
        *,
        verbose: bool = False,
    ) -> None:
        self._workers = workers
        self._console = console
        self._verbose = verbose
        self._outcome = Outcome()
        self._pids: dict[int, int] = {}
        self._running: set[int] = set()
        self._finished = False
        self._stopping = False
        self._signals: list[int] = []
        self._announced = 0
        self._selector = selectors.DefaultSelector()
        self._streams = {
            fd: _Stream(fd, rank, stream, copies.get((rank, stream)))
            for fd, (rank, stream) in workers.outputs.items()
        }

    def run(self) -> Outcome:
        """Until the guard has ended, which it does when no process of the job is left."""
        for stream in self._streams.values():
            self._selector.register(stream.fd, selectors.EVENT_READ, stream)
        self._selector.register(self._workers.events_fd, selectors.EVENT_READ, "events")
        with self._signals_wake_us():
            guard_alive = True
            while guard_alive:
                for key, _ in self._selector.select():
                    if isinstance(key.data, _Stream):
                        self._forward(key.data)
                    elif key.data == "events":
                        guard_alive = self._take_events()
                    else:
                        key.data()
            self._drain()
        self._console.finish()
        self._selector.close()
        self._outcome.output_lost = self._console.broken
        return self._outcome

    def stderr_tail(self, rank: int) -> list[str]:
        """The last lines that a rank wrote to stderr."""
        return next(
            stream.tail.lines()
            for stream in self._streams.values()
            if stream.source.rank == rank and stream.source.stream == "stderr"
        )

    # -- output ----------------------------------------------------------------------------

    def _forward(self, stream: _Stream) -> bool:
        """Pass on what is there to read; False when there is no more, now or ever."""
        try:
            data = os.read(stream.fd, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            lines = stream.splitter.feed(data)
            if stream.copy is not None:
                stream.copy.write(data)
        else:
            lines = stream.splitter.finish()
            self._selector.unregister(stream.fd)
        self._show(stream, lines)
        if self._console.broken:
            self._stop(FAILURE_GRACE)
        return bool(data)

    def _show(self, stream: _Stream, lines: list[Line]) -> None:
        stream.tail.add(lines)
        self._console.show(stream.source, lines, stream.splitter.pending)

    def _drain(self) -> None:
        """Read what is left, without waiting for a foreign process that may hold a pipe."""
        for fd, stream in self._streams.items():
            if fd in self._selector.get_map():
                os.set_blocking(fd, False)
                while self._forward(stream):
                    pass
                self._show(stream, stream.splitter.finish())

    # -- workers ---------------------------------------------------------------------------

    def _take_events(self) -> bool:
        events = self._workers.events()
        if events is None:
            self._guard_ended()
            return False
        for event in events:
            self._take(event)
        return True

    def _take(self, event: dict[str, Any]) -> None:
        if "started" in event:
            self._pids = dict(event["started"])
            self._running = set(self._pids)
            for rank, pid in self._pids.items() if self._verbose else ():
                self._console.say(f"rank {rank} started, pid {pid}")
        elif "exited" in event:
            self._take_exits([Exit(rank, self._pids[rank], code) for rank, code in event["exited"]])
        elif "failed" in event:
            number = event["failed"]["errno"]
            self._stopping = True
            self._outcome.problem = (
                f"cannot start rank {event['failed']['rank']}: {os.strerror(number)}"
            )
            self._outcome.problem_status = 126
        elif "stuck" in event:
            pids = ", ".join(map(str, event["stuck"]))
            self._console.say(f"these processes did not end even after SIGKILL: {pids}")
        else:
            self._finished = True

    def _take_exits(self, batch: Sequence[Exit]) -> None:
        self._outcome.exits += batch
        self._running -= {one.rank for one in batch}
        for one in batch if self._verbose else ():
            self._console.say(f"rank {one.rank} ended: {one.describe()}")
        failure = first_to_fail(batch)
        if failure is None or self._stopping or self._signals:
            return
        self._outcome.first_failure = failure
        others = f"; stopping the other {len(self._running)}" if self._running else ""
        self._console.say(f"rank {failure.rank} failed: {failure.describe()}{others}")
        self._stop(FAILURE_GRACE)

    def _stop(self, grace: float) -> None:
        if not self._stopping:
            self._stopping = True
            self._workers.stop(grace)

    def _guard_ended(self) -> None:
        if self._finished:
            return
        kill_groups([self._pids[rank] for rank in self._running])
        if not self._outcome.problem:
            self._outcome.problem = (
                f"the process that watches over the workers (pid {self._workers.guard_pid}) died; "
                f"the workers were killed"
            )

    # -- signals ---------------------------------------------------------------------------

    @contextmanager
    def _signals_wake_us(self) -> Iterator[None]:
        """Ctrl-C, SIGTERM and a closed terminal end the job instead of just the launcher."""
        wakeup, waker = socket.socketpair()
        wakeup.setblocking(False)
        waker.setblocking(False)
        self._selector.register(wakeup, selectors.EVENT_READ, lambda: self._announce(wakeup))
        old_waker = signal.set_wakeup_fd(waker.fileno())
        old = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup asked for this
                old[number] = signal.signal(number, self._interrupt)
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(old_waker)
            wakeup.close()
            waker.close()

    def _interrupt(self, number: int, _frame: object) -> None:
        # Here and not in the loop, which may be blocked writing to a terminal that is paused.
        self._signals.append(number)
        self._workers.stop(INTERRUPT_GRACE if len(self._signals) == 1 else 0)

    def _announce(self, wakeup: socket.socket) -> None:
        wakeup.recv(64)
        if not self._signals:
            return
        if self._outcome.interrupted is None:
            self._outcome.interrupted = self._signals[0]
        if self._announced == 0:
            name = signal.Signals(self._signals[0]).name
            self._console.say(
                f"got {name}: asked the workers to end, and waiting up to {INTERRUPT_GRACE:.0f} s; "
                f"once more kills them at once"
            )
        if self._announced < 2 <= len(self._signals):
            self._console.say("killing the workers")
        self._announced = len(self._signals)
