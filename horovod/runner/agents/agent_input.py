"""A worker's stdin, where the launcher passes its own on (``horovodrun --attach``).

Used by `agent`. Nothing here blocks: what the worker does not read yet is kept.
"""

from __future__ import annotations

import os
import selectors


class Input:
    """The writing end of a worker's stdin."""

    def __init__(self, fd: int, selector: selectors.BaseSelector) -> None:
        self._fd = fd
        self._selector = selector
        self._unsent = bytearray()
        self._ended = False
        self._closed = False
        os.set_blocking(fd, False)

    def feed(self, data: bytes) -> None:
        """Pass this on; no data stands for the end."""
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
