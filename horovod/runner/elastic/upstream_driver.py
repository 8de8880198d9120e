"""Names of Horovod 0.28.1's elastic driver. It is not offered itself, so it has no methods either.

Its workers are started by a function of the caller, which gets a place and no key. They could not
read the job's store, where decisions are: to serve them would take upstream's open rendezvous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from horovod.runner.common.unavailable import ELASTIC, unavailable


@dataclass
class Results:
    """What became of a job: an error or None, and exit code and time by worker ("host[slot]")."""

    error_message: str | None
    worker_results: dict[str, tuple[int, float]]


class ElasticDriver:
    """Not offered: a job's driver here is made by `horovod.runner.elastic.job`."""

    def __init__(
        self,
        rendezvous: Any,
        discovery: Any,
        min_num_proc: int,
        max_num_proc: int | None,
        timeout: float | None = None,
        reset_limit: int | None = None,
        cooldown_range: tuple[int, int] | None = None,
        verbose: int = 0,
    ) -> None:
        raise unavailable("ElasticDriver", *ELASTIC)
