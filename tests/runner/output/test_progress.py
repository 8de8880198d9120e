"""Who is awaited, and in which colour it is said: on a terminal, and where there is none."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from horovod.runner.output.console import Colour, Console, Source, is_colour_wanted, paint
from horovod.runner.output.lines import LineSplitter
from horovod.runner.output.progress import Progress, StartProgress, list_some
from horovod.runner.output.report import Exit, LostHost, Outcome, describe_failure
from horovod.runner.slots.hosts import Host, plan_slots
from tests.forked_python import forked_python
from tests.runner.horovodrun import HANG, command, environment

ERASE = "\r\x1b[K"
YELLOW, RED, PLAIN = "\x1b[33m", "\x1b[31m", "\x1b[0m"


def uncoloured(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def check_written(far: int, expected: str) -> None:
    """Just that came; a terminal may pass it on in pieces."""
    text = ""
    while len(text) < len(expected):
        ready, _, _ = select.select([far], [], [], HANG)
        assert ready, f"expected {expected!r} after {text!r}"
        text += os.read(far, 1 << 16).decode().replace("\r\n", "\n")
    assert text == expected


def write_to(far: int, near: int, write: Callable[[Console], object]) -> str:
    """All that a console writes to a terminal."""
    console = Console(near, near)
    write(console)
    console._put("stderr", b"\0")
    text = b""
    while not text.endswith(b"\0"):
        text += os.read(far, 1 << 16)
    return text[:-1].decode().replace("\r\n", "\n")


@pytest.fixture(autouse=True)
def _no_preference(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def terminal():
    far, near = pty.openpty()
    yield far, near
    os.close(far)
    os.close(near)


@pytest.fixture
def pipe():
    far, near = os.pipe()
    yield far, near
    os.close(far)
    os.close(near)


# -- the line --------------------------------------------------------------------------------------


def test_on_a_terminal_one_line_changes_in_place(terminal):
    far, near = terminal
    console, clock = Console(near, near), Clock()
    progress = Progress(console, clock)
    progress.update("waiting for node1")
    clock.now += 0.5
    progress.update("waiting for node1")
    console.say("first")  # before that nothing was drawn: nobody needs to hear of short waits
    check_written(far, "\x1b[36mhorovodrun:\x1b[0m first\n")
    clock.now += 1.5
    progress.update("waiting for node1")
    check_written(far, f"{YELLOW}horovodrun: waiting for node1 (2 s){PLAIN}")
    clock.now += 1.0
    progress.update("waiting for node2")
    check_written(far, f"{ERASE}{YELLOW}horovodrun: waiting for node2 (3 s){PLAIN}")
    source = Source(0, "stdout")
    console.show(source, LineSplitter().feed(b"hello\n"))
    drawn = f"{YELLOW}horovodrun: waiting for node2 (3 s){PLAIN}"
    check_written(far, f"{ERASE}[0]<stdout>:hello\n{drawn}")
    progress.update("")
    check_written(far, ERASE)
    console.show(source, LineSplitter().feed(b"bye\n"))
    check_written(far, "[0]<stdout>:bye\n")


def test_a_line_is_never_wider_than_the_terminal(terminal):
    far, near = terminal
    drawn = write_to(far, near, lambda console: console.progress("x" * 1000))
    assert len(uncoloured(drawn)) == Console(near, near).width - 1


def test_the_bar_of_a_rank_comes_back_afterwards(terminal):
    far, near = terminal
    console, bar, splitter = Console(near, near), Source(0, "stderr"), LineSplitter()
    console.show(bar, splitter.feed(b" 10%\r"), splitter.pending)
    console.progress("waiting for w1")
    console.progress("")
    bar_drawn = "[0]<stderr>: 10%"
    awaited = f"{YELLOW}horovodrun: waiting for w1{PLAIN}"
    check_written(far, f"{bar_drawn}{ERASE}{awaited}{ERASE}{bar_drawn}")


def test_elsewhere_only_long_waits_are_worth_a_line(pipe):
    far, near = pipe
    console, clock = Console(near, near), Clock()
    progress = Progress(console, clock)
    for _ in range(65):
        progress.update("1 of 2 hosts are up, waiting for node2")
        clock.now += 1.0
    line = "horovodrun: 1 of 2 hosts are up, waiting for node2 (for {} s so far)\n"
    check_written(far, line.format(30) + line.format(60))
    progress.update("")
    progress.update("again")
    console.say("over")
    check_written(far, "horovodrun: over\n")


def test_how_the_job_goes_is_shown_while_nobody_is_awaited(terminal, pipe):
    lines = iter(["", "step 1", "step 2"])
    far, near = terminal
    progress = Progress(Console(near, near), Clock(), lambda: next(lines))
    for awaited in ("", "", "", "waiting for w1"):
        progress.update(awaited)
    cyan = "\x1b[36m"
    drawn = [f"{cyan}horovodrun: step {number}{PLAIN}" for number in (1, 2)]
    check_written(far, ERASE.join(drawn))

    far, near = pipe
    clock = Clock()
    progress = Progress(console := Console(near, near), clock, lambda: f"step {clock.now:.0f}")
    assert progress.has_status
    assert not Progress(console).has_status
    clock.now = 0.0
    for _ in range(65):
        progress.update("")
        clock.now += 1.0
    check_written(far, "horovodrun: step 30\nhorovodrun: step 60\n")


# -- who is awaited --------------------------------------------------------------------------------


def test_the_steps_of_a_start_on_several_hosts():
    hosts = [f"node{n}" for n in range(1, 7)]
    start = StartProgress(plan_slots([Host(name, 1) for name in hosts], 6), hosts, all_local=False)
    assert start.describe_awaited() == (
        "0 of 6 hosts are up, waiting for node1, node2, node3, node4 and 2 more"
    )
    start.hosts_up.update(hosts[:4])
    assert start.describe_awaited() == "4 of 6 hosts are up, waiting for node5 and node6"
    start.hosts_up.update(hosts)
    start.connected.update(hosts[1:])
    assert (
        start.describe_awaited() == "all hosts are up, waiting for node1 to connect to this machine"
    )
    start.connected.add("node1")
    start.started.update(range(5))
    assert start.describe_awaited() == "5 of 6 ranks run, waiting for rank 5 on node6"
    start.started.add(5)
    assert start.describe_awaited() == "", "nobody has said that hvd.init() is called at all"
    starting = "starting 6 ranks: no output and no hvd.init() so far"
    assert start.describe_awaited(nothing_said=True) == starting
    assert not start.is_complete
    for rank in (0, 1, 2):
        start.note_key(f"init1//identity/{rank}")
    start.note_key("init1//identities")
    assert start.describe_awaited() == (
        "3 of 6 ranks are in hvd.init(), waiting for rank 3 on node4, rank 4 on node5 and rank 5 "
        "on node6"
    )
    start.ended.update((3, 4, 5))
    assert start.describe_awaited() == ""
    assert start.is_complete


@pytest.mark.parametrize(
    ("count", "text"), [(1, "n0"), (2, "n0 and n1"), (6, "n0, n1, n2, n3 and 2 more")]
)
def test_some_names(count: int, text: str):
    assert list_some([f"n{n}" for n in range(count)]) == text


# -- colours ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "on_terminal", "in_pipe"),
    [
        ({}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "0"}, True, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
    ],
)
def test_when_colour_is_wanted(terminal, pipe, environ, on_terminal: bool, in_pipe: bool):
    assert is_colour_wanted(terminal[1], environ) is on_terminal
    assert is_colour_wanted(pipe[1], environ) is in_pipe


def test_no_line_leaves_the_terminal_coloured():
    assert paint("a\n\nb", Colour.FAILURE) == f"{RED}a{PLAIN}\n\n{RED}b{PLAIN}"
    assert paint("a", Colour.PLAIN) == "a"


def test_the_account_of_a_failure_says_the_same_in_colour(terminal):
    far, near = terminal
    failure = Exit(1, 4711, 3, "node2")
    outcome = Outcome(exits=[failure], first_failure=failure)
    account = describe_failure(outcome, ["Traceback", "", "ValueError: no"])
    text = write_to(far, near, lambda console: console.write_account(account))
    assert uncoloured(text) == account
    assert f"{RED}  1     node2  4711  exit code 3{PLAIN}\n" in text
    assert "\n  ValueError: no\n" in text, "what the worker wrote stays as it is"
    other = describe_failure(Outcome(lost=LostHost("node3", [4, 5], "lost: no answer", "")), [])
    assert uncoloured(write_to(far, near, lambda console: console.write_account(other))) == other


# -- jobs ------------------------------------------------------------------------------------------


def on_terminal(
    *arguments: str,
    env: dict[str, str] | None = None,
    until: str = "",
    then: Callable[[], object] | None = None,
) -> tuple[int, str]:
    """Run to the end, and do ``then`` when ``until`` appears; the exit status and the output."""
    far, near = pty.openpty()
    process = subprocess.Popen(
        command(*arguments),
        env=environment({"OMP_NUM_THREADS": "1", "TERM": "xterm", **(env or {})}),
        stdout=near,
        stderr=near,
    )
    os.close(near)
    seen = b""
    while True:
        try:
            data = os.read(far, 4096)
        except OSError:  # the terminal's other side was closed
            break
        if not data:
            break
        seen += data
        if then is not None and until in seen.decode(errors="ignore"):
            then()
    os.close(far)
    return process.wait(timeout=HANG), seen.decode().replace("\r\n", "\n")


# Rank 0 is in init(); the other does not come before the file is there.
LATE = """
import os, sys, time
from horovod.common.store import StoreClient
from horovod.common.wire import decode_key
address, port = (os.environ[f"HOROVOD_GLOO_RENDEZVOUS_{what}"] for what in ("ADDR", "PORT"))
store = StoreClient(address, int(port), decode_key(os.environ["_HOROVOD_SECRET_KEY"]), 60)
if os.environ["HOROVOD_RANK"] == "0":
    store.set("init1//identity/0", b"")
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""


def test_a_rank_that_comes_late_to_init_is_named(tmp_path: Path):
    awaited = "horovodrun: 1 of 2 ranks are in hvd.init(), waiting for rank 1 ("
    file = tmp_path / "go on"
    status, text = on_terminal(
        *("-np", "2", sys.executable, "-c", LATE, str(file)), until=awaited, then=file.touch
    )
    assert status == 0, text
    assert awaited in text
    assert text.endswith(ERASE), "nothing is left of it"


# Worker w1 does not come before the file is there.
LATE_WORKER = """
import os, runpy, sys, time
file = sys.argv.pop(1)
while os.environ["HOROVOD_WORKER_ID"] == "w1" and not os.path.exists(file):
    time.sleep(0.05)
runpy.run_module("tests.elastic.light_worker", run_name="__main__")
"""


def test_a_worker_that_an_elastic_job_waits_for_is_named(tmp_path: Path):
    awaited = "horovodrun: starting, waiting for w1 (localhost) ("
    file = tmp_path / "go on"
    plan = '{"steps": 30, "size": 3, "faults": {"w2": ["step", 7, "SIGKILL"]}}'
    status, text = on_terminal(
        *("-H", "localhost:3", "--min-np", "2", "--max-np", "3", "-np", "3"),
        *("--start-timeout", "200"),
        *(sys.executable, "-c", LATE_WORKER, str(file), plan),
        until=awaited,
        then=file.touch,
    )
    assert status == 0, text
    assert awaited in text
    assert f"{YELLOW}2 workers: w2 (rank 2, localhost) failed: killed by SIGKILL" in text
    assert re.search(r"\x1b\[32mre-formed with [23] ranks in \d+\.\d s\x1b\[0m\n", text)


def test_what_a_rank_writes_in_init_is_what_the_launcher_looks_for(tmp_path: Path):
    """The key is the engine's; were it renamed the launcher would show nothing."""
    from horovod.common.store import MemoryStore
    from horovod.runner.jobs.run_job import run_job
    from horovod.runner.options.arguments import parse_args

    options = parse_args(["-np", "2", "unused"])
    program = "import horovod.torch as hvd; hvd.init()"
    store = MemoryStore()
    with (tmp_path / "out").open("wb") as out:
        console = Console(out.fileno(), out.fileno())
        outcome = run_job(options, [*forked_python(), "-c", program], store=store, console=console)
    assert [one.code for one in outcome.exits] == [0, 0], (tmp_path / "out").read_text()
    start = StartProgress(plan_slots(options.hosts, 2), ["localhost"], all_local=True)
    for key in store.keys(""):
        start.note_key(key)
    assert start.in_init == {0, 1}


@pytest.mark.parametrize("colour", [True, False])
def test_a_failure_on_a_terminal(colour: bool):
    env = {} if colour else {"NO_COLOR": "1"}
    status, text = on_terminal("-np", "1", sys.executable, "-c", "raise SystemExit(3)", env=env)
    assert status == 3
    assert (f"{RED}rank 0 failed: exit code 3{PLAIN}" in text) is colour
    assert ("\x1b[3" in text) is colour
    assert "rank 0 failed: exit code 3" in text


def test_a_host_that_is_awaited_is_named(tmp_path: Path):
    stub = tmp_path / "ssh"
    stub.write_text("#!/bin/sh\nexec sleep 600\n")
    stub.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    awaited = "horovodrun: 1 of 2 hosts are up, waiting for far.example ("
    for seconds in ("2", "20", "100"):  # even this host may be up late on a busy machine
        status, text = on_terminal(
            *("-np", "2", "-H", "localhost:1,far.example:1", "--start-timeout", seconds, "true"),
            env={"PATH": path},
        )
        if awaited in text:
            break
    assert status == 1
    assert awaited in text
    assert f"cannot start on far.example: no answer within {seconds} s" in text


def test_levels_of_verbose():
    program = ("-np", "1", sys.executable, "-c", "pass")
    said = []
    for level in range(3):
        arguments = command(*["--verbose"] * level, *program)
        done = subprocess.run(
            arguments, env=environment(), capture_output=True, text=True, timeout=HANG, check=True
        )
        said.append(done.stderr)
    assert said[0] == ""
    assert "rank 0 started, pid " in said[1]
    assert "HOROVOD_GLOO_RENDEZVOUS_PORT=" in said[1]
    agent = f"horovodrun: localhost: {sys.executable} "
    assert agent not in said[1]
    assert agent in said[2]
    assert "rank 0 started, pid " in said[2]
