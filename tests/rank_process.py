"""One rank of a test: what runs inside its process, and the test's hold on it.

`tests.ranks` is what tests use; it is built from these. A rank is forked from multiprocessing's
fork server, which has torch imported already but never called `hvd.init`, so it starts in
milliseconds. It leads a process group of its own, writes to an unnamed file, and prints the stacks
of all its threads on SIGUSR1.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import importlib
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import context, forkserver, popen_forkserver, reduction
from typing import Any

import cloudpickle

# torch._dynamo: what making the first optimizer imports, which takes seconds.
PRELOAD = ["torch", "torch._dynamo", "pytest", "hypothesis", "horovod.torch", "tests.ranks"]
PRELOAD += ["horovod.torch.optimizers.reducing", "horovod.torch.elastic"]  # what uses import late
LAST = "tests.preloaded"  # after all others, for it is about what they leave in memory
OUTPUT_SHOWN = 20_000  # characters of a rank's output in a failure message


@dataclass
class Outcome:
    """How one rank ended."""

    rank: int
    result: Any = None  # what its function returned
    error: str | None = None  # traceback, or how it died, if it did not return
    exitcode: int | None = None  # negative: the signal that ended it; None: still there
    output: str = ""  # stdout and stderr, interleaved

    def describe(self) -> str:
        verdict = self.error if self.error is not None else f"returned {self.result!r:.200}"
        return (
            f"--- rank {self.rank} (exit code {self.exitcode}) ---\n{verdict.rstrip()}\n"
            f"--- output of rank {self.rank} ---\n{self.output[-OUTPUT_SHOWN:].rstrip()}\n"
        )


# -- in the rank ---------------------------------------------------------------------------------

_connection: multiprocessing.connection.Connection | None = None  # to the test process


def tell(note: Any) -> None:
    """Called in a rank: send `note` to the test, which receives it from `Ranks.heard`."""
    assert _connection is not None, "tell() is for functions that run in a rank"
    _connection.send_bytes(pickle.dumps(("note", note)))


def listen() -> bytes:
    """Called in a rank: wait for what the test sends with `Ranks.say`."""
    assert _connection is not None
    return _connection.recv_bytes()


def answer(value: tuple[str, Any]) -> None:
    """Called in a rank of a pool: ("result", value) or ("error", traceback)."""
    assert _connection is not None
    _connection.send_bytes(pickle.dumps(("answer", value)))


class PassedFile:
    """A descriptor that a process object takes along to the forked process, where it is an int."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive_file, (reduction.DupFd(self.fd),)


def _receive_file(passed: Any) -> int:
    return passed.detach()


def _main(
    connection: multiprocessing.connection.Connection,
    output: int,
    environ: dict[str, str],
    payload: bytes,
) -> None:
    global _connection
    _connection = connection
    leave_test_process({1: output, 2: output}, environ)
    os.close(output)
    # As in the test process; but frameworks warn each other of what users can do nothing about.
    warnings.filterwarnings("error", module=r"(horovod|tests|examples)\b")
    # What numpy thinks of the variables of Keras and JAX, and says of whoever reads one.
    warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy keyword")
    # What torch says to whoever calls a compiled module where there are hooks.
    warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when")

    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    try:
        function, arguments = pickle.loads(payload)
        connection.send_bytes(pickle.dumps(("result", function(*arguments))))
    except SystemExit:
        raise
    except BaseException:  # pytest's own failures are no Exceptions
        connection.send_bytes(pickle.dumps(("error", traceback.format_exc())))
    # A process of multiprocessing leaves without these; a user's script does not.
    atexit._run_exitfuncs()


def leave_test_process(streams: Mapping[int, int], environ: Mapping[str, str]) -> None:
    """Give a forked process a session, an environment and these standard streams of its own."""
    os.setsid()
    _die_with_parent()
    for number, descriptor in streams.items():
        os.dup2(descriptor, number)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ.clear()
    os.environ.update(environ)
    multiprocessing.set_start_method(None, force=True)  # a script's default, not the fork server
    tempfile.tempdir = None  # the fork server may have looked it up already


def _die_with_parent() -> None:
    """Not outlive the fork server, which ends with the test process even if that is killed.

    It ends when nobody holds its pipe any more, and every rank got a copy.
    """
    os.close(forkserver._forkserver._forkserver_alive_fd)
    forkserver._forkserver._forkserver_alive_fd = None
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


# -- in the test process -------------------------------------------------------------------------


_processes = threading.RLock()  # of the test process: see `_Popen`


class _Popen(popen_forkserver.Popen):
    """What several threads may ask whether its process has ended.

    The fork server writes an exit code once, and who comes second to read it takes the end of the
    pipe for exit code 255. Every thread that starts a process asks for all others that there are.
    """

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if flag != os.WNOHANG and self.returncode is None:
            multiprocessing.connection.wait([self.sentinel])
        with _processes:
            return super().poll()


class ForkedProcess(context.ForkServerProcess):
    """A process forked from the fork server, which `start_fork_server` has started."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _Popen(process_obj)

    def start(self) -> None:
        with _processes:
            super().start()

    def close(self) -> None:
        with _processes:
            super().close()


def start_fork_server() -> None:
    """Start the fork server as ranks need it, unless it runs."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOAD, LAST])
    previous = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded, so in the server
    try:
        forkserver.ensure_running()
    finally:
        if previous is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = previous


class Rank:
    """The test's side of one rank."""

    def __init__(
        self,
        rank: int,
        environ: dict[str, str],
        function: Callable[..., Any],
        arguments: Sequence[Any],
    ) -> None:
        self.outcome = Outcome(rank)
        self.notes: list[Any] = []
        self.answers: list[tuple[str, Any]] = []
        self.reported = False
        self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (closed in `close`)
        self.connection, theirs = multiprocessing.Pipe()
        # Plain bytes: multiprocessing's own pickler would move tensors to shared memory that
        # the receiver has to fetch while the sender lives.
        payload = cloudpickle.dumps((function, tuple(arguments)))
        start_fork_server()
        self.process = ForkedProcess(
            target=_main, args=(theirs, PassedFile(self.file.fileno()), environ, payload)
        )
        self.process.start()
        theirs.close()
        self.pid: int = self.process.pid

    def output(self, start: int = 0) -> str:
        size = os.fstat(self.file.fileno()).st_size
        return os.pread(self.file.fileno(), max(size - start, 0), start).decode(errors="replace")

    def receive(self) -> None:
        """Take in what has arrived, without waiting."""
        try:
            while self.connection.poll():
                kind, value = pickle.loads(self.connection.recv_bytes())
                if kind == "note":
                    self.notes.append(value)
                elif kind == "answer":
                    self.answers.append(value)
                elif kind == "result":
                    self.outcome.result, self.reported = value, True
                else:
                    self.outcome.error, self.reported = value, True
        except (EOFError, ConnectionResetError):
            pass  # it is ending; its exit code says how

    @property
    def ended(self) -> bool:
        return not self.process.is_alive()

    @property
    def failed(self) -> bool:
        return self.outcome.error is not None or (self.ended and self.process.exitcode != 0)

    def finish(self) -> Outcome:
        self.receive()
        self.outcome.exitcode = self.process.exitcode
        self.outcome.output = self.output()
        if self.ended and not self.reported:
            self.outcome.error = f"ended without returning: {_how(self.process.exitcode)}"
        return self.outcome

    def kill(self) -> None:
        """End the rank and every process it started."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            if not self.ended:  # it has not made its group yet
                self.process.kill()
        self.process.join()

    def close(self) -> None:
        self.kill()
        self.connection.close()
        self.file.close()
        self.process.close()


def _how(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"exit code {exitcode}"
