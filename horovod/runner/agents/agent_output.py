"""The agent's line to the launcher: events, and the workers' output.

Used by `agent`, on every host. Nothing here blocks: what the launcher does not take yet is kept,
and beyond a limit the workers' pipes are not read either, so that they wait and not we.
"""

from __future__ import annotations

import json
import os
import selectors

from horovod.runner.agents.frames import MARK, event_frame, output_frame

TYPE_CHECKING = False  # as in typing, whose import would delay the agent's start
if TYPE_CHECKING:
    from collections.abc import Container
    from typing import Any

_CHUNK = 1 << 16
_MOST_UNSENT = 4 << 20  # bytes
_DRAIN_READS = 32  # a pipe holds no more than this many chunks


class _Stream:
    """The reading end of a worker's stdout or stderr."""

    def __init__(self, fd: int, worker: int, kind: int) -> None:
        self.fd = fd
        self.worker = worker
        self.kind = kind


class Output:
    """Everything that goes to the launcher, on descriptor 1."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._streams: list[_Stream] = []
        self._paused = False
        self._unsent = bytearray(MARK)
        os.set_blocking(1, False)

    def emit(self, event: dict[str, Any]) -> None:
        """Tell the launcher something."""
        self._send(event_frame(json.dumps(event).encode()))

    def follow(self, fd: int, worker: int, kind: int) -> None:
        """Pass on what a worker writes into this pipe, until its end."""
        os.set_blocking(fd, False)
        stream = _Stream(fd, worker, kind)
        self._streams.append(stream)
        if not self._paused:
            self._listen(stream)

    def drain(self, workers: Container[int] | None = None) -> None:
        """Pass on what is in the pipes now; a foreign process may hold one open, and write on."""
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
        """Pass on what is there to read; False when there is no more, now or ever."""
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
            self._unsent.clear()  # the launcher is gone; we shall notice, nobody is left to tell
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
