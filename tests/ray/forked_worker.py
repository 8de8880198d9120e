"""What the tests' Ray nodes start in place of a fresh Python for each worker.

A worker of Ray takes a second and a half of a core to import Ray, twice, and some seconds more for
torch. This program asks the tests' fork server for a process that has imported them already; see
`tests.forked_python`. A worker with a Python or a command of its own is started by Ray's program.
"""

from __future__ import annotations

import json
import os
import sys

from tests.forked_client import main

SOCKET = "HOROVOD_TEST_FORK_SERVER"
"""The environment variable with the address of the fork server."""

_CONTEXT = "--serialized-runtime-env-context="


def _start(arguments: list[str]) -> None:
    """Start the worker that Ray has asked for with these arguments, and end as it does."""
    texts = [word.removeprefix(_CONTEXT) for word in arguments if word.startswith(_CONTEXT)]
    context = json.loads(texts[0]) if texts else {}
    if (
        context.get("command_prefix")
        or context.get("py_executable", sys.executable) != sys.executable
    ):
        import ray._private.workers.setup_worker as setup

        os.execv(sys.executable, [sys.executable, str(setup.__file__), *arguments])
    os.environ.update(context.get("env_vars", {}))
    own = (_CONTEXT, "--language=")
    main(os.environ[SOCKET], [word for word in arguments if not word.startswith(own)])


if __name__ == "__main__":
    _start(sys.argv[1:])
