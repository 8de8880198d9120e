"""The driver of an elastic job: executes what `policy` decides, and tells the workers.

It is the `Handler` of the launcher's loop. What happens (agents' events, discovered hosts, what
workers write to the store) changes the book in `roster`; then `_settle` asks the policy what
follows. Everything runs in the loop's thread; the store's and the poller's threads only leave
messages. Workers learn of decisions through the store, see `horovod.common.decisions`; `roll_call`
minds their answers, and `losses` what becomes of those who fail.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from horovod.runner.elastic import policy
from horovod.runner.elastic.agents import Agents, WorkerRequest
from horovod.runner.elastic.announcing import Announcer
from horovod.runner.elastic.discovery import HostManager, NoMoreHosts
from horovod.runner.elastic.endings import Ending, Endings
from horovod.runner.elastic.losses import Losses
from horovod.runner.elastic.mailbox import Mailbox
from horovod.runner.elastic.polling import HostPoller
from horovod.runner.elastic.roll_call import RollCall
from horovod.runner.elastic.roster import Failure, Process, Roster, name_of, now, number_of
from horovod.runner.elastic.status import Status, count
from horovod.runner.host_agent import HostAgent
from horovod.runner.meeting import MeetingPlace
from horovod.runner.report import Outcome, exit_status
from horovod.runner.supervise import FAILURE_GRACE, Supervisor

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
        request: WorkerRequest,
        limits: policy.Limits,
        manager: HostManager,
        place: MeetingPlace,
        supervisor: Supervisor,
        outputs: WorkerOutputs,
        status: Status,
        connect: Callable[[str], HostAgent] | None = None,
    ) -> None:
        """``connect`` gives the agent of a host where not we start it, here or over ssh."""
        self._limits = limits
        self._manager = manager
        self._place = place
        self._supervisor = supervisor
        self._outputs = outputs
        self._status = status
        self._verbose = request.verbose
        self._agents = Agents(request, place, supervisor, connect)
        self._roster = Roster()
        self._endings = Endings(limits, self._roster, manager)
        self._announcer = Announcer(place.store)
        self._losses = Losses(
            self._roster, self._agents, manager, self._endings, self._announcer, status
        )
        self._roll_call = RollCall(
            limits,
            self._roster,
            self._announcer,
            self._losses,
            supervisor.call_later,
            self._settle,
        )
        self._finishing = False
        self._mailbox = Mailbox()
        self._last_problem = ""

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
        outcome = self._endings.outcome
        outcome.interrupted = next(iter(self._supervisor.signals), None)
        outcome.output_lost = self._supervisor.console.broken
        self._status.note("end", status=exit_status(outcome), problem=outcome.problem)
        return outcome

    @property
    def last_failure(self) -> Failure | None:
        """The one that `run`'s outcome tells of."""
        return self._endings.blamed

    # -- messages of other threads ---------------------------------------------------------

    def _on_key(self, key: str) -> None:
        if key.startswith(_WORDS_OF_WORKERS):
            self._mailbox.post("key", key)

    def _take_messages(self) -> None:
        if self._take_all():
            self._settle()

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
            elif not self._endings.discovered:
                self._end(Ending(f"cannot find out which hosts there are: {answer}"))
            elif str(answer) != self._last_problem:
                self._last_problem = str(answer)
                self._supervisor.console.say(f"going on with the known hosts: {answer}")
            return False
        before = self._manager.current_hosts
        changed = self._manager.take(answer)
        if not changed and self._endings.discovered:
            return False
        self._endings.discovered = True
        self._last_problem = ""
        for host in before.host_slots:
            if host not in answer and self._roster.on(host):
                self._announcer.causes.append(f"{host} is not available any more")
        self._status.note("hosts", hosts=answer)
        return True

    def _take_key(self, key: str) -> bool:
        what, *rest = key.split("/")[1:]
        if what == "formed":
            self._status.note("formed", decision=int(rest[0]))
            if self._announcer.take_formed(int(rest[0])):
                self._endings.formed()
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
            self._roll_call.entered(*process.entered)
        elif what == "done" and not process.done:
            process.done = True
            self._finish(process)
        elif what == "leaving" and not process.leaving:
            process.leaving = True
            if process.number in self._roster.placed:
                self._roster.left.append(process.number)
            self._manager.give_back(process.host)
            self._announcer.causes.append(f"{process} leaves, as it was told to")
        return what not in ("heard", "seen")

    # -- what the agents say ---------------------------------------------------------------

    def ready(self, agent: HostAgent) -> None:
        self._check_way(agent, self._agents.met(agent))

    def probed(self, agent: HostAgent, answer: dict[str, Any]) -> None:
        self._check_way(agent, self._agents.probed(agent, answer))

    def _check_way(self, agent: HostAgent, problem: str) -> None:
        if problem:
            self._agents.let_go(agent.name)
            self._agents.rest(agent.name)
            self._losses.blame(agent.name, problem)
        self._settle()

    def started(self, agent: HostAgent, worker: int, pid: int) -> None:
        process = self._roster.alive.get(worker)
        if process is not None:
            process.pid = pid
            if self._verbose:
                self._supervisor.console.say(f"{process.name} runs on {agent.name}, pid {pid}")
            self._status.note("started", worker=process.name, host=agent.name, pid=pid)

    def failed(self, agent: HostAgent, worker: int, number: int, what: str) -> None:
        process = self._roster.alive.get(worker)
        if process is None or self._supervisor.stopping or self._supervisor.signals:
            return
        why = f"{what!r}: {os.strerror(number)}" if what else os.strerror(number)
        self._losses.could_not_start(process, why)
        self._settle()

    def exited(self, agent: HostAgent, exits: Sequence[tuple[int, int]]) -> None:
        self._take_all()  # what they said before they ended
        for worker, code in exits:
            process = self._roster.alive.get(worker)
            self._status.note("exited", worker=name_of(worker), host=agent.name, code=code)
            if process is not None:
                self._take_exit(process, code)
        self._settle()

    def _take_exit(self, process: Process, code: int) -> None:
        roster = self._roster
        had_place = process.number in roster.placed
        removed = process.joined is not None and not had_place
        if process.dismissed or removed or (process.leaving and code == 0):
            del roster.alive[process.number]
        elif code == 0:
            del roster.alive[process.number]
            self._endings.finished()
            if not process.done:
                self._finish(process)
        elif self._supervisor.stopping or self._supervisor.signals:
            del roster.alive[process.number]
        else:
            self._losses.failed(process, code)

    def lost(self, agent: HostAgent, code: int) -> None:
        if self._supervisor.stopping or not self._agents.lost(agent):
            return
        said = agent.last_words or f"ended with exit code {code} and no message"
        if agent.hello is None:
            self._losses.blame(agent.name, f"cannot start on {agent.name}: {said}")
        else:
            self._losses.lost_host(agent, f"the connection to {agent.name} is lost: {said}")
        self._settle()

    # -- the next step ---------------------------------------------------------------------

    def _tick(self) -> None:
        if not self._supervisor.stopping:
            self._settle()
            self._supervisor.call_later(_TICK, self._tick)

    def _settle(self) -> None:
        """Do what follows from what is known."""
        if self._supervisor.stopping:
            return
        ending = self._endings.find(self._view())
        if ending is not None:
            self._end(ending)
            return
        if self._supervisor.signals and self._announcer.newest.too_few:
            self._announcer.announce_the_end(self._roster.placed)  # nobody will come any more
            return
        plan = policy.make_plan(self._view(), self._limits)
        if plan.exhausted:
            self._end(self._endings.exhausted())
            return
        for worker in plan.stop:
            self._dismiss(self._roster.alive[worker], FAILURE_GRACE)
        if plan.proposal is not None:
            self._decide(plan.proposal)
        for host in plan.start:
            self._start(host)
        self._mind_hosts()
        waiting = self._endings.waiting_for(self._view())
        if waiting:
            self._status.tell(waiting, "waiting")

    def _view(self) -> policy.View:
        hosts = self._manager.current_hosts
        resting = frozenset(h for h in hosts.host_slots if not self._agents.is_ready(h))
        return policy.View(
            now=now(),
            number=self._announcer.number,
            formed=self._announcer.formed,
            hosts=hosts.host_slots,
            blacklisted=hosts.blacklisted,
            resting=resting,
            connecting=any(map(self._agents.is_connecting, resting)),
            workers=self._roster.view(),
            failed=tuple(self._roster.failed),
            left=tuple(self._roster.left),
            finished=tuple(self._roster.finished),
            asked=self._roll_call.asked,
            troubled=bool(self._roster.failures),
            finishing=self._finishing or bool(self._supervisor.signals),
            fenced_until=self._losses.fenced_until,
        )

    def _mind_hosts(self) -> None:
        """Agents where workers may start, none where they may not and nobody is left."""
        view = self._view()
        if self._supervisor.signals or self._finishing:
            return
        if view.number or view.workers or view.slots >= self._limits.num_proc:
            wanted = self._agents.first(view.usable, self._limits.max_np)
            for host, problem in self._agents.want(wanted).items():
                self._losses.blame(host, f"cannot start on {host}: {problem}")
        for host in self._agents.names():
            if host not in view.usable and not self._roster.on(host):
                self._agents.let_go(host)

    def _start(self, host: str) -> None:
        process = self._roster.new(host)
        self._outputs.open(process)
        slots = self._manager.current_hosts.get_slots(host)
        self._agents.start(host, process.number, process.index, max(slots, process.index + 1))
        if self._announcer.number:
            self._status.tell(f"starting {process.name} on {host}", "starting", worker=process.name)

    def _dismiss(self, process: Process, grace: float) -> None:
        process.dismissed = True
        self._agents.stop(process.host, process.number, grace)

    def _finish(self, process: Process) -> None:
        """Somebody has finished: nobody new is needed."""
        roster, number = self._roster, self._announcer.number
        if process.number in roster.placed:
            roster.finished.append(process.number)
        if not self._finishing:
            self._finishing = True
            for newcomer in roster.newcomers():
                self._dismiss(newcomer, FAILURE_GRACE)
        if self._announcer.formed:
            return
        # The newest world has not come about. Those who train on in an older one will finish as
        # well; who wanted to join them is too late.
        members = roster.members()
        if any(member.joined != number for member in members):
            for member in members:
                if member.joined == number:
                    self._dismiss(member, FAILURE_GRACE)
        self._roll_call.finished()

    # -- decisions -------------------------------------------------------------------------

    def _decide(self, proposal: policy.Proposal) -> None:
        decision = self._announcer.announce(proposal)
        slots = decision.slots
        ranks = {number_of(name): slot.rank for name, slot in slots.items()}
        self._roster.place(proposal.members, ranks)
        for worker, rank in ranks.items():
            self._outputs.rename(worker, rank)
        self._roll_call.begin(decision)
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
        self._endings.settle(ending)
        if ending.problem or ending.failure:
            self._announcer.announce_the_end(self._roster.placed)
        self._supervisor.stop(FAILURE_GRACE)
