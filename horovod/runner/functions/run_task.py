"""Run one worker of ``horovod.run``: ``python -m horovod.runner.functions.run_task``.

The launcher starts it on every rank. It fetches the function from the job's store, calls it, and
puts the result or the failure into the store.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback

import cloudpickle

from horovod.common.config import Config
from horovod.common.environments import detect
from horovod.common.exceptions import is_because_of_others
from horovod.common.generations.decisions import LATEST, Decision, decision_key
from horovod.common.generations.membership import WORKER_ID, is_elastic
from horovod.common.joining.launcher_store import launchers_store
from horovod.common.store import Store
from horovod.common.tracebacks import format_error
from horovod.runner.functions.function_call import (
    CALL,
    SEARCH_PATH,
    Failure,
    pickled,
    put,
    put_failure,
    read,
    result_name,
)


def main() -> int:
    """Call the function, and return the exit status: 1 if it failed and that was reported."""
    store = launchers_store(os.environ).connect(Config.from_env().start_timeout)
    callers = json.loads(store.get(SEARCH_PATH, 0.0))  # the caller's folders, in the same order
    sys.path[:] = [*callers, *(folder for folder in sys.path if folder not in callers)]
    call = read(store, CALL)
    if call is None:
        print("this program is for horovod.run, which gives it a function", file=sys.stderr)
        return 2
    try:
        function, args, kwargs = cloudpickle.loads(call)
        del call
        value = function(*args, **kwargs)
    except BaseException as error:
        problem = f"the function raised {type(error).__qualname__}: {error}"
        if isinstance(error, SystemExit):
            problem = f"the function called sys.exit({error.code!r}) instead of returning"
        _report(store, problem, error)
        return 1
    try:
        content = cloudpickle.dumps(value)
    except Exception as error:
        _report(store, f"what the function returned cannot be pickled: {error}", None)
        return 1
    own_rank = rank(store)
    if own_rank is not None:  # otherwise the job goes on without this worker
        put(store, result_name(own_rank), content)
    return 0


def rank(store: Store) -> int | None:
    """Return this worker's rank; in an elastic job that of the newest decision, or None.

    If no worker has called `init` so far, it is the rank that this one would have.
    """
    if not is_elastic():
        return detect().claim()[0]
    latest = store.try_get(LATEST)
    if latest is None:
        return int(os.environ["HOROVOD_RANK"]) if "HOROVOD_RANK" in os.environ else None
    decision = Decision.decode(store.get(decision_key(int(latest)), 0.0))
    slot = decision.slots.get(os.environ[WORKER_ID])
    return None if slot is None else slot.rank


def _report(store: Store, problem: str, error: BaseException | None) -> None:
    text = format_error(error) if error is not None else traceback.format_exc()
    sys.stderr.write(text)
    content = None if error is None else pickled(error)
    host, victim = socket.gethostname(), is_because_of_others(error)
    put_failure(store, Failure(rank(store), host, os.getpid(), problem, text, content, victim))


if __name__ == "__main__":
    sys.exit(main())
