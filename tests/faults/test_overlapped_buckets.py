"""Buckets that are reduced beside backward, while ranks differ, do wrong, or fail."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from tests.faults import TRANSPORTS, two_and_one
from tests.faults.bucket_cases import CASES, ODD, Training, one_bucket_each, run
from tests.forked_python import forked_python
from tests.ranks import RankPool, clean_environment, listen, start_ranks, tell

SIZE = 3
OVERLAP = {"HOROVOD_OVERLAP_BACKWARD": "1"}  # also where it would not pay
KINDS: dict[str, Any] = {
    "shm": TRANSPORTS["shm"] | OVERLAP,
    "tcp": TRANSPORTS["gloo"] | OVERLAP,
    "hierarchical": lambda rank: two_and_one(rank) | OVERLAP,
}
NAMES = {"shm": "SharedMemoryTransport", "tcp": "TcpTransport"}
QUICK = {
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "1",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "8",  # before which all have warmed up
}


def environment(kind: str, more: dict[str, str]) -> Any:
    chosen = KINDS[kind]
    return (lambda rank: chosen(rank) | more) if callable(chosen) else chosen | more


@pytest.fixture(scope="module", params=KINDS)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    ranks = RankPool(SIZE, KINDS[request.param])
    names = set(ranks.run(_transport))
    assert names == {NAMES.get(request.param, "HierarchicalTransport")}
    yield ranks
    ranks.close()


def _transport() -> str:
    from horovod.engine.runtime import runtime

    return type(runtime.channel(0).transport).__name__


@pytest.mark.parametrize("case", CASES)
def test_a_right_result_or_an_error_that_names_the_parameter(pool: RankPool, case: str):
    assert pool.run(run, case) == [SIZE] * SIZE


def test_over_mpi():
    """All cases in one job, for it takes long to start."""
    pytest.importorskip("mpi4py")
    root = Path(__file__).parents[2]
    mpirun = Path(sys.executable).with_name("mpirun")
    command = [str(mpirun if mpirun.exists() else "mpirun"), "--allow-run-as-root"]
    command += ["--oversubscribe", "-np", str(SIZE), *forked_python(), "-m"]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    knobs = {"HOROVOD_CPU_OPERATIONS": "mpi", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    try:
        outcome = subprocess.run(
            [*command, "tests.faults.bucket_cases"],
            env=clean_environment() | OVERLAP | knobs,
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("there is no mpirun")
    for rank in range(SIZE):
        assert f"rank {rank}: {len(CASES)} cases are right" in outcome.stdout, outcome.stdout


class Trouble(Exception):
    """An error of the user's code."""


def _raise_in_backward(rank: int, size: int, lingers: bool) -> str:
    hvd.init()
    with one_bucket_each():
        training = Training()
        if rank == ODD:

            def trouble(_: Any) -> None:
                raise Trouble("in the middle of backward")

            # When the gradients of the last two layers have arrived.
            training.model.layers[1].register_full_backward_hook(lambda *_: trouble(None))
            with pytest.raises(Trouble):
                training.backward()
            if not lingers:
                raise Trouble("in the middle of backward")
            tell("raised")
            signal.pause()
        tell("waiting")
        with pytest.raises(HorovodInternalError) as caught:
            training.step()  # backward notices it if the other one ends early
        tell(str(caught.value))
        listen()  # an exit must not be what the others notice
        hvd.shutdown()
    return "ended in order"


@pytest.mark.parametrize("kind", KINDS)
def test_others_name_a_rank_that_raised_in_backward_and_ended(kind: str):
    with start_ranks(_raise_in_backward, SIZE, False, env=KINDS[kind]) as ranks:
        others = [rank for rank in range(SIZE) if rank != ODD]
        for rank in others:
            assert ranks.heard(rank) == "waiting"
        for rank in others:
            assert f"rank {ODD}" in ranks.heard(rank)
        ranks.say()
        for outcome in ranks.wait(ranks=others):
            assert (outcome.result, outcome.exitcode) == ("ended in order", 0), outcome.describe()


@pytest.mark.parametrize("kind", KINDS)
def test_others_name_a_rank_that_raised_in_backward_and_stays(kind: str):
    with start_ranks(_raise_in_backward, SIZE, True, env=environment(kind, QUICK)) as ranks:
        assert ranks.heard(ODD) == "raised"
        for rank in (rank for rank in range(SIZE) if rank != ODD):
            assert ranks.heard(rank) == "waiting"
            text = ranks.heard(rank)
            assert "stalled" in text
            assert re.search(rf"Missing ranks:\n{ODD}: .*layers\.[01]\.(weight|bias)", text), text


def _freeze_on_one_rank(rank: int, size: int) -> str:
    hvd.init()
    with one_bucket_each():
        training = Training()
        if rank == ODD:
            training.model.layers[2].weight.requires_grad_(False)
        training.backward()
        try:
            training.finish()
            hvd.barrier()
        except HorovodInternalError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_one_rank_froze_is_named(kind: str):
    with start_ranks(_freeze_on_one_rank, SIZE, env=environment(kind, QUICK)) as ranks:
        for message in ranks.results():
            assert "layers.2.weight" in message or f"rank {ODD}" in message, message
