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


def as_arguments(settings: BaseSettings, nics: Collection[str] | None = None) -> list[str]:
    """Return the options of horovodrun that say the same; `nics` are for settings without any."""
    nics = settings.nics or nics
    timeout = settings.start_timeout
    seconds = timeout.remaining() if isinstance(timeout, Timeout) else timeout
    values = {
        "-np": settings.num_proc,
        "--hosts": getattr(settings, "hosts", None),
        "--ssh-port": settings.ssh_port,
        "--ssh-identity-file": settings.ssh_identity_file,
        "--mpi-args": settings.extra_mpi_args,
        "--binding-args": settings.binding_args,
        "--start-timeout": None if seconds is None else int(max(1, seconds)),
        "--output-filename": settings.output_filename,
        "--network-interfaces": ",".join(nics) if nics else None,
        "--verbose": settings.verbose > 1,
        "--tcp": bool(settings.tcp_flag),
        "--prefix-output-with-timestamp": bool(settings.prefix_output_with_timestamp),
    }
    return as_words(values)


def as_elastic_arguments(settings: ElasticSettings) -> list[str]:
    """Return the options of horovodrun that say the same, but for the discovery."""
    values = {
        "--min-np": settings.min_num_proc or settings.num_proc or 1,
        "--max-np": settings.max_num_proc,
        "--elastic-timeout": settings.elastic_timeout,
        "--reset-limit": settings.reset_limit,
        "--blacklist-cooldown-range": settings.cooldown_range,
    }
    return [*as_arguments(settings), *as_words(values)]


def options_of(
    arguments: Sequence[str], command: str | Sequence[str], env: Mapping[str, str] = os.environ
) -> argparse.Namespace:
    """Return the options of a job that runs a command (text: split as a shell does)."""
    words = shlex.split(command) if isinstance(command, str) else command
    return make_options([*arguments, "--", *words], env)


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
