"""Publish decisions to the workers, check that these answer, and record what the job has lost.

`driver` makes decisions from the policy's proposals. They are numbered, and each is written once to
the store; `horovod.common.generations.decisions` describes the keys and the workers' answers.

A worker answers a decision twice: first its process has heard of it, later its training has entered
the new generation. `Liveness` gives up workers that do not answer in time. If a generation broke
although no worker died, its workers form it again by themselves; if one of them does not come, a
new decision calls all.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from horovod.common.generations.decisions import (
    DRIVER_LOST,
    LATEST,
    Decision,
    answer_key,
    decision_key,
)
from horovod.common.store import MemoryStore
from horovod.common.topology import Slot
from horovod.observe.reports.amounts import count_of, join_words
from horovod.runner.agents.controller import HostSet
from horovod.runner.agents.host_agent import HostAgent
from horovod.runner.elastic import policy
from horovod.runner.elastic.discovery import HostManager
from horovod.runner.elastic.job_state import JobState, Limits, Process, name_of, names
from horovod.runner.output.watcher import Status

_KEPT_GENERATIONS = 3

_FENCE_SECONDS = 60.0
"""Seconds within which workers on a lost host end themselves, because they cannot reach us."""

_ABSENCE_SECONDS = 5.0
"""Seconds that workers whose generation broke wait for each other before a decision calls all."""


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
            late = [p for p in self._state.newcomers() if p.number not in slots]
            missing = join_words([str(p) for p in late if p.ready_at is None])
            without = f" without {missing}: no hvd.init() there so far" if missing else ""
            return f"the job begins{without}"
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


class Failures:
    """Records losses in the job's state, for people, and against the host.

    The other workers learn of a loss by the next decision.
    """

    def __init__(
        self, state: JobState, hosts: HostSet, manager: HostManager, status: Status
    ) -> None:
        self._state = state
        self._hosts = hosts
        self._manager = manager
        self._status = status

    def failed(self, process: Process, code: int) -> None:
        """Record a worker that has ended by itself with an error."""
        lost_driver = "could not reach the driver any more"
        how = lost_driver if code == DRIVER_LOST else process.exit(code).describe()
        self._note(process, code, how)
        self.blame(process.host)

    def could_not_start(self, process: Process, why: str) -> None:
        self._state.note_failure(process, 127)
        self.blame(process.host, f"cannot start a worker on {process.host}: {why}")

    def give_up(self, process: Process, why: str) -> None:
        """Remove a worker that lives but does not answer from the job.

        It is killed if its host can be reached. Otherwise it may wake up later: then it finds that
        it is not a part of the job any more, or cannot reach us, and ends itself.
        """
        self._hosts.stop(process.host, process.number, 0.0)
        if not self._hosts.obeys(process.host):
            self._fence()
        self._note(process, -signal.SIGKILL, why)
        self.blame(process.host)

    def lost_host(self, agent: HostAgent, said: str) -> None:
        """Record the loss of a host, and with it of its workers; ``said`` is the reason."""
        workers = self._state.workers_on(agent.name)
        if agent.remote:
            self._fence()
        for process in workers:
            if process.is_dismissed:
                del self._state.alive[process.number]
            else:
                self._note(process, -signal.SIGKILL, "lost with its host")
        self.blame(agent.name, f"the connection to {agent.name} is lost: {said}")

    def blame(self, host: str, why: str = "") -> None:
        """Count one more failure against a host; `why` says how the host itself failed."""
        if why:
            self._state.host_problem = why
            self._status.announce(why, "host failed", host=host)
        if self._manager.record_failure(host):
            failures = self._manager.blacklisting.failures(host)
            self._status.announce(
                f"{host} gets no new workers after {count_of(failures, 'failure')}"
                + ("" if self._manager.blacklisting.is_for_good(host) else ", for a while"),
                "blacklisted",
                host=host,
            )

    def _note(self, process: Process, code: int, how: str) -> None:
        self._state.note_loss(process, code, how)
        said = {} if process.because_of is None else {"because_of": process.because_of}
        facts: dict[str, Any] = {"worker": process.name, "host": process.host, "how": how, **said}
        if self._state.finishing and not process.is_done:  # there may be no decision that tells it
            text = f"{process} failed: {how}; others have finished"
            self._status.announce(text, "failed", **facts)
        else:
            self._status.note("failed", **facts)

    def _fence(self) -> None:
        self._state.fenced_until = time.monotonic() + _FENCE_SECONDS


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
