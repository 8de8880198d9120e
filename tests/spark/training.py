"""An elastic training of `functions.train`, seen through the files that its workers write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.spark.cluster import until


class Training:
    """``problem`` says what has gone wrong meanwhile, if anything has."""

    def __init__(self, folder: Path, problem: Callable[[], str]) -> None:
        self.folder = folder
        self._problem = problem

    def log(self) -> list[tuple[int, int, int]]:
        """Step, size, and the process of rank 0, of all steps so far."""
        file = self.folder / "log"
        lines = file.read_text().splitlines() if file.exists() else []
        return [(int(a), int(b), int(c)) for a, b, c in map(str.split, lines)]

    def until_size(self, size: int, after: int = 0) -> int:
        """Wait for a step with so many ranks, later than ``after`` steps; how many there were."""
        until(lambda: bool(self._problem()) or any(n == size for _, n, _ in self.log()[after:]))
        assert not self._problem(), self._problem()
        return len(self.log())

    def workers(self) -> dict[int, str]:
        """The processes that have started, with the names of their hosts."""
        files = [file for file in self.folder.glob("pid-*") if file.read_text()]
        return {int(file.name[4:]): file.read_text() for file in files}

    def close_door(self) -> None:
        """Who comes from now on has to wait: it may be faster than the others go on without it."""
        (self.folder / "door").touch()

    def open_door(self) -> None:
        (self.folder / "door").unlink()

    def fail(self, worker: int) -> None:
        """Let a process raise an exception."""
        (self.folder / f"fail-{worker}").touch()

    def stop(self) -> None:
        (self.folder / "stop").touch()
