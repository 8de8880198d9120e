"""Starting and stopping, who am I, what is available; `join` and `barrier`.

Exported to users by `horovod.jax`.
"""

from __future__ import annotations

from typing import Any

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.arguments import set_id
from horovod.engine.basics import HorovodBasics
from horovod.engine.runtime import runtime
from horovod.jax import primitive
from horovod.torch import handles

_basics = HorovodBasics()

is_initialized = _basics.is_initialized
stats = _basics.stats
start_timeline = _basics.start_timeline
stop_timeline = _basics.stop_timeline
size = _basics.size
local_size = _basics.local_size
cross_size = _basics.cross_size
rank = _basics.rank
local_rank = _basics.local_rank
cross_rank = _basics.cross_rank
mpi_threads_supported = _basics.mpi_threads_supported
mpi_enabled = _basics.mpi_enabled
mpi_built = _basics.mpi_built
gloo_enabled = _basics.gloo_enabled
gloo_built = _basics.gloo_built
nccl_built = _basics.nccl_built
ddl_built = _basics.ddl_built
ccl_built = _basics.ccl_built
cuda_built = _basics.cuda_built
rocm_built = _basics.rocm_built
is_homogeneous = _basics.is_homogeneous

Average = _basics.Average
Sum = _basics.Sum
Adasum = _basics.Adasum
Min = _basics.Min
Max = _basics.Max
Product = _basics.Product


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Start Horovod in this process; all processes of the job must call it.

    `comm`: None for all processes that were started, a list of ranks to choose some of them, or
    an mpi4py communicator. `process_sets`: a list of `ProcessSet` to register, or "dynamic" to
    allow `add_process_set` later. Calling it again only registers `process_sets`.
    """
    if not _basics.is_initialized():
        handles.restart()
        primitive.forget_programs()
    _basics.init(comm, process_sets)


def shutdown() -> None:
    """Stop Horovod in this process; does nothing where it does not run.

    Programs that are still running end before.
    """
    if _basics.is_initialized():
        primitive.finish_programs()
    _basics.shutdown()


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
