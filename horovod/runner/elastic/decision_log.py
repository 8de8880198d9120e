"""Publish decisions to the workers: numbered, in the store, each written once.

`driver` makes them from the policy's proposals. `horovod.common.decisions` describes the keys and
the workers' answers.
"""

from __future__ import annotations

from horovod.common.decisions import LATEST, Decision, decision_key
from horovod.common.store import Store
from horovod.runner.elastic import policy
from horovod.runner.elastic.job_state import JobState, name_of, names
from horovod.runner.output.watcher import join_words

_KEPT_GENERATIONS = 3


class DecisionLog:
    """Writes decisions to the store, and notes the newest in the state."""

    def __init__(self, state: JobState, store: Store) -> None:
        self._state = state
        self._store = store
        self._forgotten = 0  # the last generation whose keys were deleted, with all before it

    def announce(self, proposal: policy.Proposal) -> Decision:
        """Publish a proposal as the next decision, and return that."""
        state, slots = self._state, policy.arrange(proposal.members)
        causes = list(state.causes)
        if proposal.added and state.number:
            joining = [
                f"{name_of(worker)} on {slots[worker].hostname}" for worker in proposal.added
            ]
            causes.append(f"{join_words(joining)} {'joins' if len(joining) == 1 else 'join'}")
        return self._publish(
            Decision(
                state.number + 1,
                {name_of(worker): slot for worker, slot in slots.items()},
                "; ".join(causes) or "the job begins",
                proposal.kind,
                names(proposal.lost),
                proposal.min_np,
            )
        )

    def announce_the_end(self) -> None:
        """Publish a decision without workers, so that none waits for others while all end."""
        state = self._state
        if state.number:
            lost = names(state.placed_workers)
            self._publish(Decision(state.number + 1, {}, "the job ends", "failure", lost))

    def _publish(self, decision: Decision) -> Decision:
        self._state.note_decision(decision)
        self._store.set(decision_key(decision.number), decision.encode())
        self._store.set(LATEST, str(decision.number).encode())
        return decision

    def forget_old(self) -> None:
        """Delete the keys of old generations, once the newest has formed: nobody reads them."""
        for old in range(self._forgotten + 1, self._state.number - _KEPT_GENERATIONS):
            for key in self._store.keys(f"generation/{old}/"):
                self._store.delete(key)
            self._forgotten = old
