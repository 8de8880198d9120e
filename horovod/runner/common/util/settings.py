"""What programs that start jobs hand to `gloo_run`, `mpi_run` and `js_run`."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from horovod.runner.common.util.timeout import Timeout
from horovod.runner.options.arguments import make_options


@dataclass(kw_only=True)
class BaseSettings:
    """Of any job; the names are those of horovodrun's options."""

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
    """Of a job with fixed hosts, given as for ``-H``."""

    hosts: str | None = None


def as_arguments(settings: BaseSettings, nics: Collection[str] | None = None) -> list[str]:
    """The options of horovodrun that say the same; `nics` are for settings without any."""
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
    }
    switches = {
        "--verbose": settings.verbose > 1,
        "--tcp": settings.tcp_flag,
        "--prefix-output-with-timestamp": settings.prefix_output_with_timestamp,
    }
    arguments = [f"{name}={value}" for name, value in values.items() if value is not None]
    return arguments + [name for name, wanted in switches.items() if wanted]


def options_of(
    arguments: Sequence[str], command: str | Sequence[str], env: Mapping[str, str] = os.environ
) -> argparse.Namespace:
    """The options of a job that runs a command (text: split as a shell does)."""
    words = shlex.split(command) if isinstance(command, str) else command
    return make_options([*arguments, "--", *words], env)
