"""What the driver of an elastic job decides, and the keys under which it is said in the store.

A decision is numbered, says who is in the job from now on and in which place, and never changes.
The driver writes it, then its number under `LATEST`; every worker waits for the next number
(`horovod.common.membership`). Workers answer under the other keys.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from horovod.common.topology import Topology

DRIVER_LOST = 75
"""Exit status of a worker that ends because it cannot reach the driver: sysexits' EX_TEMPFAIL."""

LATEST = "elastic/latest"
"""The number of the newest decision, as text."""

KINDS = ("start", "failure", "added", "removed", "mixed")


def decision_key(number: int) -> str:
    """Holds decision `number`, encoded."""
    return f"elastic/decision/{number}"


def ready_key(worker: str) -> str:
    """Set once a new worker could take part: its imports are done, and it waits for a place."""
    return f"elastic/ready/{worker}"


def heard_key(number: int, worker: str) -> str:
    """Set as soon as the worker's process knows decision `number`, whatever it is busy with."""
    return f"elastic/heard/{number}/{worker}"


def seen_key(number: int, worker: str) -> str:
    """Set once the worker has torn down its old generation and enters decision `number`.

    The value is the attempt to meet, counted from 0.
    """
    return f"elastic/seen/{number}/{worker}"


def broken_key(number: int, worker: str) -> str:
    """Set by a worker whose generation of decision `number` broke, or did not come about.

    The value is the reason, for people.
    """
    return f"elastic/broken/{number}/{worker}"


def formed_key(number: int) -> str:
    """Set once the workers of decision `number` have met."""
    return f"elastic/formed/{number}"


def leaving_key(worker: str) -> str:
    """Set by a worker that leaves on purpose, after its commit."""
    return f"elastic/leaving/{worker}"


def done_key(worker: str) -> str:
    """Set by a worker whose training function has returned."""
    return f"elastic/done/{worker}"


_ANSWER = re.compile(
    r"elastic/(ready|heard|seen|broken|formed|leaving|done)(?:/(\d+))?(?:/(w\d+))?"
)


def parse_answer(key: str) -> tuple[str, int, str] | None:
    """Kind, decision (or 0) and worker (or "") of a key of the above; None for other keys."""
    found = _ANSWER.fullmatch(key)
    return found and (found[1], int(found[2] or 0), found[3] or "")


@dataclass(frozen=True)
class Assignment:
    """A worker's place."""

    hostname: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    @property
    def topology(self) -> Topology:
        return Topology(
            self.rank,
            self.size,
            self.local_rank,
            self.local_size,
            self.cross_rank,
            self.cross_size,
        )


@dataclass(frozen=True)
class Decision:
    """Who is in the job from now on, by worker id; `lost` are the workers that are gone.

    With fewer workers than `min_np` they do not meet but wait for the next decision (`too_few`).
    """

    number: int
    slots: Mapping[str, Assignment]
    reason: str  # for people
    kind: str
    lost: tuple[str, ...] = ()
    min_np: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"decision {self.number} is of unknown kind {self.kind!r}")

    @property
    def too_few(self) -> bool:
        """Whether its workers wait for others."""
        return 0 < len(self.slots) < self.min_np

    @property
    def is_final(self) -> bool:
        """Whether the job ends with it: nobody has a place any more."""
        return not self.slots

    def breaks(self, generation: Decision) -> bool:
        """Whether the workers of the older decision `generation` cannot go on together until they
        notice this one: one of them is gone."""
        if self.lost:
            return any(worker in generation.slots for worker in self.lost)
        return self.kind == "failure"

    def encode(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def decode(cls, content: bytes) -> Decision:
        fields = json.loads(content)
        slots = {worker: Assignment(**place) for worker, place in fields["slots"].items()}
        return cls(**{**fields, "slots": slots, "lost": tuple(fields["lost"])})
