"""Who watches a job: the dashboard where one is asked for, otherwise nobody.

Every launcher calls `open_watcher` before it makes the workers' environment. The dashboard and its
HTTP library are imported only where they are needed.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

from horovod.common.config import Config
from horovod.common.store import MemoryStore
from horovod.runner.output.report import LaunchError
from horovod.runner.output.watcher import JobWatcher

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
    """The watcher that ``config`` asks for, which is closed with the job.

    ``say`` tells where the page is. `LaunchError` where it cannot be served.
    """
    if config.dashboard is None:
        return JobWatcher()
    from horovod.runner.dashboard.address import link, listen, parse_address

    try:
        wanted = parse_address(config.dashboard)
    except ValueError as error:
        raise LaunchError(f"argument --dashboard: {error}", 2) from None
    if wanted is None:
        return JobWatcher()
    try:
        from horovod.runner.dashboard.board import Board
        from horovod.runner.dashboard.dashboard import Dashboard
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


def watched(env: Mapping[str, str], watcher: JobWatcher) -> dict[str, str]:
    """The environment of a watched job's workers: a job that one of them starts is another one."""
    own = {name: text for name, text in env.items() if not name.startswith("HOROVOD_DASHBOARD")}
    return {**own, **watcher.variables()}


def title_of(command: Sequence[str]) -> str:
    """What a job is called: its script or module, without arguments, which may be private."""
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
        raise LaunchError(
            f"HOROVOD_DASHBOARD_TOKEN_FILE: cannot read {path!r}: {error}", 2
        ) from None
    if len(token) < _SHORTEST_TOKEN or not token.isprintable() or " " in token:
        raise LaunchError(
            f"HOROVOD_DASHBOARD_TOKEN_FILE: the first line of {path!r} must be a token of at least "
            f"{_SHORTEST_TOKEN} characters without spaces",
            2,
        )
    return token
