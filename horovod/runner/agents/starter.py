"""How an agent comes to run on another host: a command, and the seam behind which it is chosen.

`host_agent` runs the command of a `Starter`; `horovod.runner.options.starters` chooses which it is:
`ssh.Ssh`, `srun.Srun` inside a Slurm job, or `CommandStarter` for a command of the user's. All of
them run a program on the host and pass its stdin, stdout and stderr on, over which the agent gets
its source and its orders. Hosts that start their agent themselves need none: see `joining`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from horovod.runner.slots.worker_env import HOSTS_OWN

HOST = "{host}"
"""What stands for a host's name in a command of the user's."""

_NAME = re.compile(r"(?!-)[\w.:%@-]+")


class Starter(Protocol):
    """A way to run a program on another host."""

    @property
    def name(self) -> str:
        """The program that does it, for messages."""

    @property
    def keeps(self) -> Sequence[str]:
        """Variables that workers take from their host's own environment."""

    def command(self, host: str, program: Sequence[str]) -> list[str]:
        """The command that runs ``program`` on ``host``; `ValueError` for a name that is none."""

    def environment(self) -> Mapping[str, str] | None:
        """The environment of that command; None: this process's own."""


@dataclass(frozen=True)
class CommandStarter:
    """A command of the user's, such as ``kubectl exec -i {host} --``; the program comes last."""

    template: str

    keeps = HOSTS_OWN

    @property
    def name(self) -> str:
        return os.path.basename(shlex.split(self.template)[0])

    def command(self, host: str, program: Sequence[str]) -> list[str]:
        check_name(host)
        words = [word.replace(HOST, host) for word in shlex.split(self.template)]
        return [*words, *program]

    def environment(self) -> None:
        return None


def check_name(host: str) -> None:
    """`ValueError` unless this can be a host's name: it must not look like an option."""
    if not _NAME.fullmatch(host):
        raise ValueError(f"{host!r} cannot be the name of a host")
