"""The helper that forks programs: they run and end as they would under a Python of their own."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.forked_python import forked_python
from tests.rank_process import ForkedProcess, start_fork_server
from tests.ranks import PATIENCE

SHOW = """
import os, pickle, sys
from helper import WORD

class Thing:
    pass

assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
assert "torch" in sys.modules
print(WORD, sys.argv[1:], os.environ["COLOUR"], os.getcwd(), __name__, os.path.basename(__file__))
print("aside", file=sys.stderr)
print(input())
"""


def _run(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*forked_python(), *arguments],
        cwd=cwd,
        env=os.environ | env,
        input="said\n",
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_a_script_has_its_arguments_environment_folder_and_streams(tmp_path: Path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "show.py").write_text(SHOW)
    (tmp_path / "scripts" / "helper.py").write_text("WORD = 'hello'")
    done = _run("scripts/show.py", "one", "two words", cwd=tmp_path, COLOUR="blue")
    assert done.stdout == f"hello ['one', 'two words'] blue {tmp_path} __main__ show.py\nsaid\n"
    assert (done.stderr, done.returncode) == ("aside\n", 0)


@pytest.mark.parametrize(
    ("program", "exit_code", "said"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("raise SystemExit('why it ends')", 1, "why it ends\n"),
        ("raise KeyError('lost')", 1, "KeyError: 'lost'\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import atexit, sys; atexit.register(sys.stderr.write, 'at exit')", 0, "at exit"),
    ],
)
def test_the_client_ends_as_the_program_does(
    tmp_path: Path, program: str, exit_code: int, said: str
):
    done = _run("-c", program, cwd=tmp_path)
    assert done.returncode == exit_code, done.stderr
    assert done.stderr.endswith(said)


def test_what_a_program_starts_is_forked_too(tmp_path: Path):
    child = "import sys; print('torch' in sys.modules, flush=True)"
    commands = ([], ["-E"])  # with options, it is a Python of its own
    program = f"import subprocess, sys\nfor options in {commands}:\n"
    program += f"    subprocess.run([sys.executable, *options, '-c', {child!r}], check=True)\n"
    done = _run("-c", program, cwd=tmp_path)
    assert done.stdout == "True\nFalse\n", done.stderr


def test_a_module(tmp_path: Path):
    (tmp_path / "module.py").write_text("import sys; print(__name__, sys.argv[1:])")
    done = _run("-m", "module", "more", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.stdout == "__main__ ['more']\n", done.stderr


WAITS = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print(os.getpid(), flush=True)
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_client_reaches_the_program(tmp_path: Path, number: int):
    command = [*forked_python(), "-c", WAITS]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        pid = int(client.stdout.readline())
        assert pid != client.pid
        ended = os.pidfd_open(pid)
        client.send_signal(number)
        assert client.wait(PATIENCE) == (5 if number == signal.SIGTERM else -number)
    assert select.select([ended], [], [], PATIENCE)[0], "the program goes on without its client"
    os.close(ended)


def _end_when_told(connection: Connection) -> None:
    connection.recv_bytes()
    sys.exit(7)


def test_all_threads_see_how_a_process_has_ended():
    """The fork server says it once."""
    start_fork_server()
    ours, theirs = multiprocessing.Pipe()
    process = ForkedProcess(target=_end_when_told, args=(theirs,))
    process.start()
    with ours, theirs, ThreadPoolExecutor(8) as pool:
        joined = [pool.submit(process.join) for _ in range(8)]
        ours.send_bytes(b"end")
        for future in joined:
            future.result()
    assert process.exitcode == 7
    process.close()
