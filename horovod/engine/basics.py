"""The basics every binding offers: starting and stopping, who am I, what is available.

One `HorovodBasics` wraps the process's engine; a binding exports its methods as functions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from horovod.common import mpi, util
from horovod.common import process_sets as sets
from horovod.common.exceptions import HorovodInternalError
from horovod.common.generations.membership import membership
from horovod.common.reduce_op import ReduceOp
from horovod.engine.runtime import runtime


class Stats:
    """The numbers of this process: `hvd.stats()`, and the script's own: `hvd.stats.log(...)`."""

    def __call__(self) -> dict[str, Any]:
        """Return what this rank has done since `init`, as a plain dict: see docs/stats.md.

        Seconds, bytes and counts are running totals. Costs some tens of microseconds.

        Raises:
            ValueError: Before `init`.

        Examples:
            >>> numbers = hvd.stats()
            >>> print(f"{numbers['steps']} steps, {numbers['wait_seconds']:.1f} s waiting")
        """
        return runtime.stats()

    def log(
        self, metrics: Mapping[str, Any] | None = None, /, *, step: int | None = None, **named: Any
    ) -> None:
        """Show numbers of the script, such as its loss, on the dashboard of the job.

        Args:
            metrics: Names and numbers, for names that are no Python words, such as "val/acc".
            step: The step that they belong to; by default the last one of the optimizer.
            **named: More names and numbers, such as ``loss=loss``. A tensor of one element is
                read, which on a GPU waits for it.

        Raises:
            ValueError: Before `init`; for anything but a number, a name of more than 200
                characters, or more than 100 different names.

        Examples:
            >>> hvd.stats.log(loss=0.3)
            >>> hvd.stats.log({"val/acc": 0.9}, step=12)
        """
        if metrics is not None and not isinstance(metrics, Mapping):
            raise ValueError(
                f"hvd.stats.log() takes a dict or names, as in log(loss=0.3), not "
                f"{type(metrics).__name__}"
            )
        runtime.log_metrics({**(metrics or {}), **named}, step)


class HorovodBasics:
    """Controls the engine of this process, and answers questions about it.

    Upstream's arguments say where its C library is; they are accepted and ignored.
    """

    # What upstream's C library returns; here these are exceptions.
    HOROVOD_PROCESS_SET_ERROR_INIT = -1
    HOROVOD_PROCESS_SET_ERROR_DYNAMIC = -2
    HOROVOD_PROCESS_SET_ERROR_UNKNOWN_SET = -3
    HOROVOD_PROCESS_SET_ERROR_FOREIGN_SET = -4
    HOROVOD_PROCESS_SET_ERROR_SHUTDOWN = -5
    HOROVOD_PROCESS_SET_ERROR_EXISTING_SET = -6

    Average = ReduceOp.AVERAGE
    Sum = ReduceOp.SUM
    Adasum = ReduceOp.ADASUM
    Min = ReduceOp.MIN
    Max = ReduceOp.MAX
    Product = ReduceOp.PRODUCT

    def __init__(self, pkg_path: str | None = None, *args: Any) -> None: ...

    # -- life ------------------------------------------------------------------------------

    def init(self, comm: Any = None, process_sets: Any = None) -> None:
        """Start Horovod in this process; all processes of the job must call it.

        Calling it again only registers `process_sets`.

        Args:
            comm: None for all processes that were started, a list of ranks to choose some of them,
                or an mpi4py communicator.
            process_sets: A list of `ProcessSet` to register, the same on all ranks, or "dynamic" to
                allow `add_process_set` later.

        Raises:
            ValueError: The environment does not say which rank this is, or contradicts itself.
            HorovodInternalError: Another rank did not come within HOROVOD_START_TIMEOUT seconds.

        Examples:
            >>> hvd.init()
            >>> print(f"rank {hvd.rank()} of {hvd.size()}")
        """
        if isinstance(process_sets, str):
            if process_sets.lower() != "dynamic":
                raise ValueError(
                    f"process_sets must be a list of ProcessSet or 'dynamic', not {process_sets!r}"
                )
            os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
            process_sets = None
        process_sets = sets._check_argument(process_sets, comm)
        while True:
            runtime.init(comm)
            try:
                sets._setup(runtime, process_sets, comm)
                return
            except HorovodInternalError:
                member = membership()
                if member is None or not member.can_recover():
                    raise
                self.shutdown()  # a rank was lost: meet those who are left

    def shutdown(self) -> None:
        """Stop the engine on all ranks; does nothing where it does not run."""
        sets._forget()
        runtime.shutdown()

    def is_initialized(self) -> bool:
        """Return whether Horovod runs in this process: after `init` and before `shutdown`."""
        return runtime.is_initialized()

    # -- who am I --------------------------------------------------------------------------

    def size(self) -> int:
        """Return the number of processes of the job. ValueError before `init`."""
        return runtime.topology.size

    def rank(self) -> int:
        """Return this process's number in the job, from 0. ValueError before `init`."""
        return runtime.topology.rank

    def local_size(self) -> int:
        """Return the number of processes on this host. ValueError before `init`."""
        return runtime.topology.local_size

    def local_rank(self) -> int:
        """Return this process's number on its host, from 0. ValueError before `init`."""
        return runtime.topology.local_rank

    def cross_size(self) -> int:
        """Return how many hosts have a process of this local rank. ValueError before `init`."""
        return runtime.topology.cross_size

    def cross_rank(self) -> int:
        """Return this host's number among those with this local rank. ValueError before `init`."""
        return runtime.topology.cross_rank

    def is_homogeneous(self) -> bool:
        """Return whether every host runs the same number of processes. ValueError before `init`."""
        return runtime.is_homogeneous()

    # -- what is available -----------------------------------------------------------------

    def mpi_built(self) -> bool:
        """Return whether mpi4py and an MPI library are installed."""
        return util.mpi_built()

    def mpi_enabled(self) -> bool:
        """Return whether MPI started the job, and can be used, or carries CPU tensors."""
        if not runtime.is_initialized():
            return False
        config = runtime.config
        if "mpi" in (config.cpu_operations, config.controller):
            return True
        return config.controller is None and runtime.is_mpi_job and self.mpi_built()

    def mpi_threads_supported(self) -> bool:
        """Return whether several threads may call MPI at once; initialises MPI if need be.

        ValueError where MPI is not used.
        """
        if not runtime.is_initialized():
            raise ValueError("Horovod is not initialised: call hvd.init() first")
        if not self.mpi_enabled():
            raise ValueError("this job does not use MPI, so its thread level is unknown")
        mpi4py = mpi.initialise(not runtime.config.mpi_threads_disable)
        return bool(mpi4py.Query_thread() == mpi4py.THREAD_MULTIPLE)

    def gloo_built(self) -> bool:
        """Return True: this API calls Gloo what needs no MPI, which here is TCP."""
        return True

    def gloo_enabled(self) -> bool:
        """Return whether the job runs without MPI."""
        return not self.mpi_enabled()

    def nccl_built(self) -> int:
        """Return NCCL's version as major * 10000 + minor * 100 + patch; 0 without NCCL."""
        if not (dist.is_available() and dist.is_nccl_available()):
            return 0
        major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
        return int(major) * 10000 + int(minor) * 100 + int(patch)

    def ddl_built(self) -> bool:
        """Return False: IBM's DDL was an optional back end of upstream."""
        return util.ddl_built()

    def ccl_built(self) -> bool:
        """Return False: oneCCL was an optional back end of upstream."""
        return util.ccl_built()

    def cuda_built(self) -> bool:
        """Return whether PyTorch was built for CUDA."""
        return torch.version.cuda is not None

    def rocm_built(self) -> bool:
        """Return whether PyTorch was built for ROCm."""
        return torch.version.hip is not None

    # -- numbers ---------------------------------------------------------------------------

    stats = Stats()
    """The numbers of this process: called, and with a method `log`. See `Stats`."""

    # -- timeline --------------------------------------------------------------------------

    def start_timeline(self, file_path: str, mark_cycles: bool = False) -> None:
        """Record what the engine does, as a Chrome trace.

        Args:
            file_path: The file of rank 0; others add their rank to its name.
            mark_cycles: Whether to mark the rounds of the engine too.

        Raises:
            ValueError: The job was not started with HOROVOD_TIMELINE, for example set to DYNAMIC.
        """
        runtime.start_timeline(file_path, mark_cycles)

    def stop_timeline(self) -> None:
        """Finish the trace that is being recorded."""
        runtime.stop_timeline()

    # -- process sets ------------------------------------------------------------------------

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        return runtime.process_set_ids_and_ranks()
