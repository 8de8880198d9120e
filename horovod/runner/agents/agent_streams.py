"""The agent's pipes: to the launcher, and to and from its workers.

The stream to the launcher begins with `MARK`, because a login shell may have written something
before the agent started. Frames follow: u32 length of the content, u8 kind, content, and a newline,
because Slurm's srun passes on whole lines only. The kinds `STDOUT` and `STDERR` carry output of a
worker: its u32 id, then bytes, of which there are none at the end of the stream. `EVENT` carries an
event of the agent in JSON. In the launcher `host_agent` reads the stream with a `FrameReader`.

On the host `agent` uses a `LauncherOutput` for its events and the workers' output, and a
`WorkerInput` for a worker that gets the launcher's stdin (``horovodrun --attach``). Nothing here
blocks: bytes that the other side does not take yet are kept. Beyond a limit the workers' pipes are
not read either, so that the workers wait and the agent does not.
"""

from __future__ import annotations

import json
import os
import selectors
import struct

MARK = b"\nhorovod-agent-1\n"
EVENT, STDOUT, STDERR = 0, 1, 2
STREAMS = {STDOUT: "stdout", STDERR: "stderr"}

_FRAME = struct.Struct("!IB")
_WORKER = struct.Struct("!I")
_END = b"\n"


def event_frame(content: bytes) -> bytes:
    """Return the frame of an event in JSON."""
    return _FRAME.pack(len(content), EVENT) + content + _END


def output_frame(kind: int, worker: int, data: bytes) -> bytes:
    """Return the frame of a worker's output; ``kind`` is `STDOUT` or `STDERR`."""
    return _FRAME.pack(_WORKER.size + len(data), kind) + _WORKER.pack(worker) + data + _END


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
        while len(self._input) - start >= _FRAME.size:
            length, kind = _FRAME.unpack_from(self._input, start)
            content = start + _FRAME.size
            end = content + length
            if len(self._input) < end + len(_END):
                break
            worker = 0
            start = end + len(_END)
            if kind != EVENT:
                (worker,) = _WORKER.unpack_from(self._input, content)
                content += _WORKER.size
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


TYPE_CHECKING = False  # as in typing, whose import would delay the agent's start
if TYPE_CHECKING:
    from collections.abc import Container
    from typing import Any


class WorkerInput:
    """The writing end of a worker's stdin."""

    def __init__(self, fd: int, selector: selectors.BaseSelector) -> None:
        self._fd = fd
        self._selector = selector
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
            if self._fd in self._selector.get_map():
                self._selector.unregister(self._fd)
            os.close(self._fd)

    def _flush(self) -> None:
        if self._closed:
            return
        try:
            while self._unsent:
                del self._unsent[: os.write(self._fd, self._unsent)]
        except BlockingIOError:
            if self._fd not in self._selector.get_map():
                self._selector.register(self._fd, selectors.EVENT_WRITE, self._flush)
            return
        except OSError:
            self._ended = True  # nobody reads any more
        if self._ended:
            self.close()
        elif self._fd in self._selector.get_map():
            self._selector.unregister(self._fd)


_CHUNK = 1 << 16
_MOST_UNSENT = 4 << 20  # bytes
_DRAIN_READS = 32  # a pipe holds no more than this many chunks


class _Stream:
    """The reading end of a worker's stdout or stderr."""

    def __init__(self, fd: int, worker: int, kind: int) -> None:
        self.fd = fd
        self.worker = worker
        self.kind = kind


class LauncherOutput:
    """Writes everything that goes to the launcher, on descriptor 1."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._streams: list[_Stream] = []
        self._paused = False
        self._unsent = bytearray(MARK)
        os.set_blocking(1, False)

    def emit(self, event: dict[str, Any]) -> None:
        """Send an event to the launcher."""
        self._send(event_frame(json.dumps(event).encode()))

    def follow(self, fd: int, worker: int, kind: int) -> None:
        """Pass on what a worker writes into a pipe, until its end.

        Args:
            fd: The reading end of the pipe, which is closed at the end.
            worker: The worker's id.
            kind: `frames.STDOUT` or `frames.STDERR`.
        """
        os.set_blocking(fd, False)
        stream = _Stream(fd, worker, kind)
        self._streams.append(stream)
        if not self._paused:
            self._listen(stream)

    def drain(self, workers: Container[int] | None = None) -> None:
        """Pass on what is in the pipes now, of these workers or of all.

        The number of reads is bounded, because a process that outlives its worker may hold the
        pipe open and go on writing.
        """
        for stream in list(self._streams):
            if workers is None or stream.worker in workers:
                for _ in range(_DRAIN_READS):
                    if not self._forward(stream):
                        break

    def finish(self) -> None:
        """Wait until the launcher has taken everything."""
        os.set_blocking(1, True)
        self._flush()

    def _listen(self, stream: _Stream) -> None:
        self._selector.register(stream.fd, selectors.EVENT_READ, lambda: self._forward(stream))

    def _forward(self, stream: _Stream) -> bool:
        """Pass on one chunk; return False if there is nothing to read, now or ever."""
        try:
            data = os.read(stream.fd, _CHUNK)
        except BlockingIOError:
            return False
        self._send(output_frame(stream.kind, stream.worker, data))
        if not data:
            if not self._paused:
                self._selector.unregister(stream.fd)
            os.close(stream.fd)
            self._streams.remove(stream)
        return bool(data)

    def _send(self, frame: bytes) -> None:
        self._unsent += frame
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(1, self._unsent[:_CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # the launcher is gone, which the end of stdin reports
        waiting = 1 in self._selector.get_map()
        if self._unsent and not waiting:
            self._selector.register(1, selectors.EVENT_WRITE, self._flush)
        elif waiting and not self._unsent:
            self._selector.unregister(1)
        self._pause(len(self._unsent) > (_MOST_UNSENT // 2 if self._paused else _MOST_UNSENT))

    def _pause(self, pause: bool) -> None:
        if pause == self._paused:
            return
        self._paused = pause
        for stream in self._streams:
            if pause:
                self._selector.unregister(stream.fd)
            else:
                self._listen(stream)
