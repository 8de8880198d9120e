"""Requests for keys that have no value yet, kept until one has. Used by the store's server."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any, Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)


class ParkedRequests(Generic[Owner]):
    """Requests of owners (connections), each of which waits for one of its keys until a time."""

    def __init__(self) -> None:
        self._requests: dict[int, tuple[Owner, Sequence[str]]] = {}  # ticket -> owner, keys
        self._by_key: dict[str, dict[int, None]] = {}  # key -> its tickets, in their order
        self._by_owner: dict[Owner, dict[int, None]] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap: time, ticket
        self._tickets = itertools.count()

    def park(self, owner: Owner, keys: Sequence[str], deadline: float) -> None:
        """Keep a request until `take` or `take_expired` returns its owner."""
        ticket = next(self._tickets)
        self._requests[ticket] = owner, keys
        self._by_owner.setdefault(owner, {})[ticket] = None
        for key in keys:
            self._by_key.setdefault(key, {})[ticket] = None
        if len(self._deadlines) > 2 * len(self._requests) + 64:
            # Requests that were answered early leave their deadlines behind: drop these.
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._requests]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline, ticket))

    def take(self, key: str) -> list[Owner]:
        """Remove the requests for a key, and return their owners, one for each request."""
        return [self._remove(ticket) for ticket in list(self._by_key.get(key, ()))]

    def take_expired(self, now: float) -> list[Owner]:
        """Remove the requests whose deadline has passed, and return their owners."""
        owners: list[Owner] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, ticket = heapq.heappop(self._deadlines)
            if ticket in self._requests:
                owners.append(self._remove(ticket))
        return owners

    def drop(self, owner: Owner) -> None:
        """Remove all requests of an owner."""
        for ticket in list(self._by_owner.get(owner, ())):
            self._remove(ticket)

    @property
    def next_deadline(self) -> float:
        """The earliest deadline; infinity if there is none."""
        while self._deadlines and self._deadlines[0][1] not in self._requests:
            heapq.heappop(self._deadlines)  # its request was answered early
        return self._deadlines[0][0] if self._deadlines else math.inf

    def _remove(self, ticket: int) -> Owner:
        """Remove a request, and return its owner."""
        owner, keys = self._requests.pop(ticket)
        _discard(self._by_owner, owner, ticket)
        for key in keys:
            _discard(self._by_key, key, ticket)
        return owner


def _discard(tickets_of: dict[Any, dict[int, None]], name: Any, ticket: int) -> None:
    """Remove a ticket, and the entry that held it if that is empty now."""
    tickets = tickets_of[name]
    del tickets[ticket]
    if not tickets:
        del tickets_of[name]
