"""Every transport: what the others see when a rank dies, aborts, leaves or never comes."""

from __future__ import annotations

import json
import os
import queue
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from horovod.common.exceptions import HorovodInternalError, PeerLostError
from horovod.common.reduce_op import ReduceOp
from horovod.common.store import PrefixStore
from horovod.transport.base import Transport
from horovod.transport.device.host_copy import HostCopyTransport
from horovod.transport.device.process_group import DeviceTransport
from horovod.transport.hierarchical import HierarchicalTransport
from horovod.transport.network.tcp import TcpTransport
from tests.rank_process import listen
from tests.ranks import PATIENCE, Ranks, run_ranks, start_ranks, tell
from tests.transport import device_stand_in
from tests.transport.kinds import KINDS, WORLD, build, connect, whole_group

COUNTS = [3, 300_000]  # elements: a tensor that travels with its announcement, and one in pieces
MANY_FILES = 1100  # select() takes no descriptor from 1024 on
SEVERAL = [kind for kind in KINDS if KINDS[kind].size > 1]


def blocked_call(transport: Transport, count: int) -> tuple[str, Any, str, str]:
    """Wait for a rank that does not come; what was raised, and what a second call raises."""
    tell("waiting")
    tensor = torch.ones(count)
    with pytest.raises(HorovodInternalError) as first:
        transport.allreduce(tensor, ReduceOp.SUM)
    with pytest.raises(HorovodInternalError) as second:
        transport.barrier()
    transport.close()
    transport.close()
    error = first.value
    return type(error).__name__, getattr(error, "ranks", None), str(error), str(second.value)


def wait_for_victim(rank: int, size: int, kind: str, count: int, victim: int, how: str) -> Any:
    transport = build(kind, rank, connect())
    transport.barrier()
    if rank != victim:
        return blocked_call(transport, count)
    # The one for host memory beneath another belongs to the engine, which looks after both.
    beneath = isinstance(transport, (HostCopyTransport, DeviceTransport))
    owned = [transport, transport.host] if beneath else [transport]
    if how != "alone" and os.fork() == 0:
        for each in owned:
            each.after_fork_in_child()
        signal.pause()
    tell("waiting")
    if listen() == b"close":
        for each in owned:
            each.close()


def until_waiting(ranks: Ranks, size: int, victim: int) -> None:
    for rank in range(size):
        assert ranks.heard(rank) == "waiting"
        if rank != victim:
            ranks.wait_until_blocked(rank)


@pytest.mark.parametrize("kind", SEVERAL)
@pytest.mark.parametrize(
    ("count", "how"),
    [(3, "alone"), (300_000, "alone"), (3, "with a forked child living on")],
)
def test_killed_rank_is_named_on_every_other(kind: str, how: str, count: int) -> None:
    size = KINDS[kind].size
    victim = size - 1
    with start_ranks(wait_for_victim, size, kind, count, victim, how) as ranks:
        until_waiting(ranks, size, victim)
        ranks.signal(victim, signal.SIGKILL)
        outcomes = ranks.wait()
    for outcome in outcomes[:victim]:
        assert outcome.error is None, outcome.describe()
        name, lost, message, again = outcome.result
        assert name == "PeerLostError", outcome.describe()
        assert tuple(lost) == (victim,)
        assert f"rank {WORLD + victim} " in message
        assert f"rank {WORLD + victim} " in again


def find_awaited(rank: int, size: int, kind: str, count: int, late: int) -> list[list[int] | None]:
    """Whom every rank waits for while rank `late` has not come, once all others wait for it."""
    store = connect()
    transport = build(kind, rank, store)
    transport.barrier()
    waiting = threading.Thread(target=transport.allreduce, args=(torch.ones(count), ReduceOp.SUM))
    if rank != late:
        waiting.start()
    deadline = time.monotonic() + PATIENCE
    found: list[list[int] | None] = []
    while not is_told(found, late) and time.monotonic() < deadline:
        look = store.add(f"looks/{rank}", 1)
        store.set(f"look {look}/{rank}", json.dumps(transport.find_awaited()).encode())
        found = [json.loads(store.get(f"look {look}/{each}", PATIENCE)) for each in range(size)]
    if rank == late:
        waiting.start()
    waiting.join()
    transport.close()
    return found


def is_told(found: list[list[int] | None], late: int) -> bool:
    """Whether all ranks wait for somebody, some for rank `late`, and it for nobody."""
    if not found or None in found:
        return bool(found)
    awaited = {peer for peers in found for peer in peers or ()}
    return late in awaited and [rank for rank, peers in enumerate(found) if not peers] == [late]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", SEVERAL)
def test_a_rank_that_others_wait_for_is_told_from_them(kind: str, count: int) -> None:
    size = KINDS[kind].size
    nobody_knows = kind in ("staged", "device", "device, shm, 3")
    for late in (0, size - 1):
        for found in run_ranks(find_awaited, size, kind, count, late):
            assert (found == [None] * size) == nobody_knows, found
            assert is_told(found, late), found


def look_at_a_killed_rank(rank: int, size: int, kind: str) -> tuple[int, ...]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, hard))
    while os.dup(0) < MANY_FILES:
        pass
    transport = build(kind, rank, connect())
    transport.barrier()
    tell("connected")
    if rank:
        listen()
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            transport.check_peers()
        except PeerLostError as error:
            return error.ranks
    return ()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_program_that_has_opened_thousands_of_files_sees_the_end_of_others(kind: str) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2000:
        pytest.skip("this user may not open so many files")
    with start_ranks(look_at_a_killed_rank, KINDS[kind].size, kind) as ranks:
        for rank in range(KINDS[kind].size):
            assert ranks.heard(rank) == "connected"
        ranks.signal(1, signal.SIGKILL)
        (outcome,) = ranks.wait(ranks=[0])
        assert outcome.result == (1,), outcome.describe()


def lose_rank_of_other_host(rank: int, size: int) -> Any:
    transport = build("hierarchical, shm, 2+2 mixed", rank, connect())
    transport.barrier()
    assert isinstance(transport, HierarchicalTransport)
    if rank == 0:  # before the connection's own thread has told the others
        lost = PeerLostError(f"rank {WORLD + 3} is gone", [1])  # the second of the first lane
        with mock.patch.object(transport.cross, "begin_allreduce", side_effect=lost):
            return blocked_call(transport, 300_000)
    return blocked_call(transport, 300_000)


def test_a_rank_lost_between_hosts_is_named_inside_them() -> None:
    for outcome in run_ranks(lose_rank_of_other_host, 4):
        name, lost, message, _ = outcome
        assert (name, tuple(lost)) == ("PeerLostError", (3,))
        assert f"rank {WORLD + 3} is gone" in message


@pytest.mark.parametrize("kind", SEVERAL)
def test_leaving_rank_is_named(kind: str) -> None:
    size = KINDS[kind].size
    with start_ranks(wait_for_victim, size, kind, 3, 0, "alone") as ranks:
        until_waiting(ranks, size, 0)
        ranks.say(b"close")
        outcomes = ranks.wait()
    for outcome in outcomes[1:]:
        assert outcome.error is None, outcome.describe()
        assert f"rank {WORLD} " in outcome.result[2]
        assert "shut down" in outcome.result[2], outcome.describe()


def aborting(rank: int, size: int, kind: str, count: int) -> Any:
    """Rank 0 aborts from another thread; the last rank never comes, and must not be needed."""
    transport = build(kind, rank, connect())
    transport.barrier()
    if rank == size - 1:
        tell("waiting")
        while listen() != b"go home":
            pass
        return None
    if rank == 0:
        threading.Thread(target=lambda: (listen(), transport.abort("enough")), daemon=True).start()
    return blocked_call(transport, count)


@pytest.mark.parametrize("kind", SEVERAL)
@pytest.mark.parametrize("count", COUNTS)
def test_abort_wakes_everybody(kind: str, count: int) -> None:
    size = KINDS[kind].size
    with start_ranks(aborting, size, kind, count) as ranks:
        until_waiting(ranks, size, size - 1)
        ranks.say(b"abort")
        outcomes = ranks.wait(ranks=range(size - 1))
        ranks.say(b"go home")
    for outcome in outcomes:
        assert outcome.error is None, outcome.describe()
        assert "enough" in outcome.result[2], outcome.describe()


def one_looks_while_another_posts(rank: int, size: int) -> Any:
    """Rank 2 dies. Rank 0 looks for a reason before rank 1 posts one and ends its connections.

    Rank 0 sees no processes of the others, as if they were on another host.
    """
    transport = build("tcp in small pieces", rank, connect())
    assert isinstance(transport, TcpTransport)
    transport.barrier()
    if rank == 2:
        tell("waiting")
        listen()
    links, look = transport._links, transport._board.look
    assert links is not None
    links.open = dict(sorted(links.open.items()))

    def look_early() -> HorovodInternalError | None:
        found = look()
        connect().set("rank 0 has looked", b"")
        while not links.is_dead(1):
            pass
        return found

    def look_late() -> HorovodInternalError | None:
        connect().get("rank 0 has looked", PATIENCE)
        return look()

    transport._board.look = look_early if rank == 0 else look_late  # type: ignore[method-assign]
    transport._has_died = lambda rank: False  # type: ignore[method-assign]
    return blocked_call(transport, 300_000)


def test_who_only_followed_is_not_named() -> None:
    with start_ranks(one_looks_while_another_posts, 3) as ranks:
        until_waiting(ranks, 3, victim=2)
        ranks.signal(2, signal.SIGKILL)
        outcomes = ranks.wait(ranks=[0, 1])
    for outcome in outcomes:
        assert outcome.error is None, outcome.describe()
        assert tuple(outcome.result[1]) == (2,), outcome.describe()


def close_early(rank: int, size: int) -> list[int]:
    """Many lives of a transport; whoever is ready first leaves at once."""
    store = connect()
    held = []
    for life in range(100):
        group = whole_group(rank, size, PrefixStore(store, str(life)))
        transport = TcpTransport(group)
        tensor = torch.full((40_000,), float(rank))
        transport.allreduce(tensor, ReduceOp.SUM)
        assert tensor[-1] == sum(range(size))
        transport.close()
        with pytest.raises(HorovodInternalError, match="shut down"):
            transport.barrier()
        held.append(len(os.listdir("/proc/self/fd")) + 1000 * threading.active_count())
    return held


def test_tcp_lives_and_closes_many_times() -> None:
    for held in run_ranks(close_early, 3):
        assert max(held[-20:]) <= max(held[:20]), "descriptors or threads are leaking"


def one_missing(rank: int, size: int) -> str:
    if rank == size - 1:
        return ""
    group = whole_group(rank, size, connect())
    config = type(group.config)(gloo_timeout_seconds=0.5)
    with pytest.raises(HorovodInternalError) as caught:
        TcpTransport(whole_group(rank, size, group.store, config))
    return str(caught.value)


def test_tcp_gives_up_connecting() -> None:
    messages = run_ranks(one_missing, 3)[:2]
    for message in messages:
        assert "HOROVOD_GLOO_TIMEOUT_SECONDS=0.5" in message
        assert "HOROVOD_GLOO_IFACE" in message


def in_a_thread(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def closing_while_busy(rank: int, size: int) -> str:
    """`close` during a call of another thread ends that call."""
    transport = TcpTransport(whole_group(rank, size, connect()))
    transport.barrier()
    if rank == 1:
        tell("waiting")
        listen()
        return ""
    raised: list[str] = []

    def call() -> None:
        with pytest.raises(HorovodInternalError) as caught:
            transport.barrier()
        raised.append(str(caught.value))

    thread = in_a_thread(call)
    while not transport._calls.locked():
        pass
    transport.close()
    thread.join()
    return raised[0]


def test_close_ends_a_call_of_another_thread() -> None:
    with start_ranks(closing_while_busy, 2) as ranks:
        assert ranks.heard(1) == "waiting"
        (outcome,) = ranks.wait(ranks=[0])
        ranks.say()
    assert outcome.error is None, outcome.describe()
    assert "shut down during a collective" in outcome.result


def one_missing_on_devices(rank: int, size: int) -> str:
    """All tell what device they have, and then the last one does not come."""
    group = whole_group(rank, size, connect())
    host = TcpTransport(replace(group, store=PrefixStore(group.store, "host/")))
    impatient = replace(group, config=replace(group.config, gloo_timeout_seconds=2.0))
    if rank == size - 1:
        stays_away = mock.patch.object(
            device_stand_in.GlooInNcclsPlace, "barrier", side_effect=listen
        )
        with stays_away:
            device_stand_in.build(group, host)
        return ""
    with pytest.raises(HorovodInternalError) as caught:
        device_stand_in.build(impatient, host)
    tell("given up")
    return str(caught.value)


def test_a_device_transport_gives_up_connecting() -> None:
    with start_ranks(one_missing_on_devices, 2) as ranks:
        assert ranks.heard(0) == "given up"
        (outcome,) = ranks.wait(ranks=[0])
    assert outcome.error is None, outcome.describe()
    assert "rank 10 could not connect with the other ranks by GLOO on cpu" in outcome.result
    assert "HOROVOD_GLOO_TIMEOUT_SECONDS" in outcome.result
    assert "GLOO_SOCKET_IFNAME" in outcome.result


def reports_an_error(rank: int, size: int) -> str:
    """The library of the first rank has an error, although nobody is lost."""
    transport = build("device", rank, connect())
    assert isinstance(transport, DeviceTransport)
    broken: queue.Queue[str] = queue.Queue()
    transport.on_failure = lambda failure: broken.put(str(failure))
    if rank == 0:
        transport._process_group.error = "COMM_ERROR"
    return broken.get(timeout=PATIENCE)


def test_an_error_that_a_library_reports_is_not_waited_out() -> None:
    with start_ranks(reports_an_error, 2) as ranks:
        (outcome,) = ranks.wait(ranks=[0])
    assert outcome.error is None, outcome.describe()
    assert "rank 10 failed in GLOO on cpu: the library has reported an error" in outcome.result
