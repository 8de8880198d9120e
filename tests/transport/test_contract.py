"""One contract for every transport: generated collectives against a single-process reference."""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from horovod.common.reduce_op import ReduceOp
from horovod.common.store import MemoryStore
from horovod.common.store.server import StoreServer
from horovod.common.wire import new_key
from tests import rank_process
from tests.effort import examples
from tests.forked_python import forked_python
from tests.ranks import PATIENCE, Ranks, clean_environment
from tests.transport import cases
from tests.transport.kinds import KINDS, build, connect

EXAMPLES = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def serve(rank: int, size: int, kind: str) -> None:
    """A rank that runs the cases it is sent, on one transport."""
    transport = build(kind, rank, connect())
    while question := rank_process.listen():
        try:
            rank_process.answer(("result", cases.run(transport, pickle.loads(question))))
        except Exception:
            rank_process.answer(("error", traceback.format_exc()))
    transport.close()
    transport.close()


class Server:
    """Ranks with one transport, started again after a failure, which leaves them out of step."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.size = KINDS[kind].size
        self._ranks: Ranks | None = None

    def run(self, case: cases.Case) -> list[str]:
        if self._ranks is None:
            self._ranks = Ranks(serve, self.size, (self.kind,))
        try:
            return self._ranks.ask(pickle.dumps(case), PATIENCE)
        except BaseException:
            self._ranks.close()
            self._ranks = None
            raise

    def close(self) -> None:
        if self._ranks is not None:
            with self._ranks:
                self._ranks.say(b"")
                self._ranks.results()


@pytest.fixture(scope="module", params=list(KINDS))
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(request.param)
    yield server
    server.close()


def test_contract(server: Server) -> None:
    @EXAMPLES
    @given(cases.cases(server.size))
    def collectives_are_right(case: cases.Case) -> None:
        assert len(set(server.run(case))) == 1, "the ranks have different bits"

    collectives_are_right()


@pytest.mark.parametrize("kind", ["allreduce", "reduce_scatter"])
@pytest.mark.parametrize("elements", [3, 40_000])
def test_nothing_is_said_of_infinity_times_zero(server: Server, kind: str, elements: int) -> None:
    """Gradients overflow in the course of loss scaling; a warning ends the ranks of these tests."""
    for seed in range(5):
        for op in (ReduceOp.SUM, ReduceOp.PRODUCT):
            counts = elements if kind == "allreduce" else [elements] * server.size
            case = cases.Case(kind, "float32", op, "special", counts=counts, seed=seed)
            assert len(set(server.run(case))) == 1


def test_many_agreements_in_a_row(server: Server) -> None:
    words = tuple((7,) * (rank + 1) for rank in range(server.size))
    for turn in range(50):
        server.run(cases.Case("agree", words=words, preloads=(3,) * server.size, seed=turn))


@pytest.mark.parametrize("size", [2, 3])
def test_contract_over_mpi(size: int) -> None:
    """Rank 0 of the MPI job generates the cases."""
    outcome, _ = _mpirun(size, "contract")
    assert outcome.returncode == 0, outcome.stdout


def test_abort_over_mpi() -> None:
    outcome, store = _mpirun(3, "abort")
    for rank, expected in enumerate((b"no more", b"rank 10 ended the communication: no more")):
        assert expected in (store.try_get(f"raised/{rank}") or b""), outcome.stdout


def _mpirun(size: int, what: str) -> tuple[subprocess.CompletedProcess[str], MemoryStore]:
    """How it ended, and what the ranks have left in the job's store."""
    key = new_key()
    server = StoreServer("127.0.0.1", key)
    script = Path(__file__).with_name("mpi_ranks.py")
    root = script.parents[2]
    mpirun = Path(sys.executable).with_name("mpirun")
    try:
        outcome = subprocess.run(
            [
                *(str(mpirun if mpirun.exists() else "mpirun"), "--allow-run-as-root"),
                *("--oversubscribe", "-np", str(size), *forked_python(), str(script), what),
            ],
            env=clean_environment()
            | {
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": server.address,
                "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.port),
                "_HOROVOD_SECRET_KEY": base64.b64encode(key).decode(),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
            },
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        return outcome, server.store
    finally:
        server.close()
