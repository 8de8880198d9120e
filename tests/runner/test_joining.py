"""Hosts that join a job by themselves, and agents that a command of the user's starts."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from horovod.common.wire import encode_key, new_key
from horovod.runner.agents.channel import connect
from horovod.runner.agents.link_server import JoinServer, gather
from horovod.runner.agents.supervise import raise_descriptor_limit
from horovod.runner.jobs.join import job_secret
from horovod.runner.options.arguments import parse_args
from horovod.runner.slots.hosts import Host
from tests.ports import reserved_port
from tests.runner.horovodrun import HANG, command, environment, run_python

WHERE = "import os; print(os.environ['HOROVOD_HOSTNAME'], os.environ['HOROVOD_LOCAL_RANK'])"


@contextmanager
def joining(*arguments: str, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command(*arguments),
        env=environment(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_job_on_hosts_that_join(tmp_path: Path):
    """Without a secret in any command line; the host that comes early waits for the launcher."""
    secret = str(tmp_path / "secret")
    with (
        reserved_port() as port,
        joining("--join", f"127.0.0.1:{port}", "-H", "a:2", "--secret-file", secret, env={}) as a,
        joining("--join", f"127.0.0.1:{port}", "-H", "b", "--secret-file", secret, env={}) as b,
    ):
        wait = ["--listen", f"127.0.0.1:{port}", "--secret-file", secret]
        done = run_python(3, WHERE, options=[*wait, "-H", "a:2,b:1"])
        ends = [each.wait(HANG) for each in (a, b)]
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0]<stdout>:a 0",
        "[1]<stdout>:a 1",
        "[2]<stdout>:b 0",
    ]
    assert ends == [0, 0]
    assert os.stat(secret).st_mode & 0o777 == 0o600


@contextmanager
def server(*hosts: Host) -> Iterator[tuple[JoinServer, bytes]]:
    key = new_key()
    opened = JoinServer("127.0.0.1", 0, key, hosts)
    try:
        yield opened, key
    finally:
        opened.close()


def test_who_has_another_secret_is_told_and_stays_out(caplog: pytest.LogCaptureFixture):
    env = {"_HOROVOD_SECRET_KEY": encode_key(new_key())}
    with server(Host("a", 1)) as (opened, _):
        arguments = ("--join", f"127.0.0.1:{opened.port}", "-H", "a:1")
        with joining(*arguments, env=env) as stranger:
            said = stranger.communicate(timeout=HANG)[1]
        assert not opened.links()
    assert stranger.returncode == 1
    assert f"cannot join 127.0.0.1:{opened.port}" in said
    assert "its secret is another one" in said
    assert env["_HOROVOD_SECRET_KEY"] not in said
    assert "refused a connection from 127.0.0.1" in caplog.text


def ask(opened: JoinServer, key: bytes, name: str) -> tuple[str, str]:
    """How the server answers a host that asks to join, if it lets it go."""
    channel = connect("127.0.0.1", opened.port, key, HANG)
    channel.send({"host": name, "slots": 1})
    channel.socket.setblocking(True)
    messages = channel.receive() or []
    channel.close()
    return messages[0].header["end"], messages[0].header["why"]


def test_strangers_names_and_twins_are_refused(caplog: pytest.LogCaptureFixture):
    with server(Host("a", 3), Host("b", 1)) as (opened, key):
        with socket.create_connection(("127.0.0.1", opened.port)) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
            raw.settimeout(HANG)
            while raw.recv(1 << 12):
                pass
        first = connect("127.0.0.1", opened.port, key, HANG)
        first.send({"host": "a", "slots": 1})
        while not opened.waiting():
            opened.wait(HANG)
        assert opened.waiting()["a"].slots == 3  # as the job's own list says
        how, why = ask(opened, key, "a")
        assert (how, why) == (
            "refused",
            "there is a host a in this job already; say another name with -H",
        )
        how, why = ask(opened, key, "c")
        assert (how, why) == ("refused", "c is not among the hosts of this job, which are a, b")
        with pytest.raises(TimeoutError, match=r"b did not join within 0 s"):
            gather(opened, [Host("a", 3), Host("b", 1)], 4, 0.0)
        first.close()
    assert "refused a connection from 127.0.0.1" in caplog.text


def test_without_names_hosts_are_taken_until_there_are_enough_slots():
    with server() as (opened, key):
        channels = []
        for name in ("a", "b", "c"):
            channels.append(connect("127.0.0.1", opened.port, key, HANG))
            channels[-1].send({"host": name, "slots": 2})
            while name not in opened.waiting():
                opened.wait(HANG)
        assert list(gather(opened, [], 3, HANG)) == ["a", "b"]
        assert list(gather(opened, [Host("localhost", 2)], 3, HANG)) == ["a"]
        with pytest.raises(TimeoutError, match=r"needs 7 .*, and a:2, b:2, c:2 joined"):
            gather(opened, [], 7, 0.0)
        for channel in channels:
            channel.close()


def test_a_launcher_with_many_open_files_sees_its_hosts():
    """Hundreds of hosts and workers take more than the 1024 descriptors that `select` knows."""
    raise_descriptor_limit(4096)
    with server() as (opened, key), contextlib.ExitStack() as files:
        for _ in range(1100):
            files.enter_context(open(os.devnull))
        channel = connect("127.0.0.1", opened.port, key, HANG)
        channel.send({"host": "a", "slots": 2})
        assert list(gather(opened, [], 2, HANG)) == ["a"]
        channel.close()
        while opened.waiting():
            opened.wait(0.01)


def test_a_secret_that_others_can_read_is_none(tmp_path: Path):
    path = tmp_path / "secret"
    assert job_secret(str(path), {}, make=True) == job_secret(str(path), {})
    path.chmod(0o640)
    with pytest.raises(ValueError, match="others may read or change"):
        job_secret(str(path), {})
    path.chmod(0o600)
    path.write_text("hunter2")
    with pytest.raises(ValueError, match="not the base64 form") as caught:
        job_secret(str(path), {})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ValueError, match="No such file"):
        job_secret(str(tmp_path / "none"), {})
    with pytest.raises(ValueError, match="name a file with --secret-file"):
        job_secret(None, {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--join", "node1:1", "python"], "leave out 'python'"),
        (["--join", "29400"], "say where the job waits"),
        (["--join", "node1:1", "-H", "a,b"], "-H names this machine alone"),
        (["--join", "node1"], "is not HOST:PORT"),
        (["-np", "1", "--listen", "1", "--mpi", "x"], "not possible with --mpi"),
        (["-np", "1", "--start-command", "kubectl exec", "x"], "must stand"),
        (["-np", "1", "--start-command", "no-such-program {host}", "x"], "no program"),
    ],
)
def test_wrong_options_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        parse_args(arguments, {})
    assert message in capsys.readouterr().err


def test_a_command_of_the_users_starts_agents(tmp_path: Path):
    """Such as ``kubectl exec -i``: it gets the host's name, and Python with its arguments."""
    script = tmp_path / "reach"
    script.write_text(
        '#!/bin/sh\necho "$1" >> "$LOG"; [ "$2" = -- ] || exit 9; shift 2\nexec "$@"\n'
    )
    script.chmod(0o755)
    done = run_python(
        *(2, WHERE),
        options=["-H", "pod-0:1,pod-1:1", "--start-command", f"{script} {{host}} --"],
        env={"LOG": str(tmp_path / "log")},
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>:pod-0 0", "[1]<stdout>:pod-1 0"]
    assert sorted((tmp_path / "log").read_text().split()) == ["pod-0", "pod-1"]


def test_a_command_that_passes_no_input_on_is_explained():
    done = run_python(
        *(1, WHERE),
        options=["-H", "pod-0:1", "--start-command", "sh -c '\"$@\" < /dev/null' {host}"],
    )
    assert done.returncode == 1
    assert "cannot start on pod-0" in done.stderr
    assert "does not pass its stdin on" in done.stderr


KILL_THE_AGENT = """
import os, pathlib, signal, sys, time
if os.environ["HOROVOD_RANK"] == "1":
    pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGKILL)
time.sleep(600)
"""


def test_what_an_agent_that_was_killed_has_left_is_ended(tmp_path: Path):
    """Its host lives, and with it the workers. A second agent ends them."""
    pid = tmp_path / "pid"
    done = run_python(
        *(2, KILL_THE_AGENT, str(pid)),
        options=["-H", "pod-0:1,pod-1:1", "--start-command", "env HOST={host}"],
    )
    assert done.returncode != 0
    assert "pod-1 (rank 1) lost" in done.stderr
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(pid.read_text())).status() == psutil.STATUS_ZOMBIE
