"""Real ranks for tests: every rank is a process of its own that talks to the others.

Tests call `run_ranks` (run a function on N fresh ranks, get the results), `start_ranks` (the same,
but the test keeps hold of the processes and may signal them) or use a `RankPool` (ranks that stay
between tests, from the fixtures `pool2`, `pool3` and `pool4`). When something fails, the message
shows every rank's traceback and output, and where the hanging ones hang.
"""

from __future__ import annotations

import base64
import contextlib
import multiprocessing.connection
import os
import pickle
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import cloudpickle

from horovod.common.store import StoreServer
from horovod.common.wire import new_key
from tests.rank_process import Outcome, Rank, answer, listen, tell

__all__ = ["Outcome", "RankPool", "Ranks", "listen", "run_ranks", "start_ranks", "tell"]

Environment = dict[str, str] | Callable[[int], dict[str, str]] | None  # of all, or of each rank

PATIENCE = 200.0  # seconds until something counts as hanging, also on a machine that is very busy
GRACE = 10.0  # seconds the others get to finish once one rank has failed

# What a launcher that happens to run the tests would leave in the environment.
LAUNCHER_VARIABLES = re.compile(
    r"_?HOROVOD_|OMPI_COMM_|PMI_|PMIX_|PMI2_|MPI_LOCAL|MPIR_|MV2_|SLURM_|JSM_|LSB_|TORCHELASTIC_"
    r"|(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT)$"
)


def rank_environment(rank: int, size: int, server: StoreServer, key: bytes) -> dict[str, str]:
    """What `horovodrun` on one host gives to a worker."""
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(rank),
        "HOROVOD_LOCAL_SIZE": str(size),
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": server.address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.port),
        "_HOROVOD_SECRET_KEY": base64.b64encode(key).decode(),
        "OMP_NUM_THREADS": "1",
    }


def clean_environment() -> dict[str, str]:
    """This process's environment without anything a launcher or a Horovod job put there."""
    return {name: v for name, v in os.environ.items() if not LAUNCHER_VARIABLES.match(name)}


class Ranks:
    """Ranks that run one function. Leaving the `with` block kills what is left of them."""

    def __init__(
        self,
        function: Callable[..., Any],
        size: int,
        arguments: Sequence[Any] = (),
        env: Environment = None,
    ) -> None:
        key = new_key()
        self.size = size
        self._server = StoreServer("127.0.0.1", key)
        self._ranks: list[Rank] = []
        try:
            for rank in range(size):
                environ = clean_environment() | rank_environment(rank, size, self._server, key)
                everything = environ | ((env(rank) if callable(env) else env) or {})
                self._ranks.append(Rank(rank, everything, function, (rank, size, *arguments)))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [r.pid for r in self._ranks]

    def signal(self, rank: int, number: int) -> None:
        os.kill(self._ranks[rank].pid, number)

    def output(self, rank: int) -> str:
        return self._ranks[rank].output()

    def heard(self, rank: int, timeout: float = PATIENCE) -> Any:
        """The next note that the rank sent with `tell`."""
        member = self._ranks[rank]
        self._until(lambda: bool(member.notes), timeout, f"a note from rank {rank}", [rank])
        return member.notes.pop(0)

    def say(self, message: bytes = b"go on") -> None:
        """Send a message to all ranks that live; they receive it from `listen`."""
        for member in self._ranks:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                member.connection.send_bytes(message)

    def wait_for_output(self, rank: int, pattern: str, timeout: float = PATIENCE) -> str:
        """The rank's output, once it has a match of the regular expression `pattern`."""
        expression = re.compile(pattern, re.DOTALL)
        self._until(
            lambda: expression.search(self.output(rank)) is not None,
            timeout,
            f"output of rank {rank} like {pattern!r}",
            [rank],
        )
        return self.output(rank)

    def wait_until_blocked(self, rank: int, timeout: float = PATIENCE) -> None:
        """Return once the rank's main thread sleeps in the kernel, as it does in a collective."""
        path = f"/proc/{self._ranks[rank].pid}/task/{self._ranks[rank].pid}/stat"
        seen = [""]

        def sleeps() -> bool:
            with open(path) as file:
                fields = file.read().rpartition(")")[2].split()
            state, times = fields[0], " ".join(fields[11:13])
            quiet = state == "S" and seen[0] == times
            seen[0] = times if state == "S" else ""
            return quiet

        self._until(sleeps, timeout, f"rank {rank} to block", [rank])

    def wait(self, timeout: float = PATIENCE, ranks: Iterable[int] | None = None) -> list[Outcome]:
        """How these ranks (all, by default) ended; AssertionError if they do not."""
        chosen = list(range(self.size)) if ranks is None else list(ranks)
        self._until(
            lambda: all(self._ranks[r].ended for r in chosen),
            timeout,
            f"rank(s) {chosen} to end",
            (),
        )
        return [self._ranks[r].finish() for r in chosen]

    def results(self, timeout: float = PATIENCE) -> list[Any]:
        """What every rank returned; AssertionError showing all ranks if one did not."""
        deadline = time.monotonic() + timeout
        self._until(
            lambda: any(r.failed for r in self._ranks) or all(r.ended for r in self._ranks),
            timeout,
            "the ranks to return",
            (),
        )
        outcomes = self.wait(min(GRACE, deadline - time.monotonic()))
        if any(o.error is not None or o.exitcode != 0 for o in outcomes):
            raise AssertionError(self._report("a rank failed"))
        return [o.result for o in outcomes]

    # -- for RankPool ----------------------------------------------------------------------

    def any_ended(self) -> bool:
        return any(r.ended for r in self._ranks)

    def ask(self, question: bytes, timeout: float) -> list[Any]:
        """Every rank's answer to `question`; AssertionError if one failed."""
        starts = [len(r.output()) for r in self._ranks]
        everyone = range(self.size)
        self.say(question)

        def answered() -> bool:
            return all(r.answers for r in self._ranks)

        def failed() -> bool:
            return any(a[0] == "error" for r in self._ranks for a in r.answers)

        self._until(lambda: answered() or failed(), timeout, "the pool to answer", everyone)
        if failed():
            try:
                self._until(answered, GRACE, "the other ranks", everyone)
            except AssertionError as hanging:
                first = next(a[1] for r in self._ranks for a in r.answers if a[0] == "error")
                raise AssertionError(f"a rank failed:\n{first}\n{hanging}") from None
        answers = [r.answers.pop() for r in self._ranks]
        if any(kind == "error" for kind, _ in answers):
            raise AssertionError(
                "a rank failed\n"
                + "".join(
                    Outcome(
                        rank,
                        value if kind == "result" else None,
                        value if kind == "error" else None,
                        output=self._ranks[rank].output(starts[rank]),
                    ).describe()
                    for rank, (kind, value) in enumerate(answers)
                )
            )
        return [value for _, value in answers]

    # -- waiting ---------------------------------------------------------------------------

    def _until(
        self, condition: Callable[[], bool], timeout: float, what: str, needed: Sequence[int]
    ) -> None:
        """Wait for `condition`; AssertionError if a needed rank ends first or time is up."""
        deadline = time.monotonic() + timeout
        while True:
            ended = [r for r in needed if self._ranks[r].ended]
            for member in self._ranks:
                member.receive()
            if condition():
                return
            if ended:
                raise AssertionError(self._report(f"rank {ended[0]} ended before {what}"))
            left = deadline - time.monotonic()
            if left <= 0:
                self._dump_stacks()
                raise AssertionError(self._report(f"waited {timeout:.3g} s for {what}"))
            live = [r for r in self._ranks if not r.ended]
            waitable = [r.process.sentinel for r in live] + [r.connection for r in live]
            # Output and process states do not wake us: look again soon.
            multiprocessing.connection.wait(waitable, min(left, 0.02))

    def _dump_stacks(self) -> None:
        """Have every hanging rank print where it is."""
        before = {}
        for member in self._ranks:
            if not member.ended:
                before[member] = len(member.output())
                os.kill(member.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 1  # a stopped process never answers
        while time.monotonic() < deadline and any(
            "most recent call first" not in m.output(before[m]) for m in before
        ):
            time.sleep(0.01)

    def _report(self, what: str) -> str:
        return f"{what}\n" + "".join(r.finish().describe() for r in self._ranks)

    def close(self) -> None:
        for member in self._ranks:
            member.kill()
        for member in self._ranks:
            member.close()
        self._ranks.clear()
        self._server.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_ranks(fn: Callable[..., Any], size: int, *args: Any, env: Environment = None) -> Ranks:
    """Start fn(rank, size, *args) in `size` processes; use the result in a `with` block."""
    return Ranks(fn, size, args, env)


def run_ranks(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    env: Environment = None,
    timeout: float = PATIENCE,
) -> list[Any]:
    """What fn(rank, size, *args) returned on every rank; AssertionError if one failed."""
    with start_ranks(fn, size, *args, env=env) as ranks:
        return ranks.results(timeout)


class RankPool:
    """Ranks that have called `hvd.init()` and stay, so that a test costs no start.

    A function that fails on any rank leaves the ranks out of step: the next call starts new ones.
    """

    def __init__(self, size: int, env: Environment = None) -> None:
        self.size = size
        self._env = env
        self._ranks: Ranks | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = PATIENCE) -> list[Any]:
        """What fn(*args) returned on every rank; AssertionError if one failed."""
        if self._ranks is None or self._ranks.any_ended():
            self.close()
            self._ranks = Ranks(_serve_pool, self.size, env=self._env)
        try:
            return self._ranks.ask(cloudpickle.dumps((fn, args)), timeout)
        except BaseException:
            self.close(orderly=False)
            raise

    def close(self, orderly: bool = True) -> None:
        """End the ranks; `orderly`: let them shut down the way a script does."""
        if self._ranks is None:
            return
        ranks, self._ranks = self._ranks, None
        with ranks:
            if orderly and not ranks.any_ended():
                ranks.say(b"")
                ranks.results()


def _serve_pool(rank: int, size: int) -> None:
    import horovod.torch as hvd

    hvd.init()
    while question := listen():
        try:
            function, arguments = pickle.loads(question)
            answer(("result", function(*arguments)))
        except SystemExit:
            raise
        except BaseException:  # pytest's own failures are no Exceptions
            answer(("error", traceback.format_exc()))
