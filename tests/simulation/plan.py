"""What a simulated job is made of, from a seed, and what came of it."""

from __future__ import annotations

import hashlib
import json
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

VERSION = 8
"""Counted up when a seed means another job than before."""

_ROOT = str(Path(__file__).resolve().parents[2])  # messages name lines of the code

HAND_OVER = "those who hand over are lost"
"""A kind of fault that waits until new workers get the state: see `hand_over`."""

KINDS = (
    "kill worker",
    "stop worker",
    "stop worker for good",
    "worker's program hangs",
    "tell worker to leave",
    "tell all workers to leave",
    HAND_OVER,
    "power loss",
    "cut",
    "cut towards the launcher",
    "cut from the launcher",
    "cut between hosts",
    "cut from everything",
    "cut from the store",
    "connections break",
    "slow network",
    "discovery fails",
    "discovery is late",
    "discovery lies",
    "host is not offered",
    "clock jumps",
)

AGENT_KINDS = ("kill agent", "stop agent", "stop agent for good")
"""What goes wrong with the agent of a host that lives: in jobs with fixed ranks, and on request."""

STOP_WHEN_READY = "stop the next worker that is ready"
"""A kind of fault of jobs made for it: the next new worker stops when the launcher knows of it.

It has said that it is ready, and has not read a decision yet.
"""

EVERYWHERE = "power loss everywhere"
"""A kind of fault that only jobs with commits on disk have: all workers are lost.

With an odd target that happens just after the next commit that is announced to be on disk.
"""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, from `start` for some seconds."""

    kind: str
    start: float
    seconds: float
    target: int  # a number of which the worker or host is made

    def __str__(self) -> str:
        return f"{self.kind} of {self.target} at {self.start:.1f} s for {self.seconds:.1f} s"


@dataclass(frozen=True)
class Plan:
    """A cluster, a training and what goes wrong."""

    cluster: ClassVar[tuple[str, str]] = ("tests.simulation.job", "Cluster")  # what runs it

    seed: int
    num_hosts: int
    slots: int
    min_np: int
    samples: int  # of an epoch
    pace: float  # seconds of a step
    commit_every: int  # steps
    faults: tuple[Fault, ...]
    epochs: int = 1
    batch: int = 1  # samples of a rank in a step
    uses_sets: bool = False
    uses_join: bool = False
    uses_disk: bool = False  # commits are written to disk
    elastic_timeout: float = 360.0  # seconds; longer than all faults of a plan together
    stall_shutdown: float = 100.0  # seconds; without it nobody notices a program that hangs

    @property
    def host_names(self) -> tuple[str, ...]:
        return tuple(f"h{number}" for number in range(self.num_hosts))

    @property
    def num_proc(self) -> int:
        return self.num_hosts * self.slots

    @property
    def max_np(self) -> int:
        return self.num_hosts * self.slots

    @property
    def faults_end(self) -> float:
        return max((fault.start + fault.seconds for fault in self.faults), default=0.0)

    @property
    def patience(self) -> float:
        """Virtual seconds from the last fault's end to the job's, if one worker does it all."""
        return 6 * self.elastic_timeout + 2 * self.epochs * self.samples * self.pace / self.batch

    @classmethod
    def from_seed(
        cls, seed: int, num_hosts: int = 0, num_faults: int = -1, num_slots: int = 0
    ) -> Plan:
        """Draw a job. Faults are drawn apart from the scheduling, so that some can be left out.

        Args:
            seed: The number that decides everything.
            num_hosts: The number of hosts; 0 to draw it.
            num_faults: The number of faults; negative to draw it. Some seeds add one or two.
            num_slots: The number of slots of each host; 0 to draw it.
        """
        draw = random.Random(f"plan {seed}")
        hosts = num_hosts or draw.randint(1, 4)
        drawn_slots = draw.randint(1, 2)
        slots = num_slots or drawn_slots
        epochs, batch = draw.randint(1, 3), draw.randint(1, 3)
        steps, pace = draw.randint(4, 12), draw.choice([0.05, 0.5, 2.0, 5.0])
        length = steps * pace + 10.0
        count = draw.randint(0, 10) if num_faults < 0 else num_faults
        faults = [
            Fault(
                draw.choice(KINDS),
                draw.uniform(0.0, 1.5 * length),
                draw.choice([0.5, 5.0, 20.0, 45.0, 90.0]) * draw.uniform(0.5, 1.5),
                draw.randrange(1000),
            )
            for _ in range(count)
        ]
        disk = random.Random(f"disk {seed}")
        uses_disk = count > 0 and disk.random() < 0.2
        if uses_disk:
            start, seconds = disk.uniform(3.0, length), disk.uniform(1.0, 30.0)
            faults.append(Fault(EVERYWHERE, start, seconds, disk.randrange(2)))
        begin = random.Random(f"begin {seed}")
        if count > 0 and begin.random() < 0.2:  # a host answers late, while others begin
            kind = begin.choice(["slow network", "cut"])
            faults.append(Fault(kind, 0.0, begin.uniform(1.0, 5.0), begin.randrange(9)))
        faults.sort(key=lambda fault: fault.start)
        return cls(
            seed,
            hosts,
            slots,
            min_np=draw.randint(1, hosts * slots),
            samples=max(1, steps * hosts * slots * batch // epochs - draw.randint(0, 5)),
            pace=pace,
            commit_every=draw.randint(1, 5),
            faults=tuple(faults),
            epochs=epochs,
            batch=batch,
            uses_sets=draw.random() < 0.3 and not uses_disk,  # they are lost with all workers
            uses_join=draw.random() < 0.3,
            uses_disk=uses_disk,
        )


@dataclass
class Result:
    """What came of a job."""

    plan: Plan
    problem: str = ""  # a broken promise; empty if all were kept
    status: int | None = None
    ending: str = ""
    seconds: float = 0.0  # virtual
    generations: int = 0
    moments: list[tuple[str, str]] = field(default_factory=list)  # the job's phase, and the fault
    decisions: list[str] = field(default_factory=list)  # their kinds
    events: list[tuple[float, str]] = field(default_factory=list)

    def story(self, most: int = 60) -> str:
        """Tell the last events in words."""
        plan = self.plan
        lines = [f"{when - 1000.0:9.3f} s  {text}" for when, text in self.events[-most:]]
        faults = "\n".join(f"  {fault}" for fault in plan.faults) or "  none"
        head = (
            f"seed {plan.seed}: {plan.num_hosts} hosts with {plan.slots} slots, at least "
            f"{plan.min_np} workers, {plan.epochs} epochs of {plan.samples} samples, batches of "
            f"{plan.batch} in {plan.pace} s\nfaults:\n{faults}"
        )
        return "\n".join([head, *lines, self.problem or "all promises were kept"])

    def fingerprint(self) -> str:
        """Return a digest of all events: equal for two runs of one seed, wherever the code lies.

        Moving a line of code does not change it: messages name lines without their numbers here.
        """
        text = json.dumps([[f"{when:.6f}", what] for when, what in self.events])
        text = re.sub(r"\.py:\d+", ".py", text.replace(_ROOT, ""))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
