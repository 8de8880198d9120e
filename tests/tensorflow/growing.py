"""Elastic jobs for trainings with any framework: growing, and losing the first worker."""

from __future__ import annotations

import io
import re
import runpy
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from horovod.common.generations.membership import membership
from tests.elastic.job import ElasticJob
from tests.elastic.training import this_worker
from tests.ranks import listen, tell

PATIENCE = 200.0  # seconds; on a busy machine TensorFlow may take a minute to import


def await_another() -> None:
    """Called by the first worker when it has trained a while: another joins at the next commit."""
    tell("alone")
    listen()
    member = membership()
    assert member is not None
    while member.newest.number < 2:
        time.sleep(0.01)  # between looks


def halt() -> None:
    """Called by the first worker in the middle of training together: it is killed here."""
    tell("halt")
    signal.pause()


def grow_and_lose(
    function: Callable[..., Any], *arguments: Any, env: dict[str, str] | None = None
) -> Any:
    """What the second worker returns, which joins the first, gets its state, and survives it.

    The first has to call `await_another` and then `halt`.
    """
    with ElasticJob(function, *arguments, env=env) as job:
        job.start(1)
        assert job.heard(0, PATIENCE) == "alone"
        job.start(1, kind="added")
        job.say_to([0])
        assert job.heard(0, PATIENCE) == "halt"
        job.kill(0)
        job.lose(0)
        (outcome,) = job.wait(PATIENCE, [1])
        assert outcome.error is None, outcome.describe()
        assert "going back to the last commit" in outcome.output
        return outcome.result


class _HaltingOutput(io.TextIOWrapper):
    """The standard output of a worker, which halts where it prints something like `when`."""

    def __init__(self, when: str) -> None:
        super().__init__(io.FileIO(1, "w", closefd=False), write_through=True)
        self._when = when

    def write(self, text: str) -> int:
        count = super().write(text)
        if re.search(self._when, text):
            halt()
        return count


def run_script(path: str, when: str, *arguments: str) -> None:
    """What a worker does that runs a script; it has TensorFlow from the fork server."""
    if this_worker() == "w0":
        sys.stdout = _HaltingOutput(when)
    sys.argv = [path, *arguments]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{path} ended with {end.code}") from end


def lose_one_of_two(path: str, *arguments: str, when: str) -> str:
    """What the second of two workers prints that run a script, when it has lost the first.

    The first stops once it has printed `when`, and is killed there, however fast the machine is.
    """
    with ElasticJob(run_script, path, when, *arguments) as job:
        job.start(2)
        assert job.heard(0, PATIENCE) == "halt"
        job.kill(0)
        job.lose(0)
        (outcome,) = job.wait(PATIENCE, [1])
        assert outcome.error is None, outcome.describe()
        return outcome.output
