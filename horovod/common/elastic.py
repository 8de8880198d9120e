"""Elastic training, for any framework: states that can be rolled back, and the loop around them.

A binding's ``elastic.run`` is `run_fn`; its states derive from `State` or `ObjectState`. The loop
gives all ranks the newest state that one of them has, and runs the user's function. When a
collective fails, it rolls back to the last commit; when the ranks change without a failure, it
keeps everything. Then it forms the new generation and begins again. The loop and the states know
the job as an `ElasticJob`, which `horovod.elastic.worker` makes. A script that no elastic launcher
started has none, and runs as it is.

A failure costs the steps since the last commit, which are repeated. A change without a failure
costs no step.
"""

from __future__ import annotations

import contextlib
import functools
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.logging import get_logger

logger = get_logger(__name__)

S = TypeVar("S", bound="State")
P = ParamSpec("P")
T = TypeVar("T")


class Verdict(Enum):
    """What the ranks have agreed on."""

    STAY = "nothing has changed"
    CHANGE = "the ranks change: all form a new generation"
    LEAVE = "the ranks change, because this one leaves"


class ElasticJob(Protocol):
    """A job whose ranks may change, as a state and the loop use it."""

    def agree(self, notified: bool) -> Verdict:
        """Agree with all ranks whether the ranks change now. Collective.

        `notified` says that the program itself, not the driver, has told this rank of a change.
        """

    def newest_state(self, version: int) -> tuple[int, int]:
        """Return the lowest rank with the newest state, and the state's version. Collective."""

    def confirm_state(self) -> None:
        """Note that this rank has the newest state, and a snapshot of it."""

    def leave(self) -> NoReturn:
        """End this process in order."""

    def can_recover(self, error: HorovodInternalError) -> bool:
        """End the old generation, and return whether a new one may succeed."""

    def taking_part(self) -> AbstractContextManager[object]:
        """Return a context in which the training function runs."""

    def finish(self) -> None:
        """Note that the training function has returned."""


class State(ABC):
    """What training carries over when ranks are lost or added.

    Args:
        bcast_object: A function of an object and `root_rank` that sends that rank's object to all.
        get_rank: A function that returns this process's rank.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._job: ElasticJob | None = None
        self._root = 0  # the rank whose state `sync` gives to all
        self._version = -1  # counts commits; negative: this rank has not begun to train
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()  # upstream's name
        self._reset_callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Register functions to call after the ranks have changed.

        Args:
            callbacks: Functions without arguments, for example to adapt the learning rate.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to new ranks: call `reset`, then the registered functions."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Note that hosts have changed; the next check acts on it. Any thread may call.

        Args:
            timestamp: The time when they changed.
            update_res: The kind of change. Both are upstream's, and are not used.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Make this the state to come back to, and check whether the ranks change.

        Collective: all ranks must commit in the same step.

        Raises:
            HostsUpdatedInterrupt: The ranks change. All ranks raise it together.
        """
        self.save()
        self._version += 1
        verdict = self._agree()
        self.on_commit()
        self._follow(verdict)

    def check_host_updates(self) -> None:
        """Check whether the ranks change. Collective.

        Raises:
            HostsUpdatedInterrupt: The ranks change. All ranks raise it together. It never allows
                to skip the synchronisation: a rank that fails at this moment, or a new one, takes
                part in it.
        """
        self._follow(self._agree())

    def _agree(self) -> Verdict:
        """Agree with all ranks whether the ranks change now."""
        notified = False
        with contextlib.suppress(queue.Empty):
            while True:
                self._host_messages.get_nowait()
                notified = True
        if self._job is None:
            return Verdict.CHANGE if notified else Verdict.STAY
        return self._job.agree(notified)

    def _follow(self, verdict: Verdict) -> None:
        """Do what the ranks have agreed on."""
        if verdict is Verdict.STAY:
            return
        if self._job is not None:
            self.gather()
            if verdict is Verdict.LEAVE:
                self.hand_over()
                self._job.leave()
        raise HostsUpdatedInterrupt(skip_sync=False)

    @abstractmethod
    def save(self) -> None:
        """Take a snapshot of the state, in memory."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to the snapshot."""

    @abstractmethod
    def sync(self) -> None:
        """Give all ranks the state of rank `_root`, and take a snapshot of it. Collective."""

    def on_commit(self) -> None:  # noqa: B027 (a snapshot in memory is enough for most)
        """Do something after all ranks have taken the snapshot with the number `_version`.

        It is not called on a rank that the others have given up.
        """

    def reset(self) -> None:  # noqa: B027 (not every state depends on the ranks)
        """Adapt to the new ranks, before the callbacks and the synchronisation."""

    def gather(self) -> None:  # noqa: B027 (not every state has something that ranks do not share)
        """Exchange what only single ranks know, before some of them leave. Collective."""

    def hand_over(self) -> None:
        """Commit before this rank leaves. The others count what they have now as a commit too."""
        self.save()
        self._version += 1
        self.on_commit()


class ObjectState(State):
    """A state of plain attributes, given as keyword arguments.

    Snapshots have references to the values: assign new values, do not change lists or dicts in
    place.

    Args:
        bcast_object: A function of an object and `root_rank` that sends that rank's object to all.
        get_rank: A function that returns this process's rank.
        **kwargs: The attributes and their first values.
    """

    def __init__(
        self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state: dict[str, Any] = kwargs
        self._set_attributes()

    def save(self) -> None:
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attributes()

    def sync(self) -> None:
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state, root_rank=self._root)
            self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


def run_fn(
    func: Callable[Concatenate[S, P], T],
    reset: Callable[[], None],
    find_job: Callable[[], ElasticJob | None] = lambda: None,
) -> Callable[Concatenate[S, P], T]:
    """Return `func` with recovery around it.

    Args:
        func: The training function. Its first argument is the state.
        reset: A function that stops the engine and starts it again with the ranks that are there.
        find_job: A function that returns this process's elastic job, or None.
    """

    @functools.wraps(func)
    def run(state: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        job = find_job()
        if job is None:
            return _run_without_job(func, reset, state, *args, **kwargs)
        state._job = job
        is_first = True
        with job.taking_part():
            while True:
                try:
                    if not is_first:
                        reset()
                        state.on_reset()
                    is_first = False
                    state._root, version = job.newest_state(state._version)
                    state.sync()
                    state._version = max(version, state._version, 0)
                    job.confirm_state()
                    result = func(state, *args, **kwargs)
                except HorovodInternalError as error:
                    if not job.can_recover(error):
                        raise
                    logger.warning("going back to the last commit: %s", error)
                    state.restore()
                except HostsUpdatedInterrupt:
                    logger.info("the ranks change")
                    _keep(state)
                else:
                    job.finish()
                    return result

    return run


def _keep(state: State) -> None:
    """Make this the state to come back to, or go back to the last commit if that fails.

    It fails if a rank is lost at this moment, while a device still works on the state.
    """
    try:
        state.save()
        state._version += 1
    except HorovodInternalError as error:
        logger.warning("going back to the last commit: %s", error)
        state.restore()


def _run_without_job(
    func: Callable[Concatenate[S, P], T],
    reset: Callable[[], None],
    state: S,
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Run `func` without an elastic launcher: ranks neither come nor go, and a failure is final."""
    while True:
        try:
            state.sync()
            state._version = max(state._version, 0)
            return func(state, *args, **kwargs)
        except HostsUpdatedInterrupt:  # somebody called on_hosts_updated, on all ranks
            state.save()
            reset()
            state.on_reset()
        except HorovodInternalError as error:
            raise HorovodInternalError(
                f"{error} (not recovered, because this job is not elastic: start it with "
                f"horovodrun --min-np or --host-discovery-script)"
            ) from error
