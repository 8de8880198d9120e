"""Publish decisions to the workers, check that these answer, and give up those that do not.

`driver` makes decisions from the policy's proposals. They are numbered, and each is written once to
the store; `horovod.common.generations.decisions` describes the keys and the workers' answers.

A worker answers a decision twice: first its process has heard of it, later its training has entered
the new generation. The driver gives up workers that do not answer in time. If a generation broke
although no worker died, its workers form it again by themselves; if one of them does not come, a
new decision calls all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from horovod.common.generations.decisions import LATEST, Decision, answer_key, decision_key
from horovod.common.store import MemoryStore
from horovod.common.topology import Slot
from horovod.observe.reports.amounts import join_words
from horovod.runner.elastic import policy
from horovod.runner.elastic.failures import Failures
from horovod.runner.elastic.job_state import JobState, Limits, Process, name_of, names

_KEPT_GENERATIONS = 3


class DecisionLog:
    """Writes decisions to the store, and notes the newest in the state."""

    def __init__(self, state: JobState, store: MemoryStore) -> None:
        self._state = state
        self._store = store
        self._forgotten = 0  # the last generation whose keys were deleted, with all before it

    def announce(self, proposal: policy.Proposal) -> Decision | None:
        """Publish a proposal as the next decision, and return that.

        Returns:
            None if it would give another slot to a worker that has just chosen a device by its old
            one. The worker's message about its choice is on its way to the state.
        """
        state, slots = self._state, policy.arrange(proposal.members)
        causes = list(state.causes)
        if proposal.added and state.number:
            joining = [
                f"{name_of(worker)} on {slots[worker].hostname}" for worker in proposal.added
            ]
            causes.append(f"{join_words(joining)} {'joins' if len(joining) == 1 else 'join'}")
        decision = Decision(
            state.number + 1,
            {name_of(worker): slot for worker, slot in slots.items()},
            "; ".join(causes) or self._explain(slots),
            proposal.kind,
            names(proposal.lost),
            proposal.min_np,
        )
        before = {member.number: member.index for member in state.members()}
        moved = [w.number for w in proposal.members if before.get(w.number, w.index) != w.index]
        return self._publish(decision, [answer_key("met", worker=name) for name in names(moved)])

    def _explain(self, slots: Mapping[int, Slot]) -> str:
        """Return the reason for a decision before which nothing happened to workers or hosts."""
        if not self._state.number:
            return "the job begins"
        left = [str(member) for member in self._state.members() if member.number not in slots]
        if left:
            return f"no slot is offered any more for {join_words(left)}"
        return "workers wait for others that have finished"

    def announce_the_end(self) -> None:
        """Publish a decision without workers, so that none waits for others while all end."""
        state = self._state
        if state.number:
            lost = names(state.placed_workers)
            self._publish(Decision(state.number + 1, {}, "the job ends", "failure", lost))

    def _publish(self, decision: Decision, obstacles: Iterable[str] = ()) -> Decision | None:
        key = decision_key(decision.number)
        if not self._store.set_unless(key, decision.encode(), obstacles):
            return None
        self._state.note_decision(decision)
        # The decision is written before its number, so that whoever reads the number finds it.
        self._store.set(LATEST, str(decision.number).encode())
        return decision

    def forget_old(self) -> None:
        """Delete the keys of old generations, once the newest has formed: nobody reads them."""
        for old in range(self._forgotten + 1, self._state.number - _KEPT_GENERATIONS):
            for key in self._store.keys(f"generation/{old}/"):
                self._store.delete(key)
            self._forgotten = old


_ABSENCE_SECONDS = 5.0
"""Seconds that workers whose generation broke wait for each other before a decision calls all."""


class Liveness:
    """Gives up workers that do not answer a decision in time."""

    def __init__(
        self,
        limits: Limits,
        state: JobState,
        failures: Failures,
        later: Callable[[float, Callable[[], None]], None],
        reconcile: Callable[[], None],
    ) -> None:
        """Prepare for decisions.

        Args:
            limits: What the user asked for; it has the deadlines.
            state: The job's state.
            failures: What records workers that are given up.
            later: Calls a function after a number of seconds.
            reconcile: Makes the driver ask the policy what follows.
        """
        self._limits = limits
        self._state = state
        self._failures = failures
        self._later = later
        self._reconcile = reconcile

    def begin(self, decision: Decision) -> None:
        """Start the deadlines for the answers to a new decision."""
        self._later(self._limits.answer_timeout, lambda: self._check_heard(decision.number))
        self._later(self._limits.elastic_timeout, lambda: self._check_entered(decision))

    def note_entry(self, number: int, attempt: int) -> None:
        """Take notice of a worker that has entered a generation; the first attempt is number 0.

        A later attempt means that the generation broke although no worker died: then all its
        workers must enter it again.
        """
        if number != self._state.number:
            return
        if self._state.finished_workers and (attempt or not self._state.is_formed):
            self._ask(number, attempt)
        elif attempt:
            self._later(_ABSENCE_SECONDS, lambda: self._ask(number, attempt))

    def note_finish(self) -> None:
        """Request a decision if workers wait in the newest generation for one that has finished."""
        state = self._state
        if not state.is_formed:
            waiting = any(member.entered[0] == state.number for member in state.members())
            state.decision_requested |= state.too_few or waiting

    def _ask(self, number: int, attempt: int) -> None:
        state = self._state
        absent = state.absent_members(number, attempt)
        if number != state.number or not (absent or state.finished_workers):
            return
        if absent:
            who = join_words([str(process) for process in absent])
            state.causes.append(f"the others have lost {who}")
        state.decision_requested = True
        self._reconcile()

    def _check_heard(self, number: int) -> None:
        """Give up processes that have not noticed a decision: stopped, swapping, or cut off."""
        late = self._state.unresponsive_workers(number)
        self._give_up(late, f"did not react within {self._limits.answer_timeout:g} s")

    def _check_entered(self, decision: Decision) -> None:
        """Give up workers that have not come back after a failure: their program hangs.

        Later decisions do not prolong the time: while the others wait for such a worker in vain,
        they request one decision after the other.
        """
        seconds = self._limits.elastic_timeout
        if decision.too_few or decision.kind not in ("failure", "start"):
            return
        if self._state.too_few:  # meanwhile the job waits for more workers, and expects no answer
            self._later(seconds, lambda: self._check_entered(decision))
            return
        late = self._state.absent_members(decision.number)
        late = [process for process in late if (process.joined or 0) <= decision.number]
        self._give_up(late, f"did not come back to training within {seconds:g} s")

    def _give_up(self, processes: Sequence[Process], why: str) -> None:
        for process in processes:
            self._failures.give_up(process, why)
        if processes:
            self._reconcile()
