"""Where the tasks of a job connect to the driver.

`runner` opens a `TaskServer` before it starts the Spark job. A thread accepts connections; who
does not prove to know the job's key within seconds is dropped. Each task becomes a `TaskLink`,
which from then on belongs to the job that takes it.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time

from horovod.common.logging import get_logger
from horovod.common.wire import Session
from horovod.spark.channel import DriverChannel
from horovod.spark.task_link import TaskInfo, TaskLink

_HANDSHAKE_SECONDS = 10.0
_MOST_PENDING = 256
_MAX_HELLO = 1 << 20
_ACCEPT_PAUSE = 0.1


class TaskServer:
    """Listens on one address; tasks that have connected are in `links`."""

    def __init__(self, address: str, key: bytes) -> None:
        self._key = key
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Condition()
        self._links: list[TaskLink] = []
        self._pending: dict[DriverChannel, float] = {}  # until when they may prove themselves
        self._closing = False
        self._paused = False
        self._rejected = 0
        self._wakeup, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wakeup, selectors.EVENT_READ, lambda: None)
        self._thread = threading.Thread(target=self._serve, name="horovod-tasks", daemon=True)
        self._thread.start()

    # -- for the job -----------------------------------------------------------------------

    def newest(self) -> dict[int, TaskLink]:
        """The living tasks, the newest attempt of each partition."""
        found: dict[int, TaskLink] = {}
        for link in self.living():
            older = found.get(link.info.partition)
            if older is None or older.info.attempt < link.info.attempt:
                found[link.info.partition] = link
        return found

    def living(self) -> list[TaskLink]:
        with self._lock:
            links = list(self._links)
        return [link for link in links if link.is_alive]

    def partitions(self) -> set[int]:
        """Those whose tasks are running."""
        with self._lock:
            return {link.info.partition for link in self._links if link.holds_task}

    def wait(self, seconds: float) -> None:
        """Until a task arrives, `wake` is called or the time is over."""
        with self._lock:
            self._lock.wait(seconds)

    def wake(self) -> None:
        """Let `wait` return; from any thread."""
        with self._lock:
            self._lock.notify_all()

    def close(self) -> None:
        """No more tasks; those that are left end."""
        self._closing = True
        self._waker.send(b"\0")
        self._thread.join()
        for link in self._links:
            link.end("done")

    # -- in the thread ---------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(self._patience()):
                key.data()
            self._drop_the_late()
        for channel in list(self._pending):
            self._drop(channel)
        self._listener.close()
        self._selector.close()
        self._wakeup.close()
        self._waker.close()

    def _patience(self) -> float | None:
        if self._paused:
            return _ACCEPT_PAUSE
        return max(0.0, min(self._pending.values()) - time.monotonic()) if self._pending else None

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # out of descriptors: others may be closed meanwhile
            self._selector.unregister(self._listener)
            self._paused = True
            return
        channel = DriverChannel(sock, Session(self._key, server=True, max_frame=_MAX_HELLO))
        self._pending[channel] = time.monotonic() + _HANDSHAKE_SECONDS
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._take(channel))
        if len(self._pending) > _MOST_PENDING:
            self._drop(next(iter(self._pending)))

    def _take(self, channel: DriverChannel) -> None:
        if channel not in self._pending:
            return
        try:
            messages = channel.receive()
            channel.flush()
            if messages is None:
                raise ConnectionResetError("it closed the connection")
            info = TaskInfo.from_message(messages[0].header) if messages else None
        except BlockingIOError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            # Once, because a stranger could otherwise fill the log.
            level = logging.DEBUG if self._rejected else logging.WARNING
            get_logger().log(level, "horovod.spark refused a connection: %s", error)
            self._rejected += 1
            self._drop(channel)
            return
        if info is not None:
            self._selector.unregister(channel.socket)
            del self._pending[channel]
            link = TaskLink(channel, info)
            with self._lock:
                self._links.append(link)
                self._lock.notify_all()

    def _drop_the_late(self) -> None:
        if self._paused:
            self._paused = False
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        now = time.monotonic()
        for channel in [each for each, until in self._pending.items() if until <= now]:
            self._drop(channel)

    def _drop(self, channel: DriverChannel) -> None:
        del self._pending[channel]
        self._selector.unregister(channel.socket)
        channel.close()
