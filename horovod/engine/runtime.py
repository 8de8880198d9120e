"""The engine of this process: started by `init`, shared by all bindings.

`runtime` is the one front of the engine: starting, stopping, who am I, process sets and the
timeline. It inherits what bindings do through it as well, submitting operations.
"""

from __future__ import annotations

import atexit
import dataclasses
import importlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from horovod.common import mpi
from horovod.common.config import Config
from horovod.common.exceptions import HorovodInternalError
from horovod.common.generations.generation import Generation
from horovod.common.generations.loss_note import leave_note, let_others_end
from horovod.common.generations.membership import membership
from horovod.common.inherited import check_not_inherited, mark_process, unmark_process
from horovod.common.logging import get_logger, set_rank
from horovod.common.store import PrefixStore
from horovod.common.topology import Topology
from horovod.common.tracebacks import install_hook
from horovod.engine import identity
from horovod.engine.agreement.background import finish_threads
from horovod.engine.autotune import TunedSet
from horovod.engine.channel import Channel
from horovod.engine.collective import WORLD, Kind
from horovod.engine.execution.heap import keep_heap
from horovod.engine.execution.lane import Lane
from horovod.engine.job import Job
from horovod.engine.submission import Submission
from horovod.observe.statistics.process import Statistics
from horovod.observe.statistics.reporter import Reporter
from horovod.observe.timeline.recorder import Timeline, path_of_rank
from horovod.transport import select
from horovod.transport.base import Group
from horovod.transport.device.farewells import await_farewells

logger = get_logger(__name__)

NOT_INITIALISED = "Horovod is not initialised: call hvd.init() first"


class Runtime(Submission):
    """The engine's front: life, topology, process sets and, inherited, submission."""

    def __init__(self) -> None:
        super().__init__()
        self._job: Job | None = None
        self.is_mpi_job = False  # whether MPI started the ranks
        self.statistics = Statistics()  # optimizers tell it about their steps
        self._reporter: Reporter | None = None
        self._inits = 0
        self._parents_job: Job | None = None  # in a forked child, for facts only
        self._ending = threading.Lock()  # held while a job is aborted from another thread
        self._summary: str | None = None  # summary of the last job
        self._wanted_sets: list[tuple[int, ...]] = []  # made again in the next generation

    # -- life ------------------------------------------------------------------------------

    def init(self, comm: Any = None) -> None:
        """Find out our rank, meet the other ranks, and connect. Does nothing if running."""
        if self._job is not None:
            return
        check_not_inherited()
        _stop_at_exit()
        install_hook()
        config = Config.from_env()
        if config.keep_heap:
            keep_heap()
        member = membership()
        if member is None:
            self._start(comm, config)
            return
        if comm is not None and (not isinstance(comm, Iterable) or list(comm)):
            raise ValueError("an elastic job's driver chooses the ranks: call init() without comm")
        # The first optimizer loads it anyway. If we do so before we join, no rank waits for that.
        importlib.import_module("torch._dynamo")
        member.on_break = self.abort
        patience = config.elastic_timeout + config.start_timeout
        member.form(lambda: self._start(None, config), patience)
        # As upstream does in elastic jobs: programs look there for their rank.
        for name, value in dataclasses.asdict(self.topology).items():
            os.environ[f"HOROVOD_{name.upper()}"] = str(value)

    def _start(self, comm: Any, config: Config) -> None:
        self.is_mpi_job = mpi.runs_the_job(comm)
        if self.is_mpi_job:
            mpi.initialise_if_deferred(not config.mpi_threads_disable)
        topology, connection, cross_is_known = identity.meet(comm, config)
        set_rank(topology.rank)
        if not isinstance(connection, Generation):  # a generation has a store of its own
            self._inits += 1
        # Every rank has initialised equally often, so nobody sees keys of an earlier job.
        store = PrefixStore(connection, f"init{self._inits}/")
        launched = list(comm) if isinstance(comm, Iterable) else []
        try:
            identities = identity.exchange_identities(topology, store, config)
        except HorovodInternalError as error:
            leave_note([launched[rank] for rank in error.ranks] if launched else error.ranks)
            raise
        if not cross_is_known:
            topology = identity.with_cross(topology, identities)
        if isinstance(connection, Generation):  # statistics go on
            self.statistics.reform()
        else:
            self.statistics.restart()
        numbers = self.statistics
        job = Job(topology, config, connection, store, identities, numbers, launched or None)
        self._parents_job = None
        self._job = job
        try:
            job.start()
            if config.stats_interval is not None:
                self._reporter = Reporter(job, config.stats_interval)
            if isinstance(connection, Generation):
                self._open_wanted_sets(job)
                connection.mark_formed()
        except BaseException as error:
            if isinstance(error, HorovodInternalError) and error.ranks:
                job.note_loss(error.ranks)
            self.shutdown()
            raise
        mark_process(topology.size)

    def abort(self, reason: str, generation: Generation) -> None:
        """Fail all operations, in flight and to come, here and on the other ranks of `generation`.

        Any thread may call this. It does nothing if this process has left that generation. The
        engine has to be shut down and initialised again.
        """
        with self._ending:
            job = self._job
            if job is not None and job.connection is generation:
                job.abort(reason)

    def shutdown(self) -> None:
        """Stop. Operations in flight fail, here and where other ranks wait for us."""
        with self._ending:
            job, self._job = self._job, None
        self._parents_job = None
        if job is None:
            return
        unmark_process()
        reporter, self._reporter = self._reporter, None
        if reporter is not None:
            reporter.stop()
        job.close()
        self._summary = job.summary()
        if not isinstance(job.connection, Generation):  # else another may come: see `_end`
            self.log_summary()
        self._signatures.clear()
        self.prepared.clear()

    def log_summary(self) -> None:
        """Log rank 0's summary of the last job, once."""
        summary, self._summary = self._summary, None
        if summary is not None:
            logger.info("%s", summary)

    def is_initialized(self) -> bool:
        return self._job is not None or self._parents_job is not None

    def _after_fork_in_child(self) -> None:
        job, self._job, self._reporter = self._job, None, None
        self._ending = threading.Lock()  # another thread may have held it
        self.statistics.after_fork_in_child()
        self.prepared.clear()
        if job is not None:
            self._parents_job = job
            job.after_fork_in_child(self._why_not())

    # -- who am I --------------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        return self._known_job().topology

    @property
    def config(self) -> Config:
        return self._known_job().config

    def is_elastic(self) -> bool:
        """Return whether the ranks of this job may change."""
        return self._job is not None and isinstance(self._job.connection, Generation)

    def is_homogeneous(self) -> bool:
        """Return whether every host runs the same number of ranks."""
        return len({len(ranks) for ranks in select.by_host(self._known_job().identities)}) == 1

    def _known_job(self) -> Job:
        """Return the job to ask for facts, which hold in forked children too."""
        return self._parents_job or self._running()

    def _running(self) -> Job:
        if self._job is None:
            raise ValueError(self._why_not())
        return self._job

    def _why_not(self) -> str:
        if self._parents_job is not None:
            return (
                "Horovod was initialised in the process that this one was forked from: forked "
                "children, such as data loader workers, know rank() and size(), but take no part "
                "in collective operations"
            )
        return NOT_INITIALISED

    # -- process sets ----------------------------------------------------------------------

    def channel(self, set_id: int) -> Channel:
        """Return the channel of a set that this rank belongs to. Bindings must not call this."""
        job = self._job
        if job is None:
            raise HorovodInternalError(self._why_not())
        channel = job.channels.get(set_id)
        if channel is None:
            raise ValueError(
                f"rank {job.topology.rank} does not belong to process set {set_id}, "
                f"whose ranks are {list(job.ranks_of(set_id))}"
            )
        return channel

    def group(self, set_id: int) -> Group:
        """Return this rank's number in a set, and the set's size; raise if it is not a member."""
        return self.channel(set_id).group

    def open_lane(self, set_id: int, name: str, device: torch.device) -> Lane | None:
        """Open a lane for one optimizer's gradients on `device`, on all ranks of the set.

        Returns None where its tensors go through host memory: see `horovod.engine.execution.lane`.
        """
        return self.channel(set_id).open_lane(name, device)

    def check_devices(self) -> None:
        """Raise if a device was interrupted in the middle of an operation, in any set.

        Call this after waiting for a device, before the result is relied on: the operation may have
        been aborted, because a rank was lost.
        """
        job = self._job
        for channel in list(job.channels.values()) if job is not None else ():
            channel.check_devices()

    def failure(self, set_id: int) -> HorovodInternalError | None:
        """Return why no operation of the set runs any more, if that is so."""
        return self.channel(set_id).failure

    def crosses_hosts(self, set_id: int) -> bool:
        """Return whether reducing in the set means waiting for a network."""
        return self.channel(set_id).transport.crosses_hosts

    def tuned_set(self, set_id: int) -> TunedSet:
        """Return the set as autotuning sees it, which changes how the set's operations run."""
        return self.channel(set_id)

    def process_set_ranks(self, set_id: int) -> list[int]:
        return list(self._known_job().ranks_of(set_id))

    def process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        return {set_id: list(ranks) for set_id, ranks in sorted(self._known_job().sets.items())}

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Register a set on all ranks; collective over the world. Returns its id."""
        ranks = sorted(ranks)

        def add() -> int:
            self.want_process_set(ranks)
            return self._running().open_set(tuple(ranks))

        return int(self._change_sets(("add", *ranks), add))

    def remove_process_set(self, set_id: int) -> None:
        """Unregister a set on all ranks; collective over the world."""

        def remove() -> None:
            self.prepared.clear()
            ranks = self._running().remove_set(set_id)
            if ranks is not None and ranks in self._wanted_sets:
                self._wanted_sets.remove(ranks)

        self._change_sets(("remove", set_id), remove)

    def _change_sets(self, what: tuple[str | int, ...], change: Callable[[], Any]) -> Any:
        result = self.channel(WORLD).change(Kind.PROCESS_SET, what, change)
        self.barrier(WORLD, background=False).wait()  # nobody returns before everybody has it
        return result

    def want_process_set(self, ranks: Sequence[int]) -> None:
        """Have this set made again in every later generation, of an elastic job, with its ranks."""
        if self.is_elastic() and tuple(ranks) not in self._wanted_sets:
            self._wanted_sets.append(tuple(ranks))

    def _open_wanted_sets(self, job: Job) -> None:
        """Make earlier generations' sets again. Rank 0, the oldest, knows them; others may be new.

        All ranks make the same sets, so ids agree, and later registrations find the sets there.
        """
        if job.topology.rank == 0:
            job.store.set("sets", json.dumps(self._wanted_sets).encode())
        wanted = json.loads(job.store.get("sets", job.config.start_timeout))
        self._wanted_sets = [tuple(ranks) for ranks in wanted]
        for ranks in self._wanted_sets:
            if ranks[-1] < job.topology.size:
                job.open_set(ranks)

    # -- numbers ---------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return the numbers of this rank: see docs/stats.md."""
        job = self._running()
        self.statistics.sample_devices()
        return job.stats()

    def log_metrics(self, values: Mapping[str, Any], step: Any) -> None:
        """Keep a script's own numbers for the next report."""
        self._running()
        self.statistics.log(values, step)

    # -- timeline --------------------------------------------------------------------------

    @property
    def timeline(self) -> Timeline | None:
        """The timeline that is being recorded, if one is."""
        job = self._job
        return None if job is None else job.trace.timeline

    def name_members(self, name: str, members: Sequence[str]) -> None:
        """Tell the timeline what to call the tensors of the allreduce called `name`."""
        self._running().trace.members[f"{Kind.ALLREDUCE.value}.{name}"] = members

    def start_timeline(self, path: str, mark_cycles: bool = False) -> None:
        """Record into `path` from now on; needs HOROVOD_TIMELINE (e.g. DYNAMIC) at init."""
        job = self._running()
        if not job.config.timeline:
            raise ValueError(
                "the timeline was not enabled: set HOROVOD_TIMELINE=DYNAMIC before init()"
            )
        if job.trace.timeline is not None:
            if job.trace.timeline.path == path_of_rank(path, job.topology.rank):
                return
            job.trace.timeline.close()
        job.trace.record(job.new_timeline(path, mark_cycles))

    def stop_timeline(self) -> None:
        """Finish the file; a later `start_timeline` may begin another."""
        job = self._running()
        timeline = job.trace.timeline
        job.trace.record(None)
        if timeline is None:
            logger.info("the timeline is not running")
        else:
            timeline.close()


runtime = Runtime()


def _end() -> None:
    try:
        runtime.shutdown()
        runtime.log_summary()
    finally:
        finish_threads()
        await_farewells()
        let_others_end()


_stops_in = 0  # the process that calls `_end` when it ends


def _stop_at_exit() -> None:
    """Have this process stop the engine, and then finalise MPI, when it ends.

    A child of multiprocessing, in Python 3.13 and newer, forgets what its parent has registered.
    """
    global _stops_in
    if _stops_in != os.getpid():
        _stops_in = os.getpid()
        mpi.finalise_at_exit()
        atexit.unregister(_end)
        atexit.register(_end)


_stop_at_exit()
os.register_at_fork(after_in_child=lambda: runtime._after_fork_in_child())
