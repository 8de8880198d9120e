"""The ranks of a process in its job."""

from __future__ import annotations

from dataclasses import dataclass


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
