"""Decisions of the driver of an elastic job, and the keys of the store that they are written to.

A decision is numbered, and says which workers are in the job from now on, and with which ranks. It
never changes. The driver writes it, then its number under `LATEST`; every worker waits for the next
number (`horovod.common.generations.membership`). Workers answer under the other keys.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from horovod.common.topology import Slot

DRIVER_LOST = 75
"""Exit status of a worker that ends because it cannot reach the driver: sysexits' EX_TEMPFAIL."""

LATEST = "elastic/latest"
"""The number of the newest decision, as text."""

KINDS = ("start", "failure", "added", "removed", "mixed")


def decision_key(number: int) -> str:
    """Return the key of decision `number`, whose value is the encoded decision."""
    return f"elastic/decision/{number}"


AnswerKind = Literal[
    "ready",  # a new worker's imports are done, and it waits for a slot
    "heard",  # its process knows the decision, even while it is busy with something else
    "seen",  # it enters the decision's generation, having left its old one: which attempt, from 0
    "broken",  # its generation has broken, or could not be formed: the reason, for people
    "formed",  # all workers of the decision are connected
    "met",  # its first generation has formed: its program chooses a device next, by its slot there
    "received",  # it has the state that all ranks began with: others that have it may leave
    "leaving",  # it leaves on purpose, after its commit
    "done",  # its training function has returned
]
"""What workers answer, each by a key of its own; after a colon is the value of the key."""


def answer_key(kind: AnswerKind, number: int = 0, worker: str = "") -> str:
    """Return the key of an answer to decision `number`, or to none, by a worker, or by all."""
    return "/".join(["elastic", kind, *(str(part) for part in (number, worker) if part)])


_ANSWER = re.compile(rf"elastic/({'|'.join(get_args(AnswerKind))})(?:/(\d+))?(?:/(w\d+))?")


def parse_answer(key: str) -> tuple[str, int, str] | None:
    """Return kind, decision (or 0) and worker (or "") of an answer's key; None for other keys."""
    match = _ANSWER.fullmatch(key)
    return match and (match[1], int(match[2] or 0), match[3] or "")


@dataclass(frozen=True)
class Decision:
    """Which workers are in the job from now on."""

    number: int
    slots: Mapping[str, Slot]  # by worker id
    reason: str  # for people
    kind: str  # one of KINDS
    lost: tuple[str, ...] = ()  # the workers that are gone
    min_np: int = 1  # fewer workers than this only wait for the next decision

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"decision {self.number} is of unknown kind {self.kind!r}")

    @property
    def too_few(self) -> bool:
        """Whether its workers are too few, and wait for others."""
        return 0 < len(self.slots) < self.min_np

    @property
    def is_final(self) -> bool:
        """Whether the job ends with it: no worker has a slot any more."""
        return not self.slots

    def breaks(self, generation: Decision) -> bool:
        """Return whether this decision ends the generation of an older one at once.

        It does if one of the older decision's workers is gone: the others could not go on together
        until they notice by themselves.
        """
        if self.lost:
            return any(worker in generation.slots for worker in self.lost)
        return self.kind == "failure"

    def encode(self) -> bytes:
        """Return the decision as the store has it."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def decode(cls, content: bytes) -> Decision:
        """Return the decision that `encode` has turned into `content`."""
        fields = json.loads(content)
        slots = {worker: Slot(**slot) for worker, slot in fields["slots"].items()}
        return cls(**{**fields, "slots": slots, "lost": tuple(fields["lost"])})
