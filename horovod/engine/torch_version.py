"""The versions of PyTorch that the package is tested with, and a warning about others.

Called when the engine is imported. Another version is not refused: it may well work.
"""

from __future__ import annotations

import logging
import os

import torch
from packaging.version import Version

from horovod.common.logging import TORCH_VERSION_SAID, get_logger, log_once

OLDEST = "2.4"
NEWEST = "2.15"

_RANKS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "SLURM_PROCID")


def complaint(version: str) -> str | None:
    """Return the warning about a version of torch, if there is one."""
    release = Version(version).release[:2]
    if Version(OLDEST).release <= release <= Version(NEWEST).release:
        return None
    age = "older" if release < Version(OLDEST).release else "newer"
    return (
        f"torch {version} is {age} than the versions that this Horovod is tested with, {OLDEST} to "
        f"{NEWEST}: it may work, and if something fails, try one of those first"
    )


def warn_about_torch() -> None:
    """Warn once in a job: on rank 0, if the environment tells the rank, or in its driver."""
    words = complaint(torch.__version__)
    first = next((os.environ[name] for name in _RANKS if os.environ.get(name)), "0") == "0"
    if words is not None and first and TORCH_VERSION_SAID not in os.environ:
        log_once(get_logger(__name__), logging.WARNING, "torch version", words)
