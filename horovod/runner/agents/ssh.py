"""The ssh command line that starts a program on another host.

`host_agent` runs it. The system's own ``ssh`` is used, with the user's keys, agent and
configuration; host keys are checked as that configuration says. Nothing that a user chose (paths,
arguments, environment) is part of the remote command: all that travels on stdin.
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

_NAME = re.compile(r"(?!-)[\w.:%@-]+")
_ALIVE_SECONDS = 10
_ALIVE_TRIES = 3


@dataclass(frozen=True)
class Ssh:
    """How to log in to other hosts."""

    port: int | None = None
    identity_file: str | None = None
    connect_timeout: float = 30.0

    def command(self, host: str, program: Sequence[str]) -> list[str]:
        """The command that runs ``program`` on ``host``; `ValueError` for a name that is none."""
        if not _NAME.fullmatch(host):
            raise ValueError(f"{host!r} cannot be the name of a host")
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

    def login_arguments(self) -> list[str]:
        """Port and key, where they are not for ssh's own configuration to say."""
        port = [] if self.port is None else ["-p", str(self.port)]
        return [*port, *([] if self.identity_file is None else ["-i", self.identity_file])]
