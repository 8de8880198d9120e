"""Run a job from its options to its outcome, in any thread.

``horovodrun``, ``horovod.run``, scaling studies and the old `gloo_run` call `run_job`. It handles
signals only in the main thread.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from horovod.common.store import MemoryStore
from horovod.observe.dashboard.watching import open_watcher, title_of, watched_environment
from horovod.runner.agents.agent_set import AgentSet
from horovod.runner.agents.channel import ChannelLink
from horovod.runner.agents.controller import JobController
from horovod.runner.agents.host_agent import HostAgent
from horovod.runner.jobs.fixed_ranks import FixedRanks
from horovod.runner.jobs.request import JobRequest, make_request, make_worker_request
from horovod.runner.options.tunables import settings
from horovod.runner.output.console import Console
from horovod.runner.output.outputs import Outputs
from horovod.runner.output.report import LaunchError, Outcome
from horovod.runner.output.watcher import JobWatcher, Status, Watchers
from horovod.runner.slots.hosts import Host, is_local, plan_slots

if TYPE_CHECKING:
    from horovod.runner.elastic.discovery import HostDiscovery
    from horovod.runner.jobs.join import JoinedHosts


def run_job(
    options: argparse.Namespace,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    store: MemoryStore | None = None,
    console: Console | None = None,
    title: str = "",
) -> Outcome:
    """Run a command as a job until its end.

    Args:
        options: The options of horovodrun.
        command: The program that each rank runs, with its arguments.
        env: The environment from which that of the workers is made; by default this process's own.
        store: The job's store, which may have values for the workers, or get values from them.
        console: Where messages and the workers' output go.
        title: The name of the job on its dashboard; by default made from the command.

    Returns:
        The outcome, which says what went wrong, if anything.

    Raises:
        LaunchError: If the job cannot even begin.
    """
    return _Job(
        options,
        command,
        os.environ if env is None else env,
        MemoryStore() if store is None else store,
        console or Console(timestamps=options.prefix_timestamp),
        title or title_of(command),
    ).run()


@dataclass
class _Job:
    """A job, as the arguments of `run_job` describe it."""

    options: argparse.Namespace
    command: Sequence[str]
    environ: Mapping[str, str]
    store: MemoryStore
    console: Console
    title: str

    def run(self) -> Outcome:
        """Run the job to its end."""
        options = self.options
        if options.listen is not None:
            return self._run_joined()
        if options.elastic:
            if any(is_local(host.name) for host in options.hosts):
                find_command(self.command[0], self.environ.get("PATH"))
            return self._run_elastic()
        request = make_request(options, self.command, self.environ)
        if any(is_local(name) for name in request.hosts):
            find_command(self.command[0], request.env.get("PATH"))
        return self._run_fixed(request)

    def _run_joined(self) -> Outcome:
        """Run a job on hosts that join by themselves (``--listen``)."""
        # Imported late, because most jobs need none of it.
        from horovod.runner.agents.link_server import JoinServer, gather
        from horovod.runner.jobs.join import JoinedHosts, job_secret

        options = self.options
        try:
            key = job_secret(options.secret_file, self.environ, make=True)
            address, port = options.listen
            server = JoinServer(address, port, key, options.hosts)
        except ValueError as error:
            raise LaunchError(str(error), status=2) from None
        except OSError as error:
            why = f"argument --listen: cannot wait there: {error.strerror}"
            raise LaunchError(why, status=2) from None
        self.console.say(f"waiting for hosts: run horovodrun --join {server.address} on each")
        with closing(server):
            if options.elastic:
                return self._run_elastic(JoinedHosts(server, options.hosts))
            timeout = settings(options, self.environ).start_timeout
            try:
                links = gather(server, options.hosts, options.num_proc, timeout)
            except TimeoutError as error:
                raise LaunchError(str(error)) from None
            known = {host.name for host in options.hosts}
            options.hosts += [Host(n, link.slots) for n, link in links.items() if n not in known]
            return self._run_fixed(make_request(options, self.command, self.environ), links)

    def _open_watchers(self) -> JobWatcher:
        """Open what the options ask for: the dashboard, and the line of --progress."""
        environ, store, elastic = self.environ, self.store, self.options.elastic
        config, say = settings(self.options, environ), self.console.say
        page = open_watcher(config, environ, store, title=self.title, say=say, elastic=elastic)
        if not self.options.progress:
            return page
        from horovod.observe.dashboard.status_line import StatusLine

        return Watchers(StatusLine(store, environ, elastic), page)

    def _outputs(self, watcher: JobWatcher) -> Outputs:
        options = self.options
        shown, attached = options.output_ranks, options.attach
        return Outputs(self.console, shown, attached, watcher, options.output_filename)

    def _run_fixed(
        self, request: JobRequest, links: Mapping[str, ChannelLink] | None = None
    ) -> Outcome:
        """Run a job with fixed ranks; ``links`` lead to its other hosts if these have joined."""
        connect = None
        if links is not None:
            connect = lambda name: HostAgent(name, link=links.get(name))  # noqa: E731
        options, console = self.options, self.console
        with self._open_watchers() as watcher:
            request = replace(request, env=watched_environment(request.env, watcher))
            outputs = self._outputs(watcher)
            with JobController(
                console, outputs, store=self.store, watcher=watcher, pass_interrupts_on=True
            ) as job:
                if options.attach is not None:
                    console.disable_bars()
                width = len(str(len(request.slots) - 1))
                for slot in request.slots:
                    outputs.open(slot.rank, slot.rank, f"rank.{slot.rank:0{width}d}")
                if options.verbose:
                    size = len(request.slots)
                    console.say(f"running {list(request.command)!r} as {size} processes")
                    for slot in request.slots:
                        where = f"{slot.hostname}, local rank {slot.local_rank}"
                        console.say(f"rank {slot.rank}: {where}")
                hosts = AgentSet(request, job, connect, together=True)
                outcome = job.run(hosts, FixedRanks(request, job, hosts))
            if outcome.first_failure is not None:
                tail = outputs.tail(outcome.first_failure.rank)
                outcome.account += _other_python(request.command[0], request.env.get("PATH"), tail)
            watcher.ended(outcome)
        return outcome

    def _run_elastic(self, joined: JoinedHosts | None = None) -> Outcome:
        """Run an elastic job, on hosts that join by themselves if ``joined`` is given."""
        # Imported late, because most jobs are not elastic.
        from horovod.runner.elastic.discovery import HostManager
        from horovod.runner.elastic.driver import Driver
        from horovod.runner.elastic.job_state import Limits

        options, console = self.options, self.console
        config = settings(options, self.environ)
        limits = Limits(
            num_proc=options.num_proc,
            min_np=options.min_num_proc,
            max_np=options.max_num_proc,
            reset_limit=options.reset_limit,
            elastic_timeout=config.elastic_timeout,
            start_timeout=config.start_timeout,
            answer_timeout=config.elastic_answer_timeout,
        )
        with self._open_watchers() as watcher:
            request = make_worker_request(options, self.command, self.environ)
            request = replace(request, env=watched_environment(request.env, watcher))
            manager = HostManager(
                joined or getattr(options, "discovery", None) or make_discovery(options),
                options.blacklist_cooldown_range,
                options.max_worker_failures,
            )
            outputs = self._outputs(watcher)
            with (
                Status(console, options.status_file, watcher, every=options.verbose > 1) as status,
                JobController(console, outputs, store=self.store, watcher=watcher) as job,
            ):
                connect = None
                if joined is not None:
                    connect = lambda name: joined.connect(name, lambda: not job.is_ending)  # noqa: E731
                hosts = AgentSet(request, job, connect)
                driver = Driver(job, hosts, limits, manager, status, options.verbose)
                outcome = job.run(hosts, driver)
            watcher.ended(outcome)
        return outcome


def find_command(command: str, path: str | None = None) -> str:
    """Return the file that a command names on this machine, as a shell would find it.

    Raises:
        LaunchError: If there is no such program; the message says what may be meant.
    """
    found = shutil.which(command, path=path)
    if found:
        return found
    if not os.path.exists(command):
        is_line = shutil.which(command.partition(" ")[0], path=path) is not None
        hint = "; leave out the quotes, since no shell takes it apart" if is_line else ""
        raise LaunchError(f"command not found: {command!r}{hint}", status=127)
    if os.path.isdir(command):
        raise LaunchError(f"{command!r} is a directory, not a command", status=126)
    hint = f"python {command}" if command.endswith(".py") else f"./{command.removeprefix('./')}"
    if os.access(command, os.X_OK):
        raise LaunchError(
            f"command not found: {command!r} is here but not on PATH; did you mean {hint!r}?",
            status=127,
        )
    why = f"did you mean {hint!r}?" if command.endswith(".py") else "is the execute bit missing?"
    raise LaunchError(f"{command!r} is not executable; {why}", status=126)


def is_python(command: str) -> bool:
    """Return whether a program is a Python, by its name."""
    return "python" in os.path.basename(command)


def _other_python(command: str, path: str | None, tail: Sequence[str]) -> str:
    """Return a hint if a module is missing in another Python than the one of this program."""
    found = shutil.which(command, path=path)
    if not is_python(command) or found is None:
        return ""
    if not any(line.startswith(("ModuleNotFoundError", "ImportError")) for line in tail):
        return ""
    if os.path.abspath(found) == os.path.abspath(sys.executable):
        return ""
    if os.path.dirname(os.path.abspath(found)) == os.path.dirname(sys.executable):
        return ""
    return (
        f"Note that {command!r} is {found}, while horovodrun belongs to {sys.executable}: activate "
        f"the environment that you installed Horovod into, or name its python.\n\n"
    )


def make_discovery(options: argparse.Namespace) -> HostDiscovery:
    """Return the source of hosts that the options name.

    Raises:
        LaunchError: If the hosts offer too few slots.
    """
    from horovod.runner.elastic.discovery import FixedHosts, HostDiscoveryScript

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
