"""The guard: the small process between ``horovodrun`` and its workers.

`workers` starts it as ``python -I -S guard.py PARENT_PID`` (nothing but the standard library, so
it is up in about 20 ms). It starts the workers, each in a session of its own, tells the launcher
about them, and ends them when told to, or when the launcher is gone.

Why a process of its own: a launcher killed by SIGKILL cannot clean up, and a signal on the
parent's death (PR_SET_PDEATHSIG) is bound to a thread, races with the start and never reaches
grandchildren. The guard survives the launcher, notices its death through a pidfd and the closed
pipe, and is a "child subreaper": whatever a worker leaves behind, even a daemon that has left its
session, becomes the guard's child. So "no child left" means that the whole job is gone, and no
process of the job escapes a kill.

Protocol, one JSON object a line. Launcher to guard, on stdin: first the job (``executable``,
``argv``, ``env``, and ``workers``: each with ``rank``, ``env``, and the inherited descriptors
``stdout`` and ``stderr``), then commands: ``{"stop": grace}`` sends SIGTERM and after ``grace``
seconds SIGKILL; 0 kills at once. End of file stands for a lost launcher. Guard to launcher, on
stdout: ``{"started": [[rank, pid], ...]}``, or ``{"failed": {"errno": n, "rank": r}}``;
``{"exited": [[rank, code], ...]}``, codes negative for signals, ranks that were found
dead at the same moment in one message; ``{"stuck": [pid, ...]}`` for what even SIGKILL did not
end; ``{"finished": true}``. Over ssh the same protocol works as it is.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import sys
import time

TYPE_CHECKING = False  # as in typing, whose import would take longer than our start
if TYPE_CHECKING:
    from typing import Any

ORPHAN_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL when the launcher is gone."""

LEFTOVER_GRACE = 5.0
"""The same for processes that workers left behind when they ended."""

KILL_WAIT = 10.0
"""Seconds to wait for killed processes; one may hang in the kernel."""

_PR_SET_CHILD_SUBREAPER = 36
_FORGIVEN = [getattr(signal, name) for name in ("SIGPIPE", "SIGXFSZ") if hasattr(signal, name)]


class Guard:
    """Holds the workers of one host."""

    def __init__(self, parent: int) -> None:
        self._running: dict[int, int] = {}  # pid -> rank
        self._deadline: float | None = None
        self._killing = False
        self._cleaning = False
        self._input = b""
        self._selector = selectors.DefaultSelector()
        self._wakeup, waker = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: self.stop(LEFTOVER_GRACE))
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._wake)
        self._selector.register(0, selectors.EVENT_READ, self._read_commands)
        self._watch_parent(parent)

    def run(self) -> None:
        """Until no process of the job is left."""
        job = self._read_job()
        if job is None:
            return
        self._start(job)
        while self._reap():
            wait = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            for key, _ in self._selector.select(wait):
                key.data()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                if self._killing:
                    _emit({"stuck": _descendants()})
                    break
                self._kill_all()
        _emit({"finished": True})

    def stop(self, grace: float) -> None:
        """Ask every running worker's process group to end; kill everything after ``grace``."""
        if self._killing:
            return
        if grace <= 0:
            self._kill_all()
            return
        deadline = time.monotonic() + grace
        if self._deadline is None or deadline < self._deadline:
            self._deadline = deadline
            for pid in self._running:
                _signal_group(pid, signal.SIGTERM)

    def _start(self, job: dict[str, Any]) -> None:
        workers = job["workers"]
        descriptors = [fd for worker in workers for fd in (worker["stdout"], worker["stderr"])]
        for fd in descriptors:
            os.set_inheritable(fd, False)  # a worker must hold no pipe but its own
        started = []
        for worker in workers:
            try:
                pid = os.posix_spawn(
                    job["executable"],
                    job["argv"],
                    {**job["env"], **worker["env"]},
                    file_actions=[
                        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                        (os.POSIX_SPAWN_DUP2, worker["stdout"], 1),
                        (os.POSIX_SPAWN_DUP2, worker["stderr"], 2),
                    ],
                    setsid=True,
                    setsigdef=_FORGIVEN,  # Python ignores these, and ignoring is inherited
                )
            except OSError as error:
                _emit({"failed": {"errno": error.errno, "rank": worker["rank"]}})
                self.stop(0)
                break
            self._running[pid] = worker["rank"]
            started.append([worker["rank"], pid])
        for fd in descriptors:
            os.close(fd)
        _emit({"started": started})

    def _reap(self) -> bool:
        """Collect the dead and report workers among them; False when no child is left."""
        exits = []
        alive = True
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                alive = False
                break
            if pid == 0:
                break
            rank = self._running.pop(pid, None)
            if rank is not None:
                exits.append([rank, os.waitstatus_to_exitcode(status)])
        if exits:
            _emit({"exited": exits})
        if alive and self._killing:
            self._kill()  # what was forked since, or has become our child
        elif alive and not self._running and not self._cleaning:
            self._cleaning = True
            for pid in _descendants():
                _signal(pid, signal.SIGTERM)
            self.stop(LEFTOVER_GRACE)
        return alive

    def _kill_all(self) -> None:
        self._killing = True
        self._deadline = time.monotonic() + KILL_WAIT
        self._kill()

    def _kill(self) -> None:
        for pid in self._running:
            _signal_group(pid, signal.SIGKILL)
        for pid in _descendants():
            _signal(pid, signal.SIGKILL)

    def _watch_parent(self, parent: int) -> None:
        try:
            pidfd = os.pidfd_open(parent)
        except (AttributeError, OSError):
            pidfd = None  # the end of file on stdin tells the same, later in rare cases
        if os.getppid() != parent:
            sys.exit("horovodrun is gone")
        if pidfd is not None:
            self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._lost_launcher(pidfd))

    def _lost_launcher(self, fd: int) -> None:
        self._selector.unregister(fd)
        self.stop(ORPHAN_GRACE)

    def _read_job(self) -> dict[str, Any] | None:
        while b"\n" not in self._input:
            data = os.read(0, 1 << 16)
            if not data:
                return None
            self._input += data
        line, _, self._input = self._input.partition(b"\n")
        job: dict[str, Any] = json.loads(line)
        return job

    def _read_commands(self) -> None:
        data = os.read(0, 1 << 16)
        if not data:
            self._lost_launcher(0)
            return
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            self.stop(json.loads(line)["stop"])

    def _wake(self) -> None:
        os.read(self._wakeup, 1 << 12)  # a signal came; the loop looks for what it changed


def _emit(event: dict[str, Any]) -> None:
    try:
        os.write(1, json.dumps(event).encode() + b"\n")
    except OSError:
        pass  # the launcher is gone; we shall notice, and there is nobody to tell


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _descendants() -> list[int]:
    """All processes below this one, parents first; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    for name in names:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()  # the name may hold anything
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    level = [os.getpid()]
    while level:
        level = [child for pid in level for child in children.get(pid, ())]
        found += level
    return found


def _become_subreaper() -> None:
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (AttributeError, OSError):
        pass  # not Linux: process groups are all we can end


if __name__ == "__main__":
    _become_subreaper()
    Guard(parent=int(sys.argv[1])).run()
