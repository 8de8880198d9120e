"""What has been submitted to a process set and has not run. Used by its channel and its rounds."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import count

from horovod.common.exceptions import HorovodInternalError, fresh_copy
from horovod.engine.collective import Kind
from horovod.engine.request import Request


class RequestQueue:
    """Requests in the order of submission, and names in use. Any thread may call."""

    def __init__(self) -> None:
        self.requests: list[Request] = []  # for others to look at, not to change
        self.failure: HorovodInternalError | None = None  # why no more are taken
        self.grown = threading.Event()  # set by what is submitted; whoever waits for it clears it
        self._in_flight: dict[str, Request] = {}
        self._unnamed: defaultdict[Kind, count[int]] = defaultdict(partial(count, 1))
        self._lock = threading.Lock()  # held for moments

    def auto_name(self, kind: Kind) -> str:
        """Return a name for an unnamed request: ranks that submit alike count alike."""
        with self._lock:
            return f"noname.{next(self._unnamed[kind])}"

    def restart_auto_names(self) -> None:
        with self._lock:
            self._unnamed.clear()

    def append(self, request: Request) -> None:
        """Add a request. Raise ValueError if one of this name has not finished."""
        with self._lock:
            if self.failure is not None:
                raise fresh_copy(self.failure)
            if request.name in self._in_flight:
                earlier = self._in_flight[request.name]
                raise ValueError(
                    f"{request.name!r} was submitted at {earlier.source} and has not finished; "
                    f"wait for it, or give this one another name"
                )
            self._in_flight[request.name] = request
            self.requests.append(request)
        if not self.grown.is_set():
            self.grown.set()

    def put_first(self, request: Request) -> None:
        """Put a request first whose turn it is already."""
        with self._lock:
            self._in_flight[request.name] = request
            self.requests.insert(0, request)

    def remove(self, requests: Sequence[Request]) -> None:
        """Remove requests that have run, or never will; any of them may be gone already."""
        with self._lock:
            if self.requests[: len(requests)] == requests:
                del self.requests[: len(requests)]
            else:
                gone = {id(request) for request in requests}
                self.requests = [r for r in self.requests if id(r) not in gone]
            for request in requests:
                self._in_flight.pop(request.name, None)

    def copy(self) -> list[Request]:
        with self._lock:
            return list(self.requests)

    def close(self, error: HorovodInternalError) -> list[Request]:
        """Take no more, because of `error` or an earlier one; return the requests that are left."""
        with self._lock:
            if self.failure is None:
                self.failure = error
            left, self.requests = self.requests, []
            self._in_flight.clear()
        self.grown.set()
        return left
