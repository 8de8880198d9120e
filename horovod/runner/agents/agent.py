"""The agent: the small process between ``horovodrun`` and the workers of one host.

`host_agent` starts one agent on every host: directly on this machine, through one of `starters`
elsewhere. The agent's source arrives on stdin, so no host runs another version. It needs nothing
but the standard library, of which it imports little: hundreds of agents may start at once. It
starts workers, each in a session of its own, passes on their output and their exit codes, and ends
them when it is told to or when the launcher is gone.

The agent is a separate process because a launcher killed by SIGKILL cannot clean up, and a signal
on the parent's death (PR_SET_PDEATHSIG) is bound to a thread, races with the start and never
reaches grandchildren. The agent survives the launcher and notices its death by the closed pipe. It
is a "child subreaper": whatever a worker leaves behind, even a daemon that has left its session,
becomes the agent's child. So "no child left" means that everything is gone, and no process of the
job escapes a kill.

Commands come on stdin, as the agent's source did; end of file stands for a lost launcher:

- ``{"start": [{"id", "argv", "env", "cwd", "bind", "input"}, ...], "env": {...}, "own": [...]}``:
  start workers. The second ``env`` is common to all, the names in ``own`` are taken from this
  host's environment (null: all of it), ``bind`` is null or ``[kind, index, count]`` (see
  `local_host.share_of_cores`). An empty program name stands for the Python that runs the agent.
  With ``input`` a worker's stdin is what "input" commands bring. This command may come repeatedly.
- ``{"stop": grace}``: SIGTERM to all workers and SIGKILL to everything after ``grace`` seconds (0:
  at once). With ``"ids": [...]`` this is for these workers and what they started. ``"interrupt":
  true`` sends SIGINT instead, and SIGTERM 5 seconds before the time is over.
- ``{"input": id, "data": bytes}``: more of a worker's stdin; no data stands for its end.
- ``{"probe": {...}}``: see `probe`; the answer is the event ``{"probed": {...}}``.
- ``{"stack": {"id", "pid"}}``: see `stack`; the answer is the event ``{"stack": {"id", "text"}}``.
- ``{"sweep": {"agent", "workers", "mark"}}``: end what another agent has left here, see
  `local_host.end_leftovers`.
- ``{"close": true}``: no more starts will come; end when no process is left.

Events (their frames are described in `agent_streams`): ``{"hello": {...}}``; for each worker
``{"started": {"id", "pid"}}`` or ``{"failed": {"id", "errno", "what"}}``; ``{"exited": [[id, code],
...]}`` with the workers that were found dead at the same moment, and codes that are negative for
signals; ``{"note": text}`` for people; ``{"stuck": [pid, ...]}`` for processes that survived
SIGKILL; ``{"alive": true}`` now and then; ``{"finished": true}``.
"""

from __future__ import annotations

import _thread  # threading takes 8 ms to import
import errno
import os
import sys
import time

from horovod.runner.agents.agent_streams import (
    STDERR,
    STDOUT,
    CommandReader,
    LauncherOutput,
    Poller,
    WorkerInput,
)
from horovod.runner.agents.bootstrap import load_modules
from horovod.runner.agents.local_host import (
    WorkerProcess,
    become_subreaper,
    end_leftovers,
    find_descendants,
    find_program,
    host_facts,
    numa_nodes,
    share_of_cores,
    signal_all,
    signal_groups,
)

TYPE_CHECKING = False  # as in typing, whose import would delay our start
if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping, Sequence
    from typing import Any
else:
    import _signal as signal  # without the enumerations, which take 9 ms to make

ORPHAN_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL when the launcher is gone."""

SIGNAL_GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL when the agent itself gets a signal to end, for example from
Slurm: time to write a checkpoint."""

LEFTOVER_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for processes that workers left behind when they ended."""

KILL_WAIT = 10.0
"""Seconds to wait for killed processes; one may hang in the kernel."""

_RESET_SIGNALS = [getattr(signal, name) for name in ("SIGPIPE", "SIGXFSZ") if hasattr(signal, name)]


class Agent:
    """Starts, watches and ends the workers of one host."""

    def __init__(self, parent: int) -> None:
        """Prepare the loop; ``parent`` is the launcher's pid where it runs on this host, else 0."""
        self._workers: dict[int, WorkerProcess] = {}  # by pid
        self._closing = False  # nothing more will be started
        self._deadline: float | None = None  # when all workers are killed; each may have its own
        self._interrupting = False  # the workers got SIGINT, and have not got SIGTERM
        self._killing = False
        self._cleaning = False
        self._signalled = False
        self._commands = CommandReader()
        self._answers: list[dict[str, Any]] = []  # events that threads want to emit
        self._poller = Poller()
        self._output = LauncherOutput(self._poller)
        self._wakeup, self._waker = os.pipe()
        for fd in (0, self._wakeup, self._waker):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        # Slurm announces the end of a job to all processes; the launcher or the worker acts on it.
        for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._take_signal)
        self._poller.register(self._wakeup, self._wake)
        self._poller.register(0, self._read_commands)
        if parent:
            self._watch_parent(parent)

    def run(self) -> None:
        """Work until "close" has come and no process of the job is left."""
        self._output.emit({"hello": host_facts()})
        while self._reap() or not self._closing:
            self._poller.wait(self._patience())
            if self._signalled:
                self._signalled = False
                self._end(SIGNAL_GRACE)
            while self._answers:
                self._output.emit(self._answers.pop())
            self._output.pulse()
            if self._expire(time.monotonic()):
                break
        self._output.drain()
        self._output.emit({"finished": True})
        self._output.finish()

    # -- starting --------------------------------------------------------------------------

    def _start(self, specs: Sequence[Mapping[str, Any]], common: Mapping[str, Any]) -> None:
        names = os.environ if common["own"] is None else common["own"]
        own = {name: os.environ[name] for name in names if name in os.environ}
        for spec in specs:
            try:
                if self._deadline is not None or self._closing:
                    raise OSError(errno.ECANCELED, "the workers of this host are being stopped")
                self._spawn(spec, {**own, **common["env"], **spec["env"]})
            except OSError as error:
                what = {"id": spec["id"], "errno": error.errno, "what": str(error.filename or "")}
                self._output.emit({"failed": what})

    def _spawn(self, spec: Mapping[str, Any], env: Mapping[str, str]) -> None:
        self._enter(spec["cwd"])
        argv = [spec["argv"][0] or sys.executable, *spec["argv"][1:]]
        program = find_program(argv[0], env.get("PATH", os.defpath))
        ends = [os.pipe(), os.pipe()]
        feeding = os.pipe() if spec.get("input") else None
        ours = [ends[0][0], ends[1][0], *(feeding[1:] if feeding else ())]
        theirs = [ends[0][1], ends[1][1], *(feeding[:1] if feeding else ())]
        allowed = os.sched_getaffinity(0) if spec["bind"] else None
        try:
            if allowed is not None:
                # The child inherits the agent's affinity of this moment; it is restored below.
                kind, index, count = spec["bind"]
                share = share_of_cores(allowed, kind, index, count, numa_nodes())
                os.sched_setaffinity(0, share)
            pid = os.posix_spawn(
                program,
                argv,
                env,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, feeding[0], 0)
                    if feeding
                    else (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, ends[0][1], 1),
                    (os.POSIX_SPAWN_DUP2, ends[1][1], 2),
                ],
                setsid=True,
                setsigdef=_RESET_SIGNALS,  # Python ignores these, and ignoring is inherited
            )
        except OSError:
            for fd in ours:
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
            if allowed is not None:
                os.sched_setaffinity(0, allowed)
        worker = self._workers[pid] = WorkerProcess(spec["id"], pid)
        if feeding:
            worker.input = WorkerInput(feeding[1], self._poller)
        self._output.emit({"started": {"id": spec["id"], "pid": pid}})
        self._output.follow(ends[0][0], spec["id"], STDOUT)
        self._output.follow(ends[1][0], spec["id"], STDERR)

    def _enter(self, folder: str) -> None:
        try:
            os.chdir(folder)
        except OSError as error:
            home = os.path.expanduser("~")
            os.chdir(home if os.path.isdir(home) else "/")
            reason = os.strerror(error.errno or 0)
            note = f"cannot work in {folder!r} ({reason}), so it works in {os.getcwd()!r}"
            self._output.emit({"note": note})

    # -- ending ----------------------------------------------------------------------------

    def stop(self, grace: float, ids: Sequence[int] | None = None, interrupt: bool = False) -> None:
        """Ask workers to end, and kill them and what they started after ``grace`` seconds.

        This executes the command "stop" (see above), without ``ids`` for all workers.
        """
        if ids is not None:
            for worker in self._workers.values():
                if worker.number in ids:
                    self._stop_one(worker, grace)
        elif self._killing:
            pass  # SIGKILL is on its way already
        elif grace <= 0:
            self._kill_all()
        else:
            deadline = time.monotonic() + grace
            if self._deadline is None or deadline < self._deadline:
                self._interrupting = interrupt and grace > LEFTOVER_GRACE
                self._deadline = deadline - (LEFTOVER_GRACE if self._interrupting else 0)
                number = signal.SIGINT if self._interrupting else signal.SIGTERM
                signal_groups(self._running(), number)

    def _stop_one(self, worker: WorkerProcess, grace: float) -> None:
        deadline = time.monotonic() + grace
        if worker.deadline is None or deadline < worker.deadline:
            worker.deadline = deadline
            if grace > 0 and worker.running:
                signal_groups([worker.pid], signal.SIGTERM)
            elif grace > 0:  # the leader has ended, so its group may be gone: signal what it left
                signal_all(find_descendants(worker.pid), signal.SIGTERM)

    def _end(self, grace: float) -> None:
        self._closing = True
        self.stop(grace)

    def _running(self) -> list[int]:
        return [worker.pid for worker in self._workers.values() if worker.running]

    def _reap(self) -> bool:
        """Reap dead children and report the workers among them; return False if none is left."""
        exits: list[tuple[int, int]] = []
        alive = True
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                alive = False
                break
            if pid == 0:
                break
            worker = self._workers.get(pid)
            if worker is not None and worker.running:
                worker.running = False
                if worker.input is not None:
                    worker.input.close()
                exits.append((worker.number, os.waitstatus_to_exitcode(status)))
        if exits:  # their output goes first: the launcher's account quotes the last lines
            self._output.drain({number for number, _ in exits})
            self._output.emit({"exited": exits})
        if not alive:
            self._workers.clear()
            self._deadline, self._killing = None, False
        elif self._killing:
            self.kill()  # again: processes may have been forked, or become our children, since
        elif self._closing and not self._running() and not self._cleaning:
            self._cleaning = True  # all workers have ended; daemons that they started have not
            signal_all(find_descendants(os.getpid()), signal.SIGTERM)
            self.stop(LEFTOVER_GRACE)
        return alive

    def _patience(self) -> float:
        deadlines = [worker.deadline for worker in self._workers.values()]
        known = [each for each in (*deadlines, self._deadline) if each is not None]
        return max(0.0, min([self._output.next_pulse, *known]) - time.monotonic())

    def _expire(self, now: float) -> bool:
        """Kill workers whose time is over; return True if processes survive even that."""
        for worker in self._workers.values():
            if worker.killing or (worker.deadline is not None and now >= worker.deadline):
                worker.deadline = None
                members = find_descendants(worker.pid)
                signal_all(members, signal.SIGKILL)
                worker.killing = bool(members)  # look again for what was forked meanwhile
        if self._deadline is None or now < self._deadline:
            return False
        if self._interrupting:
            self._interrupting = False
            self._deadline = now + LEFTOVER_GRACE
            signal_groups(self._running(), signal.SIGTERM)
            return False
        if self._killing:
            self._output.emit({"stuck": find_descendants(os.getpid())})
            return True
        self._kill_all()
        return False

    def _kill_all(self) -> None:
        self._killing = True
        self._deadline = time.monotonic() + KILL_WAIT
        self.kill()

    def kill(self) -> None:
        """Kill all workers and all other descendants now."""
        signal_groups(self._running(), signal.SIGKILL)
        signal_all(find_descendants(os.getpid()), signal.SIGKILL)

    # -- the launcher ----------------------------------------------------------------------

    def _watch_parent(self, parent: int) -> None:
        try:
            pidfd = os.pidfd_open(parent)
        except (AttributeError, OSError):
            pidfd = None  # the end of stdin says the same, later if others hold the pipe open
        if os.getppid() != parent:  # it ended before: then its pid, and so pidfd, may be another's
            sys.exit("horovodrun is gone")
        if pidfd is not None:
            self._poller.register(pidfd, lambda: self._lost_launcher(pidfd))

    def _lost_launcher(self, fd: int) -> None:
        self._poller.unregister(fd)
        self._end(ORPHAN_GRACE)

    def _read_commands(self) -> None:
        try:
            data = os.read(0, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._lost_launcher(0)
            return
        for command in self._commands.feed(data):
            self._obey(command)

    def _obey(self, command: dict[str, Any]) -> None:
        if "start" in command:
            self._start(command["start"], command)
        elif "stop" in command:
            self.stop(command["stop"], command.get("ids"), command.get("interrupt", False))
        elif "input" in command:
            for worker in self._workers.values():
                if worker.number == command["input"] and worker.input is not None:
                    worker.input.feed(command["data"])
        elif "sweep" in command:
            end_leftovers(**command["sweep"], grace=LEFTOVER_GRACE)
        elif "close" in command:
            self._closing = True
        else:
            self._answer_later(*command.popitem())

    def _answer_later(self, kind: str, request: dict[str, Any]) -> None:
        """Answer in a thread, because that may take seconds, with code that the request brought."""
        load_modules(request["modules"])
        launched = {each.number: each.pid for each in self._workers.values() if each.running}

        def work() -> None:
            if kind == "probe":
                from horovod.runner.agents.probe import probe

                self._answers.append({"probed": probe(request)})
            else:
                from horovod.runner.agents.stack import take_stack

                self._answers.append({"stack": take_stack(request, launched)})
            os.write(self._waker, b"\0")

        _thread.start_new_thread(work, ())

    def _take_signal(self, *_: object) -> None:
        self._signalled = True

    def _wake(self) -> None:
        os.read(self._wakeup, 1 << 12)  # written by signals and threads; the loop checks the rest


def main(parent: int) -> None:
    """Run an agent. The program that `host_agent` sends calls this in the agent's process."""
    become_subreaper()
    agent = Agent(parent)
    try:
        agent.run()
    except BaseException:
        agent.kill()
        raise
    os._exit(0)  # taking the interpreter apart would only cost time
