"""The command ``python -m horovod.timeline``; `horovod.observe.reports.command` does the work."""

from __future__ import annotations

import sys

from horovod.observe.reports.command import main

if __name__ == "__main__":
    sys.exit(main())
