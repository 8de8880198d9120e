"""The engine of this process: started by `init`, shared by all bindings.

Bindings submit operations through `runtime`; a request they get back is their handle to wait on.
"""

from __future__ import annotations

import atexit
import dataclasses
import importlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from horovod.common import communicator, environments, rendezvous
from horovod.common.config import Config
from horovod.common.exceptions import HorovodInternalError
from horovod.common.logging import get_logger, set_rank
from horovod.common.membership import World, membership
from horovod.common.reduce_op import ReduceOp
from horovod.common.store import PrefixStore, Store
from horovod.common.topology import Topology
from horovod.engine.channel import Channel, Lane
from horovod.engine.executor import Executor, Trace
from horovod.engine.request import Kind, Request, signature_of
from horovod.engine.stall import StallInspector
from horovod.engine.timeline import Timeline, path_of_rank
from horovod.transport import select
from horovod.transport.base import Group

logger = get_logger(__name__)

WORLD = 0  # id of the set of all ranks
_NOT_INITIALISED = "Horovod is not initialised: call init() first"


class _Job:
    """What exists between `init` and `shutdown`."""

    def __init__(
        self,
        topology: Topology,
        config: Config,
        connection: Store,
        store: Store,
        identities: Sequence[str],
    ) -> None:
        self.topology = topology
        self.config = config
        self.connection = connection  # to the job's store
        self.store = store  # this job's part of it
        self.identities = list(identities)
        self.sets: dict[int, tuple[int, ...]] = {}
        self.channels: dict[int, Channel] = {}
        self.free_ids: list[int] = []
        self.next_id = WORLD
        self.generation = 0  # of process sets: makes their keys in the store unique
        self.trace = Trace()
        self.inspector: StallInspector | None = None


class Runtime:
    """The engine's front: life, topology, process sets and submission."""

    def __init__(self) -> None:
        self._job: _Job | None = None
        self._inits = 0
        self._forked = False
        self._ending = threading.Lock()  # held while a job is aborted from another thread
        self._wanted_sets: list[tuple[int, ...]] = []  # to be made again in the next world
        self.lanes: dict[str | None, Lane] = {}  # by the user's name; bindings look it up
        self._signatures: OrderedDict[tuple[Any, ...], tuple[str, bytes]] = OrderedDict()

    # -- life ------------------------------------------------------------------------------

    def init(self, comm: Any = None) -> None:
        """Find our place among the ranks, meet them, and connect. Does nothing if running."""
        if self._job is not None:
            return
        config = Config.from_env()
        member = membership()
        if member is None:
            self._start(comm, config)
            return
        if comm is not None and (not isinstance(comm, Iterable) or list(comm)):
            raise ValueError("an elastic job's driver chooses the ranks: call init() without comm")
        # Optimizers load it when the first is made. Before we join, nobody waits for that.
        importlib.import_module("torch._dynamo")
        member.on_break = self.abort
        patience = config.elastic_timeout + config.start_timeout
        member.form(lambda: self._start(None, config), patience)
        # As upstream does in elastic jobs: programs look there for their place.
        for name, value in dataclasses.asdict(self.topology).items():
            os.environ[f"HOROVOD_{name.upper()}"] = str(value)

    def _start(self, comm: Any, config: Config) -> None:
        topology, connection, cross_is_known = _meet(comm, config)
        set_rank(topology.rank)
        if not isinstance(connection, World):  # a world is new by itself
            self._inits += 1
        # Every rank has initialised equally often, so nobody sees keys of an earlier job.
        store = PrefixStore(connection, f"init{self._inits}/")
        identities = _exchange_identities(topology, store, config)
        if not cross_is_known:
            topology = _with_cross(topology, identities)
        job = _Job(topology, config, connection, store, identities)
        self._forked = False
        self._job = job
        try:
            if config.timeline and config.timeline.upper() != "DYNAMIC":
                job.trace.timeline = Timeline(
                    config.timeline, topology.rank, config.timeline_mark_cycles
                )
            self._open_set(job, tuple(range(topology.size)))
            if not config.stall_check_disable and topology.size > 1:
                job.inspector = StallInspector(
                    lambda: list(job.channels.values()),
                    config.stall_check_time_seconds,
                    config.stall_shutdown_time_seconds,
                )
            if isinstance(connection, World):
                self._open_wanted_sets(job)
                connection.stand()
        except BaseException:
            self.shutdown()
            raise

    def abort(self, reason: str, world: World) -> None:
        """Fail all operations, in flight and to come, here and on the other ranks of `world`.

        Any thread may call; does nothing if that world was left. The engine has to be shut down
        and initialised again.
        """
        with self._ending:
            job = self._job
            if job is not None and job.connection is world:
                for channel in list(job.channels.values()):
                    channel.abort(HorovodInternalError(reason))

    def shutdown(self) -> None:
        """Stop. Operations in flight fail, here and where other ranks wait for us."""
        with self._ending:
            job, self._job = self._job, None
        if job is None:
            return
        if job.inspector is not None:
            job.inspector.stop()
        error = HorovodInternalError("Horovod has been shut down")
        for channel in reversed(list(job.channels.values())):
            channel.close(error)
        job.channels.clear()  # the inspector's hold on the job is a cycle: let go of memory now
        job.inspector = None
        job.connection.close()
        if job.trace.timeline is not None:
            job.trace.timeline.close()
        self._signatures.clear()
        self.lanes.clear()

    def is_initialized(self) -> bool:
        return self._job is not None

    def _after_fork_in_child(self) -> None:
        job, self._job = self._job, None
        self._ending = threading.Lock()  # another thread may have held it
        self.lanes.clear()
        if job is not None:
            self._forked = True
            for channel in job.channels.values():
                channel.after_fork_in_child()

    # -- who am I --------------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        return self._running().topology

    @property
    def config(self) -> Config:
        return self._running().config

    def is_elastic(self) -> bool:
        """Whether the ranks of this job may change."""
        return self._job is not None and isinstance(self._job.connection, World)

    def is_homogeneous(self) -> bool:
        """Whether every host runs the same number of ranks."""
        hosts = select.by_host(self._running().identities)
        return len({len(ranks) for ranks in hosts}) == 1

    def _running(self) -> _Job:
        if self._job is None:
            raise ValueError(self._why_not())
        return self._job

    def _why_not(self) -> str:
        if self._forked:
            return (
                "Horovod was initialised in the process that this one was forked from; "
                "it does not work in forked children, such as data loader workers"
            )
        return _NOT_INITIALISED

    # -- process sets ----------------------------------------------------------------------

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Register a set on all ranks; collective over the world. Returns its id."""
        return int(self._change_sets("add", sorted(ranks)))

    def remove_process_set(self, set_id: int) -> None:
        """Unregister a set on all ranks; collective over the world."""
        self._change_sets("remove", [set_id])

    def process_set_ranks(self, set_id: int) -> list[int]:
        ranks = self._running().sets.get(set_id)
        if ranks is None:
            raise ValueError(f"there is no process set {set_id}")
        return list(ranks)

    def process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        return {set_id: list(ranks) for set_id, ranks in sorted(self._running().sets.items())}

    def _change_sets(self, action: str, numbers: list[int]) -> Any:
        channel = self._channel(WORLD)
        name = f"{Kind.PROCESS_SET.value}.change"
        detail = [action, *numbers]
        signature = signature_of(Kind.PROCESS_SET, name, (), detail=detail)
        request = Request(channel, Kind.PROCESS_SET, name, signature, detail=detail)
        result = channel.submit(request, background=False).wait()
        self.barrier(WORLD, background=False).wait()  # nobody returns before everybody has it
        return result

    def _apply_change(self, request: Request) -> int:
        """Runs on every rank at the same point of the world's sequence of operations."""
        job = self._running()
        action, *numbers = request.detail
        if action == "add":
            self.want_process_set(numbers)
            return self._open_set(job, tuple(numbers))
        set_id: int = numbers[0]
        ranks = job.sets.pop(set_id, None)
        if ranks is not None:
            job.free_ids.append(set_id)
            if ranks in self._wanted_sets:
                self._wanted_sets.remove(ranks)
        channel = job.channels.pop(set_id, None)
        self.lanes.clear()
        if channel is not None:
            channel.close(HorovodInternalError(f"process set {set_id} has been removed"))
        return set_id

    def want_process_set(self, ranks: Sequence[int]) -> None:
        """In an elastic job: make this set in every later world that has its ranks."""
        if self.is_elastic() and tuple(ranks) not in self._wanted_sets:
            self._wanted_sets.append(tuple(ranks))

    def _open_wanted_sets(self, job: _Job) -> None:
        """Make the sets of earlier worlds again. Rank 0, the oldest, knows them: some may be new.

        The same on every rank, so ids agree and later registrations find them there.
        """
        if job.topology.rank == 0:
            job.store.set("sets", json.dumps(self._wanted_sets).encode())
        wanted = json.loads(job.store.get("sets", job.config.start_timeout))
        self._wanted_sets = [tuple(ranks) for ranks in wanted]
        for ranks in self._wanted_sets:
            if ranks[-1] < job.topology.size:
                self._open_set(job, ranks)

    def _open_set(self, job: _Job, ranks: tuple[int, ...]) -> int:
        if job.free_ids:
            set_id = job.free_ids.pop(0)
        else:
            set_id, job.next_id = job.next_id, job.next_id + 1
        job.generation += 1
        job.sets[set_id] = ranks
        if job.topology.rank in ranks:
            job.channels[set_id] = self._open_channel(job, set_id, ranks)
        return set_id

    def _open_channel(self, job: _Job, set_id: int, ranks: tuple[int, ...]) -> Channel:
        group = Group(
            rank=ranks.index(job.topology.rank),
            size=len(ranks),
            global_ranks=ranks,
            store=PrefixStore(job.store, f"set{job.generation}/"),
            config=job.config,
        )
        hosts = select.by_host([job.identities[rank] for rank in ranks])
        transport, reason = select.for_host_memory(group, hosts)
        if group.rank == 0:
            where = "all ranks" if set_id == WORLD else f"process set {set_id}"
            logger.info("%s: CPU tensors through %s (%s)", where, transport.name, reason)
        executor = Executor(
            transport,
            lambda device: select.for_device(group, transport, device),
            job.trace,
        )
        core = _core_of_background(job.config, job.topology)
        return Channel(set_id, group, executor, job.trace, self._apply_change, core)

    def _channel(self, set_id: int) -> Channel:
        job = self._job
        if job is None:
            raise HorovodInternalError(self._why_not())
        channel = job.channels.get(set_id)
        if channel is None:
            ranks = job.sets.get(set_id)
            if ranks is None:
                raise ValueError(f"there is no process set {set_id}")
            raise ValueError(
                f"rank {job.topology.rank} does not belong to process set {set_id}, "
                f"whose ranks are {list(ranks)}"
            )
        return channel

    def channel(self, set_id: int) -> Channel:
        """The operations of a set that this rank belongs to, for whoever tunes them."""
        return self._channel(set_id)

    # -- timeline --------------------------------------------------------------------------

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
        job.trace.timeline = Timeline(path, job.topology.rank, mark_cycles)

    def stop_timeline(self) -> None:
        """Finish the file; a later `start_timeline` may begin another."""
        job = self._running()
        timeline, job.trace.timeline = job.trace.timeline, None
        if timeline is None:
            logger.info("the timeline is not running")
        else:
            timeline.close()

    # -- submitting ------------------------------------------------------------------------

    def _named(
        self,
        channel: Channel,
        kind: Kind,
        name: str | None,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp = ReduceOp.SUM,
        prescale: float = 1.0,
        postscale: float = 1.0,
        detail: Any = None,
    ) -> tuple[str, bytes]:
        """The request's name on the wire and its signature, remembered for named requests."""
        if name is None:
            full = f"{kind.value}.{channel.auto_name(kind)}"
            return full, signature_of(kind, full, tensors, op, prescale, postscale, detail)
        if len(tensors) == 1:
            tensor = tensors[0]
            key: tuple[Any, ...] = (
                kind,
                name,
                tensor.dtype,
                tensor.shape,
                tensor.device,
                op,
                prescale,
                postscale,
                detail,
            )
        else:
            forms = tuple((t.dtype, t.shape, t.device) for t in tensors)
            key = (kind, name, forms, op, prescale, postscale, detail)
        known = self._signatures.get(key)
        if known is None:
            full = f"{kind.value}.{name}"
            known = full, signature_of(kind, full, tensors, op, prescale, postscale, detail)
            if len(self._signatures) >= channel.group.config.cache_capacity:
                if not self._signatures:
                    return known
                self._signatures.popitem(last=False)
            self._signatures[key] = known
        return known

    def _submit(
        self,
        channel: Channel,
        request: Request,
        tensors: Sequence[torch.Tensor],
        background: bool,
        deferred: bool = False,
    ) -> Request:
        if tensors and not tensors[0].is_cpu:
            module = torch.get_device_module(tensors[0].device)
            request.stream = module.current_stream(tensors[0].device)
            request.event = module.Event()
            request.event.record(request.stream)
            request.deferred = deferred or channel.group.config.enable_async_completion
        return channel.submit(request, background)

    def allreduce(
        self,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        name: str | None,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set_id: int = WORLD,
        background: bool = True,
        deferred: bool = False,
    ) -> Request:
        """Reduce one tensor, or a group that runs together. `outputs` may be `tensors`.

        `background` false promises that the caller waits at once, which saves waking a thread.
        With `deferred` waiting is for the device: the caller goes on while it works.
        """
        channel = self._channel(process_set_id)
        if len(tensors) > 1:
            _check_one_device(tensors)
        full, signature = self._named(
            channel, Kind.ALLREDUCE, name, tensors, op, prescale, postscale
        )
        request = Request(
            channel, Kind.ALLREDUCE, full, signature, tensors, outputs, op, prescale, postscale
        )
        if request.plain and name is not None and not background:
            self._remember_lane(request, name, process_set_id)
        return self._submit(channel, request, tensors, background, deferred)

    def allreduce_again(
        self, lane: Lane, tensors: Sequence[torch.Tensor], background: bool
    ) -> Request:
        """What was asked for when the lane was made, for tensors like those, deferred."""
        request = lane.request(tensors)
        request.waiting = not background
        return self._submit(lane.channel, request, tensors, background, True)

    def _remember_lane(self, request: Request, name: str, process_set_id: int) -> None:
        """The next tensor like this one, if it is waited for, may go without a request."""
        capacity = request.channel.group.config.cache_capacity
        if request.tensors[0].dtype.is_floating_point and len(self.lanes) < capacity:
            self.lanes[name] = Lane(request, process_set_id)

    def allgather(
        self,
        tensors: Sequence[torch.Tensor],
        name: str | None,
        process_set_id: int = WORLD,
        background: bool = True,
    ) -> Request:
        """Concatenate along the first dimension, which may differ between ranks."""
        channel = self._channel(process_set_id)
        _check_one_device(tensors)
        for tensor in tensors:
            if tensor.dim() == 0:
                raise ValueError("allgather needs at least one dimension, got a scalar")
        full, signature = self._named(channel, Kind.ALLGATHER, name, tensors)
        request = Request(channel, Kind.ALLGATHER, full, signature, tensors)
        return self._submit(channel, request, tensors, background)

    def broadcast(
        self,
        tensor: torch.Tensor,
        output: torch.Tensor,
        root_rank: int,
        name: str | None,
        process_set_id: int = WORLD,
        background: bool = True,
    ) -> Request:
        """Copy the root's tensor to all; `root_rank` is a rank of the world."""
        channel = self._channel(process_set_id)
        ranks = channel.group.global_ranks
        if root_rank not in ranks:
            raise ValueError(
                f"root rank {root_rank} is not in the process set, whose ranks are {list(ranks)}"
            )
        root = ranks.index(root_rank)
        full, signature = self._named(channel, Kind.BROADCAST, name, [tensor], detail=root)
        request = Request(channel, Kind.BROADCAST, full, signature, [tensor], [output], detail=root)
        return self._submit(channel, request, [tensor], background)

    def alltoall(
        self,
        tensor: torch.Tensor,
        splits: Sequence[int] | None,
        name: str | None,
        process_set_id: int = WORLD,
        background: bool = True,
    ) -> Request:
        """Send `splits[i]` rows to rank i of the set; without splits, equal shares."""
        channel = self._channel(process_set_id)
        rows = _check_splits(tensor, splits, channel.group.size)
        full, signature = self._named(channel, Kind.ALLTOALL, name, [tensor])
        request = Request(channel, Kind.ALLTOALL, full, signature, [tensor], detail=rows)
        return self._submit(channel, request, [tensor], background)

    def reducescatter(
        self,
        tensors: Sequence[torch.Tensor],
        name: str | None,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set_id: int = WORLD,
        background: bool = True,
    ) -> Request:
        """Reduce, and leave each rank its share of the rows."""
        channel = self._channel(process_set_id)
        _check_one_device(tensors)
        if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            raise HorovodInternalError(f"reducescatter takes Sum or Average, not {op!r}")
        for tensor in tensors:
            if tensor.dim() == 0:
                raise ValueError("reducescatter needs at least one dimension, got a scalar")
        full, signature = self._named(
            channel, Kind.REDUCESCATTER, name, tensors, op, prescale, postscale
        )
        request = Request(
            channel, Kind.REDUCESCATTER, full, signature, tensors, (), op, prescale, postscale
        )
        return self._submit(channel, request, tensors, background)

    def barrier(self, process_set_id: int = WORLD, background: bool = True) -> Request:
        """Finished once every rank of the set has called it."""
        channel = self._channel(process_set_id)
        full, signature = self._named(channel, Kind.BARRIER, "noname", ())
        return channel.submit(Request(channel, Kind.BARRIER, full, signature), background)

    def join(self, background: bool = True) -> Request:
        """This rank is out of data; result: the last rank to join."""
        channel = self._channel(WORLD)
        full, signature = self._named(channel, Kind.JOIN, "noname", ())
        return channel.submit(Request(channel, Kind.JOIN, full, signature), background)


def _meet(comm: Any, config: Config) -> tuple[Topology, Store, bool]:
    """Our place in the job, the store that all its ranks share, and whether somebody who knows
    all hosts told the cross rank."""
    if comm is not None and not isinstance(comm, Iterable):
        if not hasattr(comm, "Get_rank"):
            raise ValueError(
                f"comm must be None, a list of ranks or an mpi4py communicator, not {comm!r}"
            )
        return *communicator.connect(comm, config), True
    environment = environments.detect()
    topology = environment.topology()
    store = rendezvous.connect(environment, config)
    ranks = list(comm or ())
    if not ranks:
        return topology, store, environment.cross() is not None
    if sorted(set(ranks)) != sorted(ranks) or not all(0 <= r < topology.size for r in ranks):
        raise ValueError(f"comm={ranks} is not a list of different ranks below {topology.size}")
    if topology.rank not in ranks:
        raise ValueError(f"rank {topology.rank} is not in comm={ranks}, so it must not call init()")
    return _chosen(topology, ranks, store), PrefixStore(store, f"comm{ranks}/"), True


def _chosen(topology: Topology, ranks: list[int], store: Store) -> Topology:
    """The topology among some of the launched ranks: local places come from who is where."""
    prefix = PrefixStore(store, f"chosen{ranks}/")
    prefix.set(f"{topology.rank}", select.host_identity().encode())
    identities = [prefix.get(f"{rank}", 60).decode() for rank in ranks]
    hosts = select.by_host(identities)
    rank = ranks.index(topology.rank)
    (here,) = [host for host in hosts if rank in host]
    local = here.index(rank)
    peers = [host for host in hosts if len(host) > local]
    return Topology(rank, len(ranks), local, len(here), peers.index(here), len(peers))


def _with_cross(topology: Topology, identities: Sequence[str]) -> Topology:
    """The cross rank from who is where, if that is how the launcher counts local ranks."""
    hosts = select.by_host(identities)
    (here,) = [host for host in hosts if topology.rank in host]
    if (here.index(topology.rank), len(here)) != (topology.local_rank, topology.local_size):
        return topology
    peers = [host for host in hosts if len(host) > topology.local_rank]
    return dataclasses.replace(topology, cross_rank=peers.index(here), cross_size=len(peers))


def _exchange_identities(topology: Topology, store: Store, config: Config) -> list[str]:
    """Every rank's host identity. Rank 0 collects, so the store serves one large value to each."""
    if topology.size == 1:
        return [select.host_identity()]
    timeout = config.start_timeout
    store.set(f"identity/{topology.rank}", select.host_identity().encode())
    if topology.rank == 0:
        identities = []
        for rank in range(topology.size):
            try:
                identities.append(store.get(f"identity/{rank}", timeout).decode())
            except TimeoutError:
                raise HorovodInternalError(
                    f"rank {rank} did not call init() within {timeout:g} s "
                    f"(HOROVOD_START_TIMEOUT): did it start, and did it fail before?"
                ) from None
        store.set("identities", json.dumps(identities).encode())
        return identities
    result: list[str] = json.loads(store.get("identities", timeout))
    return result


def _check_one_device(tensors: Sequence[torch.Tensor]) -> None:
    if len(tensors) > 1:
        kinds = {tensor.device for tensor in tensors}
        if len(kinds) > 1:
            names = ", ".join(sorted(map(str, kinds)))
            raise HorovodInternalError(f"the tensors of a group are on several devices: {names}")


def _check_splits(tensor: torch.Tensor, splits: Sequence[int] | None, size: int) -> list[int]:
    if tensor.dim() == 0:
        raise ValueError("alltoall needs at least one dimension, got a scalar")
    rows = tensor.shape[0]
    if splits is None or len(splits) == 0:
        if rows % size:
            raise ValueError(
                f"alltoall without splits needs a first dimension divisible by {size}, got {rows}"
            )
        return [rows // size] * size
    if len(splits) != size:
        raise ValueError(f"alltoall needs one split for each of {size} ranks, got {len(splits)}")
    if min(splits) < 0:
        raise ValueError(f"alltoall splits must not be negative: {list(splits)}")
    if sum(splits) > rows:
        raise ValueError(f"alltoall splits sum up to {sum(splits)}, but there are {rows} rows")
    return list(splits)


def _core_of_background(config: Config, topology: Topology) -> int | None:
    """The core that HOROVOD_THREAD_AFFINITY gives to this rank's background threads."""
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


runtime = Runtime()
atexit.register(lambda: runtime.shutdown())
os.register_at_fork(after_in_child=lambda: runtime._after_fork_in_child())
