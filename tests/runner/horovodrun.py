"""Running the real ``horovodrun`` in tests: workers are small Python programs without torch."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HANG = 240.0  # seconds; nothing here takes a fraction of it unless it hangs, or torch loads slowly


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    env.pop("OMP_NUM_THREADS", None)
    return {**env, "PYTHONPATH": str(ROOT), **(extra or {})}


def command(*arguments: str, patient: bool = False) -> list[str]:
    module = "tests.runner.patient_launcher" if patient else "horovod.runner"
    return [sys.executable, "-m", module, *arguments]


def run(
    *arguments: str,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    patient: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run to the end; `patient`: where it is the cause of a failure that matters."""
    return subprocess.run(
        command(*arguments, patient=patient),
        env=environment(env),
        cwd=cwd,
        capture_output=True,
        encoding="utf-8",
        errors="backslashreplace",
        timeout=HANG,
        check=False,
    )


def run_python(
    num_proc: int, program: str, *arguments: str, options: Sequence[str] = (), **how: object
) -> subprocess.CompletedProcess[str]:
    """Run ``program`` with ``num_proc`` workers."""
    worker = (sys.executable, "-c", program, *arguments)
    return run("-np", str(num_proc), *options, *worker, **how)  # type: ignore[arg-type]


def wait_for_starts(process: subprocess.Popen[bytes], count: int) -> None:
    """Until horovodrun, which is verbose, knows that so many ranks have started."""
    assert process.stderr is not None
    known, said = 0, b""
    while known < count:
        line = process.stderr.readline()
        said += line
        assert line, f"horovodrun ended early:\n{said.decode()}"
        known += re.match(rb"horovodrun: rank \d+ started", line) is not None


class Job:
    """A launcher that is running, whose workers announce their processes."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._pidfds: dict[int, int] = {}

    def wait_for_pids(self, count: int) -> list[int]:
        """Read output until ``count`` processes have announced themselves with "pid <n>"."""
        assert self.process.stdout is not None
        seen: list[int] = []
        while len(seen) < count:
            line = self.process.stdout.readline()
            assert line, f"horovodrun ended early after {seen}"
            text = line.decode().partition(">:")[2].split()
            if text[:1] == ["pid"]:
                seen.append(int(text[1]))
                self._pidfds[seen[-1]] = os.pidfd_open(seen[-1])
        return seen

    def finish(self) -> tuple[int, str, str]:
        stdout, stderr = self.process.communicate(timeout=HANG)
        return self.process.returncode, stdout.decode(), stderr.decode()

    def gone(self, pid: int) -> bool:
        """Whether the process ends; waits as long as a hang would take to be sure."""
        return bool(select.select([self._pidfds[pid]], [], [], HANG)[0])

    def close(self) -> None:
        for pid, pidfd in self._pidfds.items():
            if not select.select([pidfd], [], [], 0)[0]:
                os.kill(pid, signal.SIGKILL)  # only after a failed assertion
            os.close(pidfd)
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@contextmanager
def started(
    num_proc: int, program: str, *options: str, env: dict[str, str] | None = None
) -> Iterator[Job]:
    """A running job; afterwards everything it announced is ended."""
    process = subprocess.Popen(
        command("-np", str(num_proc), *options, sys.executable, "-c", program),
        env=environment(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    job = Job(process)
    try:
        yield job
    finally:
        job.close()
