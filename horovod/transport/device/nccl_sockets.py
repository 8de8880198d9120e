"""How many threads NCCL sends with where gradients travel over TCP. Called before it connects.

Unless it is told otherwise, NCCL copies all bytes of a connection with one thread, through one
socket: a few gigabytes a second, whatever the network can do. It chooses better values by itself
for the network cards of two clouds only. With cores to spare, two threads with two sockets each
send nearly twice as much. Where cores are scarce, the threads hinder each other (measured:
docs/gpus.md).

Networks that NCCL drives in other ways (InfiniBand, a vendor's plugin) do not look at these values,
nor do links inside a machine.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from horovod.common.logging import get_logger

THREADS, SOCKETS = "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"
VALUES = {THREADS: "2", SOCKETS: "2"}
CORES = 8  # of a rank, at least, for more threads to have cores to run on

# Network cards of Amazon and Google, for which NCCL chooses more threads by itself.
_KNOWN_VENDORS = ("0x1d0f", "0x1ae0")
_INTERFACES = Path("/sys/class/net")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds of processors, and of time
_FILES = ("/etc/nccl.conf", "~/.nccl.conf")  # where a site may set NCCL's variables

logger = get_logger(__name__)


def use_spare_cores(neighbours: int) -> bool:
    """Set NCCL's variables for this process if it has cores to spare and nobody has set them.

    Each rank may decide for itself: NCCL's listening side tells the other how many there are.

    Args:
        neighbours: Number of ranks on this machine, this one included.

    Returns:
        Whether the variables are set by us, now or before.
    """
    if _chosen:
        return True
    cores = min(len(os.sched_getaffinity(0)), _quota()) // neighbours
    if cores < CORES or _is_set_by_others() or _has_known_card():
        return False
    os.environ.update(VALUES)
    _chosen.update(VALUES)
    logger.info(
        "NCCL may use 2 threads for each connection between hosts, because this rank has %d cores "
        "(%s=0 leaves it to NCCL)",
        cores,
        THREADS,
    )
    return True


_chosen: dict[str, str] = {}  # what this process has set


def _quota() -> int:
    """Return how many cores this container may use; without a limit, more than there are."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = _QUOTA.read_text().split()
        return int(quota) // int(period)  # ValueError for "max"
    return sys.maxsize


def _is_set_by_others() -> bool:
    if any(name in os.environ for name in VALUES):
        return True
    for file in (*_FILES, os.environ.get("NCCL_CONF_FILE", "")):
        with contextlib.suppress(OSError, ValueError):
            text = Path(file).expanduser().read_text() if file else ""
            if any(name in text for name in VALUES):
                return True
    return False


def _has_known_card() -> bool:
    for vendor in _INTERFACES.glob("*/device/vendor"):
        with contextlib.suppress(OSError):
            if vendor.read_text().strip() in _KNOWN_VENDORS:
                return True
    return False
