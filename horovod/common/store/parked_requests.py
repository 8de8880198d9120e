"""Requests for keys that have no value yet, kept until they have. Used by the store's server."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)


class ParkedRequests(Generic[Owner]):
    """Requests of owners (connections), each of which waits for a key until a deadline."""

    def __init__(self) -> None:
        self._by_key: dict[str, dict[int, Owner]] = {}  # key -> ticket -> owner
        self._by_owner: dict[Owner, dict[int, str]] = {}  # owner -> ticket -> key
        self._deadlines: list[tuple[float, int, str]] = []  # a heap: time, ticket, key
        self._tickets = itertools.count()
        self._count = 0

    def park(self, owner: Owner, key: str, deadline: float) -> None:
        """Keep a request until `take` or `take_expired` returns its owner."""
        ticket = next(self._tickets)
        self._by_key.setdefault(key, {})[ticket] = owner
        self._by_owner.setdefault(owner, {})[ticket] = key
        self._count += 1
        if len(self._deadlines) > 2 * self._count + 64:
            # Requests that were answered early leave their deadlines behind: drop these.
            self._deadlines = [
                entry for entry in self._deadlines if entry[1] in self._by_key.get(entry[2], ())
            ]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline, ticket, key))

    def take(self, key: str) -> list[Owner]:
        """Remove the requests for a key, and return their owners, one for each request."""
        return [
            owner
            for ticket in list(self._by_key.get(key, ()))
            for owner in self._remove(ticket, key)
        ]

    def take_expired(self, now: float) -> list[Owner]:
        """Remove the requests whose deadline has passed, and return their owners."""
        owners: list[Owner] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, ticket, key = heapq.heappop(self._deadlines)
            owners += self._remove(ticket, key)
        return owners

    def drop(self, owner: Owner) -> None:
        """Remove all requests of an owner."""
        for ticket, key in list(self._by_owner.get(owner, {}).items()):
            self._remove(ticket, key)

    @property
    def next_deadline(self) -> float:
        """The earliest deadline; infinity if there is none."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def _remove(self, ticket: int, key: str) -> list[Owner]:
        """Remove a request; return its owner, or nothing if it was removed before."""
        waiting = self._by_key.get(key, {})
        if ticket not in waiting:
            return []
        owner = waiting.pop(ticket)
        if not waiting:
            del self._by_key[key]
        tickets = self._by_owner[owner]
        del tickets[ticket]
        if not tickets:
            del self._by_owner[owner]
        self._count -= 1
        return [owner]
