"""What happens when processes die, stop, fork, or are used hard. All with real processes."""

from __future__ import annotations

TRANSPORTS = {
    "shm": {"HOROVOD_CPU_OPERATIONS": "shm"},
    "gloo": {"HOROVOD_CPU_OPERATIONS": "gloo"},
}


def two_and_one(rank: int) -> dict[str, str]:
    """Three ranks as on two hosts: shared memory between the first two, TCP to the third."""
    alone = rank == 2
    return {
        "HOROVOD_HOSTNAME": "second" if alone else "first",
        "HOROVOD_LOCAL_RANK": "0" if alone else str(rank),
        "HOROVOD_LOCAL_SIZE": "1" if alone else "2",
        "HOROVOD_CROSS_RANK": "1" if alone else "0",
        "HOROVOD_CROSS_SIZE": "1" if rank == 1 else "2",
    }
