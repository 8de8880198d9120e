"""The agent's pipes: to the launcher, and to and from its workers.

The stream to the launcher begins with `MARK`, because a login shell may have written something
before the agent started. Frames follow: u32 length of the content, u8 kind, content, and a newline,
because Slurm's srun passes on whole lines only. The kinds `STDOUT` and `STDERR` carry output of a
worker: its u32 id, then bytes, of which there are none at the end of the stream. `EVENT` carries an
event of the agent in JSON. In the launcher `host_agent` reads the stream with a `FrameReader`.
Commands for the agent, made by `command_frame`, are a u32 length and a dict in the format of
`marshal`, which costs the least to read. It is safe only for bytes from a trusted sender: the agent
reads it from the launcher, which also sends its source; the launcher never reads it from hosts.

On the host `agent` uses a `LauncherOutput` for its events and the workers' output, and a
`WorkerInput` for a worker that gets the launcher's stdin (``horovodrun --attach``). Only its
`Poller` blocks: bytes that the other side does not take yet are kept. Beyond a limit the workers'
pipes are not read either, so that the workers wait and the agent does not.

`Poller` and `to_json` do a small part of what `selectors` and `json` do, because importing those
takes longer than everything else that an agent does before it is up.
"""

from __future__ import annotations

import marshal
import os
import select
import time

TYPE_CHECKING = False  # as in typing, whose import would delay the agent's start
if TYPE_CHECKING:
    from collections.abc import Callable, Container
    from typing import Any

MARK = b"\nhorovod-agent-1\n"
EVENT, STDOUT, STDERR = 0, 1, 2
STREAMS = {STDOUT: "stdout", STDERR: "stderr"}

MARSHAL_VERSION = 4
"""The format of `marshal` that every Python from 3.4 on reads, as long as it has no code in it."""

_LENGTH_BYTES = 4
_HEADER_BYTES = _LENGTH_BYTES + 1
_WORKER_BYTES = 4
_END = b"\n"
_CHUNK = 1 << 16


def event_frame(content: bytes) -> bytes:
    """Return the frame of an event in JSON."""
    return _frame(EVENT, b"", content)


def output_frame(kind: int, worker: int, data: bytes) -> bytes:
    """Return the frame of a worker's output; ``kind`` is `STDOUT` or `STDERR`."""
    return _frame(kind, worker.to_bytes(_WORKER_BYTES, "big"), data)


def _frame(kind: int, start: bytes, rest: bytes) -> bytes:
    length = len(start) + len(rest)
    return length.to_bytes(_LENGTH_BYTES, "big") + bytes([kind]) + start + rest + _END


def command_frame(command: dict[str, Any]) -> bytes:
    """Return the frame of a command; it may have anything in it that JSON has, and bytes."""
    content = marshal.dumps(command, MARSHAL_VERSION)
    return len(content).to_bytes(_LENGTH_BYTES, "big") + content


class CommandReader:
    """Cuts the stream from the launcher into commands."""

    def __init__(self) -> None:
        self._input = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Return the commands that ``data`` completes."""
        self._input += data
        commands = []
        while len(self._input) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._input[:_LENGTH_BYTES], "big")
            if len(self._input) < end:
                break
            commands.append(marshal.loads(self._input[_LENGTH_BYTES:end]))
            self._input = self._input[end:]
        return commands


class FrameReader:
    """Cuts the stream into frames. `before` has the last bytes that came ahead of the mark."""

    def __init__(self) -> None:
        self._input = bytearray()
        self._begun = False
        self.before = b""

    def feed(self, data: bytes) -> list[tuple[int, int, bytes]]:
        """Return the frames that ``data`` completes: kind, worker (0 for an event) and content."""
        self._input += data
        if not self._begun and not self._find_mark():
            return []
        frames = []
        start = 0
        while len(self._input) - start >= _HEADER_BYTES:
            content = start + _HEADER_BYTES
            kind = self._input[content - 1]
            end = content + int.from_bytes(self._input[start : content - 1], "big")
            if len(self._input) < end + len(_END):
                break
            worker = 0
            start = end + len(_END)
            if kind != EVENT:
                worker = int.from_bytes(self._input[content : content + _WORKER_BYTES], "big")
                content += _WORKER_BYTES
            frames.append((kind, worker, bytes(self._input[content:end])))
        del self._input[:start]
        return frames

    def _find_mark(self) -> bool:
        at = self._input.find(MARK)
        kept = at if at >= 0 else max(0, len(self._input) - len(MARK))
        self.before = (self.before + bytes(self._input[:kept]))[-4000:]
        del self._input[: at + len(MARK) if at >= 0 else kept]
        self._begun = at >= 0
        return self._begun


def to_json(value: Any) -> str:
    """Return a value as JSON; the keys of a dict must be strings."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{to_json(key)}:{to_json(value[key])}' for key in value)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(to_json, value))}]"
    if isinstance(value, int):
        return str(value).lower()
    if isinstance(value, str) and value.isascii() and value.isprintable() and "\\" not in value:
        return '"' + value.replace('"', '\\"') + '"'
    import json

    return json.dumps(value)


class Poller:
    """Calls a function when a descriptor is ready."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._callbacks: dict[int, Callable[[], object]] = {}

    def register(self, fd: int, callback: Callable[[], object], *, writing: bool = False) -> None:
        """Call ``callback`` whenever the descriptor can be read, or written, without blocking."""
        self._poll.register(fd, select.POLLOUT if writing else select.POLLIN)
        self._callbacks[fd] = callback

    def unregister(self, fd: int) -> None:
        self._poll.unregister(fd)
        del self._callbacks[fd]

    def write(self, fd: int, unsent: bytearray, callback: Callable[[], object]) -> None:
        """Write what the other side takes now; call ``callback`` when it takes more."""
        write_unsent(fd, unsent)
        if unsent and fd not in self._callbacks:
            self.register(fd, callback, writing=True)
        elif fd in self._callbacks and not unsent:
            self.unregister(fd)

    def wait(self, seconds: float | None) -> None:
        """Wait until a descriptor is ready, or for this time; call what was registered for it."""
        for fd, _ in self._poll.poll(None if seconds is None else seconds * 1000):
            callback = self._callbacks.get(fd)  # none if a callback has just unregistered it
            if callback is not None:
                callback()


def write_unsent(fd: int, unsent: bytearray) -> None:
    """Write the bytes that the other side takes now, and remove them; of a closed pipe, all."""
    try:
        while unsent:
            del unsent[: os.write(fd, unsent[:_CHUNK])]
    except BlockingIOError:
        pass
    except OSError:
        unsent.clear()  # nobody reads: what we read from the other side tells us that it is gone


class WorkerInput:
    """The writing end of a worker's stdin."""

    def __init__(self, fd: int, poller: Poller) -> None:
        self._fd = fd
        self._poller = poller
        self._unsent = bytearray()
        self._ended = False
        self._closed = False
        os.set_blocking(fd, False)

    def feed(self, data: bytes) -> None:
        """Pass data on to the worker; empty data closes its stdin."""
        self._unsent += data
        self._ended |= not data
        self._flush()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._unsent:
                self._poller.unregister(self._fd)
            os.close(self._fd)

    def _flush(self) -> None:
        if not self._closed:
            self._poller.write(self._fd, self._unsent, self._flush)
            if self._ended and not self._unsent:
                self.close()


_MOST_UNSENT = 4 << 20  # bytes
_DRAIN_READS = 32  # a pipe holds no more than this many chunks

_PULSE = 30.0
"""Seconds between signs of life. The connection, such as sshd's, may not notice for hours that the
launcher is gone, or has given this host up, while nothing is sent."""


class LauncherOutput:
    """Writes everything that goes to the launcher, on descriptor 1."""

    def __init__(self, poller: Poller) -> None:
        self._poller = poller
        self._streams: dict[int, tuple[int, int]] = {}  # by descriptor: worker and kind
        self._paused = False
        self.next_pulse = time.monotonic() + _PULSE  # when `pulse` has something to do
        self._unsent = bytearray(MARK)
        os.set_blocking(1, False)

    def emit(self, event: dict[str, Any]) -> None:
        """Send an event to the launcher."""
        self._send(event_frame(to_json(event).encode()))

    def pulse(self) -> None:
        """Send a sign of life if it is time for one."""
        if time.monotonic() >= self.next_pulse:
            self.next_pulse = time.monotonic() + _PULSE
            self.emit({"alive": True})

    def follow(self, fd: int, worker: int, kind: int) -> None:
        """Pass on what a worker writes into a pipe, until its end.

        Args:
            fd: The reading end of the pipe, which is closed at the end.
            worker: The worker's id.
            kind: `STDOUT` or `STDERR`.
        """
        os.set_blocking(fd, False)
        self._streams[fd] = worker, kind
        if not self._paused:
            self._listen(fd)

    def drain(self, workers: Container[int] | None = None) -> None:
        """Pass on what is in the pipes now, of these workers or of all.

        The number of reads is bounded, because a process that outlives its worker may hold the
        pipe open and go on writing.
        """
        for fd, (worker, _) in list(self._streams.items()):
            if workers is None or worker in workers:
                for _ in range(_DRAIN_READS):
                    if not self._forward(fd):
                        break

    def finish(self) -> None:
        """Wait until the launcher has taken everything."""
        os.set_blocking(1, True)
        self._flush()

    def _listen(self, fd: int) -> None:
        self._poller.register(fd, lambda: self._forward(fd))

    def _forward(self, fd: int) -> bool:
        """Pass on one chunk; return False if there is nothing to read, now or ever."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        worker, kind = self._streams[fd]
        self._send(output_frame(kind, worker, data))
        if not data:
            if not self._paused:
                self._poller.unregister(fd)
            os.close(fd)
            del self._streams[fd]
        return bool(data)

    def _send(self, frame: bytes) -> None:
        self._unsent += frame
        self._flush()

    def _flush(self) -> None:
        self._poller.write(1, self._unsent, self._flush)
        # Reading resumes at half of the limit, so that it does not stop and start all the time.
        self._pause(len(self._unsent) > (_MOST_UNSENT // 2 if self._paused else _MOST_UNSENT))

    def _pause(self, pause: bool) -> None:
        if pause == self._paused:
            return
        self._paused = pause
        for fd in self._streams:
            if pause:
                self._poller.unregister(fd)
            else:
                self._listen(fd)
