"""Open the dashboard of a job, if the options ask for one.

Every launcher calls `open_watcher` before it makes the workers' environment. The dashboard and its
HTTP library are imported only if they are needed. `PATTERN` and `looks_like_address` tell the
options what --dashboard and HOROVOD_DASHBOARD may contain.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from horovod.common.config import Config
from horovod.common.joining.addresses import LOOPBACK
from horovod.common.store import MemoryStore
from horovod.runner.output.report import LaunchError
from horovod.runner.output.watcher import JobWatcher

DEFAULT_PORT = 8470
_NEXT_PORTS = 100
"""How many ports after the wanted one are tried if that is in use."""

_ON, _OFF = ("on", "1", "true", "yes"), ("off", "0", "false", "no")
_ADDRESS = re.compile(r"(?:(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[\w.-]*):)?(?P<port>[0-9]{1,5})")
PATTERN = f"(?i:{'|'.join(_ON + _OFF)})|{re.sub('[?]P<[a-z]+>', '?:', _ADDRESS.pattern)}"
"""``ADDRESS:PORT``, ``:PORT``, ``PORT``, or a word that switches the page on or off."""


@dataclass(frozen=True)
class Address:
    """An address of this machine and the first port to try; 0 stands for any free port."""

    host: str = LOOPBACK
    port: int = DEFAULT_PORT


def looks_like_address(text: str) -> bool:
    """Return whether a word after --dashboard is its value; otherwise it is the command."""
    return re.fullmatch(PATTERN, text) is not None


def parse_address(text: str | None) -> Address | None:
    """Return the address of the page; None if no page is wanted.

    Raises:
        ValueError: If the text is not an address.
    """
    if text is None or text.lower() in _OFF or not text.strip():
        return None
    if text.lower() in _ON:
        return Address()
    match = _ADDRESS.fullmatch(text.strip())
    if match is None or int(match["port"]) > 65535:
        raise ValueError(
            f"{text!r} is not ADDRESS:PORT; for example 127.0.0.1:{DEFAULT_PORT}, "
            f"0.0.0.0:{DEFAULT_PORT} or on"
        )
    return Address((match["host"] or LOOPBACK).strip("[]"), int(match["port"]))


def listen(wanted: Address) -> socket.socket:
    """Return a socket that listens at this address, or at the next free port.

    Raises:
        OSError: If the address is not one of this machine.
    """
    family, _, _, _, address = socket.getaddrinfo(wanted.host, None, type=socket.SOCK_STREAM)[0]
    last = min(wanted.port + _NEXT_PORTS, 65535) if wanted.port else 0
    for port in [*range(wanted.port, last + 1), 0]:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address[0], port, *address[2:]))
            sock.listen(128)
            return sock
        except OSError as error:
            sock.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES) or port == 0:
                raise
    raise AssertionError("the last port to try was any free one")


def link(listener: socket.socket, token: str) -> str:
    """Return the link that a person opens, without a token if that is empty."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    host = f"[{host}]" if ":" in host else host
    return f"http://{host}:{port}/" + (f"?token={token}" if token else "")


INTERVAL = "HOROVOD_STATS_INTERVAL"
_SECONDS = 1.0  # between a rank's reports
_SHORTEST_TOKEN = 16


def open_watcher(
    config: Config,
    environ: Mapping[str, str],
    store: MemoryStore,
    *,
    title: str,
    say: Callable[[str], None],
    elastic: bool = False,
) -> JobWatcher:
    """Open the watcher that the configuration asks for; the caller closes it after the job.

    Args:
        config: The job's configuration.
        environ: The launcher's environment.
        store: The job's store, into which ranks write reports.
        title: The name of the job on the page.
        say: Shows a line to the person who starts the job; it gets the link.
        elastic: Whether the job is elastic.

    Raises:
        LaunchError: If the page cannot be served.
    """
    if config.dashboard is None:
        return JobWatcher()
    try:
        wanted = parse_address(config.dashboard)
    except ValueError as error:
        raise LaunchError(f"argument --dashboard: {error}", 2) from None
    if wanted is None:
        return JobWatcher()
    try:
        from horovod.observe.dashboard.board import Board
        from horovod.observe.dashboard.dashboard import Dashboard
    except ModuleNotFoundError as error:
        raise LaunchError(
            f"the dashboard needs {error.name}, which is not installed: pip install "
            f"'horovod[dashboard]', or start the job without --dashboard (HOROVOD_DASHBOARD)"
        ) from None
    token = _token(config.dashboard_token_file)
    save = config.dashboard_save
    if save is not None and not os.path.isdir(os.path.dirname(os.path.abspath(save))):
        raise LaunchError(f"argument --dashboard-save: the directory of {save!r} is not there", 2)
    try:
        listener = listen(wanted)
    except OSError as error:
        raise LaunchError(
            f"argument --dashboard: cannot listen on {wanted.host}: {error.strerror}", 2
        ) from None
    shown = "" if config.dashboard_token_file else token
    say(f"dashboard: {link(listener, shown)}")
    interval = float(environ.get(INTERVAL) or _SECONDS)
    board = Board(title, time.time(), interval, elastic)
    return Dashboard(board, store, listener, token, say, save)


def watched_environment(env: Mapping[str, str], watcher: JobWatcher) -> dict[str, str]:
    """Return the environment of a watched job's workers.

    It lacks the variables of this dashboard: a job that a worker starts needs a page of its own.
    """
    own = {name: text for name, text in env.items() if not name.startswith("HOROVOD_DASHBOARD")}
    return {**own, **watcher.variables()}


def title_of(command: Sequence[str]) -> str:
    """Return the name of a job: its script or module, without arguments, which may be private."""
    for before, word in itertools.pairwise(command):
        if before == "-m" or word.endswith(".py"):
            return os.path.basename(word)
    return os.path.basename(command[0]) if command else ""


def _token(path: str | None) -> str:
    if path is None:
        return secrets.token_urlsafe(24)
    try:
        with open(path, encoding="ascii") as file:
            token = file.readline().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = f"cannot read {path!r}: {error}"
    else:
        if len(token) >= _SHORTEST_TOKEN and token.isprintable() and " " not in token:
            return token
        least = f"{_SHORTEST_TOKEN} characters without spaces"
        why = f"the first line of {path!r} must be a token of at least {least}"
    raise LaunchError(f"HOROVOD_DASHBOARD_TOKEN_FILE: {why}", 2)
