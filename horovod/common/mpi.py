"""MPI in this process, through mpi4py: whether it started the job, and initialising it.

Used by `init`, by the capability queries and by what talks over MPI. mpi4py initialises MPI when it
is imported, and finalises it, unless a program tells it not to (`mpi4py.rc.initialize = False`).
Such a program expects `init` to do it, so we do, and finalise it after the engine has stopped.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterable
from typing import Any

from horovod.common import environments

_is_ours = False  # whether we initialised it


def runs_the_job(comm: Any) -> bool:
    """Whether MPI started the ranks, or gave `init` a communicator."""
    if comm is not None and not isinstance(comm, Iterable):
        return True
    return environments.detect().meeting is environments.RendezvousMethod.MPI


def initialise_if_deferred(threads: bool = True) -> None:
    """Initialise MPI if the program has kept mpi4py from doing it."""
    package = sys.modules.get("mpi4py")
    if package is not None and not package.rc.initialize:
        initialised(threads)


def initialised(threads: bool = True) -> Any:
    """The module mpi4py.MPI, with MPI initialised; `threads`: for calls from several threads."""
    global _is_ours
    import mpi4py

    if not threads and "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.threads = False
    from mpi4py import MPI

    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE if threads else MPI.THREAD_SINGLE)
        _is_ours = True
    return MPI


def _finalise() -> None:
    # After an uncaught exception the other ranks may never finalise; mpirun ends them instead.
    if _is_ours and not hasattr(sys, "last_value"):
        from mpi4py import MPI

        if not MPI.Is_finalized():
            MPI.Finalize()


def _after_fork_in_child() -> None:
    global _is_ours
    _is_ours = False


atexit.register(_finalise)  # runs last: what uses MPI registers later
os.register_at_fork(after_in_child=_after_fork_in_child)
