"""Hosts that join a job by themselves: ``horovodrun --join`` on each, ``--listen`` in the launcher.

`launch` calls `run_join`, which brings this machine into a job that waits for hosts. The process
stays until the job has ended, or does not need this host any more. If an elastic job releases it
for a while, it joins again. In the launcher `JoinedHosts` offers the hosts that have joined to an
elastic job.

Both sides get the secret with which hosts join from `job_secret`: from a file or from the
environment. It is never an argument, because every user of a machine sees the arguments of all
processes.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from horovod.common.joining.launcher_store import SECRET_KEY
from horovod.common.wire import WireError, decode_key, encode_key, new_key
from horovod.runner.agents.channel import LinkChannel, Relay, connect
from horovod.runner.agents.host_agent import HostAgent
from horovod.runner.agents.link_server import JoinServer
from horovod.runner.elastic.discovery import HostDiscovery
from horovod.runner.options.tunables import settings
from horovod.runner.output.console import Console
from horovod.runner.output.report import LaunchError
from horovod.runner.slots.hosts import Host, is_local
from horovod.runner.slots.worker_env import KEY

_PAUSE = 0.5  # seconds between attempts to connect to a launcher that has not started yet


def run_join(options: argparse.Namespace, environ: Mapping[str, str], console: Console) -> int:
    """Take part in the job until it releases this host, and return the exit status.

    Raises:
        LaunchError: If this host cannot join, or the job is gone.
    """
    address, port = options.join
    timeout = settings(options, environ).start_timeout
    try:
        key = job_secret(options.secret_file, environ, patience=timeout)
    except ValueError as error:
        raise LaunchError(str(error), status=2) from None
    host = _own_host(options, environ)
    while True:
        channel = _connect(address, port, key, timeout)
        try:
            channel.send({"host": host.name, "slots": host.slots})
            if options.verbose:
                console.say(f"asked {address}:{port} to join as {host.name}:{host.slots}")
            own = {name: value for name, value in environ.items() if name != KEY}
            relay = Relay(channel, own)
            ended = _take_signals(relay)
            how = relay.run()
        except ConnectionError as error:
            raise LaunchError(f"left the job at {address}:{port}: {error}") from None
        finally:
            channel.close()
        if how == "refused":
            raise LaunchError(f"{address}:{port} refused this host: {relay.why}")
        if ended:
            return 128 + ended[0]
        if how == "done":
            return 0


def _own_host(options: argparse.Namespace, environ: Mapping[str, str]) -> Host:
    """Return the name of this machine in the job, and how many processes it offers to run."""
    if options.hosts:
        return Host(options.hosts[0].name, options.hosts[0].slots or 1)
    named = environ.get("HOROVOD_HOSTNAME") or environ.get("SLURMD_NODENAME")
    return Host(named or socket.gethostname(), 1)


def _connect(address: str, port: int, key: bytes, timeout: float) -> LinkChannel:
    deadline = time.monotonic() + timeout
    while True:
        try:
            return connect(address, port, key, timeout)
        except (WireError, PermissionError) as error:
            raise LaunchError(
                f"cannot join {address}:{port}: {error}. Either it is not a horovodrun --listen, "
                f"or its secret is another one"
            ) from None
        except ConnectionRefusedError as error:  # the launcher may not have started yet
            if time.monotonic() > deadline:
                raise LaunchError(f"cannot join {address}:{port}: {error.strerror}") from None
        except OSError as error:
            raise LaunchError(f"cannot join {address}:{port}: {error}") from None
        time.sleep(_PAUSE)


def _take_signals(relay: Relay) -> list[int]:
    """Let Ctrl-C and SIGTERM end the workers first; the returned list gets the signals."""
    signals: list[int] = []

    def end(number: int, _frame: object) -> None:
        signals.append(number)
        if not relay.terminate():
            os._exit(128 + number)  # no agent runs, so there is nothing to end first

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    return signals


_FILE_PAUSE = 0.2  # seconds between looks at whether the file of the secret is there
_MAX_BYTES = 4096


class JoinedHosts(HostDiscovery):
    """The hosts that have joined (``horovodrun --join``), and this machine if it takes part."""

    def __init__(self, server: JoinServer, hosts: Sequence[Host]) -> None:
        self._server = server
        self._own = {host.name: host.slots or 1 for host in hosts if is_local(host.name)}

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        joined = {name: link.slots for name, link in self._server.waiting().items()}
        return {**self._own, **joined}

    def connect(self, name: str, goes_on: Callable[[], bool]) -> HostAgent:
        """Start the agent of a host.

        Args:
            name: The host.
            goes_on: Returns whether the job goes on; a host that is released may then join again.

        Raises:
            ConnectionResetError: If the host has gone.
        """
        if name in self._own:
            return HostAgent(name)
        link = self._server.waiting().get(name)
        if link is None:
            raise ConnectionResetError("horovodrun --join has ended there")
        link.restarts = goes_on
        return HostAgent(name, link=link)


def job_secret(
    path: str | None, environ: Mapping[str, str], *, make: bool = False, patience: float = 0.0
) -> bytes:
    """Return the secret in a file, or in the environment if no file is named.

    Args:
        path: The file; None stands for the environment.
        environ: The environment.
        make: Whether to make a file that does not exist, readable by its owner alone.
        patience: Seconds to wait for a file that does not exist, if it is not to be made.

    Raises:
        ValueError: If the secret is missing or wrong; the message never shows what is in the file.
    """
    if path is None:
        if not environ.get(SECRET_KEY):
            raise ValueError(
                f"hosts join with a secret, and there is none: name a file with --secret-file, or "
                f"set {SECRET_KEY} to the same base64 form of 32 random bytes everywhere"
            )
        return decode_key(environ[SECRET_KEY])
    path = os.path.expanduser(path)
    try:
        if make and not os.path.exists(path):
            return _make(path)
        return _read(path, time.monotonic() + patience)
    except OSError as error:
        raise ValueError(f"argument --secret-file: {path!r}: {error.strerror}") from None


def _make(path: str) -> bytes:
    """Make a secret and its file, which appears with its whole content or not at all."""
    key = new_key()
    draft = f"{path}.{os.getpid()}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        file.write(encode_key(key) + "\n")
    os.replace(draft, path)
    return key


def _read(path: str, deadline: float) -> bytes:
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(_FILE_PAUSE)
    with open(path, encoding="ascii", errors="replace") as file:
        status = os.fstat(file.fileno())
        if status.st_mode & 0o077 or status.st_uid not in (os.getuid(), 0):
            raise ValueError(
                f"argument --secret-file: others may read or change {path!r}: chmod 600 {path}"
            )
        try:
            return decode_key(file.read(_MAX_BYTES).strip())
        except ValueError as error:
            raise ValueError(f"argument --secret-file: {path!r}: {error}") from None
