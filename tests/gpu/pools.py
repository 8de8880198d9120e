"""Pools of NCCL ranks that live as long as the test session: the fixture `gpus`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import Phase, settings

from tests.accelerators import nccl_environment
from tests.gpu import EXAMPLES, LIMIT, size_of
from tests.ranks import RankPool

# For properties. A failure costs new ranks, each with a new context: no search for a smaller one.
few_examples = settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)

_SETTINGS = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
# In these jobs even small models have several buckets; in the others, one.
_SMALL_BUCKETS = ("3 ranks", "2 hosts")
_BUCKET_BYTES = "160"


def job_environment(job: str) -> Callable[[int], dict[str, str]]:
    """The environment of each rank of one of the `JOBS`, for `tests.ranks`."""
    size, settings = size_of(job), dict(_SETTINGS)
    if job in _SMALL_BUCKETS:
        settings["HOROVOD_FUSION_THRESHOLD"] = _BUCKET_BYTES
    of_rank = nccl_environment(size, settings)
    if job.endswith("ranks"):
        return of_rank
    return lambda rank: of_rank(rank) | one_rank_a_host(rank, size)


def one_rank_a_host(rank: int, size: int) -> dict[str, str]:
    """What a launcher tells a rank that is alone on its host."""
    return {
        "HOROVOD_HOSTNAME": f"host{rank}",
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": str(rank),
        "HOROVOD_CROSS_SIZE": str(size),
    }


class GpuPools:
    """A pool for each of the `JOBS`, started when it is first needed."""

    def __init__(self) -> None:
        self._pools: dict[str, RankPool] = {}

    def run(
        self, job: str, function: Callable[..., Any], *arguments: Any, timeout: float = LIMIT
    ) -> list[Any]:
        """What function(*arguments) returned on each rank; AssertionError if one failed."""
        if job not in self._pools:
            self._pools[job] = RankPool(size_of(job), job_environment(job))
        try:
            return self._pools[job].run(function, *arguments, timeout=timeout)
        except BaseException:
            # The ranks of that pool were killed. Under MPS that may have broken all others.
            self.close(orderly=False)
            raise

    def close(self, orderly: bool = True) -> None:
        """End all ranks; `orderly`: let them shut down the way a script does."""
        while self._pools:
            self._pools.popitem()[1].close(orderly)
