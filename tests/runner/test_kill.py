"""Nothing of a job survives its end, whoever ends it and however."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.runner.horovodrun import HANG, Job, command, environment, run_python, started

# A worker with a child, and a grandchild that has left the session and been orphaned. They share
# one stdout, so each announces itself in a single write.
FAMILY = """
import os, signal, subprocess, sys, time
CHILD = "import os, signal; os.write(1, b'pid %d\\\\n' % os.getpid()); signal.pause()"
DAEMON = '''
import os, signal
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {prepare}
        os.write(1, b'pid %d\\\\n' % os.getpid())
        while True:
            signal.pause()
    os._exit(0)
os.wait()
'''
def family(prepare="pass"):
    subprocess.Popen([sys.executable, "-c", CHILD])
    subprocess.run([sys.executable, "-c", DAEMON.format(prepare=prepare)])
    os.write(1, b"pid %d\\n" % os.getpid())
"""
PATIENT = FAMILY + "family()\nsignal.pause()\n"
STUBBORN = FAMILY + (
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "family('signal.signal(signal.SIGTERM, signal.SIG_IGN)')\n"
    "while True:\n"
    "    time.sleep(1000)\n"
)


def all_gone(job: Job, pids: list[int]) -> bool:
    return all([job.gone(pid) for pid in pids])


def test_one_failing_rank_ends_the_trees_of_the_others(tmp_path: Path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = (
        "import os\n"
        "if os.environ['RANK'] == '1':\n"
        f"    open({str(fifo)!r}).read()\n"
        "    os._exit(5)\n"
    ) + STUBBORN
    with started(3, program) as job:
        pids = job.wait_for_pids(6)
        fifo.write_text("fail now")
        code, _, stderr = job.finish()
        assert code == 5
        assert re.search(r"^  1     localhost  \d+ +exit code 5$", stderr, re.MULTILINE), stderr
        assert "failed after it" not in stderr  # what we killed is not blamed
        assert all_gone(job, pids)


def test_a_killed_launcher_takes_everything_along():
    with started(2, PATIENT) as job:
        pids = job.wait_for_pids(6)
        job.process.kill()
        assert all_gone(job, pids)


def test_a_killed_launcher_takes_along_even_what_ignores_sigterm():
    with started(1, STUBBORN) as job:
        pids = job.wait_for_pids(3)
        job.process.kill()
        assert all_gone(job, pids)


def test_a_killed_agent_ends_the_job():
    with started(2, "import os, signal; print('pid', os.getpid()); signal.pause()") as job:
        pids = job.wait_for_pids(2)
        with open(f"/proc/{pids[0]}/stat") as file:
            agent = int(file.read().rpartition(")")[2].split()[1])
        assert agent != job.process.pid
        os.kill(agent, signal.SIGKILL)
        code, _, stderr = job.finish()
        assert code == 1
        assert f"pid {agent}) died" in stderr
        assert all_gone(job, pids)


POLITE = (
    "import os, signal, sys, time\n"
    "def save(*_):\n"
    "    print('saved')\n"
    "    sys.exit(4)\n"
    "signal.signal(signal.SIGTERM, save)\n"
    "signal.signal(signal.SIGINT, save)\n"
    "print('pid', os.getpid())\n"
    "while True:\n"
    "    time.sleep(1000)\n"
)

INTERRUPTED = """
import os, signal, time
try:
    print("pid", os.getpid())
    time.sleep(1000)
except KeyboardInterrupt:
    print("interrupted")
    raise
finally:
    time.sleep(0.1)
    print("finally")
"""


def test_ctrl_c_is_a_keyboard_interrupt_in_the_workers():
    with started(2, INTERRUPTED) as job:
        pids = job.wait_for_pids(2)
        job.process.send_signal(signal.SIGINT)
        code, stdout, stderr = job.finish()
        assert code == 130
        assert re.fullmatch(r"horovodrun: got SIGINT: .*\n", stderr)  # and no traceback
        for rank in range(2):
            said = [line for line in stdout.splitlines() if line.startswith(f"[{rank}]")]
            assert said == [f"[{rank}]<stdout>:interrupted", f"[{rank}]<stdout>:finally"]
        assert all_gone(job, pids)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_signal_lets_the_workers_end_in_peace(number: signal.Signals, status: int):
    with started(2, POLITE) as job:
        pids = job.wait_for_pids(2)
        job.process.send_signal(number)
        code, stdout, stderr = job.finish()
        assert code == status
        assert sorted(stdout.splitlines()) == ["[0]<stdout>:saved", "[1]<stdout>:saved"]
        assert number.name in stderr
        assert "Horovod detected" not in stderr  # nobody failed
        assert all_gone(job, pids)


def test_a_second_signal_kills_at_once():
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    with started(2, ignoring + STUBBORN) as job:
        pids = job.wait_for_pids(6)
        job.process.send_signal(signal.SIGINT)
        assert job.process.stderr is not None
        while b"once more kills" not in job.process.stderr.readline():
            assert job.process.poll() is None
        job.process.send_signal(signal.SIGINT)
        code, _, stderr = job.finish()
        assert code == 130
        assert "killing the workers" in stderr
        assert all_gone(job, pids)


def test_sigterm_from_a_batch_system_and_from_its_script_is_one_request(tmp_path: Path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = POLITE.replace("print('saved')", f"print('saved', open({str(fifo)!r}).read())")
    with started(1, program) as job:
        pids = job.wait_for_pids(1)
        job.process.send_signal(signal.SIGTERM)
        assert job.process.stderr is not None
        while b"once more kills" not in job.process.stderr.readline():
            assert job.process.poll() is None
        job.process.send_signal(signal.SIGTERM)
        fifo.write_text("in peace")
        code, stdout, stderr = job.finish()
        assert code == 143
        assert stdout == "[0]<stdout>:saved in peace\n"
        assert stderr == ""
        assert all_gone(job, pids)


def test_ctrl_c_in_the_terminal_reaches_the_launcher_only():
    program = "import os; print({'foreground': os.getpgrp() == os.getpid() == os.getsid(0)})"
    done = run_python(2, program)
    assert done.stdout.count("{'foreground': True}") == 2


def test_what_workers_leave_behind_ends_with_the_job(tmp_path: Path):
    fifos = [tmp_path / "0", tmp_path / "1"]
    for fifo in fifos:
        os.mkfifo(fifo)
    wait = f"open(os.path.join({str(tmp_path)!r}, os.environ['RANK'])).read()\n"
    with started(2, FAMILY + "family()\n" + wait) as job:
        pids = job.wait_for_pids(6)
        for fifo in fifos:
            fifo.write_text("end now")
        code, _, stderr = job.finish()
        assert code == 0, stderr
        assert all_gone(job, pids)


def test_a_pipe_held_by_a_stranger_does_not_hold_up_the_end(tmp_path: Path):
    """A process outside the job may hold a worker's stdout, sent to it over a socket."""
    path = str(tmp_path / "socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    program = (
        "import socket\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        f"s.connect({path!r})\n"
        "socket.send_fds(s, [b'x'], [1])\n"
        "s.recv(1)\n"
        "print('last words')\n"
    )
    with started(1, program) as job, listener:
        connection, _ = listener.accept()
        _, (held,), _, _ = socket.recv_fds(connection, 1, 1)
        connection.close()
        code, stdout, _ = job.finish()
        os.close(held)
        assert code == 0
        assert stdout == "[0]<stdout>:last words\n"


CHATTY = "import os\nprint('pid', os.getpid())\nwhile True:\n    print('more output ' * 100)\n"


def test_a_reader_that_goes_away_ends_the_job():
    with started(2, CHATTY) as job:
        pids = job.wait_for_pids(2)
        assert job.process.stdout is not None
        job.process.stdout.close()
        assert job.process.wait(timeout=HANG) == 141
        assert all_gone(job, pids)
        job.process.stdout = None


def test_a_signal_is_obeyed_while_nobody_reads_the_output():
    with started(1, CHATTY) as job:
        (pid,) = job.wait_for_pids(1)
        job.process.send_signal(signal.SIGTERM)  # its stdout is full, or soon will be
        assert job.gone(pid)
        code, _, _ = job.finish()
        assert code == 143


def test_nohup_is_respected():
    process = subprocess.Popen(
        ["nohup", *command("-np", "1", "sh", "-c", "echo $$; exec sleep 1000")],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()  # the supervisor is at work
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=HANG)
    assert process.returncode == 143
    assert b"SIGTERM" in stderr
    assert b"SIGHUP" not in stderr
