"""The variables that a worker gets from the launcher.

`launch` calls it. `horovod.common.environments` reads the HOROVOD_* names in the worker; the
names of torchrun are there for plain torch.distributed scripts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from horovod.common.wire import encode_key
from horovod.runner.hosts import Slot

KEY = "_HOROVOD_SECRET_KEY"


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of the job meet."""

    address: str
    store_port: int  # the launcher's store
    free_port: int  # for the user's own init_process_group
    key: bytes


def common_variables(meeting: Meeting) -> dict[str, str]:
    """The variables that are the same for all workers."""
    return {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": meeting.address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(meeting.store_port),
        KEY: encode_key(meeting.key),
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.free_port),
        "PYTHONUNBUFFERED": "1",
    }


def slot_variables(slot: Slot) -> dict[str, str]:
    """The variables that say which worker it is."""
    return {
        "HOROVOD_HOSTNAME": slot.hostname,
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
        "RANK": str(slot.rank),
        "WORLD_SIZE": str(slot.size),
        "LOCAL_RANK": str(slot.local_rank),
        "LOCAL_WORLD_SIZE": str(slot.local_size),
    }


def terminal_variables(columns: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Tell workers that a person is watching, and how wide their progress bars may be."""
    room = max(20, columns - len("[0]<stderr>:"))
    return {"HOROVOD_LAUNCHER_TTY": "1", "COLUMNS": environ.get("COLUMNS", str(room))}


def threads_per_worker(local_size: int) -> int:
    """A fair share of the cores that this process may use."""
    return max(1, usable_cores() // local_size)


def usable_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
