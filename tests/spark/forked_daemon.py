"""What the tests' executors run in place of `pyspark.daemon`, forked as `tests.forked_python` says.

The daemon makes itself the leader of a process group, and a forked process is one already.
"""

from __future__ import annotations

import os

from pyspark.daemon import manager

_setpgid = os.setpgid


def _lead_group(process: int, group: int) -> None:
    if os.getpgrp() != os.getpid():
        _setpgid(process, group)


if __name__ == "__main__":
    os.setpgid = _lead_group
    manager()
