"""Elastic jobs started by the real ``horovodrun``, for tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.forked_python import forked_python
from tests.runner.horovodrun import HANG, command, environment

_END = re.compile(r"end (\d+) ([\d.]+) worker (w\d+) rank (\d+) size (\d+)")

# A job begins without the workers that are later than this, on however busy a machine.
PATIENT = {"HOROVOD_START_TIMEOUT": "200"}


class Launched:
    """A running ``horovodrun``; what happens is read from its status file."""

    def __init__(
        self,
        folder: Path,
        options: list[str],
        plan: dict[str, Any] | None = None,
        *,
        program: list[str] | None = None,
        env: dict[str, str] | None = None,
        patience: float = HANG,
        forked: bool = False,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self._patience = patience
        self._status = folder / "status"
        self._out, self._err = folder / "out", folder / "err"
        worker = program or ["-m", "tests.elastic.light_worker", json.dumps(plan or {})]
        python = forked_python() if forked else [sys.executable]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command("--status-file", str(self._status), *options, *python, *worker),
                env=environment({"OMP_NUM_THREADS": "1", **PATIENT, **(env or {})}),
                stdout=out,
                stderr=err,
            )

    # -- what happened ---------------------------------------------------------------------

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """What happened so far."""
        if not self._status.exists():
            return []
        lines = self._status.read_text().splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [each for each in found if not kinds or each["event"] in kinds]

    def await_event(self, kind: str, occurrence: int = 1, **details: Any) -> dict[str, Any]:
        """The event, which must come."""

        def look() -> dict[str, Any] | None:
            found = [e for e in self.events(kind) if details.items() <= e.items()]
            return found[occurrence - 1] if len(found) >= occurrence else None

        return self._await(look, f"{kind} {details}")

    def await_output(self, text: str) -> None:
        self._await(lambda: text in self.output or None, repr(text))

    def _await(self, look: Any, what: str) -> Any:
        deadline = time.monotonic() + self._patience
        while (found := look()) is None:
            ended = self.process.poll() is not None and (found := look()) is None
            assert not ended, f"ended without {what}:\n{self}"
            assert time.monotonic() < deadline, f"no {what}:\n{self}"
            time.sleep(0.02)  # between looks at a file
        return found

    @property
    def output(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def errors(self) -> str:
        return self._err.read_text(errors="replace")

    def pids(self) -> dict[str, int]:
        return {event["worker"]: event["pid"] for event in self.events("started")}

    def kill(self, worker: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids()[worker], number)

    def sizes(self) -> list[int]:
        """The number of workers of each decision."""
        return [len(event["workers"]) for event in self.events("decision")]

    def ends(self) -> dict[str, tuple[int, float, int, int]]:
        """Steps, value, rank and size with which workers ended."""
        found = {}
        for steps, value, worker, rank, size in _END.findall(self.output):
            found[worker] = (int(steps), float(value), int(rank), int(size))
        return found

    # -- the end ---------------------------------------------------------------------------

    def wait(self) -> int:
        try:
            return self.process.wait(self._patience)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running:\n{self}") from None

    def check_success(self, size: int | None = None) -> None:
        """Ended well: all steps count once, the ranks are complete, and nothing is left."""
        assert self.wait() == 0, str(self)
        ends = self.ends()
        assert ends, str(self)
        for steps, value, _, _ in ends.values():
            assert steps == value, str(self)
        assert len({steps for steps, _, _, _ in ends.values()}) == 1, str(self)
        if size is not None:
            ranks = sorted((rank, n) for _, _, rank, n in ends.values())
            assert ranks == [(rank, size) for rank in range(size)], str(self)
        self.check_nothing_left()

    def await_nothing_left(self) -> None:
        """The workers end soon, though nobody waits for them."""
        deadline = time.monotonic() + self._patience
        while any(os.path.exists(f"/proc/{pid}") for pid in self.pids().values()):
            assert time.monotonic() < deadline, str(self)
            time.sleep(0.02)  # between looks at the process table

    def check_nothing_left(self) -> None:
        left = [pid for pid in self.pids().values() if os.path.exists(f"/proc/{pid}")]
        assert not left, f"{left} are left:\n{self}"

    def __str__(self) -> str:
        status = self._status.read_text() if self._status.exists() else ""
        return f"status:\n{status}\nstdout:\n{self.output}\nstderr:\n{self.errors}"

    def __enter__(self) -> Launched:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
