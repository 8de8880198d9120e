"""`ElasticDriver`, under the name and with the arguments of Horovod 0.28.1: not offered."""

from __future__ import annotations

from typing import Any

from horovod.runner.common.unavailable import ELASTIC, unavailable


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
