"""Moves into a host of `tests.hosts` and becomes another program there.

Started by `benchmarks.network` with what `Hosts.entrance` gave, in JSON, and the program.
"""

from __future__ import annotations

import json
import os
import sys

from tests.hosts import enter

if __name__ == "__main__":
    entrance, *program = sys.argv[1:]
    enter(*json.loads(entrance))
    os.execv(program[0], program)
