"""Report this rank's numbers to the launcher, through the job's store.

With HOROVOD_STATS_INTERVAL the engine starts a `Reporter`. Its thread writes one JSON text under
``stats/<generation>/<rank>`` at that interval and once more at the end; the launcher's dashboard
and scaling study read them. docs/stats.md describes the text. The thread calls nothing of torch,
and training goes on even if the store is lost.

A rank that has waited for a second reports for what, and for which ranks: each waiting rank writes
its name into the store, and the ranks without a name there are those that it waits for.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from horovod.common.joining.launcher_store import SECRET_KEY, STORE_ADDRESS, launchers_store
from horovod.common.logging import get_logger
from horovod.common.store import Store
from horovod.common.topology import Topology
from horovod.observe.statistics.operations import ObservedChannel, PendingOperation
from horovod.observe.statistics.process import MOST_STEPS, MOST_VALUES, Statistics, Step
from horovod.observe.timeline.recorder import allowed_cores

logger = get_logger(__name__)

VERSION = 1
WAITING_SECONDS = 1.0  # after which a rank counts as waiting

_LOOK_SECONDS = 0.5  # between looks at what is waited for
_CONNECT_SECONDS = 5.0
_LONGEST_PAUSE = 30.0  # seconds between attempts to reach a store that is gone
_GOODBYE = 2.0  # seconds that the last report may take
_NAMES_SHOWN = 6
_LONGEST_TEXT = 300  # characters of a tensor's name, or of a path


def report_key(generation: int, rank: int) -> str:
    """Return the key of a rank's report in the launcher's store."""
    return f"stats/{generation}/{rank}"


class ReportedJob(Protocol):
    """The engine's job, as a report describes it."""

    topology: Topology
    statistics: Statistics
    connection: Store

    @property
    def generation(self) -> int:
        """The number of an elastic job's generation; 0 in other jobs."""

    @property
    def channels(self) -> Mapping[int, ObservedChannel]:
        """The channels of the process sets to which this rank belongs."""

    def stats(self) -> dict[str, Any]:
        """Return the numbers of `hvd.stats()`."""


class Reporter:
    """Reports on `job` from a thread of its own until `stop`."""

    def __init__(self, job: ReportedJob, interval: float) -> None:
        self._job = job
        self._interval = interval
        self._key = report_key(job.generation, job.topology.rank)
        self._store: Store | None = None
        self._steps_before = job.statistics.steps  # of this process, in earlier generations
        self._reported_steps = self._steps_before
        self._gpu = GpuUse()
        self._notes = WaitingNotes(job)
        self._metrics: dict[str, list[tuple[int, float]]] = {}  # values to send
        self._complained = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="horovod-stats", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send the last report, unless that takes too long."""
        self._job.statistics.sample_devices()
        self._stop.set()
        self._thread.join(_GOODBYE)
        if self._thread.is_alive() and self._store is not None:
            self._disconnect()  # wakes the thread
            self._thread.join(_GOODBYE)

    def _run(self) -> None:
        due, pause, reachable = 0.0, self._interval, True
        while True:
            left = max(0.0, due - time.monotonic())
            ended = self._stop.wait(min(left, _LOOK_SECONDS))
            if not ended and time.monotonic() < due:
                if reachable:
                    reachable = self._try(lambda: self._notes.look(self._connected()))
                continue
            reachable = self._try(partial(self._send, ended))
            pause = self._interval if reachable else min(2 * pause, _LONGEST_PAUSE)
            due = time.monotonic() + pause
            if ended:
                self._disconnect()
                return

    def _try(self, act: Callable[[], None]) -> bool:
        """Return whether an action worked. Only the first failure is logged, at level debug."""
        try:
            act()
            return True
        except Exception as error:
            # Catch everything: no report is worth a job. A broken connection is not used again.
            self._disconnect()
            if not self._complained:
                self._complained = True
                logger.debug("reports of hvd.stats() do not reach the launcher: %s", error)
            return False

    def _send(self, ended: bool) -> None:
        store = self._connected()
        self._notes.look(store)
        waiting = None if ended else self._notes.waiting(store)
        statistics = self._job.statistics
        steps = [step for step in statistics.recent() if step.number > self._reported_steps]
        for name, values in statistics.take_metrics().items():
            self._metrics[name] = [*self._metrics.get(name, ()), *values][-MOST_VALUES:]
        report = self._report(ended, waiting, chosen_steps(steps))
        store.set(self._key, json.dumps(report, allow_nan=False).encode())
        self._reported_steps = steps[-1].number if steps else self._reported_steps
        self._metrics.clear()

    def _report(
        self, ended: bool, waiting: dict[str, Any] | None, steps: list[Step]
    ) -> dict[str, Any]:
        stats = self._job.stats() | self._gpu.look(self._job.statistics.gpu_uuid)
        to_epoch = time.time() - time.monotonic()
        metrics = self._metrics.items()
        if ended:
            state = "ended"
        elif waiting is not None:
            state = "waiting"
        else:
            state = "training" if stats["operations"] or stats["steps"] else "starting"
        return {
            "version": VERSION,
            **{key: stats[key] for key in ("rank", "size", "local_rank", "host", "generation")},
            "pid": os.getpid(),
            "time": time.time(),
            "state": state,
            "cores": allowed_cores() or [],
            "steps_before": self._steps_before,
            "stats": {key: finite(value) for key, value in stats.items()},
            "steps": [[step.number, step.end + to_epoch, *step[2:]] for step in steps],
            "waiting": waiting,
            "metrics": {
                name: [[at, finite(value)] for at, value in each] for name, each in metrics
            },
        }

    def _connected(self) -> Store:
        """Return the launcher's store, or the one that rank 0 serves if there is no launcher."""
        if self._store is None:
            if os.environ.get(STORE_ADDRESS) and os.environ.get(SECRET_KEY):
                self._store = launchers_store(os.environ).connect(_CONNECT_SECONDS)
            else:
                return self._job.connection
        return self._store

    def _disconnect(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            with contextlib.suppress(OSError):
                store.close()


class WaitingNotes:
    """Finds out for which ranks this one waits. Only the reporter's thread uses it."""

    def __init__(self, job: ReportedJob) -> None:
        self._job = job
        self._posted: dict[int, str] = {}  # by process set: the key of our note
        self._compared: set[str] = set()  # notes old enough that other ranks' have come as well

    def look(self, store: Store) -> None:
        """Write a note about what this rank waits for, and delete notes about what has run."""
        wanted: dict[int, str] = {}
        for channel in list(self._job.channels.values()):
            oldest = _oldest(channel, _LOOK_SECONDS)
            if oldest is not None and channel.group.size > 1:
                wanted[channel.set_id] = self._key(channel, oldest.name)
        for set_id, key in list(self._posted.items()):
            if wanted.get(set_id) != key:
                store.delete(key)
                del self._posted[set_id]
                self._compared.discard(key)
        for set_id, key in wanted.items():
            if set_id in self._posted:
                self._compared.add(key)
            else:
                store.set(key, b"")
                self._posted[set_id] = key

    def waiting(self, store: Store) -> dict[str, Any] | None:
        """Return the operation that this rank has waited for longest, as a report has it."""
        channels = list(self._job.channels.values())
        waits = [(each, _oldest(each, WAITING_SECONDS)) for each in channels]
        found = [(channel, oldest) for channel, oldest in waits if oldest is not None]
        if not found:
            return None
        channel, oldest = min(found, key=lambda each: each[1].submitted)
        names = [request.name for request in channel.pending()][:_NAMES_SHOWN]
        missing: list[int] = []
        key = self._posted.get(channel.set_id)
        if key in self._compared:
            keys = store.keys(key.rpartition("/")[0] + "/")
            here = {int(each.rpartition("/")[2]) for each in keys}
            missing = [rank for rank in channel.group.global_ranks if rank not in here]
        return {
            "since": time.time() - (time.monotonic() - oldest.submitted),
            "tensors": [name[:_LONGEST_TEXT] for name in names],
            "missing_ranks": missing,
            "source": oldest.source[-_LONGEST_TEXT:],
        }

    def _key(self, channel: ObservedChannel, name: str) -> str:
        digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        rank = self._job.topology.rank
        return f"stats-waiting/{self._job.generation}/{channel.set_id}/{digest}/{rank}"


class GpuUse:
    """Asks NVIDIA's library (NVML) how busy this rank's GPU is, and how much memory it has.

    The Python package for NVML is optional (`pip install nvidia-ml-py`). Without it, or without an
    NVIDIA GPU, only the memory is reported that torch itself counts. Used by one thread.
    """

    def __init__(self, module: str = "pynvml") -> None:
        self._module = module
        self._library: Any = None
        self._device: Any = None
        self._uuid = ""
        self._is_missing = False

    def look(self, uuid: str) -> dict[str, float]:
        """Return the numbers of the GPU with this UUID, or nothing where they are unknown.

        `gpu_use` is the share of the last moment in which the GPU computed, from 0 to 1. Both
        numbers are about the whole GPU, which several ranks may share.
        """
        if not uuid or self._is_missing:
            return {}
        try:
            if self._uuid != uuid:
                self._open(uuid)
            busy = self._library.nvmlDeviceGetUtilizationRates(self._device).gpu
            memory = self._library.nvmlDeviceGetMemoryInfo(self._device).total
            return {"gpu_use": busy / 100, "gpu_memory_total_bytes": int(memory)}
        except Exception:
            # No package, no driver, a GPU that NVML cannot ask: a report is never worth an error.
            self._is_missing = True
            return {}

    def _open(self, uuid: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an older package of the same name is deprecated
            self._library = importlib.import_module(self._module)
        self._library.nvmlInit()
        self._device = self._library.nvmlDeviceGetHandleByUUID(uuid)
        self._uuid = uuid


def _oldest(channel: ObservedChannel, seconds: float) -> PendingOperation | None:
    """Return the oldest pending operation, if it has waited for this many seconds."""
    pending = channel.pending()
    if pending and time.monotonic() - pending[0].submitted > seconds:
        return pending[0]
    return None


def chosen_steps(steps: list[Step]) -> list[Step]:
    """Return the steps for a report: the last ones, and the longest of all."""
    last = steps[-MOST_STEPS:]
    longest = max(steps, key=lambda step: step.seconds, default=None)
    if longest is not None and longest.number < last[0].number:
        last[0] = longest
    return last


def finite(value: Any) -> Any:
    """Return a value that JSON can express: None in place of NaN and infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
