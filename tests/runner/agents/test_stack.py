"""Where a worker is in its code: only its own processes, no arguments, and a clear word if not."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from horovod.runner.agents import stack
from horovod.runner.agents.host_agent import WorkerSpec
from tests.runner.agents.test_agent import ENV, Talk

ANSWER = """Process 7: python train.py --password secret
Python v3.11.7 (/usr/bin/python3.11)

Thread 7 (idle): "MainThread"
    forward (model.py:12)
    <module> (train.py:3)
Thread 8 (idle): "horovod-stats"
    wait (threading.py:331)
Thread 9 (active): "loader"
    fetch (data.py:4)
"""


@pytest.fixture
def py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name, which is found before any other."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(stack.sys, "executable", str(folder / "python"))
    program = folder / "py-spy"
    program.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path / 'asked'}\ncat <<'E'\n{ANSWER}E\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def test_the_command_line_and_our_own_threads_are_not_shown():
    assert stack.trim_answer(ANSWER) == (
        'Thread 7 (idle): "MainThread"\n    forward (model.py:12)\n    <module> (train.py:3)\n'
        'Thread 9 (active): "loader"\n    fetch (data.py:4)'
    )
    assert stack.trim_answer("Error: no such process\n") == "Error: no such process"


def test_a_process_of_the_worker(py_spy: Path, tmp_path: Path):
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        request = {"id": 3, "pid": child.pid}
        found = stack.take_stack(request, {3: child.pid})
        assert found["id"] == 3
        assert found["text"].startswith("Thread 7")
        assert "secret" not in found["text"]
        asked = (tmp_path / "asked").read_text().split()
        assert asked == ["dump", "--nonblocking", "--pid", str(child.pid)]
    finally:
        child.communicate()


def test_no_other_process_is_looked_at(py_spy: Path, tmp_path: Path):
    for request, launched in [
        ({"id": 3, "pid": os.getppid()}, {3: os.getpid()}),
        ({"id": 3, "pid": os.getpid()}, {4: os.getpid()}),
    ]:
        assert "does not belong to this worker" in stack.take_stack(request, launched)["text"]
    assert not (tmp_path / "asked").exists()


def test_without_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = stack.take_stack({"id": 0, "pid": os.getpid()}, {0: os.getpid()})
    assert found["text"] == stack.NOT_INSTALLED
    assert "pip install 'horovod[stacks]'" in found["text"]


def test_a_system_that_does_not_allow_it(py_spy: Path):
    py_spy.write_text("#!/bin/sh\necho 'Error: Permission denied: try with sudo'\nexit 1\n")
    found = stack.take_stack({"id": 0, "pid": os.getpid()}, {0: os.getpid()})
    assert "ptrace_scope" in found["text"]


def test_an_agent_is_asked():
    talk = Talk()
    talk.until(lambda: bool(talk.said("hello")))
    worker = [sys.executable, "-c", "import time; time.sleep(1000)"]
    talk.agent.start([WorkerSpec(5, worker, {}, ".")], ENV)
    talk.until(lambda: 5 in talk.pids())
    talk.agent.ask_for_stack(5, 1)
    talk.until(lambda: bool(talk.said("stack")))
    (found,) = talk.said("stack")
    assert found == {"id": 5, "text": "process 1 does not belong to this worker, or has ended"}
    talk.agent.stop(0)
    talk.agent.finish()
    talk.until(lambda: bool(talk.said("finished")))
