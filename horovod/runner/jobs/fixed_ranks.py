"""The policy of jobs with a fixed set of ranks: all start together, and the first failure ends all.

`run_job` and the launcher for Spark give a `FixedRanks` to the job controller. All workers start
once all hosts have found their way to the job's store. The first worker that fails, or the first
host that is lost, ends the others; if several fail, the account is about the cause.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from horovod.common.generations.loss_note import read_note
from horovod.runner.agents.agent_set import AgentSet
from horovod.runner.agents.controller import JobController, JobPolicy
from horovod.runner.agents.host_agent import HostAgent
from horovod.runner.agents.supervise import FAILURE_GRACE
from horovod.runner.jobs.request import JobRequest, describe_threads, neighbours, worker_specs
from horovod.runner.output.console import Colour
from horovod.runner.output.progress import StartProgress
from horovod.runner.output.report import CauseFinder, Exit, LaunchError, LostHost, format_ranks

_BLAME_WINDOW = 0.5
"""Seconds to wait, when several hosts report failures, for the one that caused the others."""

_CAUSE_PATIENCE = 10.0
"""Seconds to wait, when ranks have failed because of another, for that one to end."""

_COMPANY_WINDOW = 2.0
"""Seconds to wait, when a host cannot be used, for others that cannot either."""


class FixedRanks(JobPolicy):
    """Reacts to the events of a job with fixed ranks."""

    def __init__(self, request: JobRequest, job: JobController, hosts: AgentSet) -> None:
        """Prepare a job.

        Args:
            request: What to run.
            job: The controller of the job.
            hosts: The hosts of the request, which connect together.
        """
        super().__init__()
        self._request = request
        self._job = job
        self._supervisor = job.supervisor
        self._hosts = hosts
        self._console = job.console
        self._all_local = False  # whether all agents are on this machine, started by us
        self._failed_hosts: dict[str, LaunchError] = {}
        self._pids: dict[int, int] = {}
        self._running: set[int] = set()
        self._cause = CauseFinder()
        self._bystanders = 0
        self._stopped_at = 0.0  # when it began to end all ranks
        self._awaits_cause = False  # whether it waits for the end of ranks that others blame

    def begin(self) -> None:
        request = self._request
        workers = {str(slot.rank): [slot.hostname, slot.rank] for slot in request.slots}
        self._job.watcher.note("decision", number=0, workers=workers)
        for problem in self._hosts.want(list(request.hosts)).values():
            raise problem
        self._all_local = not any(agent.remote for agent in self._agents())
        self._start = StartProgress(request.slots, list(request.hosts), self._all_local)
        if len(request.slots) > 1:
            self._job.endpoints.store.watch(self._start.note_key)

    def _agents(self) -> list[HostAgent]:
        return [agent for name in self._hosts.names() if (agent := self._hosts.agent(name))]

    def tick(self) -> str | None:
        start = self._start
        start.hosts_up = {agent.name for agent in self._agents() if agent.hello is not None}
        start.connected = set(filter(self._hosts.is_ready, self._hosts.names()))
        if self._job.is_ending or start.is_complete:
            return None
        return start.describe_awaited(self._console.is_blank)

    def end(self) -> None:
        self._blame()

    # -- hosts -----------------------------------------------------------------------------

    def host_ready(self, name: str) -> None:
        self._start_if_complete()

    def host_failed(self, name: str, problem: LaunchError) -> None:
        self._failed_hosts[name] = problem
        if len(self._failed_hosts) == 1:
            self._supervisor.call_later(_COMPANY_WINDOW, self._give_up)
        self._start_if_complete()

    def _start_if_complete(self) -> None:
        """Start all workers, or give up, once no host is waited for."""
        if self._job.is_ending or any(map(self._hosts.is_connecting, self._hosts.names())):
            return
        if self._failed_hosts:
            self._give_up()
        elif all(map(self._hosts.is_ready, self._request.hosts)):
            self._start_workers()

    def _give_up(self) -> None:
        if self._job.is_ending:
            return
        texts = [str(problem) for problem in self._failed_hosts.values()]
        if any("Host key verification failed" in text for text in texts):
            texts.append(
                "ssh does not know the key of such a host: log in once by hand and check it, or "
                "put it into ~/.ssh/known_hosts"
            )
        first = next(iter(self._failed_hosts.values()))
        self._end_for("\n".join(texts), first.status)

    def _end_for(self, problem: str, status: int = 1) -> None:
        """End the job because of a problem; only the first problem is reported."""
        if not self.outcome.problem and not self._supervisor.signals:
            self.outcome.problem = problem
            self.outcome.problem_status = status
        self._supervisor.stop(0.0)

    def host_lost(self, agent: HostAgent, code: int) -> None:
        own = [slot.rank for slot in self._request.hosts[agent.name]]
        ranks = [rank for rank in own if rank in self._running]
        self._running -= set(ranks)
        if self._cause.awaited(ranks) or (agent.remote and not self._job.is_ending):
            how = f"lost: {agent.describe_end(code)}"
            self.outcome.lost = LostHost(agent.name, ranks or own, how, agent.last_words)
        if not agent.remote:
            said = f":\n{agent.last_words}" if agent.last_words else ""
            self._end_for(
                f"the process that watches over the workers (pid {agent.pid}) died; the workers "
                f"were killed{said}"
            )
        elif not self._job.is_ending and self.outcome.lost is not None:
            who = format_ranks(self.outcome.lost.ranks)
            self._console.say(
                f"{agent.name} (rank {who}) {self.outcome.lost.how}; stopping the others",
                Colour.FAILURE,
            )
            self._stop_ranks()

    def _stop_ranks(self) -> None:
        self._stopped_at = time.monotonic()
        self._supervisor.stop(FAILURE_GRACE)

    # -- workers ---------------------------------------------------------------------------

    def _start_workers(self) -> None:
        request, agents = self._request, {agent.name: agent for agent in self._agents()}
        for sentence in describe_threads(request, [agents[name] for name in request.hosts]):
            self._console.say(sentence)
        address, port = self._hosts.entrance(next(iter(request.hosts)))  # the host of rank 0
        master = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        for name in request.hosts:
            agent = agents[name]
            env = self._hosts.environment(name, len(neighbours(request, name))) | master
            if request.verbose:
                for variable in sorted(env):
                    if variable.startswith(("HOROVOD_", "MASTER_")):
                        self._console.say(f"{name}: {variable}={env[variable]}")
            specs = worker_specs(request, agent)
            agent.start(specs, env)
            if request.attach is not None and any(spec.input for spec in specs):
                self._supervisor.attach(agent, request.attach)
            agent.finish()

    def started(self, host: str, worker: int, pid: int) -> None:
        self._pids[worker] = pid
        self._start.started.add(worker)
        self._running.add(worker)
        self._job.watcher.note("started", worker=str(worker), host=host, pid=pid)
        if self._request.verbose:
            self._console.say(f"rank {worker} started{self._on(host)}, pid {pid}")

    def could_not_start(self, host: str, worker: int, problem: LaunchError) -> None:
        self._end_for(f"cannot start rank {worker}{self._on(host)}: {problem}", problem.status)

    def exited(self, host: str, exits: Sequence[tuple[int, int]]) -> None:
        store = self._job.endpoints.store
        batch = [
            Exit(rank, self._pids[rank], code, host, read_note(store, str(rank)) if code else None)
            for rank, code in exits
        ]
        self.outcome.exits += batch
        self._running -= {one.rank for one in batch}
        self._start.ended |= {one.rank for one in batch}
        for one in batch:
            how = {"code": one.code, "because_of": one.because_of, "stopped": self._job.is_ending}
            self._job.watcher.note("exited", worker=str(one.rank), host=one.host, **how)
        for one in batch if self._request.verbose else ():
            self._console.say(f"rank {one.rank} ended: {one.describe()}")
        failures = [one for one in batch if one.code != 0]
        stopping = self._supervisor.stopping
        # Ranks that end after a signal, or because something else ended the job, are not to blame.
        if self._supervisor.signals or (stopping and not self._cause.failures):
            return
        # A failure reported later may have happened earlier, unless we have ended that rank.
        self._cause.add(o for o in failures if not (stopping and self._is_ours(o)))
        if self._cause.failures and not stopping:
            self._look_for_cause()

    def _is_ours(self, one: Exit) -> bool:
        """Return whether we have ended a rank: with SIGTERM, or with SIGKILL if it hung."""
        is_late = time.monotonic() >= self._stopped_at + FAILURE_GRACE
        return -one.code == signal.SIGTERM or (-one.code == signal.SIGKILL and is_late)

    def _on(self, host: str) -> str:
        return "" if self._all_local else f" on {host}"

    # -- the cause of a failure ------------------------------------------------------------

    def _look_for_cause(self) -> None:
        """End the job, unless it waits for a rank that others name as the cause to end."""
        if not self._cause.awaited(self._running):
            self._end_others()
        elif not self._awaits_cause:
            self._awaits_cause = True
            self._supervisor.call_later(_CAUSE_PATIENCE, self._end_others)

    def _end_others(self) -> None:
        if self._job.is_ending:
            return
        self._bystanders = len(self._running)
        awaited = self._cause.awaited(self._running)
        self._stop_ranks()
        if awaited:  # blame when they have ended; by then those that hang are killed
            self._supervisor.call_later(FAILURE_GRACE + _BLAME_WINDOW, self._blame)
        elif len(self._request.hosts) == 1:
            self._blame()
        else:
            self._supervisor.call_later(_BLAME_WINDOW, self._blame)

    def _blame(self) -> None:
        """Decide which of the failures so far is the cause, unless the loss of a host is."""
        failure, lost = self._cause.first(), self.outcome.lost
        if failure is None or self.outcome.first_failure is not None:
            return
        if lost is not None and self._cause.awaited(lost.ranks):
            return  # the others say that they failed because of a rank there
        if self._cause.awaited(self._running):
            return  # a blamed rank has not ended yet, or its agent is slow to report that
        self.outcome.first_failure = failure
        self.blamed_worker = failure.rank
        early = self.outcome.early_exits = self._cause.early_exits(self.outcome.exits)
        if early:
            who = format_ranks([one.rank for one in early])
            self._console.say(f"other ranks waited for rank {who} in vain", Colour.FAILURE)
            return
        others = f"; stopping the other {self._bystanders}" if self._bystanders else ""
        where = self._on(failure.host)
        self._console.say(
            f"rank {failure.rank}{where} failed: {failure.describe()}{others}", Colour.FAILURE
        )
