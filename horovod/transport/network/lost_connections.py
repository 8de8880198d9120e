"""Finding out which rank is lost, and why, when a TCP connection of a group has ended.

Somebody has died, aborted or closed. The reason comes, in this order, from what was posted in the
store (`FailureBoard`), from which connections are dead, and from which processes of this host are
dead. Used by the TCP transport.
"""

from __future__ import annotations

from collections.abc import Iterable

from horovod.common.exceptions import HorovodInternalError, PeerLostError
from horovod.common.host import is_running
from horovod.transport.base import Group
from horovod.transport.breakable import FailureBoard
from horovod.transport.network.links import Links, MissingPeerError, connection_failure


def explain_end(
    group: Group, links: Links | None, board: FailureBoard, error: OSError | None
) -> HorovodInternalError:
    """Return the error that says why a connection has ended.

    Args:
        group: The ranks.
        links: Their connections, or None while these are still being made.
        board: The board on which ranks post why they fail.
        error: The error that the socket raised; None if the peer closed its end.
    """
    # Connections first, then the board: a rank that only follows another's failure posts the
    # reason before it ends its connections. So if its connection is seen dead, the board says why.
    ended = _ended_ranks(links)
    posted = board.look()
    if posted is not None:
        return posted
    if board.unreachable:
        ended = _ended_ranks(links)  # asking took a while, and more may have ended meanwhile
    if links is not None and ended:
        return _loss(group, links, board, ended, error)
    me = group.describe(group.rank)
    return HorovodInternalError(f"{me} failed in a collective: {error}")


def explain_absence(
    group: Group, peers: Iterable[int], error: TimeoutError
) -> HorovodInternalError:
    """Return the error that names a rank which has accepted connections and made none."""
    for rank in peers:
        if group.store.try_get(f"connected/{rank}") is None:
            who = group.describe(rank)
            error = MissingPeerError(rank, f"{who} has begun to connect, and hangs")
            break
    return connection_failure(group, error)


def _ended_ranks(links: Links | None) -> list[int]:
    """Return the ranks whose connections have ended."""
    return [] if links is None else [rank for rank in links.open if links.is_dead(rank)]


def _loss(
    group: Group, links: Links, board: FailureBoard, ended: list[int], error: OSError | None
) -> PeerLostError:
    """Return an error that names the ranks that are gone, of those whose connections ended."""
    lost = [rank for rank in ended if _has_died(links, group.rank, rank)]
    if not lost and board.unreachable:
        # Rank 0 serves the store, which is gone with it.
        lost = [rank for rank in ended if group.global_ranks[rank] == 0]
    lost = sorted(lost or ended[:1])
    said = "; ".join(_obituary(group, links, board, rank, error) for rank in lost)
    return PeerLostError(said, lost)


def _has_died(links: Links, own_rank: int, rank: int) -> bool:
    """Return whether a rank ran where we see processes, and does not run any more."""
    location = links.locations[rank]
    return location.pids == links.locations[own_rank].pids and not is_running(location.pid)


def _obituary(
    group: Group, links: Links, board: FailureBoard, rank: int, error: OSError | None
) -> str:
    """Say what happened to a lost rank."""
    location = links.locations[rank]
    who = f"{group.describe(rank)} (pid {location.pid} on {location.host})"
    if board.said_goodbye(rank):
        return f"{who} has shut down Horovod"
    if isinstance(error, TimeoutError):
        return (
            f"{who} is cut off: it did not answer for {group.config.gloo_timeout_seconds:g} s "
            f"(HOROVOD_GLOO_TIMEOUT_SECONDS)"
        )
    return f"{who} has died or was cut off: its connection is closed"
