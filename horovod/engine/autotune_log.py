"""The file of HOROVOD_AUTOTUNE_LOG: a row for each sample, the last one for what was chosen.

The columns of upstream come first, so that its users' scripts find them. Written by one rank,
through `horovod.torch.gradients.autotune`.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping

from horovod.common.logging import get_logger

logger = get_logger(__name__)

COLUMNS = (
    "hierarchical_allreduce",
    "hierarchical_allgather",
    "torus_allreduce",
    "cache_enabled",
    "cycle_time_ms",
    "tensor_fusion_threshold",  # mebibytes of a bucket
    "score",  # bytes of gradients per microsecond of training
    "overlap",
    "algorithm",
    "step_ms",
    "phase",
    "optimizer",
)

_begun: set[str] = set()  # files that this process has emptied


class AutotuneLog:
    """Writes rows to `path`, which is emptied the first time that this process writes to it."""

    def __init__(self, path: str) -> None:
        self._path: str | None = path
        if path not in _begun:
            _begun.add(path)
            self._put("w", COLUMNS)

    def add(self, row: Mapping[str, object]) -> None:
        self._put("a", [row[column] for column in COLUMNS])

    def _put(self, mode: str, cells: object) -> None:
        if self._path is None:
            return
        try:
            with open(self._path, mode, newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerow(cells)  # type: ignore[arg-type]
        except OSError as error:
            logger.error("HOROVOD_AUTOTUNE_LOG: tuning goes on without a log: %s", error)
            self._path = None
