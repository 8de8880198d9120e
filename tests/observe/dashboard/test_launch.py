"""``--dashboard`` from the command line: the link, ports, failures, and jobs that do not notice."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("aiohttp")

import horovod
from horovod.observe.dashboard.watching import (
    DEFAULT_PORT,
    Address,
    listen,
    parse_address,
    title_of,
)
from horovod.runner.options.arguments import parse_args
from tests.observe.dashboard.training import saved
from tests.runner.horovodrun import HANG, command, environment, run, run_python

# A worker that reports as a real rank does, without torch.
REPORTER = """
import json, os, sys, time
from horovod.common.joining.launcher_store import launchers_store
store = launchers_store(os.environ).connect(60)
rank, interval = int(os.environ["HOROVOD_RANK"]), os.environ.get("HOROVOD_STATS_INTERVAL", "none")
def report(step, state="training"):
    steps = [[step, time.time(), 0.1, 0.05, 0.01, 0.01, 0.0]]
    text = {"version": 1, "rank": rank, "size": 2, "local_rank": rank, "host": "x",
            "pid": os.getpid(), "generation": 0, "time": time.time(), "state": state,
            "stats": {"steps": step, "steps_per_second": 10.0}, "steps": steps,
            "waiting": None, "metrics": {}}
    store.set(f"stats/0/{rank}", json.dumps(text).encode())
assert not any(name.startswith("HOROVOD_DASHBOARD") for name in os.environ)
print("interval", interval, flush=True)
"""
LINK = re.compile(r"horovodrun: dashboard: (http://\S+)")


class Running:
    """A horovodrun that has printed its link."""

    def __init__(self, *arguments: str, **env: str) -> None:
        self.process = subprocess.Popen(
            command(*arguments),
            env=environment(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        self.lines: list[str] = []
        self.link = ""
        for line in self.process.stdout:
            self.lines.append(line)
            if match := LINK.match(line):
                self.link = match[1]
                break
        self._rest = threading.Thread(target=lambda: self.lines.extend(self.process.stdout or ()))
        self._rest.start()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def ask(self, path: str) -> tuple[int, bytes]:
        where = urlsplit(self.link)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=HANG)
        try:
            token = where.query.removeprefix("token=")
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def wait_for(self, text: str) -> str:
        """What /metrics says, once that has the text."""
        deadline = time.monotonic() + HANG
        while True:
            found = self.ask("/metrics")[1].decode()
            if text in found:
                return found
            assert time.monotonic() < deadline, found
            time.sleep(0.05)

    def finish(self) -> int:
        status = self.process.wait(HANG)
        self._rest.join()
        return status


@contextlib.contextmanager
def running(*arguments: str, **env: str) -> Iterator[Running]:
    job = Running(*arguments, **env)
    try:
        assert job.link, job.output
        yield job
    finally:
        if job.process.poll() is None:
            job.process.terminate()
        job.finish()


# -- arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("on", Address()),
        ("1", Address()),
        ("True", Address()),
        ("off", None),
        ("0", None),
        ("", None),
        (None, None),
        ("8000", Address("127.0.0.1", 8000)),
        (":8000", Address("127.0.0.1", 8000)),
        (":0", Address("127.0.0.1", 0)),
        ("0.0.0.0:80", Address("0.0.0.0", 80)),
        ("[::1]:80", Address("::1", 80)),
        ("node-1.example:80", Address("node-1.example", 80)),
    ],
)
def test_addresses(text: str | None, expected: object):
    assert parse_address(text) == expected


@pytest.mark.parametrize("text", ["x", "host", "1.2.3.4", "a:b", "a:99999", "::1", "http://a:1"])
def test_what_is_no_address(text: str):
    with pytest.raises(ValueError, match="is not ADDRESS:PORT"):
        parse_address(text)


@pytest.mark.parametrize(
    ("argv", "value", "rest"),
    [
        ("--dashboard python train.py", "on", "python train.py"),
        ("--dashboard :9000 python train.py", ":9000", "python train.py"),
        ("--dashboard=0.0.0.0:9000 python a:1", "0.0.0.0:9000", "python a:1"),
        ("--dashboard -H localhost:2 python a", "on", "python a"),
        ("-H localhost:2 --dashboard python --dashboard x", "on", "python --dashboard x"),
        ("--verb --dashboard python a", "on", "python a"),
        ("--blacklist-cooldown-range 1 2 --min-np 1 --dashboard a b", "on", "a b"),
        ("--dashboard -- python a", "on", "python a"),
        ("--verbose python --dashboard :1", None, "python --dashboard :1"),
        ("-- --dashboard", None, "--dashboard"),
    ],
)
def test_the_command_is_not_taken_for_an_address(argv: str, value: str | None, rest: str):
    options = parse_args(["-np", "2", *argv.split()], {})
    assert options.dashboard == value
    assert options.command == rest.split()


def test_options_of_a_configuration_file(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text("dashboard:\n  address: 127.0.0.1:9001\n  save: page.html\n")
    options = parse_args(["-np", "2", "--config-file", str(file), "cmd"], {})
    assert (options.dashboard, options.dashboard_save) == ("127.0.0.1:9001", "page.html")


def test_titles_have_no_arguments_in_them():
    assert title_of(["python", "-u", "/home/me/train.py", "--key", "secret"]) == "train.py"
    assert title_of(["python", "-m", "my.module", "secret"]) == "my.module"
    assert title_of(["/bin/true", "secret"]) == "true"


def test_a_port_in_use_leads_to_the_next_one():
    with listen(Address(port=0)) as first:
        port = first.getsockname()[1]
        with listen(Address(port=port)) as second:
            assert second.getsockname()[1] > port


# -- mistakes --------------------------------------------------------------------------------


def test_an_address_of_another_machine():
    found = run_python(1, "print('ran')", options=["--dashboard", "192.0.2.1:0"])
    assert found.returncode == 2
    assert "argument --dashboard: cannot listen on 192.0.2.1" in found.stderr
    assert "ran" not in found.stdout


def test_a_variable_that_is_no_address():
    found = run_python(1, "print('ran')", env={"HOROVOD_DASHBOARD": "everywhere"})
    assert found.returncode == 2
    assert "'everywhere' is not ADDRESS:PORT" in found.stderr
    assert "ran" not in found.stdout


def test_a_file_that_could_not_be_saved(tmp_path: Path):
    options = ["--dashboard", ":0", "--dashboard-save", str(tmp_path / "no" / "page.html")]
    found = run_python(1, "print('ran')", options=options)
    assert found.returncode == 2
    assert "argument --dashboard-save" in found.stderr
    assert "ran" not in found.stdout


def test_saving_alone_has_no_effect():
    found = run_python(1, "print('ran')", options=["--dashboard-save", "page.html"])
    assert found.returncode == 0
    assert "--dashboard-save has no effect without --dashboard" in found.stderr


def test_without_the_library_the_error_says_what_to_install(tmp_path: Path):
    (tmp_path / "aiohttp.py").write_text("raise ModuleNotFoundError('gone', name='aiohttp')")
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    found = run_python(1, "print('ran')", options=["--dashboard"], env={"PYTHONPATH": path})
    assert found.returncode == 1
    assert "pip install 'horovod[dashboard]'" in found.stderr
    assert "ran" not in found.stdout
    without = run_python(1, "print('ran')", env={"PYTHONPATH": path})
    assert without.returncode == 0


@pytest.mark.parametrize("content", ["", "short\n", "with some spaces in it\n"])
def test_a_token_file_that_is_no_good(tmp_path: Path, content: str):
    file = tmp_path / "token"
    file.write_text(content)
    env = {"HOROVOD_DASHBOARD_TOKEN_FILE": str(file), "HOROVOD_DASHBOARD": ":0"}
    found = run_python(1, "print('ran')", env=env)
    assert found.returncode == 2
    assert "HOROVOD_DASHBOARD_TOKEN_FILE: the first line of" in found.stderr
    assert content.strip() not in found.stderr.replace(str(file), "") or not content


# -- jobs ------------------------------------------------------------------------------------


def test_a_job_with_a_page(tmp_path: Path):
    gate = tmp_path / "gate"
    program = REPORTER + (
        f"report(7)\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.05)\nreport(9, 'ended')"
    )
    path = tmp_path / "page.html"
    secret = "value-of-the-environment"
    options = ["-np", "2", "--dashboard", ":0", "--dashboard-save", str(path)]
    with running(*options, sys.executable, "-c", program, "argument-secret", SECRET=secret) as job:
        text = job.wait_for('horovod_steps_total{rank="1",host="localhost"} 7.0')
        # The page under its link, and the job's processes as the launcher knows them.
        assert job.link.startswith("http://127.0.0.1:")
        assert job.ask("/")[0] == 200
        gate.touch()
        assert job.finish() == 0
    output = job.output
    assert output.count("interval 1") == 2
    token = job.link.partition("token=")[2]
    assert output.count(token) == 1
    content = saved(path)
    board = content["board"]
    assert board["job"]["ended"]["status"] == 0
    assert [rank["step"] for rank in board["ranks"]] == [9, 9]
    assert [rank["state"] for rank in board["ranks"]] == ["ended", "ended"]
    assert content["output"]["0"][0][2] == "interval 1"
    for hidden in (token, secret, "argument-secret"):
        assert hidden not in path.read_text()
        assert hidden not in text


def test_a_failed_job_is_saved_with_its_cause(tmp_path: Path):
    path = tmp_path / "page.html"
    program = (
        REPORTER + "report(3)\nif rank == 1: raise ValueError('<b>wrong</b>')\ntime.sleep(100)"
    )
    options = ["--dashboard", ":0", "--dashboard-save", str(path)]
    found = run_python(2, program, options=options)
    assert found.returncode == 1
    board = saved(path)["board"]
    ended = board["job"]["ended"]
    assert ended["status"] == 1
    assert ended["cause"] == "rank 1 on localhost: exit code 1"
    assert any("ValueError: <b>wrong</b>" in line for line in ended["account"])
    assert [rank["state"] for rank in board["ranks"]] == ["ended", "failed"]
    assert board["ranks"][0]["why"] == "stopped by the launcher"
    assert [event["kind"] for event in board["events"]] == ["lost"]
    assert f"horovodrun: dashboard: saved to {path}" in found.stderr


def test_a_job_that_cannot_start_is_saved_too(tmp_path: Path):
    path = tmp_path / "page.html"
    options = ["--dashboard", ":0", "--dashboard-save", str(path), "--output-filename", "/proc/x"]
    found = run_python(1, "print('ran')", options=options)
    assert found.returncode == 2
    assert "could not start" in saved(path)["board"]["job"]["ended"]["cause"]


def test_ctrl_c_with_a_page_open(tmp_path: Path):
    program = REPORTER + "report(3)\ntime.sleep(1000)"
    path = tmp_path / "page.html"
    options = ["-np", "2", "--dashboard", ":0", "--dashboard-save", str(path)]
    with running(*options, sys.executable, "-c", program) as job:
        job.wait_for('horovod_steps_total{rank="1"')
        where = urlsplit(job.link)
        with socket.create_connection((where.hostname, where.port)):  # and says nothing
            job.process.send_signal(signal.SIGINT)
            assert job.finish() == 130
    assert "signal 2" in saved(path)["board"]["job"]["ended"]["cause"]


def test_a_launcher_that_is_killed_leaves_nothing_behind():
    program = REPORTER + "report(3)\nprint('pid', os.getpid(), flush=True)\ntime.sleep(1000)"
    with running("-np", "2", "--dashboard", ":0", sys.executable, "-c", program) as job:
        deadline = time.monotonic() + HANG
        while len(pids := [int(line.split()[-1]) for line in job.lines if ":pid " in line]) < 2:
            assert time.monotonic() < deadline, job.output
            time.sleep(0.05)
        handles = [os.pidfd_open(pid) for pid in pids]
        job.process.kill()
        job.finish()
        for handle in handles:
            assert select.select([handle], [], [], HANG)[0], "the worker lives on"
            os.close(handle)
        with pytest.raises(OSError):
            job.ask("/")


def test_a_scripts_own_server_is_not_disturbed(tmp_path: Path):
    """It may even take the port that the page would have had: who comes second gives way."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        program = REPORTER + "report(3)"
        found = run_python(1, program, options=["--dashboard", f":{port}"])
    assert found.returncode == 0
    link = LINK.search(found.stderr)[1]
    assert urlsplit(link).port != port


def test_a_token_of_your_own_is_not_printed(tmp_path: Path):
    file = tmp_path / "token"
    token = "0123456789abcdef0123"
    file.write_text(f"{token}\nanything else\n")
    program = REPORTER + "report(3)\ntime.sleep(1000)"
    env = {"HOROVOD_DASHBOARD_TOKEN_FILE": str(file), "HOROVOD_DASHBOARD": ":0"}
    with running("-np", "1", sys.executable, "-c", program, **env) as job:
        assert "token" not in job.link
        job.link += f"?token={token}"
        job.wait_for("horovod_steps_total")
        job.process.terminate()
        job.finish()
    assert token not in job.output


def test_without_the_option_nothing_is_there():
    found = run_python(1, "import os\nprint(os.environ.get('HOROVOD_STATS_INTERVAL'))")
    assert found.returncode == 0
    assert "<stdout>:None" in found.stdout
    assert "dashboard" not in found.stderr


def test_mpirun_takes_the_launchers_place():
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if shutil.which("mpirun", path=path) is None:
        pytest.skip("there is no mpirun")
    options = ["-np", "1", "--mpi", "--dashboard", "--dry-run"]
    found = run(*options, sys.executable, "-c", "0", env={"PATH": path})
    assert "no dashboard: mpirun takes horovodrun's place" in found.stderr


def test_horovod_run_has_a_page_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any):
    def train() -> int:
        namespace: dict[str, Any] = {}
        exec(program + "report(5)", namespace)
        return int(namespace["rank"])

    program = REPORTER
    path = tmp_path / "page.html"
    monkeypatch.setenv("HOROVOD_DASHBOARD", ":0")
    monkeypatch.setenv("HOROVOD_DASHBOARD_SAVE", str(path))
    assert horovod.run(train, num_proc=2) == [0, 1]
    assert LINK.search(capfd.readouterr().err)
    board = saved(path)["board"]
    assert [rank["step"] for rank in board["ranks"]] == [5, 5]
    assert "train" in board["job"]["title"]
    assert DEFAULT_PORT == 8470
