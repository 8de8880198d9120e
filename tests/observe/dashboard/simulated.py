"""Simulated reporters: what real ranks would write into the job's store, as fast as wanted."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

START = 1_700_000_000.0


class SimulatedJob:
    """Ranks that step together: the slowest computes longest, the others wait for it."""

    def __init__(
        self,
        size: int,
        per_host: int = 4,
        compute: float = 0.05,
        seed: int = 1,
        cores: int | None = None,
    ) -> None:
        """``cores`` of every host; by default one for each rank. With fewer, ranks take turns."""
        self.size = size
        self.per_host = per_host
        self.compute = compute
        self.cores = per_host if cores is None else cores
        self.generation = 0
        self.steps_before: dict[int, int] = {}  # by rank, of earlier generations
        self.slow: dict[int, float] = {}  # extra seconds in backward, by rank
        self.slow_input: dict[int, float] = {}  # the same outside of backward
        self.slow_link: dict[int, float] = {}  # extra seconds of reduction
        self.now = START
        self.step = 0
        self._random = random.Random(seed)
        self._luck = dict.fromkeys(range(size), 1.0)
        self._steps: dict[int, list[list[float]]] = {rank: [] for rank in range(size)}
        self._logged: list[list[float]] = []

    def host(self, rank: int) -> str:
        return f"node{rank // self.per_host:02d}"

    def places(self) -> dict[str, list[Any]]:
        return {str(rank): [self.host(rank), rank] for rank in range(self.size)}

    def run(self, steps: int) -> None:
        for _ in range(steps):
            base = {rank: self.compute * self._noise(rank) for rank in self._steps}
            own = {
                rank: base[rank] + self.slow.get(rank, 0.0) + self.slow_input.get(rank, 0.0)
                for rank in self._steps
            }
            slowest = max(own.values())
            reduces = {rank: 0.2 * self.compute * self._noise(rank) for rank in self._steps}
            longest = slowest + max(
                reduces[rank] + self.slow_link.get(rank, 0.0) for rank in self._steps
            )
            self.now += longest
            self.step += 1
            for rank, steps_of_rank in self._steps.items():
                mine = reduces[rank] + self.slow_link.get(rank, 0.0)
                steps_of_rank.append(
                    [
                        self.step,
                        self.now,
                        longest,
                        0.6 * base[rank] + self.slow.get(rank, 0.0),
                        max(0.0, longest - own[rank] - mine),
                        mine,
                        0.1 * reduces[rank],
                    ]
                )
            self._logged.append([self.step, 2.0 / (1 + 0.02 * self.step)])

    def _noise(self, rank: int) -> float:
        """A factor for a time of a rank.

        With a core for each rank it is nearly 1. Otherwise a rank waits for its turn, for up to as
        many turns of others as there are ranks for a core, and who was unlucky may stay so.
        """
        if self.cores >= self.per_host:
            return self._random.uniform(0.98, 1.02)
        if self._random.random() < 0.1:
            self._luck[rank] = self._random.uniform(0.8, 1.4)
        turns = self._random.uniform(0, self.per_host / self.cores)
        return self._luck[rank] * (1 + turns)

    def report(self, rank: int, **changes: Any) -> dict[str, Any]:
        """The report of a rank since the one before."""
        steps, self._steps[rank] = self._steps[rank][-50:], []
        mean = sum(step[2] for step in steps) / len(steps) if steps else 0.0
        stats = {
            "steps": self.steps_before.get(rank, 0) + self.step,
            "cpu_seconds": 0.5 * (self.now - START),
            "step_seconds": mean * self.step,
            "backward_seconds": 0.6 * mean * self.step,
            "wait_seconds": 0.1 * mean * self.step,
            "reduce_seconds": 0.2 * mean * self.step,
            "hidden_seconds": 0.05 * mean * self.step,
            "bytes_reduced": 4_000_000 * self.step,
            "bytes_shared_memory": 3_000_000 * self.step,
            "bytes_network": 1_000_000 * self.step,
            "bytes_device": 0,
            "buckets": 3 * self.step,
            "operations": 3 * self.step,
            "negotiation_misses": 4,
            "queue_length": 1,
            "memory_bytes": 700_000_000 + rank,
            "gpu_memory_bytes": 0,
            "last_step_seconds": steps[-1][2] if steps else 0.0,
            "steps_per_second": 1 / mean if mean else 0.0,
            "rank": rank,
            "size": self.size,
        }
        metrics: Mapping[str, Any] = {}
        if rank == 0:
            metrics, self._logged = {"loss": self._logged[-200:]}, []
        return {
            "version": 1,
            "rank": rank,
            "size": self.size,
            "local_rank": rank % self.per_host,
            "host": self.host(rank),
            "pid": 10_000 + rank,
            "generation": self.generation,
            "time": self.now,
            "state": "training",
            "cores": list(range(self.cores)),
            "steps_before": self.steps_before.get(rank, 0),
            "stats": stats,
            "steps": steps,
            "waiting": None,
            "metrics": metrics,
            **changes,
        }

    def encoded(self, rank: int, **changes: Any) -> bytes:
        return json.dumps(self.report(rank, **changes)).encode()

    def key(self, rank: int) -> str:
        return f"stats/{self.generation}/{rank}"
