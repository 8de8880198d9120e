"""``horovod.run``: functions, results and failures of real workers (most without torch)."""

from __future__ import annotations

import inspect
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import horovod
from horovod.common.store import MemoryStore
from horovod.runner.functions import function_call
from horovod.runner.functions.run_function import RemoteError
from tests.forked_python import forked_python
from tests.runner import stub_ssh
from tests.runner.horovodrun import HANG, ROOT, Job, environment


def place(first: str, second: str = "") -> tuple[int, str, str]:
    print("here")
    return int(os.environ["HOROVOD_RANK"]), first + second, os.getcwd()


class OddError(Exception):
    """Comes out of its pickle as something that cannot be made."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


def fail_on_rank_1(kind: Callable[[], BaseException]) -> str:
    if os.environ["HOROVOD_RANK"] == "1":
        raise kind()
    return "fine"


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_results_come_in_the_order_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd):
    monkeypatch.chdir(tmp_path)
    found = horovod.run(place, ("a",), {"second": "b"}, num_proc=3)
    assert found == [(rank, "ab", str(tmp_path)) for rank in range(3)]
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == [f"[{rank}]<stdout>:here" for rank in range(3)]


def test_ranks_of_a_function_meet():
    def total() -> float:
        import torch

        import horovod.torch as hvd

        hvd.init()
        return hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()

    assert horovod.run(total, num_proc=2) == [3.0, 3.0]


def test_jobs_of_several_threads_at_once():
    found: dict[int, Any] = {}

    def start(number: int) -> None:
        found[number] = horovod.run(lambda: (number, os.environ["HOROVOD_RANK"]), num_proc=2)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    assert found == {number: [(number, "0"), (number, "1")] for number in range(2)}


def test_modules_that_only_the_caller_knows_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "only_here.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here  # type: ignore[import-not-found]

    assert horovod.run(only_here.answer, num_proc=1) == [42]


def test_an_exception_is_raised_again_as_itself(capfd):
    with pytest.raises(ZeroDivisionError, match="over") as caught:
        horovod.run(fail_on_rank_1, (lambda: ZeroDivisionError("over"),), num_proc=2)
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteError)
    assert cause.rank == 1
    assert "rank 1 on " in str(cause)
    assert "fail_on_rank_1" in cause.traceback
    assert "[1]<stderr>:ZeroDivisionError: over" in capfd.readouterr().err


def test_an_exception_of_a_class_that_was_sent_along():
    class Mine(ValueError):
        pass

    with pytest.raises(Mine, match="own"):
        horovod.run(fail_on_rank_1, (lambda: Mine("own"),), num_proc=2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: OddError("a", "b"), "raised OddError: a"),
        (lambda: SystemExit(3), r"called sys.exit\(3\) instead of returning"),
    ],
)
def test_exceptions_that_cannot_be_brought_here(make: Callable[[], BaseException], words: str):
    with pytest.raises(RemoteError, match=words) as caught:
        horovod.run(fail_on_rank_1, (make,), num_proc=2)
    assert caught.value.rank == 1
    assert "fail_on_rank_1" in str(caught.value)


def test_a_result_that_cannot_be_pickled_names_its_rank():
    def lock_of_rank_1() -> Any:
        return threading.Lock() if os.environ["HOROVOD_RANK"] == "1" else None

    with pytest.raises(RemoteError, match=r"rank 1 on .* returned cannot be pickled: .*lock"):
        horovod.run(lock_of_rank_1, num_proc=2)


def test_a_result_that_cannot_be_unpickled_here_names_its_rank():
    class Fragile:
        def __reduce__(self) -> Any:
            return (lambda pid: pid == os.getpid() or 1 / 0), (os.getpid(),)

    with pytest.raises(RemoteError, match="what rank 0 returned cannot be unpickled here"):
        horovod.run(Fragile, num_proc=1)


def test_a_process_that_dies_without_a_word():
    with pytest.raises(RemoteError, match="killed by SIGKILL") as caught:
        horovod.run(lambda: os.kill(os.getpid(), 9), num_proc=2)
    assert caught.value.rank in (0, 1)


def test_a_process_that_ends_well_before_the_function_returned():
    with pytest.raises(RemoteError, match=r"rank 1 has returned nothing: .*exit code 0") as caught:
        horovod.run(lambda: os._exit(0) if os.environ["HOROVOD_RANK"] == "1" else None, num_proc=2)
    assert caught.value.rank == 1


INTERRUPTED = """
import os, signal, horovod
def wait():
    print("pid", os.getpid(), flush=True)
    signal.pause()
try:
    horovod.run(wait, num_proc=2)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_ends_the_workers_and_is_a_keyboard_interrupt():
    program = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    job = Job(program)
    try:
        pids = job.wait_for_pids(2)
        program.send_signal(signal.SIGINT)
        assert all(job.gone(pid) for pid in pids)
        status, output, _ = job.finish()
        assert (status, output) == (0, "interrupted\n")
    finally:
        job.close()


def test_hosts_through_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in stub_ssh.install(tmp_path).items():
        monkeypatch.setenv(name, value)
    found = horovod.run(
        lambda: (os.environ["HOROVOD_HOSTNAME"], os.environ["HOROVOD_LOCAL_RANK"]),
        num_proc=3,
        hosts="alpha:2,localhost:1",
    )
    assert found == [("alpha", "0"), ("alpha", "1"), ("localhost", "0")]
    with pytest.raises(RemoteError, match="Could not resolve hostname unknown"):
        horovod.run(os.getpid, num_proc=1, hosts="unknown:1")


def test_another_python(tmp_path: Path):
    wrapper = tmp_path / "my python"
    wrapper.write_text(f'#!/bin/sh\nexport WRAPPED=1\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    assert horovod.run(os.getenv, ("WRAPPED",), executable=str(wrapper)) == ["1"]
    with pytest.raises(RuntimeError, match="command not found"):
        horovod.run(os.getpid, executable=str(tmp_path / "missing"))


def test_nothing_of_the_call_is_in_a_command_line_or_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)

    def look(argument: str) -> list[bytes]:
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                lines.append(path.read_bytes())
            except OSError:
                pass
        key = os.environ["_HOROVOD_SECRET_KEY"].encode()
        assert not any(key in line for line in lines)
        return [line for line in lines if argument.encode() in line]

    assert horovod.run(look, ("a-telling-argument",)) == [[]]
    assert list(tmp_path.iterdir()) == []


def test_output_goes_to_files_too(tmp_path: Path):
    horovod.run(place, ("a",), num_proc=2, output_filename=str(tmp_path / "out"))
    assert (tmp_path / "out" / "rank.1" / "stdout").read_text() == "here\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"hosts": "a:1", "hostfile": "b"}, "one of hosts, hostfile"),
        ({"use_gloo": True, "use_mpi": True}, "one of use_gloo and use_mpi"),
        ({"num_proc": 0}, "must be 1 or more"),
        ({"num_proc": 3, "hosts": "localhost:2"}, "2 slots, but 3 processes"),
        ({"min_num_proc": 3, "max_num_proc": 2}, "more than --max-np"),
        ({"cooldown_range": (0, 5)}, "blacklist-cooldown-range"),
        ({"func": 7}, "needs a function"),
        ({"func": print, "args": (threading.Lock(),)}, "cannot send the function or its arguments"),
    ],
)
def test_mistakes(arguments: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        horovod.run(**{"func": os.getpid, **arguments})


def test_older_names_still_work():
    with pytest.warns(DeprecationWarning, match="np is deprecated; use num_proc"):
        assert horovod.run(place, ("a",), np=2)[1][0] == 1


def test_the_signature_is_the_known_one():
    names = " ".join(inspect.signature(horovod.run).parameters)
    assert names == (
        "func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range "
        "hosts hostfile host_discovery_script start_timeout ssh_port ssh_identity_file "
        "disable_cache output_filename verbose use_gloo use_mpi mpi_args network_interface "
        "network_interfaces executable np min_np max_np"
    )


def test_importing_horovod_stays_cheap():
    program = (
        "import sys, horovod; assert not any('runner' in m or 'pickle' in m for m in sys.modules)"
    )
    program += "; from horovod.runner import run; assert run is horovod.run"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=HANG)


def test_large_values_travel_in_pieces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(function_call, "_PIECE", 10)
    for content in (b"", b"x" * 10, bytes(range(95))):
        store = MemoryStore()
        function_call.put(store, "value", content)
        assert len(store.keys("value/")) == -(-len(content) // 10)
        assert function_call.read(store, "value") == content
        assert function_call.take(store, "value") == content
        assert store.keys("") == []
    assert function_call.take(MemoryStore(), "value") is None


def test_an_elastic_job_returns_what_its_ranks_returned_in_the_end(tmp_path: Path):
    """One worker dies; the one in its place takes part, and the results are by rank."""

    def train() -> tuple[int, int, int]:
        import torch

        import horovod.torch as hvd

        hvd.init()
        state = hvd.elastic.TorchState(batch=0)

        @hvd.elastic.run
        def steps(state: Any) -> tuple[int, int, int]:
            while state.batch < 6:
                hvd.allreduce(torch.ones(1), name="step")
                state.batch += 1
                state.commit()
                if state.batch == 3 and hvd.rank() == 1 and not (tmp_path / "died").exists():
                    (tmp_path / "died").touch()
                    os.kill(os.getpid(), 9)
            return hvd.rank(), hvd.size(), state.batch

        return steps(state)

    (python,) = forked_python()
    found = horovod.run(train, num_proc=2, min_num_proc=2, max_num_proc=2, executable=python)
    assert found == [(0, 2, 6), (1, 2, 6)]
    assert (tmp_path / "died").exists()


def test_a_function_that_always_fails_ends_an_elastic_job_with_its_exception():
    with pytest.raises(ZeroDivisionError):
        horovod.run(lambda: 1 / 0, num_proc=2, min_num_proc=1)


def _place_before_init(go: Path) -> tuple[int, int, int]:
    """Without init; rank 0 returns before the others have got anywhere."""
    place = [int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE", "LOCAL_RANK")]
    while place[0] > 0 and not go.exists():
        time.sleep(0.01)  # between looks at the file system
    return place[0], place[1], place[2]


def test_an_elastic_function_need_not_call_init(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Whoever is ended because rank 0 has finished does not return."""
    go, said = tmp_path / "go", ""
    with ThreadPoolExecutor() as pool:
        how = {"num_proc": 3, "min_num_proc": 3, "verbose": 2}
        found = pool.submit(horovod.run, _place_before_init, (go,), **how)
        try:
            while not re.search(r"event: exited: .*code 0", said):
                assert not found.done(), said
                time.sleep(0.01)  # between looks at the output
                said += capfd.readouterr().err
        finally:
            go.touch()
        assert found.result() == [(0, 3, 0), (1, 3, 1), (2, 3, 2)]
