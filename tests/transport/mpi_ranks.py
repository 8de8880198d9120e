"""Run by `mpirun` from test_contract: one rank of an MPI job."""

from __future__ import annotations

import sys
import threading
import time
import traceback

import torch
from hypothesis import HealthCheck, given, settings
from mpi4py import MPI

from horovod.common.exceptions import HorovodInternalError
from horovod.common.reduce_op import ReduceOp
from horovod.common.store import PrefixStore
from horovod.transport import pairwise
from horovod.transport.base import Group
from horovod.transport.mpi import MpiTransport, communicator_of
from tests.effort import examples
from tests.ranks import PATIENCE
from tests.transport import cases
from tests.transport.kinds import connect, whole_group

world = MPI.COMM_WORLD


def meet() -> None:
    """Wait for all ranks without taking a core from them, as MPI's own calls do."""
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(0.001)


def contract() -> None:
    """Rank 0 generates cases and hands them out; all run them and report to it."""
    pairwise.MESSAGE = 1 << 20  # so that large cases take the paths of very large tensors
    store = connect()
    group = whole_group(world.rank, world.size, store)
    transport = MpiTransport(group, world.Dup())

    def run(case: cases.Case) -> tuple[str, str]:
        try:
            return cases.run(transport, case), ""
        except AssertionError as error:
            return "", f"rank {world.rank}: {error}"

    if world.rank == 0:

        @settings(
            max_examples=examples(60),
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
        @given(cases.cases(world.size))
        def collectives_are_right(case: cases.Case) -> None:
            meet()
            world.bcast(case)
            result = run(case)
            meet()
            results = world.gather(result)
            assert not any(error for _, error in results), results
            assert len({result for result, _ in results}) == 1, "the ranks have different bits"

        collectives_are_right()
        meet()
        world.bcast(None)
    else:
        meet()
        while (case := world.bcast(None)) is not None:
            result = run(case)
            meet()
            world.gather(result)
            meet()
    transport.close()
    transport.close()

    # A communicator of some ranks only, made without the others, and many lives of it.
    if world.rank < 2:
        for turn in range(20):
            pair = Group(world.rank, 2, (0, 1), PrefixStore(store, f"pair{turn}"), group.config)
            transport = MpiTransport(pair, communicator_of(pair))
            tensor = torch.tensor([world.rank + 1])
            transport.allreduce(tensor, ReduceOp.SUM)
            assert tensor.item() == 3
            transport.close()
    MPI.Finalize()  # mpi4py does it only where the whole interpreter is taken down


def abort() -> None:
    """Rank 0 aborts while rank 1 waits with it for rank 2, which never comes."""
    store = connect()
    transport = MpiTransport(whole_group(world.rank, world.size, store), world.Dup())
    if world.rank < 2:
        said = "nothing raised"
        if world.rank == 0:
            threading.Timer(0.3, transport.abort, ["no more"]).start()
        try:
            transport.allreduce(torch.ones(5), ReduceOp.SUM)
        except HorovodInternalError as error:
            said = str(error)
        # Not printed: mpirun may drop what it has not read yet when a rank aborts.
        store.set(f"raised/{world.rank}", said.encode())
    for rank in (0, 1):
        store.get(f"raised/{rank}", PATIENCE)
    transport.close()
    world.Abort(0)  # what is left unfinished cannot be finalised


if __name__ == "__main__":
    try:
        {"contract": contract, "abort": abort}[sys.argv[1]]()
    except BaseException:
        traceback.print_exc()
        world.Abort(1)  # the others would wait for this rank
