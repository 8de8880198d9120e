"""Where hosts connect whose agents the launcher does not start: those that join, Spark tasks.

A thread accepts connections; who does not prove to know the job's key within seconds is dropped,
before anything that it says is read. Each host becomes a link, which from then on belongs to the
job that takes it. `joining` and `horovod.spark.task_link` derive from `LinkServer`.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from horovod.common.logging import get_logger
from horovod.common.wire import Session
from horovod.runner.agents.channel import LinkChannel
from horovod.runner.agents.channel_link import ChannelLink

Link = TypeVar("Link", bound=ChannelLink)

_HANDSHAKE_SECONDS = 10.0
_MOST_PENDING = 256
_MAX_HELLO = 1 << 20
_ACCEPT_PAUSE = 0.1


class LinkServer(ABC, Generic[Link]):
    """Listens on one address, at any free port by default."""

    owner: str
    """Who listens, for the log."""

    def __init__(self, address: str, key: bytes, port: int = 0) -> None:
        self._key = key
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family, backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Condition()
        self._links: list[Link] = []
        self._pending: dict[LinkChannel, float] = {}  # until when they may prove themselves
        self._closing = False
        self._paused = False
        self._rejected = 0
        self._wakeup, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wakeup, selectors.EVENT_READ, lambda: None)
        self._thread = threading.Thread(target=self._serve, name="horovod-hosts", daemon=True)
        self._thread.start()

    # -- for the job -----------------------------------------------------------------------

    @abstractmethod
    def make_link(self, channel: LinkChannel, hello: Mapping[str, Any]) -> Link:
        """The link to a host that has proved itself, from what it says of itself.

        Called in the server's thread. `ValueError`, `KeyError` or `TypeError` where it makes no
        sense.
        """

    def links(self) -> list[Link]:
        with self._lock:
            return list(self._links)

    def living(self) -> list[Link]:
        """The links whose hosts hold their connection."""
        return [link for link in self.links() if link.is_alive]

    def wait(self, seconds: float) -> None:
        """Until a host arrives, `wake` is called or the time is over."""
        with self._lock:
            self._lock.wait(seconds)

    def wake(self) -> None:
        """Let `wait` return; from any thread."""
        with self._lock:
            self._lock.notify_all()

    def close(self) -> None:
        """No more hosts; those that are left are let go."""
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
        channel = LinkChannel(sock, Session(self._key, server=True, max_frame=_MAX_HELLO))
        self._pending[channel] = time.monotonic() + _HANDSHAKE_SECONDS
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._take(channel))
        if len(self._pending) > _MOST_PENDING:
            self._drop(next(iter(self._pending)))

    def _take(self, channel: LinkChannel) -> None:
        if channel not in self._pending:
            return
        try:
            messages = channel.receive()
            channel.flush()
            if messages is None:
                raise ConnectionResetError("it closed the connection")
            link = self.make_link(channel, messages[0].header) if messages else None
        except BlockingIOError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            # Once, because a stranger could otherwise fill the log.
            level = logging.DEBUG if self._rejected else logging.WARNING
            get_logger().log(
                level, "%s refused a connection from %s: %s", self.owner, _peer(channel), error
            )
            self._rejected += 1
            self._drop(channel)
            return
        if link is not None:
            self._selector.unregister(channel.socket)
            del self._pending[channel]
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

    def _drop(self, channel: LinkChannel) -> None:
        del self._pending[channel]
        self._selector.unregister(channel.socket)
        channel.close()


def _peer(channel: LinkChannel) -> str:
    try:
        return str(channel.socket.getpeername()[0]).removeprefix("::ffff:")
    except OSError:
        return "an address that is gone"
