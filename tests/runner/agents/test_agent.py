"""One agent, spoken to directly: what the elastic driver relies on besides the fixed jobs."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from horovod.runner.agents.host_agent import AgentEvent, HostAgent, WorkerSpec
from tests.runner.horovodrun import HANG

ENV = {"PATH": os.environ["PATH"], "COMMON": "yes"}


class Talk:
    """An agent, and all that it has said so far."""

    def __init__(self) -> None:
        self.agent = HostAgent("here")
        self.events: list[AgentEvent] = []

    def until(self, done: Callable[[], bool]) -> None:
        """Read until the condition holds."""
        deadline = time.monotonic() + HANG
        while not done():
            writing = [self.agent.link.input_fd] if self.agent.unsent else []
            left = deadline - time.monotonic()
            readable, writable, _ = select.select(
                [self.agent.link.output_fd], writing, [], max(left, 0)
            )
            assert readable or writable, f"nothing more after {self.events[-5:]}"
            if writable:
                self.agent.flush()
            if readable:
                self.events += self.agent.read()
            assert done() or ("ended", False) not in self.events, self.agent.last_words

    def said(self, kind: str) -> list:
        return [each.content for each in self.events if each.kind == kind]

    def exits(self) -> dict[int, int]:
        return {worker: code for batch in self.said("exited") for worker, code in batch}

    def pids(self) -> dict[int, int]:
        return {each["id"]: each["pid"] for each in self.said("started")}

    def output(self, worker: int, stream: str = "stdout") -> bytes:
        outputs = self.said("output")
        return b"".join(data for *source, data in outputs if source == [worker, stream])

    def start(self, *workers: tuple[int, str], cwd: str = "/", bind=None, **env: str) -> None:
        specs = [
            WorkerSpec(number, [sys.executable, "-u", "-c", program], env, cwd, bind)
            for number, program in workers
        ]
        self.agent.start(specs, ENV)


@pytest.fixture
def talk() -> Iterator[Talk]:
    talk = Talk()
    yield talk
    talk.agent.link.release()
    talk.agent.link.wait()


WAIT = "import os, signal; print(os.getpid()); signal.pause()"


def gone(pids: Sequence[int]) -> bool:
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended = select.select([fd], [], [], HANG)[0]
        os.close(fd)
        if not ended:
            return False
    return True


def test_workers_start_at_any_time_and_the_agent_stays_until_told(talk: Talk):
    talk.start((7, "import os; print(os.environ['COMMON'], os.environ['OWN'])"), OWN="seven")
    talk.until(lambda: talk.exits() == {7: 0})
    assert talk.output(7) == b"yes seven\n"
    talk.start((8, "import sys; sys.exit('eight')"), (9, WAIT))
    talk.until(lambda: 8 in talk.exits() and bool(talk.output(9)))
    assert talk.exits() == {7: 0, 8: 1}
    assert talk.output(8, "stderr") == b"eight\n"
    talk.agent.stop(30, [9])
    talk.until(lambda: 9 in talk.exits())
    assert talk.exits()[9] == -signal.SIGTERM
    talk.agent.finish()
    talk.until(lambda: ("ended", True) in talk.events)


CHILD = """
import os, signal
signal.signal(15, signal.SIG_IGN)
print(os.getpid())
while True:
    signal.pause()
"""
LEAVE_BEHIND = f"""
import signal, subprocess, sys
subprocess.Popen([sys.executable, "-u", "-c", {CHILD!r}])
"""
# It ignores the signal, if it does, before the child says that it is there.
FAMILY = (
    "import signal\n{ignore}\n"
    + LEAVE_BEHIND
    + """
while True:
    signal.pause()
"""
)


@pytest.mark.parametrize("ignore", ["", "signal.signal(15, signal.SIG_IGN)"])
def test_stopping_one_worker_ends_its_family_and_nobody_else(talk: Talk, ignore: str):
    talk.start((1, FAMILY.format(ignore=ignore)), (2, FAMILY.format(ignore=ignore)))
    talk.until(lambda: bool(talk.output(1)) and bool(talk.output(2)))
    child, other = int(talk.output(1)), int(talk.output(2))
    talk.agent.stop(0.2, [1])
    talk.until(lambda: 1 in talk.exits())
    assert gone([child])
    os.kill(other, 0)
    assert talk.exits() == {1: -9 if ignore else -15}
    talk.agent.stop(0)
    talk.until(lambda: 2 in talk.exits())
    assert talk.exits()[2] == -signal.SIGKILL
    assert gone([other])


def test_what_a_dead_worker_left_can_be_stopped_later(talk: Talk):
    talk.start((1, LEAVE_BEHIND), (2, WAIT))
    talk.until(lambda: 1 in talk.exits() and bool(talk.output(1)))
    child = int(talk.output(1))
    os.kill(child, 0)
    talk.agent.stop(0, [1])
    assert gone([child])
    assert talk.exits() == {1: 0}


def test_nothing_starts_while_all_are_being_stopped(talk: Talk):
    talk.start((1, "import signal; signal.signal(15, signal.SIG_IGN); print('up'); signal.pause()"))
    talk.until(lambda: bool(talk.output(1)))
    talk.agent.stop(HANG)
    talk.start((2, WAIT))
    talk.until(lambda: bool(talk.said("failed")))
    assert talk.said("failed") == [{"id": 2, "errno": errno.ECANCELED, "what": ""}]
    talk.agent.stop(0)
    talk.until(lambda: 1 in talk.exits())
    talk.start((3, "pass"))  # all are gone, so it may go on
    talk.until(lambda: 3 in talk.exits())


def test_a_lost_launcher_ends_the_workers():
    talk = Talk()
    talk.start((1, FAMILY.format(ignore="")))
    talk.until(lambda: bool(talk.output(1)))
    child = int(talk.output(1))
    talk.agent.link.release()
    assert talk.agent.link.wait() == 0
    assert gone([child, talk.pids()[1]])


OFTEN = """
import os
from horovod.runner.agents import agent, agent_streams
agent_streams._PULSE = 0.01
agent.main(os.getppid())
"""


def test_an_agent_with_nothing_to_say_gives_signs_of_life():
    """Without them the connection would never notice that the launcher is gone: see `_PULSE`."""
    command = [sys.executable, "-c", OFTEN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        said = b""
        while said.count(b'"alive"') < 3:
            assert select.select([process.stdout], [], [], HANG)[0], said
            more = os.read(process.stdout.fileno(), 4096)
            assert more, said
            said += more
        process.stdin.close()
        process.stdout.read()
        assert process.wait(HANG) == 0


def test_programs_that_cannot_start(talk: Talk, tmp_path: Path):
    (tmp_path / "data").write_text("no program")
    (tmp_path / "data").chmod(0o755)
    for number, name in enumerate(["no-such-program", "./data", "./missing"]):
        talk.agent.start([WorkerSpec(number, [name], {}, str(tmp_path))], ENV)
    talk.until(lambda: len(talk.said("failed")) == 3)
    assert [each["errno"] for each in talk.said("failed")] == [
        errno.ENOENT,
        errno.ENOEXEC,
        errno.ENOENT,
    ]
    assert [each["what"] for each in talk.said("failed")] == [
        "no-such-program",
        "./data",
        "./missing",
    ]


def test_a_directory_that_is_not_there_is_told_and_replaced(talk: Talk, tmp_path: Path):
    talk.start((1, "import os; print(os.getcwd())"), cwd=str(tmp_path / "missing"))
    talk.until(lambda: 1 in talk.exits())
    (note,) = talk.said("note")
    assert "missing" in note
    assert repr(talk.output(1).decode().strip()) in note


def test_workers_keep_to_their_cores(talk: Talk):
    cores = sorted(os.sched_getaffinity(0))
    show = "import os; print(sorted(os.sched_getaffinity(0)))"
    for index in range(len(cores)):
        talk.start((index, show), bind=("core", index, len(cores)))
    talk.start((1000, show))
    talk.until(lambda: len(talk.exits()) == len(cores) + 1)
    assert [talk.output(i) for i in range(len(cores))] == [b"[%d]\n" % core for core in cores]
    assert talk.output(1000).decode().strip() == str(cores)  # the agent itself is free again


def wait_until_blocked(pid: int) -> None:
    """Until the process has been asleep whenever we looked for a while."""
    asleep = 0
    deadline = time.monotonic() + HANG
    while asleep < 20:
        assert time.monotonic() < deadline
        with open(f"/proc/{pid}/stat") as file:
            asleep = asleep + 1 if file.read().rpartition(")")[2].split()[0] == "S" else 0
        time.sleep(0.01)


def test_a_launcher_that_does_not_read_holds_the_workers_up_and_not_the_agent(talk: Talk):
    talk.start((1, "while True: print('x' * 4000)"))
    talk.until(lambda: bool(talk.output(1)))
    pid = talk.pids()[1]
    wait_until_blocked(pid)
    talk.agent.stop(0)
    assert gone([pid])  # though nobody reads
    talk.until(lambda: 1 in talk.exits())
    assert set(talk.output(1)) == set(b"x\n")
    assert len(talk.output(1)) < 8 << 20  # what the agent keeps is bounded


def test_the_environment_of_the_host_is_taken_where_asked(talk: Talk):
    show = [
        sys.executable,
        "-c",
        "import os; print(os.environ.get('HOME'), os.environ.get('LANG'))",
    ]
    talk.agent.link.own_variables = ["HOME", "ABSENT"]
    talk.agent.start([WorkerSpec(1, show, {}, "/")], {"LANG": "C", "HOME": "/x"})
    talk.agent.link.own_variables = ["HOME", "LANG"]
    talk.agent.start([WorkerSpec(2, show, {}, "/")], {"LANG": "C"})
    talk.until(lambda: len(talk.exits()) == 2)
    assert talk.output(1) == b"/x C\n"
    assert talk.output(2).decode() == f"{os.environ['HOME']} C\n"


def test_all_of_the_hosts_environment_and_its_python(talk: Talk):
    show = "import os, sys; print(os.environ['PATH'], os.environ['LANG'], sys.executable)"
    talk.agent.link.own_variables = None
    talk.agent.start([WorkerSpec(1, ["", "-c", show], {}, ".")], {"LANG": "C"})
    talk.until(lambda: len(talk.exits()) == 1)
    assert talk.output(1).decode() == f"{os.environ['PATH']} C {sys.executable}\n"
