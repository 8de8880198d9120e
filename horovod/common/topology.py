"""The ranks of a process in its job, and the host on which it runs."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Topology:
    """Ranks and sizes of this process.

    `cross_rank` is the number of this host among the hosts that have a process of this local rank.
    So it differs by local rank where hosts run different numbers of processes.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1

    def __post_init__(self) -> None:
        for kind in ("", "local_", "cross_"):
            rank, size = getattr(self, f"{kind}rank"), getattr(self, f"{kind}size")
            if not 0 <= rank < size:
                raise ValueError(
                    f"{kind}rank {rank} is outside [0, {size}): the launcher's "
                    f"variables contradict each other"
                )


@dataclass(frozen=True)
class Slot:
    """The host of one rank, and its numbers in the job, on the host and across hosts.

    The launcher plans the slots of a job with fixed ranks; the driver of an elastic job assigns one
    to each worker in every decision.
    """

    hostname: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    @property
    def topology(self) -> Topology:
        """The ranks and sizes alone."""
        return Topology(*astuple(self)[1:])
