"""The driver of an elastic job: executes what `policy` decides, and tells the workers.

It is the `Handler` of the launcher's loop. What happens (agents' events, discovered hosts, what
workers write to the store) changes the book in `roster`; then `_reconcile` asks the policy what
follows. Everything runs in the loop's thread; the store's and the poller's threads only leave
messages. Workers learn of decisions through the store, see `horovod.common.decisions`; `liveness`
minds their answers, and `failures` what becomes of those who fail.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

from horovod.common.loss_note import read_note
from horovod.runner.elastic import policy
from horovod.runner.elastic.decision_log import DecisionLog
from horovod.runner.elastic.discovery import HostManager, NoMoreHosts
from horovod.runner.elastic.failures import Failures
from horovod.runner.elastic.host_set import Host, HostSet
from horovod.runner.elastic.liveness import Liveness
from horovod.runner.elastic.mailbox import Mailbox
from horovod.runner.elastic.polling import DISCOVER_HOSTS_FREQUENCY_SECS, HostPoller
from horovod.runner.elastic.roster import Process, Roster, WorkerFailure, name_of, now, number_of
from horovod.runner.elastic.status import Status, count
from horovod.runner.elastic.termination import Ending, Termination
from horovod.runner.elastic.upstream_driver import ElasticDriver
from horovod.runner.host_agent import HostAgent
from horovod.runner.progress import Progress, some
from horovod.runner.report import Outcome, exit_status
from horovod.runner.store_endpoints import StoreEndpoints
from horovod.runner.supervise import FAILURE_GRACE, Supervisor

__all__ = ["DISCOVER_HOSTS_FREQUENCY_SECS", "Driver", "ElasticDriver", "WorkerOutputs"]

_TICK = 0.5
"""Seconds after which the loop looks at the clock, if nothing else happens."""

_WORDS_OF_WORKERS = tuple(
    f"elastic/{word}/" for word in ("ready", "heard", "seen", "formed", "done", "leaving")
)


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
        limits: policy.Limits,
        manager: HostManager,
        place: StoreEndpoints,
        supervisor: Supervisor,
        outputs: WorkerOutputs,
        status: Status,
        verbose: int = 0,
    ) -> None:
        self._limits = limits
        self._manager = manager
        self._place = place
        self._supervisor = supervisor
        self._outputs = outputs
        self._status = status
        self._verbose = verbose
        self._hosts = hosts
        self._roster = Roster()
        self._termination = Termination(limits, self._roster, manager)
        self._log_of_decisions = DecisionLog(place.store)
        self._failures = Failures(
            self._roster, self._hosts, manager, self._termination, self._log_of_decisions, status
        )
        self._liveness = Liveness(
            limits,
            self._roster,
            self._log_of_decisions,
            self._failures,
            supervisor.call_later,
            self._reconcile,
        )
        self._finishing = False
        self._mailbox = Mailbox()
        self._last_problem = ""
        self._progress = Progress(supervisor.console)
        self._forming_since = 0.0  # when the first decision since workers last met was made
        self._forms_anew = False  # workers have met before

    def run(self) -> Outcome:
        """From discovery to the end."""
        self._supervisor.watch(self._mailbox.descriptor, self._take_messages)
        self._place.store.watch(self._on_key)
        self._supervisor.held = True
        self._tick()
        poller = HostPoller(
            self._manager.discovery, lambda answer: self._mailbox.post("hosts", answer)
        )
        try:
            self._supervisor.run(self)
        finally:
            poller.close()
            self._supervisor.unwatch(self._mailbox.descriptor)
            self._mailbox.close()
        outcome = self._termination.outcome
        outcome.interrupted = next(iter(self._supervisor.signals), None)
        outcome.note_lost_output(self._supervisor.console)
        self._status.note("end", status=exit_status(outcome), problem=outcome.problem)
        return outcome

    @property
    def last_failure(self) -> WorkerFailure | None:
        """The one that `run`'s outcome tells of."""
        return self._termination.blamed

    # -- messages of other threads ---------------------------------------------------------

    def _on_key(self, key: str) -> None:
        if key.startswith(_WORDS_OF_WORKERS):
            self._mailbox.post("key", key)

    def _take_messages(self) -> None:
        if self._take_all():
            self._reconcile()

    def _take_all(self) -> bool:
        changed = False
        for kind, content in self._mailbox.take_all():
            changed |= self._take_hosts(content) if kind == "hosts" else self._take_key(content)
        return changed

    def _take_hosts(self, answer: dict[str, int] | Exception) -> bool:
        if isinstance(answer, Exception):
            self._status.note("discovery failed", reason=str(answer))
            if isinstance(answer, NoMoreHosts):
                self._end(Ending(str(answer), self._roster.last_failure))
            elif not self._termination.discovered:
                self._end(Ending(f"cannot find out which hosts there are: {answer}"))
            elif str(answer) != self._last_problem:
                self._last_problem = str(answer)
                self._supervisor.console.say(f"going on with the known hosts: {answer}")
            return False
        before = self._manager.current_hosts
        changed = self._manager.take(answer)
        if not changed and self._termination.discovered:
            return False
        self._termination.discovered = True
        self._last_problem = ""
        for host in before.host_slots:
            if host not in answer and self._roster.on(host):
                self._log_of_decisions.causes.append(f"{host} is not available any more")
        self._status.note("hosts", hosts=answer)
        return True

    def _take_key(self, key: str) -> bool:
        what, *rest = key.split("/")[1:]
        if what == "formed":
            self._take_formed(int(rest[0]))
            return True
        process = self._roster.get(rest[-1])
        if process is None:
            return False
        if what == "ready":
            process.ready_at = process.ready_at or now()
            self._status.note("ready", worker=process.name, host=process.host)
        elif what == "heard":
            process.heard = max(process.heard, int(rest[0]))
        elif what == "seen":
            attempt = int(self._place.store.try_get(key) or 0)
            process.entered = max(process.entered, (int(rest[0]), attempt))
            self._liveness.entered(*process.entered)
        elif what == "done" and not process.done:
            process.done = True
            self._finish(process)
        elif what == "leaving" and not process.leaving:
            process.leaving = True
            if process.number in self._roster.placed:
                self._roster.left.append(process.number)
            self._manager.give_back(process.host)
            self._log_of_decisions.causes.append(f"{process} leaves, as it was told to")
        return what not in ("heard", "seen")

    def _take_formed(self, number: int) -> None:
        newest = self._log_of_decisions.take_formed(number)
        seconds, ranks = now() - self._forming_since, len(self._roster.placed)
        if newest and self._forms_anew:
            text = f"re-formed with {count(ranks, 'rank')} in {seconds:.1f} s"
            self._status.tell(text, "formed", decision=number, ranks=ranks, seconds=seconds)
        else:
            self._status.note("formed", decision=number)
        if newest:
            self._forming_since, self._forms_anew = 0.0, True
            self._termination.formed()

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
        process = self._roster.alive.get(worker)
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
        process = self._roster.alive.get(worker)
        if process is None or self._supervisor.stopping or self._supervisor.signals:
            return
        self._failures.could_not_start(process, why)
        self._reconcile()

    def exited(self, agent: Host, exits: Sequence[tuple[int, int]]) -> None:
        self._take_all()  # what they said before they ended
        for worker, code in exits:
            process = self._roster.alive.get(worker)
            self._status.note("exited", worker=name_of(worker), host=agent.name, code=code)
            if process is not None:
                self._take_exit(process, code)
        self._reconcile()

    def _take_exit(self, process: Process, code: int) -> None:
        roster = self._roster
        if code != 0:
            process.because_of = read_note(self._place.store, process.name)
        had_place = process.number in roster.placed
        removed = process.joined is not None and not had_place
        if process.dismissed or removed or (process.leaving and code == 0):
            del roster.alive[process.number]
        elif code == 0:
            roster.remove(process)
            self._termination.finished(process.exit(code))
            if not process.done:
                self._finish(process)
        elif self._supervisor.stopping or self._supervisor.signals:
            del roster.alive[process.number]
        else:
            self._failures.failed(process, code)

    def lost(self, agent: HostAgent, code: int) -> None:
        if self._supervisor.stopping or not self._hosts.lost(agent):
            return
        said = agent.last_words or f"ended with exit code {code} and no message"
        if agent.hello is None:
            self._failures.blame(agent.name, f"cannot start on {agent.name}: {said}")
        else:
            self._failures.lost_host(agent, f"the connection to {agent.name} is lost: {said}")
        self._reconcile()

    # -- the next step ---------------------------------------------------------------------

    def _tick(self) -> None:
        if not self._supervisor.stopping:
            self._reconcile()
            over = self._supervisor.stopping or self._supervisor.signals
            self._progress.update("" if over else self._awaited())
            self._supervisor.call_later(_TICK, self._tick)

    def _awaited(self) -> str:
        """Who or what is awaited, for people; empty while the workers train."""
        log, roster = self._log_of_decisions, self._roster
        if self._finishing or (log.formed and not self._termination.lacking):
            return ""
        if self._termination.lacking:
            return self._termination.lacking
        connecting = [name for name in self._hosts.names() if self._hosts.is_connecting(name)]
        if log.number == 0 and connecting:
            return f"starting, waiting for {some(connecting)}"
        members = roster.members() if log.number else list(roster.alive.values())
        absent = [
            member
            for member in members
            if (member.entered[0] < log.number if log.number else member.ready_at is None)
        ]
        if not absent:
            return ""
        what = f"{'re-' * self._forms_anew}forming with {count(len(members), 'rank')}"
        return f"{what if log.number else 'starting'}, waiting for {some(list(map(str, absent)))}"

    def _reconcile(self) -> None:
        """Do what follows from what is known."""
        if self._supervisor.stopping:
            return
        ending = self._termination.find(self._view())
        if ending is not None:
            self._end(ending)
            return
        if self._supervisor.signals and self._log_of_decisions.newest.too_few:
            self._log_of_decisions.announce_the_end(
                self._roster.placed
            )  # nobody will come any more
            return
        plan = policy.make_plan(self._view(), self._limits)
        if plan.exhausted:
            self._end(self._termination.exhausted())
            return
        for worker in plan.stop:
            self._dismiss(self._roster.alive[worker], FAILURE_GRACE)
        if plan.proposal is not None:
            self._decide(plan.proposal)
        for host in plan.start:
            self._start(host)
        self._mind_hosts()
        waiting = self._termination.waiting_for(self._view())
        if waiting:
            self._status.tell(waiting, "waiting")

    def _view(self) -> policy.View:
        hosts = self._manager.current_hosts
        resting = frozenset(h for h in hosts.host_slots if not self._hosts.is_ready(h))
        return policy.View(
            now=now(),
            number=self._log_of_decisions.number,
            formed=self._log_of_decisions.formed,
            hosts=hosts.host_slots,
            blacklisted=hosts.blacklisted,
            resting=resting,
            connecting=any(map(self._hosts.is_connecting, resting)),
            workers=self._roster.view(),
            failed=tuple(self._roster.failed),
            left=tuple(self._roster.left),
            finished=tuple(self._roster.finished),
            asked=self._liveness.asked,
            troubled=bool(self._roster.failures),
            finishing=self._finishing or bool(self._supervisor.signals),
            ended_early=self._ended_early(),
            fenced_until=self._failures.fenced_until,
        )

    def _ended_early(self) -> tuple[str, ...] | None:
        begun = self._log_of_decisions.number or self._supervisor.signals
        return tuple(self._roster.ended_early) if self._finishing and not begun else None

    def _mind_hosts(self) -> None:
        """Agents where workers may start, none where they may not and nobody is left."""
        view = self._view()
        if self._supervisor.signals or self._finishing:
            return
        if view.number or view.workers or view.slots >= self._limits.num_proc:
            wanted = self._hosts.first(view.usable, self._limits.max_np)
            for host, problem in self._hosts.want(wanted).items():
                self._failures.blame(host, f"cannot start on {host}: {problem}")
        for host in self._hosts.names():
            if host not in view.usable and not self._roster.on(host):
                self._hosts.let_go(host)

    def _start(self, host: str) -> None:
        process = self._roster.new(host)
        place = policy.expect(self._view(), self._limits).get(process.number)
        process.rank = process.rank if place is None else place.rank
        self._outputs.open(process)
        slots = self._manager.current_hosts.get_slots(host)
        self._hosts.start(host, process.number, process.index, max(slots, process.index + 1), place)
        if self._log_of_decisions.number:
            self._status.tell(f"starting {process.name} on {host}", "starting", worker=process.name)

    def _dismiss(self, process: Process, grace: float) -> None:
        process.dismissed = True
        self._hosts.stop(process.host, process.number, grace)

    def _finish(self, process: Process) -> None:
        """Somebody has finished: nobody new is needed."""
        roster, number = self._roster, self._log_of_decisions.number
        if process.number in roster.placed:
            roster.finished.append(process.number)
        if not self._finishing:
            self._finishing = True
            for newcomer in roster.newcomers() if number else ():
                self._dismiss(newcomer, FAILURE_GRACE)
        if self._log_of_decisions.formed or not number:
            return
        # The newest generation has not come about. Those who train on in an older one will finish
        # as well; who wanted to join them is too late.
        members = roster.members()
        if any(member.joined != number for member in members):
            for member in members:
                if member.joined == number:
                    self._dismiss(member, FAILURE_GRACE)
        self._liveness.finished()

    # -- decisions -------------------------------------------------------------------------

    def _decide(self, proposal: policy.Proposal) -> None:
        self._forming_since = self._forming_since or now()
        decision = self._log_of_decisions.announce(proposal)
        slots = decision.slots
        ranks = {number_of(name): slot.rank for name, slot in slots.items()}
        self._roster.place(decision.number, proposal.members, ranks)
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
            workers={name: [slot.hostname, slot.rank] for name, slot in slots.items()},
            lost=decision.lost,
        )

    def _end(self, ending: Ending) -> None:
        self._termination.settle(ending)
        if ending.problem or ending.failure:
            self._log_of_decisions.announce_the_end(self._roster.placed)
        self._supervisor.stop(FAILURE_GRACE)
