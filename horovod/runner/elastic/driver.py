"""The driver of an elastic job: it executes what `policy` decides.

The job controller (`runner.agents.controller`) reports every event of hosts and workers to the
driver; discovery and the workers' answers in the store come through `mailbox`. Each event is noted
in `job_state` and in the status file; then `_reconcile` asks the policy what follows. Everything
runs in the loop's thread: the store's and the poller's threads only leave messages. Workers learn
of decisions through the store, see `horovod.common.generations.decisions`; `liveness` checks their
answers and records losses.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from horovod.common.generations.loss_note import read_note
from horovod.observe.reports.amounts import count_of
from horovod.runner.agents.controller import HostSet, JobController, JobPolicy
from horovod.runner.agents.host_agent import HostAgent
from horovod.runner.agents.supervise import FAILURE_GRACE
from horovod.runner.elastic import policy, termination
from horovod.runner.elastic.discovery import HostManager
from horovod.runner.elastic.job_state import JobState, Limits, Process, name_of, number_of
from horovod.runner.elastic.liveness import DecisionLog, Failures, Liveness
from horovod.runner.elastic.mailbox import Inbox
from horovod.runner.output.report import LaunchError, exit_status
from horovod.runner.output.watcher import Status

__all__ = ["DISCOVER_HOSTS_FREQUENCY_SECS", "Driver"]


def __getattr__(name: str) -> Any:
    """Import names of Horovod 0.28.1 (docs/old_names.md) when a program asks for them."""
    if name in ("ElasticDriver", "Results"):
        from horovod.runner._upstream import find_old_name

        return find_old_name("horovod.runner._upstream.environment", name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


DISCOVER_HOSTS_FREQUENCY_SECS = 1.0


class Driver(JobPolicy):
    """The policy of one elastic job."""

    def __init__(
        self,
        job: JobController,
        hosts: HostSet,
        limits: Limits,
        manager: HostManager,
        status: Status,
        verbose: int = 0,
    ) -> None:
        """Prepare a job.

        Args:
            job: The controller of the job.
            hosts: The hosts, on which it starts and stops workers.
            limits: What the user asked for.
            manager: The known hosts, and their record of failures.
            status: The receiver of events.
            verbose: How much to say on the console.
        """
        super().__init__()
        self._job = job
        self._hosts = hosts
        self._limits = limits
        self._manager = manager
        self._store = job.endpoints.store
        self._supervisor = job.supervisor
        self._outputs = job.outputs
        self._status = status
        self._verbose = verbose
        self._state = JobState()
        self._decisions = DecisionLog(self._state, self._store)
        self._failures = Failures(self._state, hosts, manager, status)
        self._liveness = Liveness(
            limits, self._state, self._failures, self._supervisor.call_later, self._reconcile
        )
        self._inbox = Inbox(
            self._state,
            self._store,
            manager,
            job.console,
            status,
            self._decisions,
            self._liveness,
            self._finish,
        )

    def begin(self) -> None:
        self._supervisor.watch(self._inbox.descriptor, self._take_messages)
        self._supervisor.awaits_agents = True
        self._inbox.open(DISCOVER_HOSTS_FREQUENCY_SECS)

    def tick(self) -> str:
        self._reconcile()
        connecting = [name for name in self._hosts.names() if self._hosts.is_connecting(name)]
        return self._state.describe_awaited(connecting)

    def close(self) -> None:
        # End the poller's thread before closing the descriptors to which it writes.
        self._inbox.stop_polling()
        self._supervisor.unwatch(self._inbox.descriptor)
        self._inbox.close()

    def end(self) -> None:
        self._status.note("end", status=exit_status(self.outcome), problem=self.outcome.problem)

    def _take_messages(self) -> None:
        if self._inbox.note_all():
            self._reconcile()

    # -- what the hosts say ----------------------------------------------------------------

    def host_ready(self, name: str) -> None:
        self._reconcile()

    def host_failed(self, name: str, problem: LaunchError) -> None:
        self._hosts.let_go(name)
        self._hosts.rest(name)
        self._failures.blame(name, str(problem))
        self._reconcile()

    def started(self, host: str, worker: int, pid: int) -> None:
        process = self._state.alive.get(worker)
        if process is not None:
            process.pid = pid
            if self._verbose:
                self._job.console.say(f"{process.name} runs on {host}, pid {pid}")
            self._status.note("started", worker=process.name, host=host, pid=pid)

    def could_not_start(self, host: str, worker: int, problem: LaunchError) -> None:
        process = self._state.alive.get(worker)
        if process is None or self._job.is_ending:
            return
        self._failures.could_not_start(process, str(problem))
        if not self._state.workers_on(process.host):  # let the policy try other hosts first
            self._hosts.let_go(process.host)
            self._hosts.rest(process.host)
        self._reconcile()

    def exited(self, host: str, exits: Sequence[tuple[int, int]]) -> None:
        self._inbox.note_all()  # first what the workers wrote before they ended
        for worker, code in exits:
            process = self._state.alive.get(worker)
            self._status.note("exited", worker=name_of(worker), host=host, code=code)
            if process is not None:
                self._take_exit(process, code)
        self._reconcile()

    def _take_exit(self, process: Process, code: int) -> None:
        state = self._state
        if code != 0:
            process.because_of = read_note(self._store, process.name)
        # Workers that were told to end, or that a decision has left out, are no failures.
        removed = process.joined is not None and process.number not in state.placed_workers
        expected = process.is_dismissed or removed or (process.is_leaving and code == 0)
        if expected or (code != 0 and self._job.is_ending):
            del state.alive[process.number]
        elif code == 0:
            state.note_success(process)
            if not process.is_done:
                self._finish(process)
        else:
            self._failures.failed(process, code)

    def host_lost(self, agent: HostAgent, code: int) -> None:
        if self._supervisor.stopping:
            return
        if agent.finished:  # somebody else told the agent to end: that is no failure of the host
            self._status.announce(f"{agent.name} has left the job", "host left", host=agent.name)
        else:
            self._failures.lost_host(agent, agent.explain_end(code))
        self._reconcile()

    # -- the next step ---------------------------------------------------------------------

    def _reconcile(self) -> None:
        """Ask the policy what follows from the state, and do it."""
        if self._supervisor.stopping:
            return
        state = self._look()
        plan = policy.make_plan(state, self._limits)
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
        if plan.stop or plan.start or plan.proposal is not None:
            self._look()
        self._mind_hosts()
        is_short = state.short_since is not None
        shortage = termination.describe_shortage(self._look(), self._limits) if is_short else ""
        if shortage and shortage != state.shortage:
            self._status.announce(shortage, "waiting")
        state.shortage = shortage

    def _look(self) -> JobState:
        """Return the state, after updating what it says about hosts and time."""
        state, hosts, offered = self._state, self._hosts, self._manager.current_hosts
        state.now = time.monotonic()
        state.hosts, state.blacklisted = offered.host_slots, offered.blacklisted
        state.excluded_hosts = frozenset(
            filter(self._manager.blacklisting.is_for_good, state.hosts)
        )
        state.resting_hosts = frozenset(host for host in state.hosts if not hosts.is_ready(host))
        state.hosts_connecting = any(map(hosts.is_connecting, state.resting_hosts))
        state.interrupted = bool(self._supervisor.signals)
        state.obstacle = hosts.obstacle()
        return state

    def _mind_hosts(self) -> None:
        """Prepare the hosts on which workers may start, and release unused ones without workers."""
        state = self._state
        if state.is_over:
            return
        usable = state.usable
        if state.number or state.workers or state.slots >= self._limits.num_proc:
            wanted = self._hosts.first(usable, self._limits.max_np)
            for host, problem in self._hosts.want(wanted).items():
                self._failures.blame(host, str(problem))
        for host in self._hosts.names():
            if host not in usable and not state.workers_on(host):
                self._hosts.let_go(host)

    def _start(self, host: str) -> None:
        process = self._state.add_process(host)
        assignment = policy.expect_assignments(self._look(), self._limits).get(process.number)
        process.rank = process.rank if assignment is None else assignment.rank
        self._outputs.open(process.number, process.rank, f"worker.{process.number}")
        slots = max(self._manager.current_hosts.get_slots(host), process.index + 1)
        self._hosts.start(host, process.number, process.index, slots, assignment)
        if self._state.number:
            self._status.announce(
                f"starting {process.name} on {host}", "starting", worker=process.name
            )

    def _dismiss(self, process: Process) -> None:
        process.is_dismissed = True
        self._hosts.stop(process.host, process.number, FAILURE_GRACE)

    def _finish(self, process: Process) -> None:
        """Take notice of the first or a further worker that has finished; add no more workers."""
        state = self._state
        if process.number in state.placed_workers:
            state.finished_workers.append(process.number)
        if not state.finishing:
            state.finishing = True
            for newcomer in state.newcomers() if state.number else ():
                self._dismiss(newcomer)
        if state.is_formed or not state.number:
            return
        # The newest generation has not formed. Workers that go on training in an older one will
        # finish as well; workers that wanted to join them are too late.
        members = state.members()
        if any(member.joined != state.number for member in members):
            for member in members:
                if member.joined == state.number:
                    self._dismiss(member)
        self._liveness.note_finish()

    def _decide(self, proposal: policy.Proposal) -> None:
        decision = self._decisions.announce(proposal)
        if decision is None:
            return  # a worker's message is on its way; after it the policy is asked again
        slots = decision.slots
        ranks = {number_of(name): slot.rank for name, slot in slots.items()}
        self._state.assign_ranks(proposal.members, ranks)
        for worker, rank in ranks.items():
            self._outputs.rename(worker, rank)
        for process in self._state.unaware_workers():
            self._dismiss(process)
        self._liveness.begin(decision)
        size = count_of(len(slots), "worker")
        if decision.too_few:
            size += f", too few to go on (at least {proposal.min_np})"
        self._status.announce(
            f"{size}: {decision.reason}",
            "decision",
            number=decision.number,
            kind=decision.kind,
            too_few=decision.too_few,
            workers={name: [slot.hostname, slot.rank] for name, slot in slots.items()},
            lost=decision.lost,
        )

    def _end(self, ending: termination.Ending) -> None:
        self.outcome = termination.make_outcome(self._state, ending)
        self.blamed_worker = None if ending.failure is None else ending.failure.worker
        if ending.problem or ending.failure or self._state.alive:
            self._decisions.announce_the_end()
        self._supervisor.stop(FAILURE_GRACE)
