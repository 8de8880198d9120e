"""Decisions as workers get them: numbered, in the store, each written once.

`driver` makes them from the policy's proposals. Which keys there are, and what workers answer, is
said in `horovod.common.decisions`.
"""

from __future__ import annotations

from collections.abc import Iterable

from horovod.common.decisions import LATEST, Decision, decision_key
from horovod.common.store import Store
from horovod.runner.elastic import policy
from horovod.runner.elastic.roster import name_of, names
from horovod.runner.elastic.status import listing

_KEPT_GENERATIONS = 3


class DecisionLog:
    """Writes decisions, and remembers the newest."""

    def __init__(self, store: Store) -> None:
        self.newest = Decision(0, {}, "", "start")
        self.formed = False  # its workers have met
        self.causes: list[str] = []  # of the next one, for people
        self._store = store
        self._forgotten = 0  # generations up to this one have no keys in the store any more

    @property
    def number(self) -> int:
        """Of the newest decision; 0 before the first."""
        return self.newest.number

    def announce(self, proposal: policy.Proposal) -> Decision:
        """Make a proposal the next decision."""
        slots = policy.arrange(proposal.members)
        causes, self.causes = self.causes, []
        if proposal.added and self.number:
            joining = [
                f"{name_of(worker)} on {slots[worker].hostname}" for worker in proposal.added
            ]
            causes.append(f"{listing(joining)} {'joins' if len(joining) == 1 else 'join'}")
        return self._publish(
            Decision(
                self.number + 1,
                {name_of(worker): slot for worker, slot in slots.items()},
                "; ".join(causes) or "the job begins",
                proposal.kind,
                names(proposal.lost),
                proposal.min_np,
            )
        )

    def announce_the_end(self, workers: Iterable[int]) -> None:
        """Nobody has a place any more, so that nobody waits for anybody while all end."""
        if self.number:
            lost = names(workers)
            self._publish(Decision(self.number + 1, {}, "the job ends", "failure", lost))

    def _publish(self, decision: Decision) -> Decision:
        self.newest, self.formed = decision, False
        self._store.set(decision_key(decision.number), decision.encode())
        self._store.set(LATEST, str(decision.number).encode())
        return decision

    def take_formed(self, number: int) -> bool:
        """The workers of a decision have met; whether it is the newest."""
        if number != self.number:
            return False
        self.formed = True
        for old in range(self._forgotten + 1, number - _KEPT_GENERATIONS):
            for key in self._store.keys(f"generation/{old}/"):
                self._store.delete(key)
            self._forgotten = old
        return True
