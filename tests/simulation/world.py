"""The virtual clock, and the scheduler that decides which of all threads runs next.

Every thread of every simulated process is a greenlet. It runs until it waits for something, or
until `World.pause` lets another one go first; which one is drawn from the seed. Time stands still
while threads run, but for a little for each switch, and jumps to the next timer when all wait: an
hour of waiting costs nothing.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit, getcurrent, greenlet

if TYPE_CHECKING:
    from tests.simulation.modules import Library
    from tests.simulation.processes import Process

_NEVER = float("inf")
_SWITCH_SECONDS = 2e-6
"""How long a thread runs before it waits again, in virtual time: loops that spin do end."""


_MOST_PAUSES = 200
"""How often a thread may go on where another could run: one that spins does not stop the world."""


_MOST_SWITCHES = 20_000
"""How often threads may run, one after the other, until all wait: more, and one of them spins."""


class Task:
    """One thread of one simulated process."""

    def __init__(
        self, world: World, process: Process, function: Callable[[], Any], name: str
    ) -> None:
        self.process = process
        self.name = name
        self.number = world.next_number()
        self.thread: Any = None  # the object that the code under test knows it by
        self.is_done = False
        self.is_frozen = False  # never runs again
        self.waiting_for: object = ""  # for the story of a job that hangs
        self._limit = _NEVER, 0  # when its wait ends at the latest, and the number of that timer
        self._alarm = _NEVER  # its first timer
        self._is_parked = False
        self._was_woken = False
        self.greenlet = greenlet(function, parent=world.hub)

    def describe_wait(self) -> str:
        """Say what it waits for."""
        what = self.waiting_for
        return " ".join(map(str, what)) if isinstance(what, tuple) else str(what)


class World:
    """Everything that happens, in one order, from one seed."""

    def __init__(self, seed: int, modules: Library) -> None:
        self.modules = modules
        modules.begin(self)
        self.stopped: set[object] = set()  # processes and threads that do not run now
        self.has_changed = False  # what decides whether `run` is over
        self.random = random.Random(seed)
        self.now = 1000.0
        self.hub = getcurrent()
        self.current: Task | None = None
        self.events: list[tuple[float, str]] = []
        self.switches = 0
        self.on_spin: Callable[[str], None] = lambda problem: None
        self._switches_before = 0  # until all threads waited for the last time
        self._draw = self.random.random
        self._preemption = self.random.choice([0.0, 0.02, 0.2])
        self._pauses = 0  # since another thread ran
        self._runnable: list[Task] = []
        self._tasks: list[Task] = []
        self._timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    # -- what happens -------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Add a line to the story."""
        self.events.append((self.now, text))

    def next_number(self) -> int:
        """Return a number that nothing else has."""
        return next(self._numbers)

    def later(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call back after this much virtual time, outside of any simulated thread."""
        heappush(self._timers, (self.now + seconds, next(self._numbers), call, arguments))

    def run(self, is_over: Callable[[], bool], limit: float) -> bool:
        """Let things happen until `is_over`; return False if nothing can, or time is up."""
        self._is_over, self._end = is_over, self.now + limit
        self.has_changed = True
        while (task := self._next_task()) is not None:
            task.greenlet.switch()
        return is_over()

    def close(self) -> None:
        """End all threads that are left. Their code finds every simulated call refused."""
        for task in self._tasks:
            if not task.is_done:
                task.process.is_gone = True
                self.act(task, partial(task.greenlet.throw, GreenletExit))

    def _next_task(self) -> Task | None:
        """Let time pass until a thread can run, and return it; None at the end of `run`.

        Threads that wait call this themselves: a switch leads from one to the next.
        """
        self.current = None
        timers, draw_bits = self._timers, self.random.getrandbits
        while True:
            if self.has_changed:
                if self._is_over():
                    return None
                self.has_changed = False
            if not timers or timers[0][0] > self.now:
                candidates = self._runnable
                if self.stopped:
                    candidates = [
                        task
                        for task in candidates
                        if not task.process.is_stopped and not task.is_frozen
                    ]
                if candidates:
                    count = len(candidates)
                    index = draw_bits(count.bit_length())  # `randrange`, in half of its time
                    while index >= count:
                        index = draw_bits(count.bit_length())
                    task = candidates[index]
                    self._runnable.remove(task)
                    self._pauses = 0
                    self.switches += 1
                    if self.switches - self._switches_before > _MOST_SWITCHES:
                        self._switches_before = self.switches
                        who = f"{task.name} of {task.process}"
                        self.on_spin(f"a thread does not wait: {who}, or another")
                    self.now += _SWITCH_SECONDS
                    self.current = task
                    if self.modules.owner is not task.process:
                        self.modules.enter(task.process)
                    return task
                if not timers or timers[0][0] > self._end:
                    return None
                self.now = timers[0][0]
                self._switches_before = self.switches
            _, _, call, arguments = heappop(timers)
            call(*arguments)

    def _wait(self, task: Task) -> None:
        """Let others run, until it is this thread's turn."""
        chosen = self._next_task()
        if chosen is not task:
            (self.hub if chosen is None else chosen.greenlet).switch()
        if task.process.is_gone:
            raise GreenletExit

    def act(self, task: Task, call: Callable[[], Any]) -> None:
        """Call something that does not wait, as a thread."""
        before, self.current = self.current, task
        self.modules.enter(task.process)
        try:
            call()
        finally:
            self.current = before
            if before is not None:
                self.modules.enter(before.process)

    # -- for simulated threads --------------------------------------------------------------

    def spawn(self, process: Process, function: Callable[[], Any], name: str) -> Task:
        """Start a thread."""
        task = Task(self, process, function, name)
        self._tasks.append(task)
        self._runnable.append(task)
        return task

    def threads_of(self, process: Process) -> list[Any]:
        """Return the threads that a process has started and that run."""
        return [task.thread for task in self._tasks if task.process is process and not task.is_done]

    def running(self) -> Task:
        """Return the thread that calls this; refuse to go on where its process is gone."""
        task = self.current
        assert task is not None, "only simulated threads may wait"
        if task.process.is_gone:
            raise GreenletExit
        return task

    def pause(self) -> None:
        """Perhaps let another thread go first."""
        task = self.current
        if task is None or task.process.is_gone:
            task = self.running()
        self._pauses += 1
        if self._pauses > _MOST_PAUSES or (self._preemption and self._draw() < self._preemption):
            self._runnable.append(task)
            self._wait(task)

    def park(self, reason: object, seconds: float | None = None) -> bool:
        """Wait until `wake`; return False if that does not come within this time."""
        task = self.current
        if task is None or task.process.is_gone:
            task = self.running()
        task._is_parked, task._was_woken = True, False
        task.waiting_for = reason
        if seconds is None:
            task._limit = _NEVER, 0
        else:
            task._limit = self.now + max(0.0, seconds), next(self._numbers)
            if task._limit[0] < task._alarm:
                self._set_alarm(task)
        self._wait(task)
        task.waiting_for = ""
        return task._was_woken

    def wake(self, task: Task) -> None:
        """Let a thread go on, if it is parked."""
        if task._is_parked and not task.process.is_gone:
            task._is_parked, task._was_woken = False, True
            self._runnable.append(task)

    def forget(self, process: Process) -> None:
        """Never run a thread of this process again."""
        self._runnable = [task for task in self._runnable if task.process is not process]

    def _set_alarm(self, task: Task) -> None:
        when, number = task._limit
        task._alarm = when
        heappush(self._timers, (when, number, self._time_out, (task, number)))

    def _time_out(self, task: Task, number: int) -> None:
        """End a wait, or set the timer of a later one: most waits end early, and need none."""
        if self.now >= task._alarm:
            task._alarm = _NEVER
        if task._is_parked and not task.process.is_gone:
            if number == task._limit[1]:
                task._is_parked = False
                self._runnable.append(task)
            elif task._limit[0] < task._alarm:
                self._set_alarm(task)
