"""A dashboard with simulated ranks, and a plain HTTP client for it."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from horovod.common.store import MemoryStore
from horovod.observe.dashboard.board import Board
from horovod.observe.dashboard.dashboard import Dashboard
from horovod.observe.dashboard.stragglers import WINDOW
from tests.observe.dashboard.simulated import SimulatedJob

TOKEN = "correct-horse-battery-staple"
HANG = 120.0


class Served:
    """The dashboard, its ranks, and what an HTTP client says to it."""

    def __init__(
        self,
        size: int = 3,
        elastic: bool = False,
        save: str | None = None,
        per_host: int = 2,
        cores: int | None = None,
    ) -> None:
        self.store = MemoryStore()
        self.said: list[str] = []
        self.job = SimulatedJob(size, per_host, cores=cores)
        self.board = Board("train.py", time.time(), 1.0, elastic)
        listener = socket.create_server(("127.0.0.1", 0))
        self.dashboard = Dashboard(self.board, self.store, listener, TOKEN, self.said.append, save)
        self.port = self.dashboard.port
        self.dashboard.note("decision", number=0, workers=self.job.places())

    def train(self, steps: int = 10, ago: float = 0.0, **changes: Any) -> None:
        """All ranks take steps, which ended some seconds ago, and report."""
        self.job.run(steps)
        late = time.time() - self.job.now
        for rank in range(self.job.size):
            report = self.job.report(rank)
            report["time"] += late
            for step in report["steps"]:
                step[1] += late - ago
            report |= changes.get(f"rank{rank}", {})
            self.store.set(self.job.key(rank), json.dumps(report).encode())

    def settle(self) -> None:
        """Train on until what the steps are made of has lasted, and is said."""
        self.board.interval = 0.0  # however fast the reports come
        for _ in range(3):
            self.train(WINDOW)
            step = self.job.step
            self.wait_for(lambda board: board["job"]["step"] == step)  # noqa: B023

    def get(
        self, path: str, headers: Mapping[str, str] | None = None, method: str = "GET"
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG)
        try:
            connection.request(method, path, headers=dict(headers or {}))
            answer = connection.getresponse()
            body = answer.read()
            found = {name.lower(): value for name, value in answer.getheaders()}
            if found.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            return answer.status, found, body
        finally:
            connection.close()

    def ask(self, path: str) -> Any:
        """With the token; what comes as JSON."""
        status, _, body = self.get(path, {"Authorization": f"Bearer {TOKEN}"})
        assert status == 200, (status, body)
        return json.loads(body)

    def wait_for(self, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Everything that a new page gets, once it fulfils the condition."""
        deadline = time.monotonic() + HANG
        while True:
            found: dict[str, Any] = self.ask("/changes")
            if condition(found):
                return found
            assert time.monotonic() < deadline, found
            time.sleep(0.05)


@contextmanager
def served(size: int = 3, **how: Any) -> Iterator[Served]:
    found = Served(size, **how)
    try:
        yield found
    finally:
        found.dashboard.close()
