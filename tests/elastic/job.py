"""A driver for tests: starts workers and decides about them as the test says, and only then."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

from horovod.common.generations.decisions import (
    LATEST,
    Decision,
    answer_key,
    decision_key,
)
from horovod.common.store import StoreServer
from horovod.common.topology import Slot
from horovod.common.wire import new_key
from tests.rank_process import Rank
from tests.ranks import PATIENCE, Ranks, clean_environment


class ElasticJob(Ranks):
    """Workers "w0", "w1", ... on one host; `Ranks` counts them in the order of their start."""

    def __init__(
        self, function: Callable[..., Any], *arguments: Any, env: dict[str, str] | None = None
    ) -> None:
        self._key = new_key()
        self._server = StoreServer("127.0.0.1", self._key)
        self._ranks = []
        self._function = function
        self._arguments = arguments
        self._env = env or {}
        self.number = 0
        self.members: list[int] = []

    @property
    def size(self) -> int:  # type: ignore[override]
        return len(self._ranks)

    @property
    def store(self) -> Any:
        return self._server.store

    def decide(
        self, members: Sequence[int], kind: str, reason: str = "a test", lost: Sequence[int] = ()
    ) -> None:
        """The job consists of `members`, oldest first, from now on."""
        self.number += 1
        self.members = list(members)
        size = len(self.members)
        slots = {
            f"w{worker}": Slot("localhost", rank, size, rank, size, 0, 1)
            for rank, worker in enumerate(self.members)
        }
        gone = tuple(f"w{worker}" for worker in lost)
        decision = Decision(self.number, slots, reason, kind, gone)
        self.store.set(decision_key(self.number), decision.encode())
        self.store.set(LATEST, str(self.number).encode())

    def start(self, count: int, kind: str = "start", front: bool = False) -> None:
        """Decide that there are `count` more workers, and start them. `front`: as the first."""
        first = len(self._ranks)
        new = list(range(first, first + count))
        self.decide([*new, *self.members] if front else [*self.members, *new], kind)
        for worker in range(first, first + count):
            environ = {
                **clean_environment(),
                "HOROVOD_ELASTIC": "1",
                "HOROVOD_WORKER_ID": f"w{worker}",
                "HOROVOD_HOSTNAME": "localhost",
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": self._server.address,
                "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self._server.port),
                "_HOROVOD_SECRET_KEY": base64.b64encode(self._key).decode(),
                "OMP_NUM_THREADS": "1",
                **self._env,
            }
            self._ranks.append(Rank(worker, environ, self._function, self._arguments))

    def lose(self, *workers: int) -> None:
        """These workers are gone: decide so."""
        left = [worker for worker in self.members if worker not in workers]
        self.decide(left, "failure", f"lost {', '.join(f'w{w}' for w in workers)}", workers)

    def kill(self, worker: int) -> None:
        """End a worker at once; the driver does not know yet."""
        self._ranks[worker].kill()

    def say_to(self, workers: Sequence[int], message: bytes = b"go on") -> None:
        """Send a message to these workers; they receive it from `listen`."""
        for worker in workers:
            self._ranks[worker].connection.send_bytes(message)

    def await_seen(self, number: int, *workers: int, timeout: float = PATIENCE) -> None:
        """Until these workers have entered decision `number`."""
        for worker in workers:
            self.store.get(answer_key("seen", number, f"w{worker}"), timeout)

    def await_leaving(self, worker: int, timeout: float = PATIENCE) -> None:
        self.store.get(answer_key("leaving", worker=f"w{worker}"), timeout)

    def lose_driver(self) -> None:
        """The driver dies, and the store with it."""
        self._server.close()
