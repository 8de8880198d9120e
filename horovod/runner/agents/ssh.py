"""The ssh command line that starts a program on another host: a `starter.Starter`.

`host_agent` runs it. The system's own ``ssh`` is used, with the user's keys, agent and
configuration; host keys are checked as that configuration says. Nothing that a user chose (paths,
arguments, environment) is part of the remote command: all that travels on stdin.
"""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from horovod.runner.agents.starter import check_name
from horovod.runner.slots.worker_env import HOSTS_OWN

_ALIVE_SECONDS = 10
_ALIVE_TRIES = 3


@dataclass(frozen=True)
class Ssh:
    """How to log in to other hosts."""

    port: int | None = None
    identity_file: str | None = None
    connect_timeout: float = 30.0

    name = "ssh"
    keeps = HOSTS_OWN

    def command(self, host: str, program: Sequence[str]) -> list[str]:
        """The command that runs ``program`` on ``host``; `ValueError` for a name that is none."""
        check_name(host)
        options = [
            "BatchMode=yes",  # never ask: several run at once, and stdin is not a person
            f"ConnectTimeout={max(1, math.ceil(self.connect_timeout))}",
            f"ServerAliveInterval={_ALIVE_SECONDS}",
            f"ServerAliveCountMax={_ALIVE_TRIES}",
            "ClearAllForwardings=yes",
        ]
        command = [shutil.which("ssh") or "ssh", "-T"]
        for option in options:
            command += ["-o", option]
        # The far side hands this to the user's login shell, whichever that is.
        return [*command, *self.login_arguments(), host, "--", f"exec {shlex.join(program)}"]

    def environment(self) -> None:
        return None

    def login_arguments(self) -> list[str]:
        """Port and key, where they are not for ssh's own configuration to say."""
        port = [] if self.port is None else ["-p", str(self.port)]
        return [*port, *([] if self.identity_file is None else ["-i", self.identity_file])]


SSH = Ssh()
"""Ssh as its own configuration says."""
