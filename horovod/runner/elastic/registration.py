"""The states of workers in upstream's driver; its registry is not offered."""

from __future__ import annotations

from typing import Any

from horovod.runner.common.unavailable import ELASTIC, unavailable

READY = "READY"
SUCCESS = "SUCCESS"
FAILURE = "FAILURE"


class WorkerStateRegistry:
    """Not offered: `horovod.runner.elastic.job_state` and `policy` do this here."""

    def __init__(
        self, driver: Any, host_manager: Any, reset_limit: int | None = None, verbose: bool = False
    ) -> None:
        raise unavailable("WorkerStateRegistry", *ELASTIC)
