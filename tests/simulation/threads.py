"""What `threading` and `time` are inside of a simulated process."""

from __future__ import annotations

import time as real_time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tests.simulation.world import Task, World

if TYPE_CHECKING:
    from tests.simulation.modules import Library
    from tests.simulation.processes import Process


class Time:
    """`time`. The clock of a host differs from the others, and may jump; `monotonic` does not."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def __getattr__(self, name: str) -> Any:
        return getattr(real_time, name)

    def monotonic(self) -> float:
        return self._process.world.now + self._process.host.boot_offset

    perf_counter = monotonic

    def time(self) -> float:
        return 1.8e9 + self._process.world.now + self._process.host.clock_offset

    def monotonic_ns(self) -> int:
        return int(self.monotonic() * 1e9)

    perf_counter_ns = monotonic_ns

    def time_ns(self) -> int:
        return int(self.time() * 1e9)

    def sleep(self, seconds: float) -> None:
        self._process.world.park("sleep", seconds)


class Lock:
    """`threading.Lock`."""

    _is_reentrant = False

    def __init__(self, world: World) -> None:
        self._world = world
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = self._world
        world.pause()
        task = world.current
        assert task is not None
        if self._owner is None:
            self._owner, self._depth = task, 1
            return True
        if self._is_reentrant and self._owner is task:
            self._depth += 1
            return True
        deadline = None if timeout < 0 else world.now + timeout
        while self._owner is not None:
            left = None if deadline is None else deadline - world.now
            if not blocking or (left is not None and left <= 0):
                return False
            self._waiting.append(task)
            world.park("a lock", left)
            if task in self._waiting:
                self._waiting.remove(task)
        self._owner, self._depth = task, 1
        return True

    def release(self) -> None:
        task = self._world.current
        if task is not None and task.process.is_gone:
            return  # what its threads leave undone does not matter any more
        if self._owner is None:
            raise RuntimeError("release unlocked lock")
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            if self._waiting:
                self._world.wake(self._waiting.pop(0))

    def locked(self) -> bool:
        return self._owner is not None

    __enter__ = acquire

    def __exit__(self, *error: object) -> None:
        self.release()


class RLock(Lock):
    """`threading.RLock`."""

    _is_reentrant = True


class Condition:
    """`threading.Condition`."""

    def __init__(self, world: World, lock: Lock | None = None) -> None:
        self._world = world
        self._lock = RLock(world) if lock is None else lock
        self._waiting: list[Task] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        lock, task = self._lock, self._world.running()
        if lock._owner is not task:
            raise RuntimeError("cannot wait on un-acquired lock")
        depth, lock._depth = lock._depth, 1
        self._waiting.append(task)
        lock.release()
        try:
            woken = self._world.park("a condition", timeout)
        finally:
            if task in self._waiting:
                self._waiting.remove(task)
        lock.acquire()
        lock._depth = depth
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        deadline = None if timeout is None else self._world.now + timeout
        found = predicate()
        while not found:
            left = None if deadline is None else deadline - self._world.now
            if left is not None and left <= 0:
                break
            self.wait(left)
            found = predicate()
        return found

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiting))):
            self._world.wake(self._waiting.pop(0))

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Event:
    """`threading.Event`."""

    def __init__(self, world: World) -> None:
        self._changed = Condition(world, Lock(world))
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._is_set, timeout))


class Local:
    """`threading.local`, also as a base class: `__init__` runs once in every thread."""

    _modules: Library

    def __new__(cls, *args: Any, **kwargs: Any) -> Local:
        self = super().__new__(cls)
        by_task: dict[Task | None, dict[str, Any]] = {cls._modules.world.current: {}}
        object.__setattr__(self, "_own", (by_task, args, kwargs))
        return self

    def _values(self) -> dict[str, Any]:
        by_task, args, kwargs = object.__getattribute__(self, "_own")
        task = self._modules.world.current
        if task not in by_task:
            by_task[task] = {}
            type(self).__init__(self, *args, **kwargs)
        values: dict[str, Any] = by_task[task]
        return values

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values()[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._values()[name] = value


class Thread:
    """`threading.Thread`."""

    def __init__(
        self,
        process: Process,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        daemon: bool | None = None,
    ) -> None:
        self.name = name or "thread"
        self.daemon = daemon
        self._process = process
        self._call = target, tuple(args), dict(kwargs or {})
        self._task: Task | None = None
        self._joining: list[Task] = []

        self._number = process.world.next_number()

    def __hash__(self) -> int:
        return self._number  # addresses would make the order of sets differ between runs

    @property
    def ident(self) -> int | None:
        return self._task and self._task.number

    def start(self) -> None:
        world = self._process.world
        self._task = world.spawn(self._process, self._run, self.name)
        self._task.thread = self
        world.pause()

    def _run(self) -> None:
        target, args, kwargs = self._call
        task = self._task
        assert target is not None
        assert task is not None
        try:
            target(*args, **kwargs)
        except Exception as error:
            self._process.report(f"thread {self.name} failed", error)
        finally:
            task.is_done = True
            for other in self._joining:
                self._process.world.wake(other)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_done

    def join(self, timeout: float | None = None) -> None:
        world = self._process.world
        deadline = None if timeout is None else world.now + timeout
        while self.is_alive():
            left = None if deadline is None else deadline - world.now
            if left is not None and left <= 0:
                return
            self._joining.append(world.running())
            world.park(f"the end of thread {self.name}", left)


class Threading:
    """`threading`."""

    TIMEOUT_MAX = 1e9
    _DummyThread = None  # no thread is foreign

    def __init__(self, process: Process) -> None:
        world = process.world
        self._world = world
        self._process = process
        self._main = Thread(process, name="MainThread", daemon=False)
        self.Thread = lambda *args, **kwargs: Thread(process, *args[1:], **kwargs)
        self.Lock = lambda: Lock(world)
        self.RLock = lambda: RLock(world)
        self.Condition = lambda lock=None: Condition(world, lock)
        self.Event = lambda: Event(world)
        self.local = type("local", (Local,), {"_modules": world.modules})

    def begin(self, main: Task) -> None:
        """Take a task for the main thread."""
        self._main._task = main
        main.thread = self._main

    def current_thread(self) -> Thread:
        thread: Thread = self._world.running().thread
        return thread

    def enumerate(self) -> list[Thread]:
        return self._world.threads_of(self._process)

    def main_thread(self) -> Thread:
        return self._main

    def get_ident(self) -> int:
        return self._world.running().number
