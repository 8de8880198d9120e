"""The driver of an elastic job: executes what `policy` decides, and tells the workers.

It is the `Handler` of the launcher's loop. What happens (agents' events, discovered hosts, what
workers answer in the store) is noted in `job_state` and in the status file; then `_reconcile` asks
the policy what follows. Everything runs in the loop's thread; the store's and the poller's threads
only leave messages. Workers learn of decisions through the store, see `horovod.common.decisions`;
`liveness` minds their answers, and `failures` what becomes of those who fail.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from horovod.common.decisions import broken_key, parse_answer, seen_key
from horovod.common.loss_note import read_note
from horovod.runner.agents.host_agent import HostAgent
from horovod.runner.agents.store_endpoints import StoreEndpoints
from horovod.runner.agents.supervise import FAILURE_GRACE, Supervisor
from horovod.runner.elastic import policy, termination
from horovod.runner.elastic.decision_log import DecisionLog
from horovod.runner.elastic.discovery import HostManager, NoMoreHosts
from horovod.runner.elastic.failures import Failures
from horovod.runner.elastic.host_set import Host, HostSet
from horovod.runner.elastic.job_state import (
    JobState,
    Limits,
    Process,
    WorkerFailure,
    name_of,
    number_of,
)
from horovod.runner.elastic.liveness import Liveness
from horovod.runner.elastic.mailbox import Mailbox
from horovod.runner.elastic.polling import HostPoller
from horovod.runner.elastic.status import Status, count
from horovod.runner.output.progress import Progress
from horovod.runner.output.report import Outcome, exit_status

__all__ = ["DISCOVER_HOSTS_FREQUENCY_SECS", "Driver", "WorkerOutputs"]


def __getattr__(name: str) -> Any:
    """Names of Horovod 0.28.1 (docs/old_names.md), imported when somebody asks for them."""
    if name in ("ElasticDriver", "Results"):
        from horovod.runner._upstream import elastic

        return getattr(elastic, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


DISCOVER_HOSTS_FREQUENCY_SECS = 1.0
_TICK = 0.5
"""Seconds after which the loop looks at the clock, if nothing else happens."""


class WorkerOutputs(Protocol):
    """Where workers' output goes."""

    def open(self, process: Process) -> None:
        """Expect output of a worker."""

    def rename(self, worker: int, rank: int) -> None:
        """The worker is that rank now."""


class Driver:
    """One elastic job."""

    def __init__(
        self,
        hosts: HostSet,
        limits: Limits,
        manager: HostManager,
        place: StoreEndpoints,
        supervisor: Supervisor,
        outputs: WorkerOutputs,
        status: Status,
        verbose: int = 0,
    ) -> None:
        self.last_failure: WorkerFailure | None = None  # the one that the outcome tells of
        self._hosts = hosts
        self._limits = limits
        self._manager = manager
        self._store = place.store
        self._supervisor = supervisor
        self._outputs = outputs
        self._status = status
        self._verbose = verbose
        self._state = JobState()
        self._decisions = DecisionLog(self._state, self._store)
        self._failures = Failures(self._state, hosts, manager, status)
        self._liveness = Liveness(
            limits, self._state, self._failures, supervisor.call_later, self._reconcile
        )
        self._mailbox = Mailbox()
        self._last_problem = ""  # of discovery
        self._progress = Progress(supervisor.console, status=status.of_the_job)
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """From discovery to the end."""
        self._supervisor.watch(self._mailbox.descriptor, self._take_messages)
        self._store.watch(self._on_key)
        self._supervisor.held = True
        self._tick()
        tell = partial(self._mailbox.post, "hosts")
        poller = HostPoller(self._manager.discovery, tell, DISCOVER_HOSTS_FREQUENCY_SECS)
        try:
            self._supervisor.run(self)
        finally:
            poller.close()
            self._supervisor.unwatch(self._mailbox.descriptor)
            self._mailbox.close()
        outcome = self._outcome
        outcome.interrupted = next(iter(self._supervisor.signals), None)
        outcome.note_lost_output(self._supervisor.console)
        self._status.note("end", status=exit_status(outcome), problem=outcome.problem)
        return outcome

    # -- messages of other threads ---------------------------------------------------------

    def _on_key(self, key: str) -> None:
        answer = parse_answer(key)
        if answer is not None:
            self._mailbox.post("answer", answer)

    def _take_messages(self) -> None:
        if self._take_all():
            self._reconcile()

    def _take_all(self) -> bool:
        changed = False
        for kind, content in self._mailbox.take_all():
            changed |= self._take_hosts(content) if kind == "hosts" else self._take_answer(*content)
        return changed

    def _take_hosts(self, answer: dict[str, int] | Exception) -> bool:
        state = self._state
        if isinstance(answer, Exception):
            self._status.note("discovery failed", reason=str(answer))
            if isinstance(answer, NoMoreHosts):
                state.no_hosts = str(answer)
            elif not state.discovered:
                state.no_hosts = f"cannot find out which hosts there are: {answer}"
            elif str(answer) != self._last_problem:
                self._last_problem = str(answer)
                self._supervisor.console.say(f"going on with the known hosts: {answer}")
            return bool(state.no_hosts)
        before = self._manager.current_hosts
        changed = self._manager.take(answer)
        if not changed and state.discovered:
            return False
        state.discovered = True
        self._last_problem = ""
        for host in before.host_slots:
            if state.number and host not in answer and state.on(host):
                state.causes.append(f"{host} is not available any more")
        self._status.note("hosts", hosts=answer)
        return True

    def _take_answer(self, kind: str, number: int, worker: str) -> bool:
        """What a worker has written to the store; whether something may follow from it."""
        if kind == "formed":
            self._take_formed(number)
            return True
        process, status = self._state.alive.get(number_of(worker)), self._status
        if process is None:
            return False
        if kind == "ready":
            process.ready_at = process.ready_at or time.monotonic()
            status.note("ready", worker=worker, host=process.host)
        elif kind == "heard":
            process.heard = max(process.heard, number)
            status.note("heard", worker=worker, decision=number)
        elif kind == "seen":
            attempt = int(self._store.try_get(seen_key(number, worker)) or 0)
            status.note("entered", worker=worker, decision=number, attempt=attempt)
            self._state.entered(process, number, attempt)
            self._liveness.entered(*process.entered)
        elif kind == "broken":
            why = self._store.try_get(broken_key(number, worker)) or b""
            status.note("broken", worker=worker, decision=number, why=why.decode(errors="replace"))
        elif kind == "done" and not process.done:
            status.note("done", worker=worker)
            process.done = True
            self._finish(process)
        elif kind == "leaving" and not process.leaving:
            status.note("leaving", worker=worker)
            process.leaving = True
            if process.number in self._state.placed:
                self._state.left.append(process.number)
            self._manager.give_back(process.host)
            self._state.causes.append(f"{process} leaves, as it was told to")
        return kind not in ("heard", "seen", "broken")

    def _take_formed(self, number: int) -> None:
        state = self._state
        if number != state.number or not state.formed_before:
            self._status.note("formed", decision=number)
        else:
            now, ranks = time.monotonic(), len(state.placed)
            seconds = now - (state.forming_since or now)
            text = f"re-formed with {count(ranks, 'rank')} in {seconds:.1f} s"
            self._status.tell(text, "formed", decision=number, ranks=ranks, seconds=seconds)
        if number == state.number:
            state.mark_formed()
            self._decisions.forget_old()

    # -- what the hosts say ----------------------------------------------------------------

    def ready(self, agent: Host) -> None:
        self._check_way(agent, self._hosts.met(agent))

    def probed(self, agent: HostAgent, answer: dict[str, Any]) -> None:
        self._check_way(agent, self._hosts.probed(agent, answer))

    def _check_way(self, agent: Host, problem: str) -> None:
        if problem:
            self._hosts.let_go(agent.name)
            self._hosts.rest(agent.name)
            self._failures.blame(agent.name, problem)
        self._reconcile()

    def started(self, agent: Host, worker: int, pid: int) -> None:
        process = self._state.alive.get(worker)
        if process is not None:
            process.pid = pid
            if self._verbose:
                self._supervisor.console.say(f"{process.name} runs on {agent.name}, pid {pid}")
            self._status.note("started", worker=process.name, host=agent.name, pid=pid)

    def failed(self, agent: HostAgent, worker: int, number: int, what: str) -> None:
        self.could_not_start(
            worker, f"{what!r}: {os.strerror(number)}" if what else os.strerror(number)
        )

    def could_not_start(self, worker: int, why: str) -> None:
        """A worker will never run."""
        process = self._state.alive.get(worker)
        if process is None or self._ending:
            return
        self._failures.could_not_start(process, why)
        if not self._state.on(process.host):  # others may do better
            self._hosts.let_go(process.host)
            self._hosts.rest(process.host)
        self._reconcile()

    def exited(self, agent: Host, exits: Sequence[tuple[int, int]]) -> None:
        self._take_all()  # what they said before they ended
        for worker, code in exits:
            process = self._state.alive.get(worker)
            self._status.note("exited", worker=name_of(worker), host=agent.name, code=code)
            if process is not None:
                self._take_exit(process, code)
        self._reconcile()

    def _take_exit(self, process: Process, code: int) -> None:
        state = self._state
        if code != 0:
            process.because_of = read_note(self._store, process.name)
        removed = process.joined is not None and process.number not in state.placed
        expected = process.dismissed or removed or (process.leaving and code == 0)
        if expected or (code != 0 and self._ending):
            del state.alive[process.number]
        elif code == 0:
            state.end_well(process)
            if not process.done:
                self._finish(process)
        else:
            self._failures.failed(process, code)

    def lost(self, agent: HostAgent, code: int) -> None:
        if self._supervisor.stopping or not self._hosts.lost(agent):
            return
        if agent.finished:  # told to by somebody else: nothing speaks against the host
            self._status.tell(f"{agent.name} has left the job", "host left", host=agent.name)
        else:
            self._failures.lost_host(agent, agent.explain_end(code))
        self._reconcile()

    # -- the next step ---------------------------------------------------------------------

    @property
    def _ending(self) -> bool:
        return self._supervisor.stopping or bool(self._supervisor.signals)

    def _tick(self) -> None:
        if not self._supervisor.stopping:
            self._reconcile()
            connecting = [name for name in self._hosts.names() if self._hosts.is_connecting(name)]
            self._progress.update("" if self._ending else self._state.awaited(connecting))
            self._supervisor.call_later(_TICK, self._tick)

    def _reconcile(self) -> None:
        """Do what follows from what is known."""
        if self._supervisor.stopping:
            return
        state = self._state
        plan = policy.make_plan(self._look(), self._limits)
        if plan.ending is not None:
            self._end(plan.ending)
            return
        if plan.release:
            self._decisions.announce_the_end()
            return
        if plan.begin_anew:
            state.begin_anew()
        state.short_since = plan.short_since
        for worker in plan.stop:
            self._dismiss(state.alive[worker])
        if plan.proposal is not None:
            self._decide(plan.proposal)
        for host in plan.start:
            self._start(host)
        self._mind_hosts()
        told, state.shortage = state.shortage, termination.shortage(self._look(), self._limits)
        if state.shortage and state.shortage != told:
            self._status.tell(state.shortage, "waiting")

    def _look(self) -> JobState:
        """The state, with what is to be said of the hosts now."""
        state, hosts, offered = self._state, self._hosts, self._manager.current_hosts
        state.now = time.monotonic()
        state.hosts, state.blacklisted = offered.host_slots, offered.blacklisted
        state.for_good = frozenset(filter(self._manager.blacklisting.is_for_good, state.hosts))
        state.resting = frozenset(host for host in state.hosts if not hosts.is_ready(host))
        state.connecting = any(map(hosts.is_connecting, state.resting))
        state.interrupted = bool(self._supervisor.signals)
        state.obstacle = hosts.obstacle()
        return state

    def _mind_hosts(self) -> None:
        """Agents where workers may start, none where they may not and nobody is left."""
        state = self._look()
        if state.over:
            return
        if state.number or state.workers or state.slots >= self._limits.num_proc:
            wanted = self._hosts.first(state.usable, self._limits.max_np)
            for host, problem in self._hosts.want(wanted).items():
                self._failures.blame(host, f"cannot start on {host}: {problem}")
        for host in self._hosts.names():
            if host not in state.usable and not state.on(host):
                self._hosts.let_go(host)

    def _start(self, host: str) -> None:
        process = self._state.new(host)
        place = policy.expect(self._look(), self._limits).get(process.number)
        process.rank = process.rank if place is None else place.rank
        self._outputs.open(process)
        slots = self._manager.current_hosts.get_slots(host)
        self._hosts.start(host, process.number, process.index, max(slots, process.index + 1), place)
        if self._state.number:
            self._status.tell(f"starting {process.name} on {host}", "starting", worker=process.name)

    def _dismiss(self, process: Process) -> None:
        process.dismissed = True
        self._hosts.stop(process.host, process.number, FAILURE_GRACE)

    def _finish(self, process: Process) -> None:
        """Somebody has finished: nobody new is needed."""
        state = self._state
        if process.number in state.placed:
            state.finished.append(process.number)
        if not state.finishing:
            state.finishing = True
            for newcomer in state.newcomers() if state.number else ():
                self._dismiss(newcomer)
        if state.formed or not state.number:
            return
        # The newest generation has not come about. Those who train on in an older one will finish
        # as well; who wanted to join them is too late.
        members = state.members()
        if any(member.joined != state.number for member in members):
            for member in members:
                if member.joined == state.number:
                    self._dismiss(member)
        self._liveness.finished()

    def _decide(self, proposal: policy.Proposal) -> None:
        decision = self._decisions.announce(proposal)
        slots = decision.slots
        ranks = {number_of(name): slot.rank for name, slot in slots.items()}
        self._state.place(proposal.members, ranks)
        for worker, rank in ranks.items():
            self._outputs.rename(worker, rank)
        self._liveness.begin(decision)
        size = count(len(slots), "worker")
        if decision.too_few:
            size += f", too few to go on (at least {proposal.min_np})"
        self._status.tell(
            f"{size}: {decision.reason}",
            "decision",
            number=decision.number,
            kind=decision.kind,
            too_few=decision.too_few,
            workers={name: [slot.hostname, slot.rank] for name, slot in slots.items()},
            lost=decision.lost,
        )

    def _end(self, ending: termination.Ending) -> None:
        self._outcome, self.last_failure = termination.outcome(self._state, ending), ending.failure
        if ending.problem or ending.failure or self._state.alive:
            self._decisions.announce_the_end()
        self._supervisor.stop(FAILURE_GRACE)
