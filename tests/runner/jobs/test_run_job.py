"""`run_job`, as ``horovod.run`` and others call it: from Python, in any thread."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import pytest

from horovod.common.store import MemoryStore
from horovod.runner.jobs.run_job import run_job
from horovod.runner.options.arguments import parse_args
from horovod.runner.output.console import Console
from horovod.runner.output.report import LaunchError, Outcome
from tests.runner.horovodrun import HANG, ROOT

PROGRAM = """
import os
from horovod.common.store import StoreClient
from horovod.common.wire import decode_key
address, port = (os.environ[f"HOROVOD_GLOO_RENDEZVOUS_{what}"] for what in ("ADDR", "PORT"))
store = StoreClient(address, int(port), decode_key(os.environ["_HOROVOD_SECRET_KEY"]), 200)
rank = os.environ["HOROVOD_RANK"]
store.set(f"result/{rank}", store.get("work", 200) + rank.encode())
print("told", os.environ["GIVEN"])
"""


def start(console: Console, store: MemoryStore) -> Outcome:
    options = parse_args(["-np", "2", "unused"])
    command = [sys.executable, "-c", PROGRAM]
    env = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "GIVEN": "this",
        "OMP_NUM_THREADS": "1",
    }
    return run_job(options, command, env=env, store=store, console=console)


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_store_given_and_looked_into_afterwards(tmp_path: Path, in_thread: bool):
    store = MemoryStore()
    store.set("work", b"for ")
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    outcomes: list[Outcome] = []
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        console = Console(out.fileno(), err.fileno())
        if in_thread:
            thread = threading.Thread(target=lambda: outcomes.append(start(console, store)))
            thread.start()
            thread.join(HANG)
        else:
            outcomes.append(start(console, store))
    assert [one.code for one in outcomes[0].exits] == [0, 0]
    assert outcomes[0].first_failure is None
    assert [store.try_get(f"result/{rank}") for rank in range(2)] == [b"for 0", b"for 1"]
    lines = sorted((tmp_path / "out").read_text().splitlines())
    assert lines == ["[0]<stdout>:told this", "[1]<stdout>:told this"]
    assert (tmp_path / "err").read_text() == ""
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_a_job_that_cannot_begin_raises():
    options = parse_args(["-np", "2", "unused"])
    with pytest.raises(LaunchError, match="command not found: 'no-such-command'") as caught:
        run_job(options, ["no-such-command"])
    assert caught.value.status == 127
