"""What to run, where and how: a job as its launchers get it.

`make_request` makes it from the options; `static_job`, `controllers` and `dry_run` do with it what
their names say. The launcher for Spark makes its own.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from horovod.runner.agents.ssh import SSH
from horovod.runner.agents.starter import Starter
from horovod.runner.options.starters import make_starter
from horovod.runner.options.tunables import settings, settings_environment
from horovod.runner.output.report import LaunchError
from horovod.runner.slots.hosts import Slot, is_local, plan_slots


@dataclass(frozen=True)
class JobRequest:
    """What to run, where and how."""

    command: Sequence[str]
    slots: Sequence[Slot]
    env: Mapping[str, str]  # for all workers, without what depends on rank and host
    cwd: str
    starter: Starter = SSH  # for hosts that are other machines
    nics: Sequence[str] = ()
    start_timeout: float = 30.0
    cpu_bind: str = "none"
    verbose: int = 0  # how often --verbose was given
    attach: int | None = None  # the rank that gets the launcher's stdin
    agent_names: Sequence[str] = ()  # by rank, where a host has several agents

    @functools.cached_property
    def hosts(self) -> dict[str, list[Slot]]:
        """The slots of every agent, in the order of ranks: one agent for each host, as a rule."""
        found: dict[str, list[Slot]] = {}
        names = self.agent_names or [slot.hostname for slot in self.slots]
        for slot, name in zip(self.slots, names, strict=True):
            found.setdefault(name, []).append(slot)
        return found

    @property
    def all_local(self) -> bool:
        return all(is_local(name) for name in self.hosts)


def make_request(
    options: argparse.Namespace, command: Sequence[str], env: Mapping[str, str]
) -> JobRequest:
    """What the options ask for; `LaunchError` where the hosts have too few slots."""
    try:
        slots = plan_slots(options.hosts, options.num_proc)
    except ValueError as error:
        raise LaunchError(str(error), status=2) from None
    timeout = settings(options, env).start_timeout
    return JobRequest(
        command=command,
        slots=slots,
        env={**env, **settings_environment(options, env)},
        cwd=os.getcwd(),
        starter=make_starter(options, env, timeout),
        nics=options.network_interfaces or (),
        start_timeout=timeout,
        cpu_bind=options.cpu_bind,
        verbose=options.verbose,
        attach=options.attach,
    )
