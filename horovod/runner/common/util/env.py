"""Which variables travel to other hosts, and this process's rank by its variables."""

from __future__ import annotations

import os
import re

from horovod.runner.slots.worker_env import travelling

IGNORE_REGEXES = {"BASH_FUNC_.*", "OLDPWD", ".*CUDA_VISIBLE_DEVICES", "_HOROVOD_SECRET_KEY"}
"""Upstream's list. What really stays behind is more: see `horovod.runner.slots.worker_env`."""

_PAIRS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def is_exportable(v: str) -> bool:
    """Whether a variable of this name goes along to another host."""
    ignored = any(re.fullmatch(pattern, v) for pattern in IGNORE_REGEXES)
    return not ignored and v in travelling({v: ""})


def get_env_rank_and_size() -> tuple[int, int]:
    """Rank and size by the variables of a launcher; (0, 1) where there is none."""
    for rank, size in _PAIRS:
        values = os.environ.get(rank), os.environ.get(size)
        if values[0] is not None and values[1] is not None:
            return int(values[0]), int(values[1])
        if values != (None, None):
            missing = rank if values[0] is None else size
            raise RuntimeError(f"only one of {rank} and {size} is set: {missing} is missing")
    return 0, 1
