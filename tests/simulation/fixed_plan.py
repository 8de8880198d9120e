"""What a simulated job with fixed ranks is made of, from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

from tests.simulation.plan import AGENT_KINDS, Fault, Plan

HEAD = "head"

CUTS = (
    "cut",
    "cut towards the launcher",
    "cut from the launcher",
    "cut between hosts",
    "cut from everything",
    "cut from the store",
)

FIXED_KINDS = (
    "kill worker",
    "worker fails",
    "stop worker",
    "stop worker for good",
    "worker's program hangs",
    "power loss",
    *CUTS,
    "slow network",
    "clock jumps",
    "kill the launcher",
    "interrupt the launcher",
)


@dataclass(frozen=True)
class FixedPlan(Plan):
    """A cluster, ranks that train together, and what goes wrong."""

    cluster: ClassVar[tuple[str, str]] = ("tests.simulation.fixed_job", "FixedCluster")

    includes_head: bool = False  # whether the first host is the launcher's own

    @property
    def host_names(self) -> tuple[str, ...]:
        names = super().host_names
        return (HEAD, *names[1:]) if self.includes_head else names

    @property
    def steps(self) -> int:
        return self.samples

    @property
    def patience(self) -> float:
        """Virtual seconds from the last fault's end to the job's."""
        return 1200.0 + 2 * self.steps * self.pace

    @classmethod
    def from_seed(cls, seed: int, *_: Any) -> FixedPlan:
        draw = random.Random(f"fixed plan {seed}")
        hosts, slots = draw.randint(1, 4), draw.randint(1, 3)
        steps, pace = draw.randint(4, 12), draw.choice([0.05, 0.5, 2.0, 5.0])
        length = steps * pace + 5.0
        faults = [
            Fault(
                draw.choice(FIXED_KINDS),
                draw.uniform(0.0, 1.2 * length),
                draw.choice([0.5, 5.0, 20.0, 45.0, 90.0, 300.0]) * draw.uniform(0.5, 1.5),
                draw.randrange(1000),
            )
            for _ in range(draw.choice([0, 1, 1, 1, 2, 3]))
        ]
        agents = random.Random(f"agents {seed}")
        if agents.random() < 0.25:
            start, seconds = agents.uniform(0.0, length), agents.choice([5.0, 45.0, 200.0, 500.0])
            fault = Fault(agents.choice(AGENT_KINDS), start, seconds, agents.randrange(1000))
            faults.append(fault)
        faults.sort(key=lambda fault: fault.start)
        return cls(
            seed,
            hosts,
            slots,
            min_np=hosts * slots,
            samples=steps,
            pace=pace,
            commit_every=1,
            faults=tuple(faults),
            includes_head=draw.random() < 0.4,
        )
