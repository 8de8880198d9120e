"""`init`, `shutdown`, `join` and `barrier`, which `horovod.jax` exports to users."""

from __future__ import annotations

from typing import Any

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine import shared_api
from horovod.engine.arguments import set_id
from horovod.engine.runtime import runtime
from horovod.jax.compiled import primitive
from horovod.torch.ops import handles


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Start Horovod in this process; all processes of the job must call it.

    Calling it again only registers `process_sets`.

    Args:
        comm: None for all processes that were started, a list of ranks to choose some of them, or
            an mpi4py communicator.
        process_sets: List of `ProcessSet` to register, the same on all ranks, or "dynamic" to allow
            `add_process_set` later.

    Raises:
        ValueError: The environment does not say which rank this is, or contradicts itself.
        HorovodInternalError: Another rank did not come within HOROVOD_START_TIMEOUT seconds.
    """
    if not shared_api.is_initialized():
        handles.restart()
        primitive.forget_programs()
    shared_api.init(comm, process_sets)


def shutdown() -> None:
    """Stop Horovod in this process; do nothing if it does not run.

    The call first waits for compiled programs that are still running.
    """
    if shared_api.is_initialized():
        primitive.finish_programs()
    shared_api.shutdown()


def join(device: int = -1) -> int:
    """Announce that this rank has no more data, and wait until all ranks have announced it.

    Meanwhile this rank takes part in the allreduces of the others with neutral values.

    Args:
        device: Accepted for compatibility and ignored.

    Returns:
        The rank that joined last.
    """
    primitive.wait_for_programs("join")
    return int(runtime.join(background=False).wait())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set has called it.

    Args:
        process_set: Ranks that wait for each other. By default all ranks do.
    """
    primitive.wait_for_programs("barrier")
    runtime.barrier(set_id(process_set), background=False).wait()
