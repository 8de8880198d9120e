"""Call a function on all ranks with ``HorovodRunner``, as in the package ``sparkdl``.

Users call it in a Spark driver. It is a small front of ``horovod.spark.run`` and ``horovod.run``,
for programs that were written for it or for Databricks.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from typing import Any, TextIO

ALL = "all"
CALLBACK_ONLY = "log_callback_only"

_MARK = "_HOROVOD_DRIVER_LOG"  # variable with the word before lines that the driver shows
_LONGEST = 4000  # characters of a message


class HorovodRunner:
    """Runs Horovod training jobs from a Spark driver.

    Args:
        np: Where the ranks run, and how many there are. A positive number is that many tasks of a
            Spark job. A negative number is that many processes on the driver's machine, without
            Spark, for trying a program out. 0 takes all task slots that the cluster has now.
        driver_log_verbosity: What of the ranks' output appears in the driver when they are Spark
            tasks. ``"log_callback_only"``, the default, shows what they send with
            `horovod.spark.log_to_driver`; ``"all"`` shows everything, with the rank before each
            line. Output of local processes always appears.

    Raises:
        ValueError: An argument is wrong.

    Examples:
        >>> HorovodRunner(np=2).run(train, epochs=3)
    """

    def __init__(self, *, np: int, driver_log_verbosity: str = CALLBACK_ONLY) -> None:
        if not isinstance(np, int) or isinstance(np, bool):
            raise ValueError(f"np must be a whole number, not {np!r}")
        if driver_log_verbosity not in (ALL, CALLBACK_ONLY):
            raise ValueError(
                f"driver_log_verbosity must be {ALL!r} or {CALLBACK_ONLY!r}, not "
                f"{driver_log_verbosity!r}"
            )
        self.num_processor = np  # sparkdl's name
        self.driver_log_verbosity = driver_log_verbosity

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Call ``main(**kwargs)`` on all ranks.

        An exception of the function is raised here as itself, with the rank and its traceback; the
        other ranks are ended.

        Args:
            main: Function to call, which calls ``hvd.init()``. It and its arguments must be
                possible to pickle.
            **kwargs: Keyword arguments for it.

        Returns:
            What rank 0 returned.

        Raises:
            ValueError: An argument is wrong; nothing was started.

        Examples:
            >>> accuracy = HorovodRunner(np=4).run(train, epochs=3)
        """
        if not callable(main):
            raise ValueError(f"main must be a function, not {main!r}")
        if self.num_processor < 0:
            from horovod.runner.api import run

            count = -self.num_processor
            hosts = f"localhost:{count}"  # also where the driver is part of a batch job
            return run(main, kwargs=kwargs, num_proc=count, hosts=hosts)[0]
        return self._run_in_tasks(main, kwargs)[0]

    def _run_in_tasks(self, main: Callable[..., Any], kwargs: dict[str, Any]) -> list[Any]:
        from horovod.spark.cluster import Cluster, active_context
        from horovod.spark.runner import run

        count = self.num_processor or Cluster(active_context()).slots
        if self.driver_log_verbosity == ALL:
            return run(main, kwargs=kwargs, num_proc=count)
        word = secrets.token_hex(8)
        stdout = _MarkedLines(sys.stdout, word)
        stderr = _MarkedLines(sys.stderr, word)
        env = {_MARK: word}
        return run(main, kwargs=kwargs, num_proc=count, env=env, stdout=stdout, stderr=stderr)


def log_to_driver(message: str) -> None:
    """Show a message in the driver of a job that `HorovodRunner` has started.

    It is for the ranks. Elsewhere, and where the driver shows all output anyway, it prints.

    Args:
        message: Text; what is beyond 4000 characters is cut off.

    Examples:
        >>> log_to_driver(f"epoch {epoch}: loss {loss:.3f}")
    """
    word = os.environ.get(_MARK, "")
    text = str(message)
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    for line in text.splitlines() or [""]:
        print(f"{word}{line}", flush=True)


class _MarkedLines:
    """A stream that passes on messages of the ranks and of the launcher, and drops all else."""

    def __init__(self, target: TextIO, word: str) -> None:
        self._target = target
        self._word = word
        self._pending = ""

    def write(self, text: str) -> None:
        *lines, self._pending = (self._pending + text).split("\n")
        for line in lines:
            _, mark, message = line.partition(f">:{self._word}")
            if mark:
                self._target.write(f"{message}\n")
            elif not line.startswith("["):  # [rank]<stream>: is before what ranks write
                self._target.write(f"{line}\n")

    def flush(self) -> None:
        self._target.flush()
