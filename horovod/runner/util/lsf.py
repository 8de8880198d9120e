"""Whether this is an LSF job, and which hosts it has."""

from __future__ import annotations

import os

from horovod.runner.slots.allocation import read_lsf


class LSFUtils:
    """What LSF says about the job that this process belongs to."""

    @staticmethod
    def using_lsf() -> bool:
        return bool(os.environ.get("LSB_JOBID"))

    @staticmethod
    def get_compute_hosts() -> list[str]:
        return [host.name for host in read_lsf(os.environ)]

    @staticmethod
    def get_num_processes() -> int:
        return sum(host.slots or 0 for host in read_lsf(os.environ))
