"""The store as a rank sees it: a client of a `StoreServer` in another process.

Imported through `horovod.common.store`.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from horovod.common.store.memory import Store, derive, timeout_error
from horovod.common.wire import Message, Stream, check_key

_ANSWER_GRACE = 15.0
"""Seconds beyond a request's own timeout after which a silent server counts as gone."""

_RECONNECT_PAUSE = 0.05
_LONGEST_WAIT = 1e6


class StoreClient(Store):
    """A store that another process serves. Each thread that uses it has its own connection.

    After a fork the child's copy refuses to work: two processes that share a connection would mix
    up their answers.

    Args:
        address: The address of the server.
        port: The port of the server.
        key: The key of the job.
        timeout: Seconds within which a connection must be made.

    Raises:
        ConnectionError: The server is gone or silent. Every method may raise it.
        PermissionError: The server has another key.
    """

    def __init__(self, address: str, port: int, key: bytes, timeout: float) -> None:
        self.address = address
        self.port = port
        self._key = check_key(key)
        self._timeout = timeout
        self._local = threading.local()
        # A dict, which keeps their order: a simulated job must not depend on addresses of objects.
        self._streams: weakref.WeakKeyDictionary[Stream, None] = weakref.WeakKeyDictionary()
        self._pid = os.getpid()
        self._closed = False
        _clients.add(self)
        self._stream()

    def __repr__(self) -> str:
        return f"StoreClient({self.address}:{self.port})"

    def set(self, key: str, value: bytes) -> None:
        self._request({"op": "set", "key": key}, bytes(value))

    def get_any(self, keys: Sequence[str], timeout: float) -> tuple[str, bytes]:
        wait = min(timeout, _LONGEST_WAIT)
        key, *others = keys
        header = {"op": "get", "key": key, "others": others, "timeout": wait}
        answer = self._request(header, wait=wait)
        if not answer.header["found"]:
            raise timeout_error(key, timeout)
        return answer.header["key"], answer.body

    def try_get(self, key: str) -> bytes | None:
        answer = self._request({"op": "try_get", "key": key})
        return answer.body if answer.header["found"] else None

    def add(self, key: str, amount: int) -> int:
        return int(self._request({"op": "add", "key": key, "amount": amount}).header["total"])

    def delete(self, key: str) -> bool:
        return bool(self._request({"op": "delete", "key": key}).header["found"])

    def keys(self, prefix: str) -> list[str]:
        return list(self._request({"op": "keys", "key": prefix}).header["keys"])

    def derive_key(self, purpose: str) -> bytes:
        return derive(self._key, purpose)

    def close(self) -> None:
        self._closed = True
        if os.getpid() == self._pid:
            for stream in list(self._streams):
                stream.abort()
            self._local = threading.local()

    def _close_descriptors(self) -> None:
        """Close the connections in a forked child."""
        for stream in list(self._streams):
            stream.close()

    def _request(self, header: dict[str, Any], body: bytes = b"", wait: float = 0.0) -> Message:
        """Send a request and return the answer, for which the server may wait `wait` seconds."""
        try:
            answer = self._send(header, body).receive(wait + _ANSWER_GRACE)
        except OSError as error:
            self._forget()
            raise ConnectionError(
                f"lost the job's store at {self.address}:{self.port} ({error}): the launcher or "
                f"rank 0, which serves it, has probably ended; look at its output first"
            ) from error
        except ValueError:
            raise
        except BaseException:
            # An interrupted exchange leaves an answer on its way: never reuse the connection.
            self._forget()
            raise
        if "error" in answer.header:
            raise ValueError(answer.header["error"])
        return answer

    def _send(self, header: dict[str, Any], body: bytes) -> Stream:
        """Send a request, and return the connection on which the answer comes."""
        seconds = self._timeout + _ANSWER_GRACE
        stream = self._stream()
        try:
            stream.send(header, body, timeout=seconds)
        except ConnectionError:
            # It was idle, and broke meanwhile. The server takes whole frames only, so it has not
            # got this request, and another connection may carry it.
            self._forget()
            stream = self._stream()
            stream.send(header, body, timeout=seconds)
        return stream

    def _forget(self) -> None:
        """Close this thread's connection; its next request opens another."""
        stream: Stream | None = getattr(self._local, "stream", None)
        if stream is not None:
            stream.close()
        self._local.stream = None

    def _stream(self) -> Stream:
        """Return this thread's connection, which is opened now if there is none."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                "the job's store was opened by the parent of this forked process and cannot be "
                "used here; forked children (such as DataLoader workers) take no part in the job"
            )
        if self._closed:
            raise ConnectionError(
                f"the client of the store at {self.address}:{self.port} is closed"
            )
        stream: Stream | None = getattr(self._local, "stream", None)
        if stream is None:
            stream = self._local.stream = self._connect()
            self._streams[stream] = None
        return stream

    def _connect(self) -> Stream:
        """Open a connection to the server."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return Stream.connect(
                    self.address, self.port, self._key, max(deadline - time.monotonic(), 0.001)
                )
            except PermissionError as error:
                if error.errno is not None:  # the operating system's refusal, not the peer's
                    raise self._unreachable(error) from error
                raise PermissionError(
                    f"the store at {self.address}:{self.port} refused this process: {error}; it "
                    f"probably belongs to another job (check HOROVOD_GLOO_RENDEZVOUS_ADDR, "
                    f"HOROVOD_GLOO_RENDEZVOUS_PORT and _HOROVOD_SECRET_KEY)"
                ) from None
            except ConnectionResetError as error:
                # A server under a flood drops the oldest unfinished handshakes: ours may be one.
                if time.monotonic() + _RECONNECT_PAUSE >= deadline:
                    raise self._unreachable(error) from error
                time.sleep(_RECONNECT_PAUSE)
            except OSError as error:
                raise self._unreachable(error) from error

    def _unreachable(self, error: OSError) -> ConnectionError:
        """Return the error for a server that cannot be reached."""
        return ConnectionError(
            f"cannot reach the job's store at {self.address}:{self.port} ({error}): check that "
            f"the launcher or rank 0 still runs and that this host may connect to that address"
        )


_clients: weakref.WeakSet[StoreClient] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # Inherited descriptors would hide the parent's death from the server.
    for client in list(_clients):
        client._close_descriptors()


os.register_at_fork(after_in_child=_after_fork_in_child)
