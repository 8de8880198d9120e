"""Start the Spark job that holds the slots, in a thread of its own, and cancel it as a group.

`runner` starts one for each call. Its tasks are `task.relay.serve`.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable

from horovod.spark.cluster import Cluster
from horovod.spark.task_link import Ticket

_numbers = itertools.count()
_CANCEL_SECONDS = 30.0
_TRACEBACK = "Traceback (most recent call last):"
_JAVA = ("\tat ", "Driver stacktrace:")
_MOST_LINES = 30


class SparkJob:
    """One job of ``num_tasks`` tasks."""

    def __init__(
        self,
        cluster: Cluster,
        ticket: Ticket,
        num_tasks: int,
        *,
        barrier: bool,
        ended: Callable[[], None],
    ) -> None:
        """Start the job; ``ended`` is called in another thread when it is over."""
        from pyspark import InheritableThread

        self.error: BaseException | None = None
        self.group = f"horovod.spark.run.{next(_numbers)}"
        self._context = cluster.context
        self._resource_profile = cluster.resource_profile
        self._ticket = ticket
        self._num_tasks = num_tasks
        self._barrier = barrier
        self._ended = ended
        # This thread inherits the caller's properties, such as the pool of the fair scheduler.
        self._thread: threading.Thread = InheritableThread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        from horovod.spark.task.relay import serve

        try:
            self._context.setJobGroup(
                self.group, f"Horovod: {self._num_tasks} processes", interruptOnCancel=True
            )
            rdd = self._context.parallelize(range(self._num_tasks), self._num_tasks)
            if self._resource_profile is not None:
                rdd = rdd.withResources(self._resource_profile)
            stage = rdd.barrier() if self._barrier else rdd
            stage.mapPartitions(functools.partial(serve, self._ticket)).collect()
        except BaseException as error:
            self.error = error
        finally:
            self._ended()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def cancel(self) -> None:
        """End all tasks, and wait until that has happened."""
        if self.is_running:
            self._context.cancelJobGroup(self.group)
        self.wait()

    def wait(self) -> None:
        """Wait until Spark has finished with the job."""
        self._thread.join(_CANCEL_SECONDS)

    def why(self) -> str:
        """Return why Spark ended the job, in few lines; an empty text if it did not fail."""
        return "" if self.error is None else shorten(str(self.error))


def shorten(text: str) -> str:
    """Return the last Python traceback in a message of Spark, or the message itself.

    Java's stacks are left out: they only lead through Spark itself.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    starts = [index for index, line in enumerate(lines) if _TRACEBACK in line]
    kept = lines[starts[-1] + 1 :] if starts else lines
    before_java = itertools.takewhile(lambda line: not line.startswith(_JAVA), kept)
    words = [line for line in before_java if not line.startswith(" SQLSTATE")]
    return "\n".join(([_TRACEBACK] if starts else []) + words[-_MOST_LINES:])
