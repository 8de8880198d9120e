"""Whole jobs on several hosts, through a stub that stands in for ssh."""

from __future__ import annotations

import ast
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from horovod.common.store import StoreClient
from tests.effort import examples
from tests.runner import stub_ssh
from tests.runner.horovodrun import (
    HANG,
    command,
    environment,
    run,
    run_python,
    started,
    wait_for_starts,
)

DUMP = "import os; print(ascii(dict(os.environ)))"
PATIENT = {"HOROVOD_START_TIMEOUT": str(HANG)}  # for dozens of hosts on a few busy cores


@pytest.fixture
def stub(tmp_path: Path) -> dict[str, str]:
    return stub_ssh.install(tmp_path)


def dumped(stdout: str) -> dict[int, dict]:
    found = {}
    for line in stdout.splitlines():
        match = re.fullmatch(r"\[(\d+)\]<stdout>:(\{.*\})", line)
        if match:
            found[int(match[1])] = ast.literal_eval(match[2])
    return found


def test_ranks_of_several_hosts_learn_their_place(stub: dict[str, str]):
    done = run_python(4, DUMP, options=["-H", "alpha:2,beta:1,localhost:5"], env=stub)
    assert done.returncode == 0, done.stderr
    envs = dumped(done.stdout)
    names = ("HOSTNAME", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert {r: tuple(env[f"HOROVOD_{name}"] for name in names) for r, env in envs.items()} == {
        0: ("alpha", "0", "2", "0", "3"),
        1: ("alpha", "1", "2", "0", "1"),
        2: ("beta", "0", "1", "1", "3"),
        3: ("localhost", "0", "1", "2", "3"),
    }
    same = ("MASTER_ADDR", "MASTER_PORT", "HOROVOD_GLOO_RENDEZVOUS_PORT", "_HOROVOD_SECRET_KEY")
    assert all(len({env[name] for env in envs.values()}) == 1 for name in same)


TAKE_MASTER_PORT = """
import errno, os, socket
if os.environ["RANK"] == "0":
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.socket().bind(address)
    except OSError as error:
        print(errno.errorcode[error.errno])
    with socket.create_server(address), socket.create_connection(address):
        print("served")
"""


@pytest.mark.parametrize("options", [[], ["-H", "alpha:1,beta:1"]], ids=["one host", "two hosts"])
def test_the_master_port_is_left_to_the_job(options: list[str], stub: dict[str, str]):
    """A job beside it cannot get the port by chance; the job's own server can listen there."""
    done = run_python(2, TAKE_MASTER_PORT, options=options, env=stub)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"\[0\]<stdout>:(.*)", done.stdout) == ["EADDRINUSE", "served"]


def test_the_environment_travels_but_not_what_belongs_to_a_machine(stub: dict[str, str]):
    extra = {
        "MY_SETTING": "a 'quoted'\n$(value) é",
        "PYTHONPATH": "/somewhere",
        "CUDA_VISIBLE_DEVICES": "3",
        "DISPLAY": ":0",
        "SSH_AUTH_SOCK": "/tmp/agent",
        "XDG_RUNTIME_DIR": "/run/user/9",
        "TMPDIR": "/tmp",
        "HOSTNAME": "launcher",
        "HOME": "/home/launcher",
        "OMP_NUM_THREADS": "3",
    }
    options = ["-H", "alpha:1,localhost:1", "--cycle-time-ms", "7"]
    done = run_python(2, DUMP, options=options, env={**stub, **extra})
    away, here = dumped(done.stdout)[0], dumped(done.stdout)[1]
    for env in (away, here):
        assert env["MY_SETTING"] == extra["MY_SETTING"]
        assert env["PYTHONPATH"] == "/somewhere"
        assert env["PATH"] == stub["PATH"]
        assert env["HOROVOD_CYCLE_TIME"] == "7.0"
        assert env["OMP_NUM_THREADS"] == "3"
    assert away["HOME"] == stub["STUB_HOME"]
    assert away["USER"] == "me"
    stays = ("CUDA_VISIBLE_DEVICES", "DISPLAY", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR", "TMPDIR")
    assert not set(away) & {*stays, "HOSTNAME", "SSH_CONNECTION"}
    assert here["HOME"] == extra["HOME"]
    assert {name: here[name] for name in stays} == {name: extra[name] for name in stays}


NASTY = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
    st.sampled_from(["$(touch pwned)", "`touch pwned`", "'", '"', "\n", "; touch pwned", "\\"]),
)


@settings(
    max_examples=examples(8),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(arguments=st.lists(NASTY, min_size=1, max_size=4), value=NASTY, folder=NASTY)
def test_nothing_that_a_user_writes_is_ever_read_by_a_shell(
    tmp_path_factory: pytest.TempPathFactory, arguments: list[str], value: str, folder: str
):
    tmp_path = tmp_path_factory.mktemp("job")
    stub = stub_ssh.install(tmp_path)
    cwd = tmp_path / ("in " + folder.replace("/", "_"))
    cwd.mkdir()
    program = (
        "import os, sys; print(ascii({'argv': sys.argv[1:], 'value': os.environ['VALUE'], "
        "'cwd': os.getcwd()}))"
    )
    done = run_python(
        1, program, *arguments, options=["-H", "alpha:1"], env={**stub, "VALUE": value}, cwd=cwd
    )
    assert dumped(done.stdout) == {0: {"argv": arguments, "value": value, "cwd": str(cwd)}}, done
    assert not list(tmp_path.rglob("pwned"))


def test_the_key_is_in_no_command_line_and_no_message(stub: dict[str, str], tmp_path: Path):
    done = run_python(2, DUMP, options=["-H", "alpha:1,beta:1", *["--verbose"] * 2], env=stub)
    key = dumped(done.stdout)[0]["_HOROVOD_SECRET_KEY"]
    assert key not in done.stderr
    assert key not in (tmp_path / "log").read_text()
    assert "alpha: HOROVOD_GLOO_RENDEZVOUS_ADDR=127.0.0.1" in done.stderr
    assert re.search(r"^horovodrun: beta: .*ssh .*BatchMode=yes.* beta ", done.stderr, re.MULTILINE)
    assert "horovodrun: beta: reaches this machine at 127.0.0.1, port " in done.stderr


def test_ssh_gets_port_and_identity(stub: dict[str, str], tmp_path: Path):
    (tmp_path / "my key").write_text("")
    run("-np", "1", "-H", "alpha:1", "-p", "2222", "-i", str(tmp_path / "my key"), "true", env=stub)
    words = (tmp_path / "log").read_text().splitlines()
    assert words[words.index("-p") + 1] == "2222"
    assert words[words.index("-i") + 1] == str(tmp_path / "my key")
    assert "BatchMode=yes" in words


def test_hosts_that_cannot_be_reached_are_named_in_the_words_of_ssh(stub: dict[str, str]):
    hosts = "alpha:1,unknown1:1,unknown2:1,mute:1,stranger:1"
    done = run("-np", "5", "-H", hosts, "touch", "started", env=stub, patient=True)
    assert done.returncode == 1
    for name in ("unknown1", "unknown2"):
        words = f"ssh: Could not resolve hostname {name}: Name or service not known"
        assert f"horovodrun: cannot start on {name}: {words}\n" in done.stderr
    assert "cannot start on mute: ssh ended with exit code 255 and no message" in done.stderr
    assert "cannot start on stranger: Host key verification failed." in done.stderr
    assert "log in once by hand" in done.stderr
    assert "alpha" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_host_that_does_not_answer_in_time_is_named(stub: dict[str, str]):
    for seconds in ("0.5", "10", "100"):  # a busy machine may not even start the program in time
        env = {**stub, "HOROVOD_START_TIMEOUT": seconds}
        done = run("-np", "2", "-H", "alpha:1,silent:1", "true", env=env)
        if "still trying" in done.stderr:
            break
    assert done.returncode == 1
    assert f"cannot start on silent: no answer within {seconds} s:\n" in done.stderr
    assert "still trying" in done.stderr


def test_another_host_without_python_is_named(stub: dict[str, str]):
    done = run("-np", "1", "-H", "pythonless:1", "true", env=stub)
    assert done.returncode == 1
    assert "cannot start on pythonless: " in done.stderr
    assert "/no/such/python" in done.stderr


def test_greetings_of_a_shell_do_no_harm(stub: dict[str, str]):
    done = run("-np", "1", "-H", "noisy:1", "echo", "hello", env={**stub, "OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0]<stdout>:hello\n", "")


def test_no_ssh_at_all(tmp_path: Path):
    done = run("-np", "1", "-H", "alpha:1", "true", env={"PATH": str(tmp_path)})
    assert done.returncode == 127
    assert "there is no program 'ssh' here" in done.stderr


def test_a_command_that_another_host_lacks(stub: dict[str, str]):
    done = run("-np", "1", "-H", "alpha:1", "no-such-command", env=stub)
    assert done.returncode == 127
    assert "cannot start rank 0 on alpha: command not found: 'no-such-command'" in done.stderr


def test_a_host_without_a_way_back_is_told_with_what_to_do(stub: dict[str, str]):
    done = run("-np", "1", "-H", "distant:1", "--network-interfaces", "nope0", "true", env=stub)
    assert done.returncode == 2
    assert "no interface with an address among nope0" in done.stderr
    assert "lo" in done.stderr


def test_chosen_interfaces_bind_the_store_and_reach_the_ranks(stub: dict[str, str]):
    options = ["-H", "alpha:1,beta:1", "--network-interfaces", "nope0,lo"]
    done = run_python(2, DUMP, options=options, env=stub)
    for env in dumped(done.stdout).values():
        assert env["HOROVOD_GLOO_IFACE"] == "lo"
        assert env["NCCL_SOCKET_IFNAME"] == "lo"
        assert env["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1"
        assert env["MASTER_ADDR"] == "127.0.0.1"


STORE = """
import os, signal
print("pid", os.getpid())
print("store", *(os.environ[f"HOROVOD_GLOO_RENDEZVOUS_{what}"] for what in ("ADDR", "PORT")))
signal.pause()
"""


def test_strangers_find_no_open_store(stub: dict[str, str]):
    with started(2, STORE, "-H", "alpha:1,localhost:1", env=stub) as job:
        job.wait_for_pids(2)
        assert job.process.stdout is not None
        line = job.process.stdout.readline().decode()
        while "store" not in line:
            line = job.process.stdout.readline().decode()
        address, port = line.split()[1:]
        with pytest.raises(PermissionError):
            StoreClient(address, int(port), bytes(32), HANG)
        others = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None)}
        for other in others - {address}:
            with pytest.raises(OSError):
                socket.create_connection((other, int(port)), timeout=1)
        job.process.send_signal(signal.SIGINT)
        assert job.finish()[0] == 130


def test_the_first_failure_is_named_with_its_host_and_ends_the_others(
    stub: dict[str, str], tmp_path: Path
):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = (
        "import os, signal, sys\n"
        "if os.environ['RANK'] == '1':\n"
        f"    open({str(fifo)!r}).read()\n"
        "    sys.exit('beta is broken')\n"
        "signal.pause()\n"
    )
    options = ["-H", "alpha:1,beta:1,localhost:1", "--verbose"]
    with started(3, program, *options, env=stub) as job:
        wait_for_starts(job.process, 3)
        fifo.write_text("fail now")
        code, _, stderr = job.finish()
    assert code == 1
    assert "horovodrun: rank 1 on beta failed: exit code 1; stopping the other 2\n" in stderr
    assert re.search(r"^  1     beta  \d+ +exit code 1$", stderr, re.MULTILINE), stderr
    assert "  beta is broken\n" in stderr


NOTICE = """
import os, signal, socket, sys, time
address = "\\0" + sys.argv[1]
if os.environ["RANK"] == "1":
    server = socket.create_server(address, family=socket.AF_UNIX)
    peers = [server.accept() for _ in range(3)]
    os.kill(os.getpid(), signal.SIGSEGV)
peer = socket.socket(socket.AF_UNIX)
while peer.connect_ex(address):
    time.sleep(0.01)
peer.recv(1)
os._exit(1)
"""


def test_of_failures_on_several_hosts_a_killed_rank_is_the_cause(stub: dict[str, str]):
    """The others notice the loss at once, and their hosts may be the first to report."""
    name = f"horovod-test-{os.getpid()}"
    options = ["-H", "a:1,b:1,c:1,d:1"]
    done = run_python(4, NOTICE, name, options=options, env=stub, patient=True)
    assert done.returncode == 139, done.stderr
    assert "rank 1 on b failed: killed by SIGSEGV" in done.stderr


SIT = "import os, signal; print('pid', os.getpid()); signal.pause()"


def parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def test_a_lost_connection_is_named_and_ends_the_job(stub: dict[str, str]):
    with started(3, SIT, "-H", "alpha:2,localhost:1", env=stub) as job:
        pids = job.wait_for_pids(3)
        agents = [parent(pid) for pid in pids]
        (alpha,) = {agent for agent in agents if agents.count(agent) == 2}
        os.kill(alpha, signal.SIGKILL)  # the stub has become the agent
        code, _, stderr = job.finish()
        assert code == 1
        assert "alpha (rank 0-1) lost: ssh ended with exit code -9; stopping the others" in stderr
        assert re.search(r"^  0-1   alpha  -    lost: ssh ended", stderr, re.MULTILINE), stderr
        assert job.gone(
            next(pid for pid, agent in zip(pids, agents, strict=True) if agent != alpha)
        )


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_killed_launcher_takes_along_the_ranks_of_all_hosts(stub: dict[str, str], stubborn: bool):
    ignore = "signal.signal(15, signal.SIG_IGN);" if stubborn else ""
    program = f"import os, signal; {ignore} print('pid', os.getpid())\nwhile 1: signal.pause()"
    with started(3, program, "-H", "alpha:1,beta:1,localhost:1", env=stub) as job:
        pids = job.wait_for_pids(3)
        job.process.kill()
        assert all([job.gone(pid) for pid in pids])


def test_ctrl_c_is_graceful_on_all_hosts(stub: dict[str, str]):
    program = (
        "import os, signal, sys\n"
        "def save(*_):\n"
        "    print('saved')\n"
        "    sys.exit(4)\n"
        "signal.signal(signal.SIGINT, save)\n"
        "print('pid', os.getpid())\n"
        "while True:\n"
        "    signal.pause()\n"
    )
    with started(3, program, "-H", "alpha:2,beta:1", env=stub) as job:
        pids = job.wait_for_pids(3)
        job.process.send_signal(signal.SIGINT)
        code, stdout, stderr = job.finish()
        assert code == 130
        assert sorted(stdout.splitlines()) == [f"[{rank}]<stdout>:saved" for rank in range(3)]
        assert "Horovod detected" not in stderr
        assert all([job.gone(pid) for pid in pids])


def test_ctrl_c_while_hosts_are_being_reached(stub: dict[str, str]):
    process = subprocess.Popen(
        command("-np", "2", "-H", "localhost:1,silent:1", "--verbose", "true"),
        env=environment(stub),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    while b"localhost: agent runs" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=HANG)
    assert process.returncode == 130
    assert b"cannot start" not in stderr


def test_output_of_other_hosts_in_files_and_of_chosen_ranks_only(
    stub: dict[str, str], tmp_path: Path
):
    program = "import os, sys; print('out', os.environ['RANK']); print('err', file=sys.stderr)"
    options = [
        "-H",
        "alpha:2,beta:1",
        "--output-filename",
        str(tmp_path / "logs"),
        "--output-ranks",
        "1-2",
    ]
    done = run_python(3, program, options=options, env={**stub, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[1]<stdout>:out 1", "[2]<stdout>:out 2"]
    assert sorted(done.stderr.splitlines()) == ["[1]<stderr>:err", "[2]<stderr>:err"]
    for rank in range(3):
        assert (tmp_path / "logs" / f"rank.{rank}" / "stdout").read_text() == f"out {rank}\n"
        assert (tmp_path / "logs" / f"rank.{rank}" / "stderr").read_text() == "err\n"


def test_threads_are_shared_out_on_each_host_and_said_once(stub: dict[str, str]):
    cores = len(os.sched_getaffinity(0))
    done = run_python(3, DUMP, options=["--verbose", "-H", "alpha:2,beta:1"], env=stub)
    found = {rank: env["OMP_NUM_THREADS"] for rank, env in dumped(done.stdout).items()}
    assert found == {0: str(max(1, cores // 2)), 1: str(max(1, cores // 2)), 2: str(cores)}
    assert done.stderr.count("for each worker on alpha (") == 1
    assert done.stderr.count("for each worker on beta (") == 1


def test_binding_to_cores(stub: dict[str, str]):
    cores = sorted(os.sched_getaffinity(0))
    program = "import os; print({'cores': sorted(os.sched_getaffinity(0))})"
    options = ["-H", f"alpha:{len(cores)}", "--cpu-bind", "core"]
    done = run_python(len(cores), program, options=options, env=stub)
    assert dumped(done.stdout) == {index: {"cores": [core]} for index, core in enumerate(cores)}


def test_many_hosts_take_few_descriptors_and_threads(stub: dict[str, str]):
    count = 40
    env = {**stub, **PATIENT}
    with started(count, SIT, "-H", f"h[1-{count}]:1", env=env) as job:
        job.wait_for_pids(count)
        pid = job.process.pid
        assert len(os.listdir(f"/proc/{pid}/fd")) <= 3 * count + 20
        assert len(os.listdir(f"/proc/{pid}/task")) <= 2  # the loop and the store
        job.process.send_signal(signal.SIGTERM)
        assert job.finish()[0] == 143


def test_the_launchers_need_of_descriptors_is_not_passed_on(stub: dict[str, str]):
    program = "import resource; print({'limit': resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"
    launcher = command("-np", "21", "-H", "h[1-20]:1,localhost:1", sys.executable, "-c", program)
    done = subprocess.run(
        ["sh", "-c", 'ulimit -S -n 50; exec "$@"', "sh", *launcher],
        env=environment({**stub, **PATIENT}),
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stderr
    assert dumped(done.stdout)[20] == {"limit": 50}


def test_a_dry_run_tells_everything_and_starts_nothing(stub: dict[str, str], tmp_path: Path):
    done = run(
        *(
            "-np",
            "3",
            "-H",
            "alpha:2,localhost:1",
            "-p",
            "2222",
            "--cycle-time-ms",
            "7",
            "--dry-run",
        ),
        *("touch", str(tmp_path / "a file")),
        env={**stub, "_HOROVOD_SECRET_KEY": "x" * 44},
    )
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert f"touch '{tmp_path}/a file'" in text
    assert "alpha (through ssh): ranks 0-1" in text
    assert "rank 2 of 3: localhost, local 0 of 1, cross 1 of 2" in text
    assert "HOROVOD_CYCLE_TIME=7.0" in text
    assert "HOROVOD_RANK=1" in text
    assert "-p 2222" in text
    assert "alpha -- 'exec " in text
    assert "x" * 44 not in text
    assert not (tmp_path / "log").exists()
    assert not (tmp_path / "a file").exists()


def test_a_dry_run_on_this_machine_needs_no_other(tmp_path: Path):
    done = run("-np", "2", "--dry-run", sys.executable, "train.py", env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0
    assert "the ranks meet at 127.0.0.1" in done.stdout
    assert "OMP_NUM_THREADS=1" in done.stdout
