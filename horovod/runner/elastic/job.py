"""Run an elastic job of horovodrun, from the options to its outcome; `run_job` calls it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence

from horovod.common.store import MemoryStore
from horovod.observe.dashboard.watching import watched_environment
from horovod.runner.agents.agent_set import AgentSet, WorkerRequest
from horovod.runner.agents.controller import JobController
from horovod.runner.agents.host_agent import HostAgent
from horovod.runner.agents.link_server import JoinServer
from horovod.runner.agents.starters import make_starter
from horovod.runner.elastic.discovery import (
    FixedHosts,
    HostDiscovery,
    HostDiscoveryScript,
    HostManager,
)
from horovod.runner.elastic.driver import Driver
from horovod.runner.elastic.job_state import Limits
from horovod.runner.elastic.status import Status
from horovod.runner.options.tunables import settings, settings_environment
from horovod.runner.output.console import Console
from horovod.runner.output.outputs import Outputs
from horovod.runner.output.report import LaunchError, Outcome
from horovod.runner.output.watcher import JobWatcher
from horovod.runner.slots.hosts import Host, is_local, plan_slots


class JoinedHosts(HostDiscovery):
    """The hosts that have joined (``horovodrun --join``), and this machine if it takes part."""

    def __init__(self, server: JoinServer, hosts: Sequence[Host]) -> None:
        self._server = server
        self._own = {host.name: host.slots or 1 for host in hosts if is_local(host.name)}

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        joined = {name: link.slots for name, link in self._server.waiting().items()}
        return {**self._own, **joined}

    def connect(self, name: str, goes_on: Callable[[], bool]) -> HostAgent:
        """Start the agent of a host.

        Args:
            name: The host.
            goes_on: Returns whether the job goes on; a host that is released may then join again.

        Raises:
            ConnectionResetError: If the host has gone.
        """
        if name in self._own:
            return HostAgent(name)
        link = self._server.waiting().get(name)
        if link is None:
            raise ConnectionResetError("horovodrun --join has ended there")
        link.restarts = goes_on
        return link.start_agent(name)


def run_elastic_job(
    options: argparse.Namespace,
    command: Sequence[str],
    env: Mapping[str, str],
    store: MemoryStore,
    console: Console,
    watcher: JobWatcher,
    joined: JoinedHosts | None = None,
) -> Outcome:
    """Run a command as an elastic job until its end.

    Args:
        options: The options of horovodrun.
        command: The program that each worker runs, with its arguments.
        env: The launcher's environment.
        store: The job's store.
        console: Where messages and the workers' output go.
        watcher: What follows the job, such as the dashboard.
        joined: Hosts that join by themselves; by default the options say which hosts there are.

    Returns:
        The outcome, which says what went wrong, if anything.
    """
    config = settings(options, env)
    limits = Limits(
        num_proc=options.num_proc,
        min_np=options.min_num_proc,
        max_np=options.max_num_proc,
        reset_limit=options.reset_limit,
        elastic_timeout=config.elastic_timeout,
        start_timeout=config.start_timeout,
        answer_timeout=config.elastic_answer_timeout,
    )
    request = WorkerRequest(
        command=command,
        env=watched_environment({**env, **settings_environment(options, env)}, watcher),
        cwd=os.getcwd(),
        starter=make_starter(options, env, config.start_timeout),
        nics=options.network_interfaces or (),
        start_timeout=config.start_timeout,
        cpu_bind=options.cpu_bind,
        verbose=options.verbose,
    )
    manager = HostManager(
        joined or getattr(options, "discovery", None) or make_discovery(options),
        options.blacklist_cooldown_range,
        options.max_worker_failures,
    )
    outputs = Outputs(
        console, options.output_ranks, watcher=watcher, directory=options.output_filename
    )
    with (
        Status(console, options.status_file, watcher, every=options.verbose > 1) as status,
        JobController(console, outputs, store=store, watcher=watcher) as job,
    ):
        connect = None
        if joined is not None:
            connect = lambda name: joined.connect(name, lambda: not job.is_ending)  # noqa: E731
        hosts = AgentSet(request, job, connect)
        outcome = job.run(hosts, Driver(job, hosts, limits, manager, status, options.verbose))
    watcher.ended(outcome)
    return outcome


def make_discovery(options: argparse.Namespace) -> HostDiscovery:
    """Return the source of hosts that the options name.

    Raises:
        LaunchError: If the hosts offer too few slots.
    """
    if options.host_discovery_script is not None:
        return HostDiscoveryScript(options.host_discovery_script, options.slots_per_host)
    wanted = max(options.num_proc, options.max_num_proc or 0)
    unknown = [host for host in options.hosts if host.slots is None]
    slots = {host.name: host.slots or options.slots_per_host or 0 for host in options.hosts}
    if unknown and options.slots_per_host is None:
        try:
            planned = plan_slots(options.hosts, wanted)
        except ValueError as error:
            raise LaunchError(str(error), status=2) from None
        for host in unknown:
            slots[host.name] = sum(slot.hostname == host.name for slot in planned)
    offered = sum(slots.values())
    if offered < options.num_proc:
        raise LaunchError(
            f"the hosts offer {offered} slots, but the job needs {options.num_proc} to begin; give "
            f"more slots (-H NAME:SLOTS) or a smaller -np",
            status=2,
        )
    return FixedHosts(slots)
