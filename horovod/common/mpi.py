"""MPI in this process, through mpi4py: whether it started the job, initialising and finalising it.

Used by `init`, by the capability queries and by the parts that talk over MPI. mpi4py initialises
MPI when it is imported, and finalises it, unless a program tells it not to
(`mpi4py.rc.initialize = False`). Such a program expects `init` to do it, so we do, and finalise it
after the engine has stopped.

Where we are the first to import mpi4py, we finalise MPI too. Finalising waits for all ranks: a rank
that ends while the others wait for it in a collective would never end, and mpirun would never see
its exit code. So the transport that talks over MPI says whether to do it (`finalise_if`).
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from horovod.common import environments

_is_ours = False  # whether we have to finalise MPI
_may_finalise: Callable[[], bool] | None = None


def runs_the_job(comm: Any) -> bool:
    """Return whether MPI started the ranks, or the program gave `init` a communicator, `comm`."""
    if comm is not None and not isinstance(comm, Iterable):
        return True
    return environments.detect().rendezvous is environments.RendezvousMethod.MPI


def initialise_if_deferred(threads: bool = True) -> None:
    """Initialise MPI if the program has kept mpi4py from doing it."""
    package = sys.modules.get("mpi4py")
    if package is not None and not package.rc.initialize:
        initialise(threads)


def initialise(threads: bool = True) -> Any:
    """Initialise MPI, unless it is initialised already.

    Args:
        threads: Whether several threads may call MPI.

    Returns:
        The module mpi4py.MPI.
    """
    global _is_ours
    import mpi4py

    rc = mpi4py.rc
    deferred = not rc.initialize
    if "mpi4py.MPI" not in sys.modules:
        if rc.finalize is None:  # the program does not say who finalises MPI: we do
            rc.finalize = False
            deferred = True
        setting, rc.initialize = rc.initialize, False
        try:
            from mpi4py import MPI
        finally:
            rc.initialize = setting
    else:
        from mpi4py import MPI

    if not MPI.Is_initialized():
        level = rc.thread_level.upper() if threads and rc.threads else "SINGLE"
        _init_thread(MPI, getattr(MPI, f"THREAD_{level}"))
        _is_ours = deferred or bool(rc.finalize)
    return MPI


def _init_thread(module: Any, level: int) -> None:
    """Call MPI_Init_thread, which waits for the other ranks, without holding Python's lock.

    mpi4py holds the lock, so other threads of this process could not run meanwhile. One of them may
    serve the store, which another rank still asks on its way to MPI_Init_thread: then both ranks
    would wait for ever.
    """
    library = ctypes.CDLL(module.__file__)  # its dependencies are searched as well
    try:
        init_thread = library.MPI_Init_thread
    except AttributeError:  # an MPI that names its symbols otherwise
        module.Init_thread(level)
        return
    error = init_thread(None, None, level, ctypes.byref(ctypes.c_int()))
    if error != module.SUCCESS:
        raise module.Exception(error)


def finalise_if(question: Callable[[], bool]) -> None:
    """Finalise MPI at the end of the process if `question` returns True; it may take long."""
    global _may_finalise
    _may_finalise = question


def finalise_at_exit() -> None:
    """Finalise MPI when the process ends, after everything that registers with atexit later."""
    atexit.unregister(_finalise)
    atexit.register(_finalise)


def _finalise() -> None:
    """Finalise MPI if that is ours to do and would not wait for ever."""
    # After an uncaught exception the other ranks may never finalise; mpirun ends them instead.
    if not _is_ours or hasattr(sys, "last_value"):
        return
    from mpi4py import MPI

    if not MPI.Is_initialized() or MPI.Is_finalized():
        return
    if _may_finalise is None or _may_finalise():
        MPI.Finalize()


def _after_fork_in_child() -> None:
    global _is_ours
    _is_ours = False


finalise_at_exit()
os.register_at_fork(after_in_child=_after_fork_in_child)
