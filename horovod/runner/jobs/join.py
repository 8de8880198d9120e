"""Bring this machine into a job that waits for hosts: ``horovodrun --join``.

`launch` calls `run_join`. The process stays until the job has ended, or does not need this host any
more. If an elastic job releases it for a while, it joins again.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import time
from collections.abc import Mapping

from horovod.common.wire import WireError
from horovod.runner.agents.channel import LinkChannel
from horovod.runner.agents.relay import Relay, connect
from horovod.runner.options.secret import job_secret
from horovod.runner.options.tunables import settings
from horovod.runner.output.console import Console
from horovod.runner.output.report import LaunchError
from horovod.runner.slots.hosts import Host
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
    host = own_host(options, environ)
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


def own_host(options: argparse.Namespace, environ: Mapping[str, str]) -> Host:
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
            os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    return signals
