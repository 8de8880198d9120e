"""MPI in this process, through mpi4py: whether it started the job, initialising and finalising it.

Used by `init`, by the capability queries and by what talks over MPI. mpi4py initialises MPI when it
is imported, and finalises it, unless a program tells it not to (`mpi4py.rc.initialize = False`).
Such a program expects `init` to do it, so we do, and finalise it after the engine has stopped.

Where we are the first to import mpi4py, finalising is ours as well. Finalising waits for all ranks:
a rank that ends while the others wait for it in a collective would never end, and mpirun never see
its exit code. So what talks over MPI says whether to do it (`finalise_if`).
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from horovod.common import environments

_is_ours = False  # whether we are to finalise it
_may_finalise: Callable[[], bool] | None = None


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

    rc = mpi4py.rc
    deferred = not rc.initialize
    if "mpi4py.MPI" not in sys.modules:
        if rc.finalize is None:  # not said: ours
            rc.finalize = False
            deferred = True
        initialise, rc.initialize = rc.initialize, False
        try:
            from mpi4py import MPI
        finally:
            rc.initialize = initialise
    else:
        from mpi4py import MPI

    if not MPI.Is_initialized():
        level = rc.thread_level.upper() if threads and rc.threads else "SINGLE"
        _init_thread(MPI, getattr(MPI, f"THREAD_{level}"))
        _is_ours = deferred or bool(rc.finalize)
    return MPI


def _init_thread(module: Any, level: int) -> None:
    """MPI_Init_thread, which waits for the other ranks, without Python's lock.

    mpi4py keeps the lock: other threads of this process could not run meanwhile. One of them may
    serve the store, which a rank is still asking on its way to MPI_Init_thread: neither would
    ever get on.
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
    """At the end of the process, finalise MPI if the answer is True; it may take its time."""
    global _may_finalise
    _may_finalise = question


def finalise_at_exit() -> None:
    """To be called before what uses MPI registers its own end, which then comes first."""
    atexit.unregister(_finalise)
    atexit.register(_finalise)


def _finalise() -> None:
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
