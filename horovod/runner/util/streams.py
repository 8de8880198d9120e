"""A pipe inside this process, for output that another thread reads."""

from __future__ import annotations

import threading


class Pipe:
    """What is written can be read once; `read` waits for it, and `write` for the reader."""

    def __init__(self) -> None:
        self._content = ""
        self._closed = False
        self._changed = threading.Condition()

    def write(self, buf: str) -> None:
        """Waits until what was written before has been read."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._content)
            if self._closed:
                raise RuntimeError("the pipe is closed")
            self._content = buf
            self._changed.notify_all()

    def read(self, length: int = -1, timeout: float | None = None) -> str | None:
        """Up to `length` characters; None after `timeout` seconds, or once the pipe is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._content, timeout)
            if not self._content:
                return None
            end = len(self._content) if length < 0 else length
            part, self._content = self._content[:end], self._content[end:]
            self._changed.notify_all()
            return part

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
