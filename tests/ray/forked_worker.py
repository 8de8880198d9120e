"""What the tests' Ray nodes start in place of a fresh Python for each worker.

A worker of Ray takes half a second of a core to import Ray, two more for Ray Train and some for
torch. The nodes' Python is `tests.forked_python`, so this program runs in a process that has
imported them already. A worker with a Python, a path or a command of its own is started by Ray's
own program.
"""

from __future__ import annotations

import json
import os
import runpy
import sys

_CONTEXT = "--serialized-runtime-env-context="


def _start(arguments: list[str]) -> None:
    """Be the worker that Ray has asked for with these arguments."""
    texts = [word.removeprefix(_CONTEXT) for word in arguments if word.startswith(_CONTEXT)]
    context = json.loads(texts[0]) if texts else {}
    variables = context.get("env_vars", {})
    if (
        context.get("command_prefix")
        or context.get("py_executable", sys.executable) != sys.executable
        or "PYTHONPATH" in variables
    ):
        import ray._private.workers.setup_worker as setup

        os.execv(sys.executable, [sys.executable, str(setup.__file__), *arguments])
    os.environ.update(variables)
    own = (_CONTEXT, "--language=")
    sys.argv = [word for word in arguments if not word.startswith(own)]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _start(sys.argv[1:])
