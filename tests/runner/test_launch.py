"""Whole jobs through ``horovodrun``: environment, output, exit status."""

from __future__ import annotations

import ast
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import horovod
from tests.forked_python import forked_python
from tests.runner.horovodrun import HANG, ROOT, command, environment, run, run_python

DUMP = "import os; print(ascii(dict(os.environ)))"


def dumped(stdout: str) -> dict[int, dict[str, str]]:
    """What each rank printed of a dictionary."""
    found = {}
    for line in stdout.splitlines():
        match = re.fullmatch(r"\[(\d+)\]<stdout>:(\{.*\})", line)
        if match:
            found[int(match[1])] = ast.literal_eval(match[2])
    return found


def test_workers_learn_their_place():
    done = run_python(3, DUMP, env={"HOROVOD_RANK": "9", "RANK": "9", "OMPI_COMM_WORLD_RANK": "9"})
    assert done.returncode == 0, done.stderr
    envs = dumped(done.stdout)
    assert sorted(envs) == [0, 1, 2]
    for rank, env in envs.items():
        place = {
            "HOROVOD_HOSTNAME": "localhost",
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": "3",
            "HOROVOD_LOCAL_RANK": str(rank),
            "HOROVOD_LOCAL_SIZE": "3",
            "HOROVOD_CROSS_RANK": "0",
            "HOROVOD_CROSS_SIZE": "1",
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "3",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "MASTER_ADDR": "127.0.0.1",
            "PYTHONUNBUFFERED": "1",
        }
        assert {name: env.get(name) for name in place} == place
        assert "HOROVOD_LAUNCHER_TTY" not in env
    shared = ("MASTER_PORT", "HOROVOD_GLOO_RENDEZVOUS_PORT", "_HOROVOD_SECRET_KEY")
    assert all(len({env[name] for env in envs.values()}) == 1 for name in shared)
    assert envs[0]["MASTER_PORT"] != envs[0]["HOROVOD_GLOO_RENDEZVOUS_PORT"]


MEET = """
import os
from horovod.common.store import StoreClient
from horovod.common.wire import decode_key
store = StoreClient(
    os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"],
    int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]),
    decode_key(os.environ["_HOROVOD_SECRET_KEY"]),
    200,
)
rank = os.environ["HOROVOD_RANK"]
store.set(rank, b"from " + rank.encode())
print({"other": store.get(str(1 - int(rank)), 200).decode()})
"""


def test_ranks_meet_in_the_launchers_store():
    done = run_python(2, MEET)
    assert done.returncode == 0, done.stderr
    assert dumped(done.stdout) == {0: {"other": "from 1"}, 1: {"other": "from 0"}}


def test_the_key_is_in_no_command_line_and_no_message():
    program = (
        "import glob, os\n"
        "key = os.environ['_HOROVOD_SECRET_KEY'].encode()\n"
        "pid, lines = os.getpid(), []\n"
        "for path in glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    try:\n"
        "        lines.append(open(path, 'rb').read())\n"
        "    except OSError:\n"
        "        pass\n"
        "assert len(lines) > 1\n"
        "assert not any(key in line for line in lines)\n"
        "print({'key': key.decode()})\n"
    )
    done = run_python(1, program, options=["--verbose"])
    assert done.returncode == 0, done.stderr
    key = dumped(done.stdout)[0]["key"]
    assert "HOROVOD_GLOO_RENDEZVOUS_PORT=" in done.stderr
    assert key not in done.stderr


def test_options_beat_the_environment_and_the_rest_is_inherited():
    done = run_python(
        1,
        DUMP,
        options=["--cycle-time-ms", "20"],
        env={"HOROVOD_CYCLE_TIME": "3", "HOROVOD_CACHE_CAPACITY": "7", "CUDA_VISIBLE_DEVICES": "1"},
    )
    env = dumped(done.stdout)[0]
    assert env["HOROVOD_CYCLE_TIME"] == "20.0"
    assert env["HOROVOD_CACHE_CAPACITY"] == "7"
    assert env["CUDA_VISIBLE_DEVICES"] == "1"
    assert "HOROVOD_FUSION_THRESHOLD" not in env


def test_threads_are_shared_out_unless_chosen():
    cores = len(os.sched_getaffinity(0))
    done = run_python(2, DUMP)
    assert done.stderr == ""
    done = run_python(2, DUMP, options=["--verbose"])
    assert {env["OMP_NUM_THREADS"] for env in dumped(done.stdout).values()} == {
        str(max(1, cores // 2))
    }
    assert done.stderr.count("OMP_NUM_THREADS=") == 1
    done = run_python(2, DUMP, env={"OMP_NUM_THREADS": "5"})
    assert dumped(done.stdout)[0]["OMP_NUM_THREADS"] == "5"
    assert done.stderr == ""


@pytest.mark.parametrize(
    "argument",
    [
        "",
        "a b",
        "'",
        '"',
        "line\nbreak",
        "$(touch pwned)",
        "`id`",
        "; exit 1",
        "*",
        "\\",
        "-np",
        "é",
    ],
)
def test_arguments_arrive_verbatim_without_a_shell(argument: str, tmp_path: Path):
    done = run_python(1, "import sys; print({'got': sys.argv[1:]})", argument, "--", cwd=tmp_path)
    assert dumped(done.stdout) == {0: {"got": [argument, "--"]}}
    assert list(tmp_path.iterdir()) == []


def test_arguments_that_are_not_utf8_arrive_too():
    program = "import os, sys; print({'got': os.fsencode(sys.argv[1])})"
    done = run_python(1, program, os.fsdecode(b"\xff\xfe"))
    assert dumped(done.stdout) == {0: {"got": b"\xff\xfe"}}


def test_workers_run_in_the_launchers_directory_with_empty_input(tmp_path: Path):
    program = "import os, sys; print({'cwd': os.getcwd(), 'input': sys.stdin.read()})"
    done = run_python(1, program, cwd=tmp_path)
    assert dumped(done.stdout) == {0: {"cwd": str(tmp_path), "input": ""}}


def test_workers_get_no_descriptor_but_their_own():
    program = (
        "import os\n"
        "held = {}\n"
        "for fd in os.listdir('/proc/self/fd'):\n"
        "    try:\n"
        "        held[int(fd)] = os.readlink(f'/proc/self/fd/{fd}')\n"
        "    except OSError:\n"
        "        pass  # the listing itself\n"
        "print({'fds': sorted(held)})\n"
    )
    done = run_python(3, program)
    assert dumped(done.stdout) == {rank: {"fds": [0, 1, 2]} for rank in range(3)}


def test_output_comes_by_line_with_a_prefix_and_the_last_one_too():
    program = (
        "import os, sys\n"
        "print('out é€😀')\n"
        "print('err', file=sys.stderr)\n"
        "os.write(1, b'no newline')\n"
    )
    done = run_python(2, program, env={"OMP_NUM_THREADS": "1"})
    assert sorted(done.stdout.splitlines()) == [
        "[0]<stdout>:no newline",
        "[0]<stdout>:out é€😀",
        "[1]<stdout>:no newline",
        "[1]<stdout>:out é€😀",
    ]
    assert sorted(done.stderr.splitlines()) == ["[0]<stderr>:err", "[1]<stderr>:err"]


def test_much_output_of_several_ranks_arrives_whole_and_in_order():
    program = (
        "import os\n"
        "rank = os.environ['RANK']\n"
        "for n in range(20000):\n"
        "    print(rank, n, 'x' * (n % 50))\n"
    )
    done = run_python(3, program, env={"PYTHONUNBUFFERED": "1"})
    lines: dict[str, list[str]] = {"0": [], "1": [], "2": []}
    for line in done.stdout.splitlines():
        prefix, text = line.split(">:", 1)
        lines[prefix[1]].append(text)
    for rank, got in lines.items():
        assert got == [f"{rank} {n} {'x' * (n % 50)}" for n in range(20000)]


def test_timestamps():
    done = run_python(1, "print('hello')", options=["-prefix-timestamp"])
    (line,) = done.stdout.splitlines()
    stamp, _, rest = line.partition("[0]")
    assert rest == "<stdout>:hello"
    time.strptime(stamp)


def test_output_is_also_kept_in_files(tmp_path: Path):
    program = (
        "import os, sys\n"
        "sys.stdout.buffer.write(b'out \\xff\\r' + os.environ['RANK'].encode())\n"
        "sys.stderr.write('err')\n"
    )
    logs = tmp_path / "a" / "logs"
    done = run_python(11, program, options=["--output-filename", str(logs)])
    assert done.returncode == 0
    assert sorted(path.name for path in logs.iterdir()) == [f"rank.{n:02d}" for n in range(11)]
    assert (logs / "rank.07" / "stdout").read_bytes() == b"out \xff\r7"
    assert (logs / "rank.10" / "stderr").read_bytes() == b"err"
    run_python(1, program, options=["--output-filename", str(tmp_path / "one")])
    assert (tmp_path / "one" / "rank.0" / "stdout").exists()


def test_a_place_for_output_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    done = run_python(1, "", options=["--output-filename", str(tmp_path / "file")])
    assert done.returncode == 2
    assert "--output-filename" in done.stderr


def test_the_first_failing_ranks_code_and_traceback():
    program = (
        "import os, signal, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    try:\n"
        "        {}['missing']\n"
        "    except KeyError:\n"
        "        sys.excepthook(*sys.exc_info())\n"
        "        sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "signal.pause()\n"
    )
    done = run_python(3, program)
    assert done.returncode == 3
    report = done.stderr[done.stderr.index("Horovod detected that one or more") :]
    assert re.search(r"^  1     localhost  \d+ +exit code 3$", report, re.MULTILINE)
    assert "  Traceback (most recent call last):\n" in report
    assert "  KeyError: 'missing'\n" in report


def test_death_by_signal():
    program = (
        "import os, signal\n"
        "if os.environ['RANK'] == '0':\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "signal.pause()\n"
    )
    done = run_python(2, program)
    assert done.returncode == 139
    assert "killed by SIGSEGV (exit code 139)" in done.stderr


def test_a_rank_that_ends_early_and_well_stops_nobody(tmp_path: Path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = (
        "import os, sys\n"
        "print('here')\n"
        "if os.environ['RANK'] == '1':\n"
        "    open(sys.argv[1]).read()\n"
        "    print('late')\n"
    )
    process = subprocess.Popen(
        command("-np", "2", "--verbose", sys.executable, "-c", program, str(fifo)),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "rank 0 ended: exit code 0" not in process.stderr.readline():
        assert process.poll() is None
    fifo.write_text("go on")
    stdout, stderr = process.communicate(timeout=HANG)
    assert process.returncode == 0, stderr
    assert "[1]<stdout>:late" in stdout


@pytest.mark.parametrize(
    ("make", "name", "status", "words"),
    [
        (None, "no-such-command", 127, "command not found: 'no-such-command'"),
        (None, "./no/such/path", 127, "command not found: './no/such/path'"),
        (0o644, "train.py", 126, "did you mean 'python train.py'?"),
        (0o755, "train.py", 127, "did you mean 'python train.py'?"),
        (0o755, "my-own-script", 127, "did you mean './my-own-script'?"),
        (0o644, "./data.txt", 126, "'./data.txt' is not executable"),
        (0o755, "./noformat", 126, "Exec format error"),
    ],
)
def test_commands_that_cannot_run(tmp_path: Path, make, name: str, status: int, words: str):
    if make is not None:
        (tmp_path / name).write_text("neither a script nor a program")
        (tmp_path / name).chmod(make)
    done = run("-np", "2", name, cwd=tmp_path)
    assert done.returncode == status
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_variables_before_the_command_are_for_the_workers():
    program = "import os; print(os.environ['HOROVOD_FUSION_THRESHOLD'], os.environ['A'])"
    words = ("HOROVOD_FUSION_THRESHOLD=7", "A=b c", sys.executable, "-c", program)
    done = run("-np", "1", "--fusion-threshold-mb", "32", *words)
    assert done.stdout == "[0]<stdout>:7 b c\n", done.stderr
    done = run("-np", "1", "A=b")
    assert done.returncode == 2
    assert "say what to run" in done.stderr


def test_a_command_in_quotes_is_pointed_out():
    done = run("-np", "1", "ls -l")
    assert done.returncode == 127
    assert "command not found: 'ls -l'; leave out the quotes" in done.stderr


def test_a_folder_that_is_gone(tmp_path: Path):
    folder = tmp_path / "gone"
    folder.mkdir()
    script = 'rmdir "$PWD"; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "-", *command("-np", "1", "true")],
        env=environment(),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("horovodrun: the folder in which this program runs is not there")


def test_many_processes_come_and_go():
    done = run("-np", "32", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert done.returncode == 0, done.stderr
    lines = [f"[{rank}]<stdout>:{rank} of 32" for rank in range(32)]
    assert sorted(done.stdout.splitlines()) == sorted(lines)


def test_slots_limit_the_processes():
    done = run("-np", "3", "-H", "localhost:2", "true")
    assert done.returncode == 2
    assert "offer 2 slots, but 3 processes" in done.stderr
    assert run("-np", "2", "-H", "localhost:4", "true").returncode == 0


def test_version_and_usage():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"{horovod.__version__}\n")
    done = run()
    assert done.returncode == 2
    assert "horovodrun -np 2 python train.py" in done.stderr


def test_a_flag_without_effect_is_said():
    done = run_python(1, DUMP, options=["--timeline-mark-cycles"])
    assert "HOROVOD_TIMELINE_MARK_CYCLES" not in dumped(done.stdout)[0]
    assert "no effect without --timeline-filename" in done.stderr


def test_the_launcher_imports_no_framework():
    program = (
        "import sys, horovod.runner.launch\n"
        "print(sorted({'torch', 'numpy', 'tensorflow', 'mpi4py'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=HANG
    )
    assert done.stdout == "[]\n", done.stderr


def test_a_progress_bar_on_a_terminal():
    program = (
        "import os, sys\n"
        "rank = os.environ['RANK']\n"
        "assert os.environ['HOROVOD_LAUNCHER_TTY'] == '1'\n"
        "assert int(os.environ['COLUMNS']) > 0\n"
        "if rank == '0':\n"
        "    for n in range(0, 101, 10):\n"
        "        sys.stderr.write(f'\\r{n:3d}%')\n"
        "    sys.stderr.write('\\n')\n"
        "    print('done')\n"
    )
    far, near = pty.openpty()
    process = subprocess.Popen(
        command("-np", "2", sys.executable, "-c", program),
        env=environment({"OMP_NUM_THREADS": "1"}),
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
    os.close(far)
    assert process.wait(timeout=HANG) == 0, seen
    rows = [row.rpartition("\r\x1b[K")[2] for row in seen.decode().split("\r\n")]
    assert sorted(rows) == ["", "[0]<stderr>:100%", "[0]<stdout>:done"]


TWO_NAMES = """
import os, torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.ones(3) * (hvd.rank() + 1), op=hvd.Sum, name="x")
place = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank()]
print({"place": place + [hvd.cross_size()], "total": total.tolist(),
       "host": os.environ["HOROVOD_HOSTNAME"], "threads": os.environ["OMP_NUM_THREADS"]})
"""


def test_this_machine_under_two_names_counts_as_two_hosts():
    hosts = ("-H", "localhost:2,127.0.0.1:2")
    done = run("-np", "4", *hosts, *forked_python(), "-c", TWO_NAMES)
    assert done.returncode == 0, done.stderr
    seen = dumped(done.stdout)
    assert [seen[rank]["place"] for rank in range(4)] == [
        [0, 4, 0, 2, 0, 2],
        [1, 4, 1, 2, 0, 2],
        [2, 4, 0, 2, 1, 2],
        [3, 4, 1, 2, 1, 2],
    ]
    assert [seen[rank]["host"] for rank in range(4)] == ["localhost"] * 2 + ["127.0.0.1"] * 2
    assert all(each["total"] == [10.0] * 3 for each in seen.values())
    threads = str(max(1, len(os.sched_getaffinity(0)) // 4))
    assert all(each["threads"] == threads for each in seen.values())
    said = "localhost, 127.0.0.1 are all this machine: they count as 2 hosts"
    assert done.stderr.count(said) == 1


def test_a_failure_ends_the_ranks_under_both_names():
    program = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '2' else time.sleep(600)"
    done = run_python(4, program, options=("-H", "localhost:2,127.0.0.1:2"))
    assert done.returncode == 7
    assert "rank 2" in done.stderr


def test_piped_output_keeps_carriage_returns_and_a_missing_last_newline():
    program = r"import sys; sys.stdout.write('10%\r20%\r\nlast')"
    done = subprocess.run(
        command("-np", "1", sys.executable, "-c", program),
        env=environment({"OMP_NUM_THREADS": "1"}),
        capture_output=True,
        timeout=HANG,
    )
    assert done.stdout == b"[0]<stdout>:10%\r[0]<stdout>:20%\r\n[0]<stdout>:last"


def test_another_python_in_path_is_pointed_out_where_a_module_is_missing(tmp_path: Path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = run("-np", "1", "python", "-c", "import no_such_module", env=env)
    assert f"'python' is {python}, while horovodrun belongs to {sys.executable}" in done.stderr
    done = run("-np", "1", sys.executable, "-c", "import no_such_module", env=env)
    assert "belongs to" not in done.stderr
