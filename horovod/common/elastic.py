"""Elastic training, for any framework: states that can be rolled back, and the loop around them.

A binding's ``elastic.run`` is `run_fn`; its states derive from `State` or `ObjectState`. The loop:
give all ranks the newest state that one of them has, run the user's function; when a collective
fails, roll back to the last commit; when the ranks change without a failure, keep everything; then
form the new generation and begin again. What the loop and the states need of the job comes as an
`ElasticJob` from `horovod.elastic.worker`; a script that no elastic launcher started has none and
runs as it is.

What a failure costs: the steps since the last commit, which are repeated. What a change without a
failure costs: nothing.
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
    """What the ranks agreed on."""

    STAY = "nothing has changed"
    CHANGE = "the ranks change: all meet again"
    LEAVE = "the ranks change, because this one leaves"


class ElasticJob(Protocol):
    """A job whose ranks may change, as a state and the loop see it."""

    def agree(self, notified: bool) -> Verdict:
        """Collective: whether the ranks change now. `notified`: this rank has heard that they do
        from somebody other than the driver."""

    def newest_state(self, version: int) -> tuple[int, int]:
        """Collective: the lowest rank whose state has the highest version, and that version."""

    def leave(self) -> NoReturn:
        """End this process in order."""

    def can_recover(self, error: HorovodInternalError) -> bool:
        """Whether it is of use to form a new generation after a failure; the old one is over."""

    def taking_part(self) -> AbstractContextManager[object]:
        """While the training function runs."""

    def finish(self) -> None:
        """The training function has returned."""


class State(ABC):
    """What training has to carry over when ranks are lost or added.

    `bcast_object(obj, root_rank=0)` sends an object to all ranks, `get_rank()` is this rank.
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
        """Call these after the ranks have changed, e.g. to adapt the learning rate to the size."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The ranks have changed."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Any thread of any rank may say that hosts have changed; the next check acts on it."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Make this the state to come back to, and look whether the ranks change.

        Collective: all ranks must commit in the same step. Raises `HostsUpdatedInterrupt` on all
        of them together.
        """
        self.save()
        self._version += 1
        verdict = self._agree()
        self.on_commit()
        self._follow(verdict)

    def check_host_updates(self) -> None:
        """Look whether the ranks change. Collective; raises like `commit`.

        The interrupt never allows to skip the synchronisation: it is what a rank that failed in
        this very moment, or one that is new, takes part in.
        """
        self._follow(self._agree())

    def _agree(self) -> Verdict:
        notified = False
        with contextlib.suppress(queue.Empty):
            while True:
                self._host_messages.get_nowait()
                notified = True
        if self._job is None:
            return Verdict.CHANGE if notified else Verdict.STAY
        return self._job.agree(notified)

    def _follow(self, verdict: Verdict) -> None:
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
        """Take a snapshot, in memory."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to the snapshot."""

    @abstractmethod
    def sync(self) -> None:
        """Give all ranks the state of rank `_root`, and take a snapshot of it. Collective."""

    def on_commit(self) -> None:  # noqa: B027 (a snapshot in memory is enough for most)
        """All ranks have taken a snapshot, to come back to; `_version` is its number.

        A rank that the others have given up does not get here.
        """

    def reset(self) -> None:  # noqa: B027 (not every state depends on the ranks)
        """Adapt to the new ranks, before the callbacks and the synchronisation."""

    def gather(self) -> None:  # noqa: B027 (not every state has something that ranks do not share)
        """Exchange what only single ranks know, before some of them go. Collective."""

    def hand_over(self) -> None:
        """This rank is about to leave. The others count what they have now as a commit as well."""
        self.save()
        self._version += 1
        self.on_commit()


class ObjectState(State):
    """A state of plain attributes, given as keyword arguments.

    Snapshots hold references: assign new values, do not change lists or dicts in place.
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
    """`func` with recovery around it; its first argument is the state.

    `reset` stops the engine and starts it among the ranks that are there now.
    """

    @functools.wraps(func)
    def run(state: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        job = find_job()
        if job is None:
            return _run_alone(func, reset, state, *args, **kwargs)
        state._job = job
        first = True
        with job.taking_part():
            while True:
                try:
                    if not first:
                        reset()
                        state.on_reset()
                    first = False
                    state._root, version = job.newest_state(state._version)
                    state.sync()
                    state._version = max(version, state._version, 0)
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
    """Make this the state to come back to, or go back to the last commit if it cannot be relied on.

    A rank may be lost at this moment, in the middle of what a device still does.
    """
    try:
        state.save()
        state._version += 1
    except HorovodInternalError as error:
        logger.warning("going back to the last commit: %s", error)
        state.restore()


def _run_alone(
    func: Callable[Concatenate[S, P], T],
    reset: Callable[[], None],
    state: S,
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Without an elastic launcher ranks neither come nor go, so that a failure is the end."""
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
