"""The commands that start an agent on another host: ssh, srun, or a command of the user's.

`make_starter` chooses a `Starter`, and `host_agent` runs its command. Each starter runs a program
on the host and passes on its stdin, stdout and stderr, over which the agent gets its source
(`agent_source`) and its commands. Hosts that start their agent themselves need no starter: see
`link_server`.

A `ProcessLink` is the line between the launcher and an agent: pipes to a child process, which is
the agent itself or the command that leads to it. For hosts that connect by themselves a
`channel.ChannelLink` has the same methods.
"""

from __future__ import annotations

import argparse
import functools
import marshal
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from horovod.runner.agents.agent_streams import MARSHAL_VERSION
from horovod.runner.agents.bootstrap import Packed, pack_modules
from horovod.runner.agents.local_host import AGENT_NAME
from horovod.runner.slots.allocation import slurm_groups
from horovod.runner.slots.worker_env import HOST_VARIABLES

HOST = "{host}"
"""The placeholder for a host's name in a command of the user's."""

_NAME = re.compile(r"(?!-)[\w.:%@-]+")


class Starter(Protocol):
    """A way to run a program on another host."""

    own_variables: ClassVar[Sequence[str]] = HOST_VARIABLES
    """Variables that workers take from their host's own environment."""

    @property
    def name(self) -> str:
        """The name of the program that starts others, for messages."""

    def command(self, host: str, program: Sequence[str]) -> list[str]:
        """Return the command that runs ``program`` on ``host``.

        Raises:
            ValueError: If ``host`` cannot be the name of a host.
        """

    def environment(self) -> Mapping[str, str] | None:
        """Return the environment of that command; None stands for this process's own."""
        return None


@dataclass(frozen=True)
class CommandStarter(Starter):
    """A command of the user's, such as ``kubectl exec -i {host} --``; the program comes last."""

    template: str

    @property
    def name(self) -> str:
        return os.path.basename(shlex.split(self.template)[0])

    def command(self, host: str, program: Sequence[str]) -> list[str]:
        check_name(host)
        words = [word.replace(HOST, host) for word in shlex.split(self.template)]
        return [*words, *program]


def check_name(host: str) -> None:
    """Raise `ValueError` unless this can be a host's name; it must not look like an option."""
    if not _NAME.fullmatch(host):
        raise ValueError(f"{host!r} cannot be the name of a host")


_ALIVE_SECONDS = 10
_ALIVE_TRIES = 3


@dataclass(frozen=True)
class Ssh(Starter):
    """Starts programs with the system's own ``ssh``, with the user's keys and configuration.

    Host keys are checked as that configuration says. Nothing that a user chose (paths, arguments,
    environment) is part of the remote command: all that travels on stdin.
    """

    port: int | None = None
    identity_file: str | None = None
    connect_timeout: float = 30.0

    name = "ssh"

    def command(self, host: str, program: Sequence[str]) -> list[str]:
        check_name(host)
        options = [
            "BatchMode=yes",  # never ask: several run at once, and stdin leads to no person
            f"ConnectTimeout={max(1, math.ceil(self.connect_timeout))}",
            f"ServerAliveInterval={_ALIVE_SECONDS}",
            f"ServerAliveCountMax={_ALIVE_TRIES}",
            "ClearAllForwardings=yes",
        ]
        command = [shutil.which("ssh") or "ssh", "-T"]
        for option in options:
            command += ["-o", option]
        # The other host gives the last argument to the user's login shell, whichever that is.
        return [*command, *self.login_arguments(), host, "--", f"exec {shlex.join(program)}"]

    def login_arguments(self) -> list[str]:
        """Return the options for port and key, where the user has given them."""
        port = [] if self.port is None else ["-p", str(self.port)]
        return [*port, *([] if self.identity_file is None else ["-i", self.identity_file])]


SSH = Ssh()
"""The starter that leaves everything to ssh's own configuration."""

NODE_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK"),
    *("SLURMD_NODENAME", "SLURM_CPUS_ON_NODE", "SLURM_JOB_GPUS"),
    *("SLURM_STEP_GPUS", "SLURM_TOPOLOGY_ADDR"),
)
"""Variables with which Slurm describes a node to the processes there."""

_SHAPES = (
    *("SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPUS", "SLURM_GPUS_PER_TASK"),
    *("SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_SOCKET", "SLURM_GPU_BIND", "SLURM_CPU_BIND"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_GPU"),
    *("SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_CORE", "SLURM_DISTRIBUTION"),
    *("SLURM_EXACT", "SLURM_EXCLUSIVE", "SLURM_HINT", "SLURM_CORE_SPEC", "SLURM_THREADS"),
    *("SLURM_LABELIO", "SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_STDERRMODE"),
    *("SLURM_UNBUFFEREDIO", "SLURM_EXPORT_ENV", "SLURM_STEP_GRES", "SLURM_MEM_PER_CPU"),
    *("SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    *("SLURM_WAIT", "SLURM_KILL_BAD_EXIT", "SLURM_OPEN_MODE", "SLURM_TIMELIMIT"),
)
"""Variables that srun reads like options. They describe the job's tasks, and not an agent."""


@dataclass(frozen=True)
class Srun(Starter):
    """Starts each agent as a step of its own in the Slurm job that ``environ`` describes.

    The step shares the job's resources with other steps (``--overlap``). It gets all cores and
    devices that the job has on the node, however the job was submitted: `environment` removes
    variables that would change srun's defaults.
    """

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    name = "srun"
    own_variables = (*HOST_VARIABLES, *NODE_VARIABLES)

    def command(self, host: str, program: Sequence[str]) -> list[str]:
        check_name(host)
        found = enumerate(slurm_groups(self.environ))
        groups = [n for n, hosts in found if host in {each.name for each in hosts}]
        return [
            shutil.which("srun", path=self.environ.get("PATH")) or "srun",
            "--quiet",
            "--overlap",
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={host}",
            # Without it srun looks for the node in the first group of a heterogeneous job only.
            *(f"--het-group={number}" for number in groups[:1]),
            "--cpu-bind=none",
            "--mpi=none",
            "--export=ALL",
            "--job-name=horovodrun",
            *program,
        ]

    def environment(self) -> dict[str, str]:
        return {name: value for name, value in self.environ.items() if name not in _SHAPES}


def make_starter(
    options: argparse.Namespace, environ: Mapping[str, str], timeout: float
) -> Starter:
    """Choose the starter: the user's command; srun inside a Slurm job; otherwise ssh.

    Args:
        options: The launcher's options. A port or a key for ssh asks for ssh, even inside a Slurm
            job.
        environ: The launcher's environment.
        timeout: Seconds that ssh may take to connect.
    """
    if options.start_command is not None:
        return CommandStarter(options.start_command)
    wants_ssh = options.ssh_port is not None or options.ssh_identity_file is not None
    is_slurm_job = environ.get("SLURM_JOB_ID") and shutil.which("srun", path=environ.get("PATH"))
    if is_slurm_job and not wants_ssh:
        return Srun(environ)
    return Ssh(options.ssh_port, options.ssh_identity_file, timeout)


_CHUNK = 1 << 18
_STARTER_PATIENCE = 5.0

NO_INPUT = 93
"""Exit status of an agent whose source did not come."""

_SOURCE_SECONDS = 120
"""How long an agent waits for its source. The launcher's machine may have lost its power, and the
connection, such as sshd's, notices that only when something is sent."""

_AGENT_MODULES = ("bootstrap", "local_host", "agent_streams", "agent")


def agent_command(name: str, starter: Starter | None) -> list[str]:
    """Return the command to execute here for an agent on a host; its source follows on stdin.

    The Python program has no character that is special to a shell inside single quotes.
    """
    source = agent_source(0 if starter else os.getpid())
    python = [sys.executable, *agent_arguments(len(source))]
    return starter.command(name, python) if starter else python


def agent_arguments(length: int) -> list[str]:
    """Return Python's arguments for running `agent_source`, whose length this is, from stdin."""
    program = (
        f'import _signal,marshal,os,sys;_signal.alarm({_SOURCE_SECONDS});s=b"";'
        f'exec("while len(s)<{length}:s+=os.read(0,{length}-len(s))or os._exit({NO_INPUT})");'
        "_signal.alarm(0);"
        "version,source,code,*arguments=marshal.loads(s);"
        "exec(marshal.loads(code)if version==sys.version else source);run_agent(*arguments)"
    )
    return ["-I", "-S", "-X", "utf8", "-c", program, AGENT_NAME]


@functools.cache
def agent_source(parent: int) -> bytes:
    """Return the agent's program; ``parent`` is the launcher's pid on the same host, else 0."""
    version, modules = packed_modules(*_AGENT_MODULES)
    _, source, code = modules[0]
    program: Any = (version, source, code, (version, modules), parent)
    return marshal.dumps(program, MARSHAL_VERSION)


@functools.cache
def packed_modules(*names: str) -> Packed:
    """Return modules of this folder as `bootstrap.load_modules` takes them."""
    return pack_modules(*(f"horovod.runner.agents.{name}" for name in names))


class ProcessLink:
    """Pipes to a child process.

    A link never blocks: `read`, `read_errors` and `write` raise `BlockingIOError` instead.
    """

    unsent = False  # whether bytes that `write` took are still unsent
    ends = ("", "")  # addresses of launcher and host; the agent reports what ssh or Slurm says

    def __init__(
        self,
        command: Sequence[str],
        starter: Starter | None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process.

        Args:
            command: The command to execute.
            starter: What leads to another machine; None if the process is the agent itself.
            env: The agent's environment without a starter; by default this process's own.

        Raises:
            OSError: If the process cannot be started.
        """
        self.remote = starter is not None
        """Whether the agent may be on another machine, where its processes cannot be signalled."""
        self.own_variables: Sequence[str] | None = starter.own_variables if starter else ()
        """Variables that workers take from their host's own environment. None stands for all; the
        job's key is then among them."""
        self._name = starter.name if starter else "the agent"
        self.process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=starter.environment() if starter else env,
            start_new_session=True,  # Ctrl-C, or a batch system's signal, is for us alone
        )
        self.pid = self.process.pid
        pipes = (self.process.stdin, self.process.stdout, self.process.stderr)
        self.pipes = [pipe for pipe in pipes if pipe is not None]
        for pipe in self.pipes:
            os.set_blocking(pipe.fileno(), False)

    @property
    def input_fd(self) -> int:
        """A descriptor that is writable when `write` or `flush` can go on."""
        return self.pipes[0].fileno()

    @property
    def output_fd(self) -> int:
        """A descriptor, other than `input_fd`, that is readable when `read` has something."""
        return self.pipes[1].fileno()

    @property
    def errors_fd(self) -> int:
        """A descriptor that is readable when `read_errors` has something; None if `read` tells."""
        return self.pipes[2].fileno()

    def write(self, data: memoryview) -> int:
        """Send some of the data, and return how many bytes were taken."""
        return os.write(self.input_fd, data)

    def flush(self) -> None:
        """Send bytes that are still unsent."""

    def read(self) -> bytes:
        """Return bytes from the agent; none at its end."""
        return os.read(self.output_fd, _CHUNK)

    def read_errors(self) -> bytes:
        """Return error text from the agent or the command that leads to it; none at the end."""
        return os.read(self.errors_fd, _CHUNK)

    def abandon(self) -> None:
        """Give the agent up; `read` then comes to an end."""
        if self.process.poll() is None:
            if self.remote:
                self.process.terminate()
            else:
                self.process.kill()  # the agent itself, which may be stopped

    def release(self) -> None:
        """Close our side. An agent that still runs then ends its workers, and itself."""
        for pipe in self.pipes:
            pipe.close()

    def wait(self) -> int:
        """Wait for the end after `release`; return an exit code, negative for signals."""
        try:
            return self.process.wait(_STARTER_PATIENCE if self.remote else None)
        except subprocess.TimeoutExpired:
            self.process.kill()  # the agent ends by itself when it loses us
            return self.process.wait()

    def describe_end(self, code: int) -> str:
        """Return words for people about a link that ended by itself with this code."""
        ended = f"{self._name} ended with exit code {code}"
        if code == NO_INPUT:
            return (
                f"{self._name} does not pass its stdin on to the host, over which the agent there "
                f"gets its orders (kubectl exec does with -i); horovodrun --listen and --join need "
                f"none. {ended}"
            )
        return ended
