"""Ranks that talk through NCCL, one GPU being enough for all of them: `make test-gpu`.

`tests.accelerators` says how ranks share a GPU. Everything here is skipped where there is none.
Tests marked `killing` end processes that use a GPU, or break their contexts: MPS, under which the
others run, may not survive that.
"""

from __future__ import annotations

# Jobs by name. Ranks of "2 hosts" are on one host each, or so Horovod is told.
JOBS = ("2 ranks", "3 ranks", "4 ranks", "2 hosts")
LIMIT = 90.0  # seconds until a test's ranks count as hanging: without a peer they spin forever
SOON = 30.0  # seconds in which a failure must be known to all ranks
EXAMPLES = 12  # of a property, for each job


def size_of(job: str) -> int:
    """The number of ranks of one of the `JOBS`."""
    return int(job.split()[0])
