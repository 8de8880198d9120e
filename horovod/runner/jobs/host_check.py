"""Find out in a few seconds whether a job could run on these hosts: ``horovodrun --check``.

`launch` calls `check_hosts`. It does what a job does until ranks start, with the same code: it
starts an agent on every host, lets each find out how to reach this machine
(`StoreEndpoints.probe_all`), and runs a program in the environment and folder of a rank, which is
`host_inspection` instead of the user's. Unlike a job it goes on if a host fails.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import itertools
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from horovod.common.wire import new_key
from horovod.runner.agents import host_inspection
from horovod.runner.agents.agent_set import host_variables
from horovod.runner.agents.host_agent import HostAgent, start_agent
from horovod.runner.agents.store_endpoints import StoreEndpoints, describe_problem
from horovod.runner.agents.supervise import Supervisor, raise_descriptor_limit
from horovod.runner.jobs.check_report import HostReport, describe, find_problems
from horovod.runner.jobs.request import JobRequest, make_request, worker_specs
from horovod.runner.jobs.run_job import is_python
from horovod.runner.output.console import Console
from horovod.runner.output.outputs import Outputs
from horovod.runner.output.report import LaunchError
from horovod.runner.slots.hosts import Host, is_local
from horovod.runner.slots.worker_env import WorkerRendezvous

_CONNECT_SECONDS = 4.0
"""Seconds for a host to answer, and for its neighbours to be reached, unless --start-timeout says
otherwise. A job waits longer."""

_SLACK = 1.0  # seconds beyond ssh's own time limit, so that ssh can say what is wrong
_FACTS_FACTOR = 3.0  # Python gets this many times as long to start on a busy host
_CLOCK_READINGS = 3


def check_hosts(
    options: argparse.Namespace, env: Mapping[str, str], console: Console
) -> tuple[str, int]:
    """Check the hosts that the options name.

    Returns:
        The report for people, and the exit status, which is 1 if a job would fail.
    """
    options = copy.copy(options)
    slots = _find_hosts(options)
    options.hosts = [Host(name, 1) for name in slots]
    options.num_proc = len(slots)
    if options.start_timeout is None and not env.get("HOROVOD_START_TIMEOUT"):
        options.start_timeout = _CONNECT_SECONDS
    wanted = _needed_files(options.command)
    python = wanted[:1] if wanted and is_python(wanted[0]) else [""]
    request = make_request(options, [*python, "-c", inspect.getsource(host_inspection)], env)
    content = host_inspection.folder_digest(request.cwd)
    reports = {name: HostReport(name, count) for name, count in slots.items()}
    interrupted = HostCheck(request, reports, wanted, console).run()
    if interrupted:
        return "", 128 + interrupted
    hosts = list(reports.values())
    problems = find_problems(hosts, content, wanted)
    width = console.width if console.is_terminal else None
    report = describe(hosts, problems, content, width)
    return report, int(any(each.is_fatal for each in problems))


def _find_hosts(options: argparse.Namespace) -> dict[str, int | None]:
    """Return the hosts that a job could use, with their slots."""
    if options.host_discovery_script is None:
        return {host.name: host.slots for host in options.hosts}
    from horovod.runner.jobs.run_job import make_discovery

    try:
        found = make_discovery(options).find_available_hosts_and_slots()
    except Exception as error:  # an elastic job counts any exception as a failed attempt
        raise LaunchError(f"the discovery script gives no hosts: {error}") from None
    if not found:
        raise LaunchError("the discovery script gives no hosts")
    return {**found}


def _needed_files(command: Sequence[str]) -> list[str]:
    """Return the program of a command, and the script if that program is a Python."""
    words = list(command)
    if words[:1] == ["env"]:  # also what `arguments` makes of NAME=VALUE python train.py
        words = list(itertools.dropwhile(lambda word: "=" in word, words[1:]))
    script = [word for word in words[1:2] if is_python(words[0]) and not word.startswith("-")]
    return words[:1] + script


class _Answers(Outputs):
    """Takes the output of the programs on the hosts, and passes lines of JSON on to `heard`."""

    def __init__(self, console: Console, heard: Callable[[int, dict[str, Any]], None]) -> None:
        super().__init__(console, shown=())
        self._heard = heard

    def take(self, worker: int, stream: str, data: bytes) -> None:
        if stream == "stdout":
            for line in self._streams[worker, stream].splitter.feed(data):
                if line.text.startswith(b"{"):
                    self._heard(worker, json.loads(line.text))
        else:
            super().take(worker, stream, data)


class HostCheck:
    """The steps of the check; `supervise.Handler` describes the methods that the loop calls."""

    def __init__(
        self,
        request: JobRequest,
        reports: Mapping[str, HostReport],
        wanted: Sequence[str],
        console: Console,
    ) -> None:
        self._request = request
        self._reports = reports
        self._wanted = wanted
        self._endpoints = StoreEndpoints(new_key())
        self._outputs = _Answers(console, self._hear)
        self._supervisor = Supervisor(console, self._outputs)
        self._agents: dict[str, HostAgent] = {}
        self._names = list(reports)  # the name of each worker's host
        self._token = secrets.token_bytes(32)
        self._asked: dict[tuple[str, int], float] = {}  # when each reading of a clock was asked for
        self._awaited: set[str] = set()  # the hosts whose answers the present step needs
        self._following_step: Callable[[], None] = self._probe

    def run(self) -> int:
        """Check all hosts, and write the findings into their reports.

        Returns:
            The signal that ended the check; 0 if none did.
        """
        with closing(self._endpoints), closing(self._supervisor):
            raise_descriptor_limit(7 * len(self._names) + 128)
            for worker, name in enumerate(self._names):
                self._outputs.open(worker, worker)
                way = "this machine" if is_local(name) else self._request.starter.name
                self._reports[name].way = way
                try:
                    self._agents[name] = start_agent(name, self._request.starter)
                except LaunchError as error:
                    self._reports[name].trouble = f"cannot start on {name}: {error}"
                    continue
                self._supervisor.add(self._agents[name])
            seconds = self._request.start_timeout
            self._wait(self._agents, seconds + _SLACK, f"did not answer within {seconds:g} s")
            if self._agents:
                self._supervisor.run(self)
        return next(iter(self._supervisor.signals), 0)

    # -- steps: each begins when all hosts have ended the one before, or their time is over --------

    def _wait(self, names: Sequence[str] | Mapping[str, Any], seconds: float, why: str) -> None:
        self._awaited = set(names)
        step = self._following_step

        def give_up() -> None:
            if self._following_step == step:
                for name in sorted(self._awaited):
                    said = " ".join(self._agents[name].last_words.split())
                    said = f" ({said})" if said else ""
                    self._drop(name, f"{name} {why}{said}. {self._next_step(name, said)}")

        self._supervisor.call_later(seconds, give_up)

    def _arrived(self, name: str) -> None:
        self._awaited.discard(name)
        while not self._awaited and not self._supervisor.stopping:
            step = self._following_step
            step()
            if self._following_step == step:
                return

    def _drop(self, name: str, trouble: str) -> None:
        """Go on without this host."""
        report = self._reports[name]
        if not report.trouble and not self._supervisor.stopping:
            report.trouble = trouble
        agent = self._agents.pop(name, None)
        if agent is not None:
            if agent.hello is None:
                agent.abandon()
            else:
                agent.dismiss(0.0)
        self._arrived(name)

    def _probe(self) -> None:
        self._following_step = self._ask_for_facts
        agents = list(self._agents.values())
        self._wait(self._agents, self._request.start_timeout + _SLACK, "did not find its way here")
        problem = self._endpoints.probe_all(agents, self._request.nics, self._request.start_timeout)
        for agent in agents if problem else ():
            self._drop(agent.name, problem)

    def _ask_for_facts(self) -> None:
        self._following_step = self._measure_links
        seconds = _FACTS_FACTOR * self._request.start_timeout
        self._wait(self._agents, seconds, f"said nothing about itself within {seconds:g} s")
        for name, agent in self._agents.items():
            report, worker = self._reports[name], self._names.index(name)
            address, port = self._endpoints.endpoints[0]
            rendezvous = WorkerRendezvous(address, port, self._endpoints.key)
            (spec,) = worker_specs(self._request, agent)
            env = host_variables(self._request, agent, rendezvous, (), 1)
            agent.start([replace(spec, input=True)], env)
            question: dict[str, Any] = {"address": report.address, "token": self._token.hex()}
            question |= {"folder": self._request.cwd, "files": list(self._wanted)}
            self._ask(worker, {"facts": question})

    def _measure_links(self) -> None:
        """Let every host connect to the next and to the one before, as ranks of a ring do."""
        self._following_step = self._finish
        names = list(self._agents)
        seconds = self._request.start_timeout
        self._wait(self._agents, 2 * seconds + _SLACK, "did not reach its neighbours")
        for index, name in enumerate(names):
            others = [names[(index + 1) % len(names)], names[index - 1]]
            neighbours = [
                [other, self._reports[other].address, self._reports[other].facts["port"], first]
                for other, first in zip(dict.fromkeys(others), (True, False), strict=False)
                if other != name
            ]
            question = {"neighbours": neighbours, "seconds": seconds}
            self._ask(self._names.index(name), question)

    def _finish(self) -> None:
        self._supervisor.stop(0.0)

    def _ask(self, worker: int, question: Mapping[str, Any]) -> None:
        self._agents[self._names[worker]].feed(worker, f"{json.dumps(question)}\n".encode())

    def _ask_for_clock(self, worker: int, number: int) -> None:
        self._asked[self._names[worker], number] = time.time()
        self._ask(worker, {"clock": number})

    # -- answers -----------------------------------------------------------------------------------

    def ready(self, agent: HostAgent) -> None:
        self._reports[agent.name].cores = agent.cores
        self._arrived(agent.name)

    def probed(self, agent: HostAgent, answer: dict[str, Any]) -> None:
        report = self._reports[agent.name]
        report.address, report.interface = answer["address"], answer["interface"]
        problem = describe_problem(answer, self._request.nics)
        if problem:
            self._drop(agent.name, f"{agent.name} {problem}")
        else:
            self._arrived(agent.name)

    def _hear(self, worker: int, answer: dict[str, Any]) -> None:
        name = self._names[worker]
        report = self._reports[name]
        if name not in self._agents:
            return
        if "facts" in answer:
            report.facts = answer["facts"]
            self._ask_for_clock(worker, 0)
        elif "clock" in answer:
            number, now = answer["number"], time.time()
            asked = self._asked[name, number]
            if report.clock is None or now - asked < 2 * report.clock_error:
                report.clock = answer["clock"] - (asked + now) / 2
                report.clock_error = (now - asked) / 2
            if number + 1 < _CLOCK_READINGS:
                self._ask_for_clock(worker, number + 1)
            else:
                self._arrived(name)
        else:
            report.links = answer["neighbours"]
            self._arrived(name)

    def started(self, agent: HostAgent, worker: int, pid: int) -> None:
        pass

    def failed(self, agent: HostAgent, worker: int, number: int, what: str) -> None:
        python = what or "Python"
        self._drop(
            agent.name,
            f"{agent.name} cannot run {python}: {os.strerror(number)}. Install the same Python at "
            f"the same path on all hosts",
        )

    def exited(self, agent: HostAgent, exits: Sequence[tuple[int, int]]) -> None:
        for worker, code in exits:
            said = " ".join(self._outputs.tail(worker)[-1:])
            self._drop(
                agent.name,
                f"Python on {agent.name} ended with exit code {code}: {said or 'no message'}",
            )

    def lost(self, agent: HostAgent, code: int) -> None:
        said = " ".join(agent.explain_end(code).split()).rstrip(".")
        self._drop(
            agent.name, f"cannot start on {agent.name}: {said}. {self._next_step(agent.name, said)}"
        )

    def _next_step(self, name: str, said: str) -> str:
        """Return advice about a host that does not answer."""
        if "Host key verification failed" in said:
            return "Log in once by hand and check its key, or put that into ~/.ssh/known_hosts"
        way = self._request.starter.name
        works = f"'ssh {name} true' works without a password" if way == "ssh" else f"{way} works"
        return f"See that {works}, and that the Python of this program is at the same path there"
