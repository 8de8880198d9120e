"""What exists between `init` and `shutdown`: the job's ranks, its process sets and their channels.

Made by the runtime once this process knows its rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from horovod.common.config import Config
from horovod.common.exceptions import HorovodInternalError
from horovod.common.generations.generation import Generation
from horovod.common.generations.loss_note import leave_note, take_note_back
from horovod.common.host import host_name
from horovod.common.logging import get_logger
from horovod.common.store import PrefixStore, Store
from horovod.common.topology import Topology
from horovod.engine.channel import Channel
from horovod.engine.collective import WORLD
from horovod.engine.execution.executor import Executor
from horovod.observe.observer import Observer, Trace
from horovod.observe.statistics.process import Statistics, resident_bytes
from horovod.observe.statistics.stall import StallInspector
from horovod.observe.timeline.recorder import Timeline
from horovod.transport import select
from horovod.transport.base import Group

logger = get_logger(__name__)


@dataclass(eq=False, repr=False)
class Job:
    """One job, as this rank sees it. Sets are made and removed on all ranks in the same order."""

    topology: Topology
    config: Config
    connection: Store  # to the job's store
    store: Store  # this job's part of it
    identities: Sequence[str]  # of the hosts, by rank
    statistics: Statistics
    launched_ranks: Sequence[int] | None = None  # the launcher's numbers of our ranks; None: same
    sets: dict[int, tuple[int, ...]] = field(default_factory=dict)
    channels: dict[int, Channel] = field(default_factory=dict)  # of sets that we belong to
    trace: Trace = field(default_factory=Trace)
    _free_ids: list[int] = field(default_factory=list)
    _next_id: int = WORLD
    _generation: int = 0  # counts sets, so that each has keys of its own in the store
    _inspector: StallInspector | None = None

    @property
    def generation(self) -> int:
        """The generation of an elastic job; 0 in other jobs, which have but one."""
        connection = self.connection
        return connection.decision.number if isinstance(connection, Generation) else 0

    # -- life ------------------------------------------------------------------------------

    def start(self) -> None:
        """Connect with all other ranks, and watch that they keep up."""
        config = self.config
        if config.timeline and config.timeline.upper() != "DYNAMIC":
            self.trace.record(self.new_timeline(config.timeline, config.timeline_mark_cycles))
        self._agree_on_arrivals()
        self.open_set(tuple(range(self.topology.size)))
        if not config.stall_check_disable and self.topology.size > 1:
            self._inspector = StallInspector(
                lambda: list(self.channels.values()),
                config.stall_check_time_seconds,
                config.stall_shutdown_time_seconds,
            )
        take_note_back()

    def new_timeline(self, path: str, mark_cycles: bool) -> Timeline:
        topology = self.topology
        return Timeline(
            path,
            topology.rank,
            mark_cycles,
            topology.size,
            self.host,
            self.trace.members,
            self.config.fusion_threshold,
        )

    def _agree_on_arrivals(self) -> None:
        """Have ranks tell each other when they submit what, if rank 0 records from the start.

        That is an exchange of its own, in which all ranks must take part or none. So timelines that
        are started later, by each rank for itself, do without it.
        """
        if self.topology.size == 1:
            return
        if self.topology.rank == 0:
            self.store.set("timeline", b"1" if self.trace.timeline is not None else b"0")
        told = self.store.get("timeline", self.config.start_timeout)
        self.trace.shares_arrivals = told == b"1"
        self.trace.record(self.trace.timeline)

    def abort(self, reason: str) -> None:
        """Fail all operations, in flight and to come, here and on other ranks."""
        leave_note(())  # which says that other ranks are the cause
        for channel in list(self.channels.values()):
            channel.abort(HorovodInternalError(reason))

    def close(self) -> None:
        """Stop. Operations in flight fail, here and where other ranks wait for us."""
        if self._inspector is not None:
            self._inspector.stop()
        error = HorovodInternalError("Horovod has been shut down")
        for channel in reversed(list(self.channels.values())):
            channel.close(error)
            channel.observer.close()
        self.channels.clear()  # the inspector's hold on the job is a cycle: let go of memory now
        self._inspector = None
        self.connection.close()
        if self.trace.timeline is not None:
            self.trace.timeline.close()

    def after_fork_in_child(self, reason: str) -> None:
        for channel in self.channels.values():
            channel.after_fork_in_child(reason)

    # -- numbers ---------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return what `hvd.stats()` returns."""
        statistics, totals, topology = self.statistics, self.statistics.totals(), self.topology
        recent = statistics.recent()
        return {
            "rank": topology.rank,
            "size": topology.size,
            "local_rank": topology.local_rank,
            "cross_rank": topology.cross_rank,
            "host": self.host,
            "generation": self.generation,
            "steps": statistics.steps,
            "step_seconds": statistics.step_seconds,
            "backward_seconds": statistics.backward_seconds,
            "wait_seconds": totals.wait,
            "reduce_seconds": totals.reduce,
            "hidden_seconds": totals.hidden,
            "last_step_seconds": recent[-1].seconds if recent else 0.0,
            "steps_per_second": statistics.steps_per_second(),
            "bytes_reduced": totals.reduced,
            "bytes_shared_memory": totals.shared_memory,
            "bytes_network": totals.network,
            "bytes_device": totals.device,
            "buckets": statistics.buckets,
            "operations": totals.operations,
            "negotiation_misses": totals.misses,
            "queue_length": sum(len(c.queue.requests) for c in list(self.channels.values())),
            "cpu_seconds": time.process_time(),
            "memory_bytes": resident_bytes(),
            "gpu_memory_bytes": statistics.gpu_memory,
        }

    def summary(self) -> str | None:
        """Return one line about the job, on rank 0, if anything has been done in it."""
        done = self.statistics.steps or self.statistics.totals().operations
        return self.statistics.summary() if done and self.topology.rank == 0 else None

    @property
    def host(self) -> str:
        """This host's name, as the launcher knows it."""
        return host_name()

    # -- process sets ----------------------------------------------------------------------

    def open_set(self, ranks: tuple[int, ...]) -> int:
        """Make a set, with a channel if this rank belongs to it; return its id."""
        if self._free_ids:
            set_id = self._free_ids.pop(0)
        else:
            set_id, self._next_id = self._next_id, self._next_id + 1
        self._generation += 1
        self.sets[set_id] = ranks
        if self.topology.rank in ranks:
            self.channels[set_id] = self._open_channel(set_id, ranks)
        return set_id

    def remove_set(self, set_id: int) -> tuple[int, ...] | None:
        """End a set's operations, and free its id for another; return the ranks that it had."""
        ranks = self.sets.pop(set_id, None)
        if ranks is not None:
            self._free_ids.append(set_id)
        channel = self.channels.pop(set_id, None)
        if channel is not None:
            channel.close(HorovodInternalError(f"process set {set_id} has been removed"))
            channel.observer.close()
        return ranks

    def ranks_of(self, set_id: int) -> tuple[int, ...]:
        ranks = self.sets.get(set_id)
        if ranks is None:
            raise ValueError(f"there is no process set {set_id}")
        return ranks

    def _open_channel(self, set_id: int, ranks: tuple[int, ...]) -> Channel:
        group = Group(
            rank=ranks.index(self.topology.rank),
            size=len(ranks),
            global_ranks=ranks,
            store=PrefixStore(self.store, f"set{self._generation}/"),
            config=self.config,
        )
        hosts = select.by_host([self.identities[rank] for rank in ranks])
        transport, reason = select.for_host_memory(group, hosts)
        if group.rank == 0:
            where = "all ranks" if set_id == WORLD else f"process set {set_id}"
            logger.info("%s: CPU tensors through %s (%s)", where, transport.name, reason)
        observer = Observer(set_id, group, self.trace, self.statistics, transport.media)
        neighbours = select.ranks_of_machine(self.identities, self.topology.rank)
        for_device = partial(select.for_device, group, transport, neighbours)
        executor = Executor(transport, for_device, observer, hosts)
        return Channel(
            set_id,
            group,
            executor,
            on_loss=self.note_loss,
            background_core=_core_of_background(self.config, self.topology),
        )

    def note_loss(self, ranks: Sequence[int]) -> None:
        """Tell the launcher which ranks cause operations to fail."""
        known = self.launched_ranks
        leave_note(ranks if known is None else [known[rank] for rank in ranks])


def _core_of_background(config: Config, topology: Topology) -> int | None:
    """Return the core that HOROVOD_THREAD_AFFINITY gives to this rank's background threads."""
    if not config.thread_affinity:
        return None
    cores = [int(core) for core in config.thread_affinity.split(",")]
    if topology.local_rank < len(cores):
        return cores[topology.local_rank]
    logger.error(
        "HOROVOD_THREAD_AFFINITY names %d cores for %d local ranks: not pinning",
        len(cores),
        topology.local_size,
    )
    return None
