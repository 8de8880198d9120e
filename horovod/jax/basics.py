"""Starting and stopping, who am I, what is available; `join` and `barrier`.

Exported to users by `horovod.jax`.
"""

from __future__ import annotations

from typing import Any

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine import shared_api
from horovod.engine.arguments import set_id
from horovod.engine.runtime import runtime
from horovod.jax import primitive
from horovod.torch import handles


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Start Horovod in this process; all processes of the job must call it.

    `comm`: None for all processes that were started, a list of ranks to choose some of them, or
    an mpi4py communicator. `process_sets`: a list of `ProcessSet` to register, or "dynamic" to
    allow `add_process_set` later. Calling it again only registers `process_sets`.
    """
    if not shared_api.is_initialized():
        handles.restart()
        primitive.forget_programs()
    shared_api.init(comm, process_sets)


def shutdown() -> None:
    """Stop Horovod in this process; does nothing where it does not run.

    Programs that are still running end before.
    """
    if shared_api.is_initialized():
        primitive.finish_programs()
    shared_api.shutdown()


def join(device: int = -1) -> int:
    """Say that this rank has no more data; wait until all ranks say so.

    Meanwhile the rank takes part in the others' allreduces with neutral elements. Returns the
    rank that joined last. `device` is accepted for compatibility: neutral elements are made where
    the others' arrays are.
    """
    primitive.wait_for_programs("join")
    return int(runtime.join(background=False).wait())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the set has called it."""
    primitive.wait_for_programs("barrier")
    runtime.barrier(set_id(process_set), background=False).wait()
