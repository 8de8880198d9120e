"""A real Slurm on one machine: a controller, some nodes, and a munge of its own.

Tests use the fixture `slurm` of tests/runner/conftest.py. By hand, until Ctrl-C:

    python -m tests.slurm --nodes 3

prints the variable with which `sinfo`, `sbatch` and `horovodrun` in another terminal find it. All
files are in a temporary folder and all ports are free ones; no service of the system is touched,
and leaving the `with` block ends every process that belongs to it.

All nodes are this machine: they have names, step daemons and job steps of their own, and share
cores, memory, files and the loopback interface.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.missing import SLURM
from tests.ports import reserved_port

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch", "scontrol")
_PATIENCE = 240.0  # seconds; nothing here takes a fraction of it unless it hangs
_PAUSE = 0.05

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0
MpiDefault=none
ReturnToService=1
JobRequeue=1
KillWait=30
CompleteWait=0
EpilogMsgTime=0
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


@functools.cache
def available() -> str | None:
    """Why there can be no Slurm here; None if there can."""
    missing = [name for name in _PROGRAMS if program(name) is None]
    return f"{SLURM} {missing[0]}" if missing else None


def program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class Slurm:
    """A cluster with nodes n1, n2 and so on, each with `cpus` CPUs."""

    def __init__(self, nodes: int = 3, cpus: int = 4) -> None:
        self.nodes = [f"n{number + 1}" for number in range(nodes)]
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self._configuration = self.folder / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = contextlib.ExitStack()  # also while a daemon does not run
        try:
            self._start(cpus)
        except BaseException:
            self.close()
            raise

    # -- for tests -------------------------------------------------------------------------

    def environment(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """The variables of a program that is to find this cluster, and no Slurm job around it."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        return {**own, **(env or {}), "SLURM_CONF": str(self._configuration)}

    def popen(
        self, *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            env=self.environment(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self, *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end."""
        with self.popen(*command, env=env, cwd=cwd) as process:
            try:
                out, err = process.communicate(timeout=_PATIENCE)
            except subprocess.TimeoutExpired:
                process.terminate()  # salloc then gives the nodes back
                out, err = process.communicate(timeout=_PATIENCE)
                raise AssertionError(f"{command} hangs:\n{out}\n{err}") from None
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def ask(self, *command: str) -> str:
        """The answer of a program of Slurm's, which must succeed."""
        done = self.run(*command)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def wait_until_idle(self) -> None:
        """Until no job is left and no node is busy; AssertionError with what is left."""
        self.wait_for(lambda: not self.ask("squeue", "--noheader"), "squeue")

    def cancel_everything(self) -> None:
        """End what is left of all jobs."""
        if self.ask("squeue", "--noheader"):
            self.run("scancel", "--user", str(os.getuid()))
            self.wait_until_idle()

    def requeue(self, job: str) -> None:
        """Preempt a job; it starts again as soon as it has ended, not after Slurm's usual pause."""
        self.ask("scontrol", "requeue", job)
        state = ("squeue", "--noheader", "--format=%t", f"--jobs={job}")
        self.wait_for(lambda: self.ask(*state) == "PD", f"{job} to be queued again")
        self.ask("scontrol", "update", f"jobid={job}", "StartTime=now")

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited in vain for {what}; {self._state()}")
            time.sleep(_PAUSE)

    def processes(self, *parts: str, node: str = "") -> list[int]:
        """Processes of this cluster, or of one node, whose command line has all these parts."""
        marks = [
            f"SLURM_CONF={self._configuration}",
            *([f"SLURMD_NODENAME={node}"] if node else []),
        ]
        wanted = {mark.encode() for mark in marks}
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            with contextlib.suppress(OSError):
                words = Path("/proc", entry, "cmdline").read_bytes()
                environ = Path("/proc", entry, "environ").read_bytes()
                here = wanted <= set(environ.split(b"\0"))
                if here and all(part.encode() in words for part in parts):
                    found.append(int(entry))
        return found

    # -- starting and ending ---------------------------------------------------------------

    def _start(self, cpus: int) -> None:
        host, user = socket.gethostname().partition(".")[0], pwd.getpwuid(os.getuid()).pw_name
        folder = self.folder
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        (folder / "state").mkdir()
        port = self._ports.enter_context(reserved_port())
        lines = [_CONFIGURATION.format(host=host, port=port, user=user, folder=folder)]
        for node in self.nodes:
            (folder / f"spool.{node}").mkdir()
            port = self._ports.enter_context(reserved_port())
            lines.append(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
                f"CPUs={cpus} State=UNKNOWN\n"
            )
        self._configuration.write_text("".join(lines))
        munge = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munge)
        self.wait_for((folder / "munge.socket").exists, "munged")
        self._daemon("slurmctld", "-D")
        for node in self.nodes:
            self.start_node(node)
        self.wait_for(self._is_up, "idle nodes")

    def start_node(self, node: str) -> None:
        self._daemon("slurmd", "-D", "-N", node, node=node)

    def stop_node(self, node: str) -> None:
        """End a node's daemon; the steps that run there go on."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()

    def restart_node(self, node: str) -> None:
        """End everything that runs on a node, as a lack of power does, and let it come back.

        A daemon that goes on could still end what is left of a job's steps there, and would take
        those of the same job for them when it has been queued again.
        """
        self.stop_node(node)
        for pid in self.processes(node=node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.start_node(node)
        self.ask("scontrol", "update", f"nodename={node}", "state=resume")
        state = ("sinfo", "--noheader", f"--nodes={node}", "--format=%t")
        self.wait_for(lambda: self.ask(*state) == "idle", f"{node} to come back")

    def _daemon(self, *command: str, node: str = "") -> None:
        path = program(command[0])
        assert path is not None
        name = node or command[0]
        with open(self.folder / f"{name}.out", "wb") as output:
            self._daemons[name] = subprocess.Popen(
                [path, *command[1:]],
                env=self.environment({"SLURMD_NODENAME": node} if node else None),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _is_up(self) -> bool:
        for name, daemon in self._daemons.items():
            assert daemon.poll() is None, (self.folder / f"{name}.out").read_text()
        done = self.run("sinfo", "--noheader", "--Node", "--format=%t")
        return done.stdout.split() == ["idle"] * len(self.nodes)

    def _state(self) -> str:
        queue, nodes = self.run("squeue").stdout, self.run("sinfo", "--Node").stdout
        return f"the cluster says\n{queue}\n{nodes}"

    def close(self) -> None:
        if "slurmctld" in self._daemons:
            with contextlib.suppress(AssertionError):
                self.cancel_everything()
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._ports.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Run a Slurm on this machine until Ctrl-C.")
    parser.add_argument("--nodes", type=int, default=3, help="number of nodes (3)")
    parser.add_argument("--cpus", type=int, default=4, help="CPUs of each node (4)")
    options = parser.parse_args(arguments)
    reason = available()
    if reason:
        parser.error(reason)
    with Slurm(options.nodes, options.cpus) as cluster, contextlib.suppress(KeyboardInterrupt):
        print(f"export SLURM_CONF={cluster.folder}/slurm.conf", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
