"""Descriptions of jobs, hosts and slots in the form that Horovod 0.28.1 has for them.

Programs hand settings to `launchers`. The grammar of hosts and the order of ranks are those of
`horovod.runner.slots.hosts`. The functions at the end turn configuration files and options into
the variables that `horovod.runner.options.tunables` declares. Each of these variables is an
attribute of this module, too, whose value is its own name.
"""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horovod.common.exceptions import TimeoutException
from horovod.runner.elastic.discovery import HostDiscovery
from horovod.runner.options.arguments import as_words, make_options
from horovod.runner.options.config_file import CONTROLLER, CONTROLLERS, schema
from horovod.runner.options.tunables import IB_DISABLE, TUNABLES, settings_environment
from horovod.runner.slots import hosts as new


class Timeout:
    """A deadline some seconds from now. `message` says what to do, and may have ``{activity}``."""

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout = timeout
        self._end = time.monotonic() + timeout
        self._end_of_day = time.time() + timeout
        self._message = message

    def remaining(self) -> float:
        """Return the seconds that are left; never less than 0."""
        return max(0.0, self._end - time.monotonic())

    def timeout_at(self) -> float:
        """Return when the time is up, as `time.time` counts."""
        return self._end_of_day

    def timed_out(self) -> bool:
        return self.remaining() == 0.0

    def check_time_out_for(self, activity: str) -> None:
        """Raise `TimeoutException` if the time is up."""
        if self.timed_out():
            told = self._message.format(activity=activity)
            raise TimeoutException(f"{told} Timeout after {self._timeout:g} seconds.")


@dataclass(kw_only=True)
class BaseSettings:
    """Settings of any job; the names are those of horovodrun's options."""

    num_proc: int | None = None
    verbose: int = 0
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    extra_mpi_args: str | None = None
    tcp_flag: bool | None = None
    binding_args: str | None = None
    key: bytes | None = None  # not used: every job makes its own
    start_timeout: float | Timeout | None = None
    output_filename: str | None = None
    run_func_mode: bool | None = None
    nics: Collection[str] | None = None
    elastic: bool = False
    prefix_output_with_timestamp: bool = False


@dataclass(kw_only=True)
class Settings(BaseSettings):
    """Settings of a job with fixed hosts, given as for ``-H``."""

    hosts: str | None = None


@dataclass(kw_only=True)
class ElasticSettings(BaseSettings):
    """Settings of an elastic job; `discovery` finds its hosts, and is not pickled with it."""

    discovery: HostDiscovery | None
    min_num_proc: int | None
    max_num_proc: int | None
    elastic_timeout: float | None
    reset_limit: int | None
    cooldown_range: tuple[int, int] | None = None
    elastic: bool = True

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "discovery": None}  # it may hold processes or connections


VALUES = {
    "num_proc": "-np",
    "min_num_proc": "--min-np",
    "max_num_proc": "--max-np",
    "slots": "--slots-per-host",
    "reset_limit": "--reset-limit",
    "cooldown_range": "--blacklist-cooldown-range",
    "hosts": "--hosts",
    "hostfile": "--hostfile",
    "host_discovery_script": "--host-discovery-script",
    "ssh_port": "--ssh-port",
    "ssh_identity_file": "--ssh-identity-file",
    "output_filename": "--output-filename",
    "mpi_args": "--mpi-args",
    "binding_args": "--binding-args",
    "config_file": "--config-file",
}
"""Upstream's attributes for what the options with a value say."""
SWITCHES = {
    "use_gloo": "--gloo",
    "use_mpi": "--mpi",
    "use_jsrun": "--jsrun",
    "disable_cache": "--disable-cache",
    "tcp_flag": "--tcp",
    "prefix_output_with_timestamp": "--prefix-output-with-timestamp",
    "check_build": "--check-build",
}
"""Upstream's attributes for what the options without a value say."""


def options_of(
    given: Mapping[str, Any], command: str | Sequence[str], env: Mapping[str, str] = os.environ
) -> argparse.Namespace:
    """Return the options of a job that upstream's attributes describe, of those that are given.

    Args:
        given: The attributes; None, too, stands for one that is not given.
        command: What the job runs; a text is split as a shell does.
        env: The environment of the launcher.
    """
    values: dict[str, object] = {flag: given.get(name) for name, flag in VALUES.items()}
    values |= {flag: bool(given.get(name)) for name, flag in SWITCHES.items()}
    for row in TUNABLES:
        value = given.get(row.dest)
        if value is not None and row.opposite:
            values[row.flag if value else row.opposite] = True
        else:
            values[row.flag] = value
    values["--network-interfaces"] = ",".join(given.get("nics") or ()) or None
    words = as_words(values) + ["--verbose"] * given["verbose"]
    command = shlex.split(command) if isinstance(command, str) else command
    return make_options([*words, "--", *command], env)


def attributes_of(settings: BaseSettings, nics: Collection[str] | None = None) -> dict[str, Any]:
    """Return attributes for `options_of`; `nics` are for settings without any."""
    given = {**vars(settings), "mpi_args": settings.extra_mpi_args, "nics": settings.nics or nics}
    given["verbose"] = settings.verbose > 1
    timeout = settings.start_timeout
    if timeout is not None:
        seconds = timeout.remaining() if isinstance(timeout, Timeout) else timeout
        given["start_timeout"] = int(max(1, seconds))
    if isinstance(settings, ElasticSettings):
        given["min_num_proc"] = settings.min_num_proc or settings.num_proc or 1
    return given


@dataclass(frozen=True)
class HostInfo:
    """A host and how many ranks it takes."""

    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        """Read ``NAME:SLOTS``."""
        (host,) = parse_hosts(host_string)
        return host


@dataclass
class SlotInfo:
    """One rank of a job: its host and its numbers."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int

    def to_response_string(self) -> str:
        """Return rank and size, local rank and size, cross rank and size as text."""
        facts = (self.rank, self.size, self.local_rank, self.local_size)
        return ",".join(map(str, (*facts, self.cross_rank, self.cross_size)))


INVALID_SLOT_INFO = SlotInfo("", -1, -1, -1, -1, -1, -1)


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """Read ``NAME:SLOTS,...``; raise `ValueError` if a host has no number of slots."""
    found = []
    for host in new.parse_hosts(hosts_string):
        if host.slots is None:
            raise ValueError(f"{host.name!r} has no number of slots: write {host.name}:SLOTS")
        found.append(HostInfo(host.name, host.slots))
    return found


def parse_host_files(filename: str) -> str:
    """Return the hosts in a file as ``NAME:SLOTS,...``."""
    with open(filename, encoding="utf-8") as file:
        hosts = new.parse_hostfile(file)
    return ",".join(f"{host.name}:{host.slots or 1}" for host in hosts)


def parse_hosts_and_slots(hosts: str) -> tuple[list[str], dict[str, int]]:
    """Return the names of the hosts, and the number of slots of each."""
    found = parse_hosts(hosts)
    return [host.hostname for host in found], {host.hostname: host.slots for host in found}


def get_host_assignments(
    hosts: Sequence[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """Return a rank for every slot, at most `max_num_proc`.

    Raises:
        ValueError: If there are fewer slots than `min_num_proc`.
    """
    offered = sum(host.slots for host in hosts)
    if offered < min_num_proc:
        raise ValueError(f"the hosts offer {offered} slots, but {min_num_proc} ranks are to run")
    size = offered if max_num_proc is None else min(offered, max_num_proc)
    slots = new.plan_slots([new.Host(host.hostname, host.slots) for host in hosts], size)
    return [SlotInfo(**vars(slot)) for slot in slots]


def __getattr__(name: str) -> str:
    if name == IB_DISABLE or name in {row.env for row in TUNABLES}:
        return name
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def set_args_from_config(
    args: argparse.Namespace, config: Mapping[str, Any], override_args: Collection[str]
) -> None:
    """Set options from a configuration that was read, except `override_args`."""
    controller = config.get(CONTROLLER)
    if controller and not (args.use_gloo or args.use_mpi):
        if controller not in CONTROLLERS:
            raise ValueError(f"controller must be gloo or mpi, not {controller!r}")
        setattr(args, f"use_{controller}", True)
    for key, row in schema().items():
        if row is None or row.dest in override_args:
            continue
        section, _, name = key.partition(".")
        found = (config.get(section) or {}).get(name)
        if found is not None:
            setattr(args, row.dest, not found if key == row.inverse_key else found)


def validate_config_args(args: argparse.Namespace) -> None:
    """Raise `ValueError`, which names the option, if one has no sensible value."""
    for row in TUNABLES:
        value = getattr(args, row.dest, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0:
            raise ValueError(f"{row.dest}={value} must be >= 0")


def set_env_from_args(env: dict[str, str], args: argparse.Namespace) -> dict[str, str]:
    """Add the variables that the options set to `env`, and return it."""
    env.update(settings_environment(args, env))
    return env
