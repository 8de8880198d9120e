"""What the benchmarks have in common: starting ranks, following them, and a progress bar."""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

Commands: TypeAlias = list[tuple[list[str], dict[str, str]]]  # with their environments

ROOT = Path(__file__).resolve().parent.parent
LAUNCHERS = re.compile(  # who a process is; knobs such as HOROVOD_CPU_OPERATIONS stay
    r"_HOROVOD_|HOROVOD_(RANK|SIZE|LOCAL_|CROSS_|HOSTNAME|GLOO_RENDEZVOUS_|CONTROLLER)"
    r"|OMPI_COMM_|PMI|PRTE_|SLURM_|JSM_|TORCHELASTIC_"
    r"|(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$"
)

GOODBYE = 30.0  # seconds in which ranks end that have been told to


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def environment(**more: str) -> dict[str, str]:
    """Ours without traces of another launcher, and one thread per rank."""
    environ = {name: v for name, v in os.environ.items() if not LAUNCHERS.match(name)}
    paths = [str(ROOT), *filter(None, [environ.get("PYTHONPATH")])]
    environ.update(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(paths))
    environ["PYTHONFAULTHANDLER"] = "1"  # say where a rank was that ends by a signal
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: as fast as Gloo gets
    return environ | more


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun_environment(
    rank: int, size: int, local: tuple[int, int], master: tuple[str, int], **more: str
) -> dict[str, str]:
    """What torchrun would give to a rank; `local` is its place on its host and the ranks there."""
    return environment(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(local[0]),
        LOCAL_WORLD_SIZE=str(local[1]),
        MASTER_ADDR=master[0],
        MASTER_PORT=str(master[1]),
        **more,
    )


def torchrun_environments(size: int, per_host: int | None = None) -> list[dict[str, str]]:
    """The same for each of `size` ranks on this host.

    With `per_host` that many of them believe to be on one host and the others elsewhere:
    HOROVOD_HOSTNAME keeps them from sharing memory, and what they send goes over loopback.
    """
    master = "127.0.0.1", free_port()
    per_host = per_host or size
    found = []
    for rank in range(size):
        host, local = divmod(rank, per_host)
        environ = torchrun_environment(rank, size, (local, per_host), master)
        if per_host < size:
            environ.update(
                GROUP_RANK=str(host),
                GROUP_WORLD_SIZE=str(size // per_host),
                HOROVOD_HOSTNAME=f"host{host}",
                HOROVOD_GLOO_IFACE="lo",
            )
        found.append(environ)
    return found


def bind(rank: int) -> None:
    """Give this process one of the cores it may use; before it has threads, which stay."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


@contextmanager
def processes(
    commands: Commands, errors: Sequence[Path] = (), **options: object
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start them, each in a group of its own that is ended when the block is left early.

    `errors` are files for what each of them prints to standard error.
    """
    started: list[subprocess.Popen[str]] = []
    try:
        for number, (command, environ) in enumerate(commands):
            with ExitStack() as opened:
                if errors:
                    options["stderr"] = opened.enter_context(errors[number].open("w"))
                started.append(
                    subprocess.Popen(  # type: ignore[call-overload]
                        command, env=environ, text=True, start_new_session=True, **options
                    )
                )
        yield started
    finally:
        left = [process for process in started if process.poll() is None]
        for process in left:
            os.killpg(process.pid, signal.SIGTERM)
        await_end(left, 10)
        for process in left:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def await_end(members: list[subprocess.Popen[str]], seconds: float) -> None:
    """Until all of these have ended, or for so long."""
    deadline = time.monotonic() + seconds
    for member in members:
        with suppress(subprocess.TimeoutExpired):
            member.wait(max(0.0, deadline - time.monotonic()))


class JobFailed(SystemExit):
    """A job failed or took too long. Ends the benchmark where `benchmarks.parts` does not run it.

    Its text is for people, with what the ranks printed.
    """


def failed(ranks: list[subprocess.Popen[str]], output: Path, names: Sequence[str] = ()) -> NoReturn:
    """Raise because some of these have failed; `output` is called after their job.

    `names` are for people, where "rank 0", "rank 1" and so on would not do.
    """
    known = names or [f"rank {number}" for number in range(len(ranks))]
    ends = [
        f"{name} {f'by signal {-code}' if code < 0 else f'with status {code}'}"
        for name, code in zip(known, (process.poll() for process in ranks), strict=True)
        if code
    ]
    give_up(f"ended: {', '.join(ends) or 'before it was told to'}", output)


def give_up(why: str, output: Path) -> NoReturn:
    """Raise because of the job that `output` is called after.

    It is the file with what its ranks printed, or a folder with a file for each of them.
    """
    if output.is_dir():
        texts = {int(file.name): file.read_text().strip() for file in output.iterdir()}
        said = [f"rank {rank}:\n{text}" for rank, text in sorted(texts.items()) if text]
        printed = "\n\n".join(said) or "nothing"
    else:
        printed = output.read_text().strip()
    raise JobFailed(f"\n{output.name} {why}. What its ranks printed:\n\n{printed}")


class TimeUp(Exception):
    """A `limit` has passed."""


class Group:
    """Processes that wait for orders: the ranks of one job. Both sides speak JSON, line by line."""

    def __init__(self, members: list[subprocess.Popen[str]], output: Path) -> None:
        self._members = members
        self._output = output

    def await_ready(self) -> None:
        """Wait for the first word of each of them; needed once, before the first order."""
        self._answers(self._members)

    def ask(self, order: Any, ranks: int | None = None) -> list[Any]:
        """Give an order to all, or to the first `ranks`; what each answers."""
        chosen = self._members[:ranks]
        for member in chosen:
            assert member.stdin is not None
            with suppress(BrokenPipeError):  # it will not answer
                print(json.dumps(order), file=member.stdin, flush=True)
        return self._answers(chosen)

    def _answers(self, members: list[subprocess.Popen[str]]) -> list[Any]:
        """A line from each; whoever fails is noticed at once, also while others still work."""
        answers: dict[int, Any] = {}
        try:
            with selectors.DefaultSelector() as waiting:
                for rank, member in enumerate(members):
                    assert member.stdout is not None
                    waiting.register(member.stdout, selectors.EVENT_READ, rank)
                while len(answers) < len(members):
                    for key, _ in waiting.select():
                        answers[key.data] = self._answer(members[key.data])
                        waiting.unregister(key.fileobj)
        except TimeUp:
            silent = ", ".join(str(rank) for rank in range(len(members)) if rank not in answers)
            give_up(f"took too long: no answer from rank {silent}", self._output)
        return [answers[rank] for rank in range(len(members))]

    def _answer(self, member: subprocess.Popen[str]) -> Any:
        assert member.stdout is not None
        line = member.stdout.readline()
        if not line:
            await_end([member], GOODBYE)
            failed(self._members, self._output)
        return json.loads(line)

    def dismiss(self) -> None:
        """There are no more orders: let them end."""
        for member in self._members:
            assert member.stdin is not None
            with suppress(BrokenPipeError):
                member.stdin.close()
        await_end(self._members, GOODBYE)


@contextmanager
def group(commands: Commands, output: Path, *, ready: bool = True) -> Iterator[Group]:
    """Start ranks that wait for orders, and end with the block.

    What each prints goes to a file in `output`, a folder called after the job. Without `ready` the
    block begins before they are, and calls `Group.await_ready` itself: several jobs can so start at
    the same time.
    """
    output.mkdir()
    files = [output / str(rank) for rank in range(len(commands))]
    pipe = subprocess.PIPE
    with processes(commands, files, stdin=pipe, stdout=pipe) as members:
        started = Group(members, output)
        if ready:
            started.await_ready()
        yield started
        started.dismiss()


class Member:
    """The other side of a group, in a rank; made before libraries print, which is no answer."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def obey(self, carry_out: Callable[[Any], Any]) -> None:
        """Be ready, and answer each order with what `carry_out` makes of it."""
        with suppress(BrokenPipeError):  # nobody is interested any more
            for order in self.orders():
                self.answer(carry_out(order))

    def orders(self) -> Iterator[Any]:
        """Be ready; each order has to be answered before the next comes."""
        self.answer("ready")
        for line in sys.stdin:
            yield json.loads(line)

    def answer(self, value: Any) -> None:
        print(json.dumps(value), file=self._answers)


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """`JobFailed` when the block takes longer."""

    def too_late(*_: object) -> None:
        raise TimeUp

    signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except TimeUp:
        raise JobFailed(f"\nNo end after {seconds:g} s.") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def follow(
    commands: Commands,
    output: Path,
    timeout: float,
    advance: Callable[[str], None],
    names: Sequence[str] = (),
) -> None:
    """Wait for the ranks, telling `advance` what they finish; `JobFailed` when one fails.

    `names` are what to call them where their number would not do.
    """
    deadline = time.monotonic() + timeout
    with (
        output.open("w") as sink,
        output.open() as source,
        processes(commands, stdout=sink, stderr=subprocess.STDOUT) as running,
    ):
        while True:
            ended = [process.poll() for process in running]
            for line in source:
                if line.startswith("done "):
                    advance(line.removeprefix("done ").strip())
            if any(ended):
                failed(running, output, names)
            if time.monotonic() > deadline:
                give_up(f"had not ended after {timeout:g} s", output)
            if None not in ended:
                return
            time.sleep(0.1)


class Progress:
    """A bar on standard error where that is a terminal, and nothing otherwise."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.shown = sys.stderr.isatty()

    def show(self, what: str) -> None:
        if self.shown:
            filled = 30 * self.done // self.total
            bar = "#" * filled + "." * (30 - filled)
            print(f"\r\x1b[K[{bar}] {self.done}/{self.total} {what}", end="", file=sys.stderr)
            sys.stderr.flush()

    def advance(self, what: str) -> None:
        self.done += 1
        self.show(what)

    def clear(self) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
