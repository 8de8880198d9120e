"""``horovodrun`` that waits for the cause of a failure as long as a busy machine may take.

It looks for a while for the rank, or the hosts, that explain a failure; what it finds must not
depend on how soon the processes of a test get the processor. Started by `horovodrun.run`.
"""

from __future__ import annotations

import sys

from horovod.runner.jobs import fixed_ranks
from horovod.runner.launch import run_commandline
from tests.runner.horovodrun import HANG

if __name__ == "__main__":
    for name in ("_BLAME_WINDOW", "_CAUSE_PATIENCE", "_COMPANY_WINDOW"):
        assert hasattr(fixed_ranks, name), name
        setattr(fixed_ranks, name, HANG)
    sys.exit(run_commandline())
