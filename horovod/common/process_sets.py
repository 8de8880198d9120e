"""Process sets: groups of ranks that run collectives of their own.

Every binding re-exports this module's public names. The engine keeps the sets; this module has the
objects that users handle, and checks what users ask for. Nothing here may import the engine, so a
binding's ``init`` passes its engine to `_setup`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, Protocol

from horovod.common.config import Config
from horovod.common.logging import get_logger
from horovod.common.topology import Topology

logger = get_logger(__name__)


class Engine(Protocol):
    """What process sets need of the engine."""

    @property
    def topology(self) -> Topology: ...
    @property
    def config(self) -> Config: ...
    def is_elastic(self) -> bool: ...
    def want_process_set(self, ranks: Sequence[int]) -> None: ...
    def add_process_set(self, ranks: Sequence[int]) -> int: ...
    def remove_process_set(self, set_id: int) -> None: ...
    def process_set_ids_and_ranks(self) -> dict[int, list[int]]: ...


_engine: Engine | None = None
_registered: weakref.WeakSet[ProcessSet] = weakref.WeakSet()
# Sets of an elastic job that are to be registered again once their ranks exist.
_waiting_sets: weakref.WeakSet[ProcessSet] = weakref.WeakSet()


def _is_communicator(value: object) -> bool:
    """Return whether a value is an mpi4py communicator."""
    # A communicator can only exist once mpi4py is imported, so we never import it ourselves.
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and isinstance(value, mpi.Comm)


def _running_engine() -> Engine:
    """Return the engine; raise ValueError before `init`."""
    if _engine is None:
        raise ValueError("Horovod is not initialised: call hvd.init() first")
    return _engine


class ProcessSet:
    """Some ranks of the job, to be registered by `init` or `add_process_set`.

    Args:
        ranks_or_comm: The ranks, or an mpi4py communicator.

    Raises:
        ValueError: It is neither.

    Examples:
        >>> even = hvd.ProcessSet(range(0, hvd.size(), 2))
        >>> hvd.init(process_sets=[even])
    """

    process_set_id: int | None
    ranks: list[int] | None
    mpi_comm: Any

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        self.process_set_id = None
        self.ranks = None
        self.mpi_comm = None
        if _is_communicator(ranks_or_comm):
            self.mpi_comm = ranks_or_comm
            return
        try:
            ranks = list(ranks_or_comm)
        except TypeError:
            raise ValueError(
                "a process set is made of ranks (an iterable of integers) or of an mpi4py "
                f"communicator, not of {type(ranks_or_comm).__name__}"
            ) from None
        for rank in ranks:
            if not isinstance(rank, Integral):
                raise ValueError(f"the ranks of a process set must be integers, not {rank!r}")
        self.ranks = sorted(int(rank) for rank in ranks)

    def size(self) -> int | None:
        """Return the number of ranks; None while the set is not registered."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's rank in the set; None while the set is not registered.

        Raises:
            ValueError: This process does not belong to the set.
        """
        if self.process_set_id is None or self.ranks is None:
            return None
        rank = _running_engine().topology.rank
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} does not belong to {self}")
        return self.ranks.index(rank)

    def included(self) -> bool | None:
        """Return whether this process belongs to the set; None while its ranks are unknown."""
        if self.ranks is None:
            return None
        return _running_engine().topology.rank in self.ranks

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )

    def __repr__(self) -> str:
        return f"<horovod.{self}>"


global_process_set = ProcessSet([])
"""The set of all ranks, whose number is always 0."""
global_process_set.process_set_id = 0
global_process_set.ranks = None


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set while the job runs; every rank must call it with the same ranks.

    Needs ``init(process_sets="dynamic")`` or HOROVOD_DYNAMIC_PROCESS_SETS=1.

    Args:
        process_set: A `ProcessSet` made of ranks, or a list of ranks.

    Returns:
        The registered set.

    Raises:
        ValueError: Sets are not dynamic, or the ranks do not exist or form a set already.
    """
    engine = _running_engine()
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    _require_dynamic(engine)
    if process_set.ranks is None:
        raise NotImplementedError(
            "a set made of an MPI communicator can only be registered by init(); give the ranks"
        )
    _check_ranks(process_set.ranks, engine.topology.size, str(process_set))
    if engine.is_elastic():
        known_id = _ids_by_ranks(engine).get(tuple(process_set.ranks))
        if known_id is not None:  # the engine has made it again after the ranks changed
            _adopt(process_set, known_id)
            return process_set
    elif process_set.ranks in engine.process_set_ids_and_ranks().values():
        raise ValueError(f"the ranks {process_set.ranks} already form a registered process set")
    _adopt(process_set, engine.add_process_set(process_set.ranks))
    return process_set


def shared_process_set(ranks: Sequence[int]) -> ProcessSet:
    """Return the registered set of these ranks, or make one, for a part of Horovod itself.

    It does so even if ``init`` has not allowed dynamic sets. Every rank must pass the same ranks.
    """
    engine = _running_engine()
    if list(ranks) == list(range(engine.topology.size)):
        return global_process_set
    number = _ids_by_ranks(engine).get(tuple(ranks))
    made = ProcessSet(ranks)
    _adopt(made, engine.add_process_set(ranks) if number is None else number)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a process set; every rank must call it.

    Args:
        process_set: The set that `add_process_set` returned, or that was passed to `init`.

    Returns:
        True, or False for the global set and for one that is not registered.

    Raises:
        ValueError: Sets are not dynamic.
    """
    if process_set.process_set_id is None or process_set is global_process_set:
        return False
    engine = _running_engine()
    _require_dynamic(engine)
    if process_set.process_set_id not in engine.process_set_ids_and_ranks():
        return False
    engine.remove_process_set(process_set.process_set_id)
    process_set.process_set_id = None
    _registered.discard(process_set)
    return True


def _require_dynamic(engine: Engine) -> None:
    """Raise ValueError if sets may not change after `init`."""
    if not engine.config.dynamic_process_sets:
        raise ValueError(
            "process sets can only be added and removed after init(process_sets='dynamic') or "
            "with HOROVOD_DYNAMIC_PROCESS_SETS=1"
        )


def _adopt(process_set: ProcessSet, process_set_id: int) -> None:
    """Give a set the number under which the engine knows it."""
    process_set.process_set_id = process_set_id
    _registered.add(process_set)


def _check_ranks(ranks: list[int], size: int, what: str) -> None:
    """Raise ValueError if sorted ranks do not form a set of a job of `size` ranks."""
    if not ranks:
        raise ValueError(f"{what} has no ranks")
    if ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(f"{what} names ranks outside [0, {size})")
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"{what} names a rank twice")


def _check_argument(process_sets: Any, comm: Any) -> list[ProcessSet]:
    """Return `init`'s list of sets, checked as far as is possible before the engine runs."""
    if process_sets is None:
        return []
    checked: list[ProcessSet] = list(process_sets)
    for index, process_set in enumerate(checked):
        if not isinstance(process_set, ProcessSet):
            raise ValueError(
                f"process_sets[{index}] is a {type(process_set).__name__}, not a ProcessSet"
            )
        if process_set.mpi_comm is not None and not _is_communicator(comm):
            raise NotImplementedError(
                f"process_sets[{index}] is made of an MPI communicator: pass an mpi4py "
                "communicator as comm too"
            )
    return checked


def _setup(engine: Engine, process_sets: list[ProcessSet], comm: Any) -> None:
    """Bind the module to a running engine and register the sets given to ``init``.

    Either all sets are registered or none: if one is wrong, no rank registers any, and the engine
    runs on. In an elastic job the engine has already made the sets of earlier generations again,
    and sets whose ranks do not exist wait until they do.
    """
    global _engine
    _engine = engine
    global_process_set.ranks = list(range(engine.topology.size))
    global_process_set.mpi_comm = comm if _is_communicator(comm) else None
    seen = {tuple(global_process_set.ranks)}
    if engine.is_elastic():
        seen.clear()  # a set may have all ranks for a while
        process_sets = _usable_sets(engine, process_sets)
    all_sets: list[tuple[int, ...]] = []  # in the order of their ids, the same on all ranks
    for index, process_set in enumerate(process_sets):
        process_set.process_set_id = None
        for ranks in _ranks_everywhere(process_set, comm):
            what = f"process_sets[{index}] with ranks {list(ranks)}"
            _check_ranks(list(ranks), engine.topology.size, what)
            if ranks in seen:
                raise ValueError(f"{what} duplicates an earlier process set or the global one")
            seen.add(ranks)
            all_sets.append(ranks)
    ids = _ids_by_ranks(engine)
    for ranks in all_sets:
        if ranks not in ids:
            ids[ranks] = engine.add_process_set(list(ranks))
    for process_set in process_sets:
        assert process_set.ranks is not None
        _adopt(process_set, ids[tuple(process_set.ranks)])


def _ids_by_ranks(engine: Engine) -> dict[tuple[int, ...], int]:
    """Return the ids of the sets that the engine has, except the set of all ranks."""
    sets = engine.process_set_ids_and_ranks()
    return {tuple(ranks): number for number, ranks in sets.items() if number != 0}


def _usable_sets(engine: Engine, process_sets: list[ProcessSet]) -> list[ProcessSet]:
    """Return those sets of an elastic job whose ranks exist; the others have to wait.

    Sets of earlier generations get the numbers under which the engine has made them again.
    """
    ids, size = _ids_by_ranks(engine), engine.topology.size
    for process_set in [*_waiting_sets, *process_sets]:
        ranks = process_set.ranks
        assert ranks is not None  # no communicators in an elastic job
        if ranks and ranks[-1] >= size:
            _waiting_sets.add(process_set)
            engine.want_process_set(ranks)
            logger.warning("process set %s cannot be used: there are only %d ranks", ranks, size)
        elif tuple(ranks) in ids:
            _adopt(process_set, ids[tuple(ranks)])
    _waiting_sets.difference_update(_registered)
    return [each for each in process_sets if not each.ranks or each.ranks[-1] < size]


def _ranks_everywhere(process_set: ProcessSet, comm: Any) -> list[tuple[int, ...]]:
    """Return the ranks of a set on all ranks of the job.

    They are several sets if the set is a communicator that comes from a split of `comm`.
    """
    if process_set.mpi_comm is None:
        assert process_set.ranks is not None
        return [tuple(process_set.ranks)]
    group = process_set.mpi_comm.Get_group()
    members = group.Translate_ranks(list(range(group.Get_size())), comm.Get_group())
    process_set.ranks = sorted(members)
    return sorted({tuple(ranks) for ranks in comm.allgather(process_set.ranks)})


def _forget() -> None:
    """Unregister all sets, because the engine stops. An elastic job registers them again later."""
    for process_set in list(_registered):
        process_set.process_set_id = None
    if _engine is not None and _engine.is_elastic():
        _waiting_sets.update(_registered)
    _registered.clear()
