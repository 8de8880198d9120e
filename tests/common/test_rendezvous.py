"""Real processes meet: under real launchers where there are any, else under their variables."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from horovod.common.config import Config
from horovod.common.environments import detect
from horovod.common.joining import rendezvous
from horovod.common.joining.bootstraps import LocalSocket, SharedFile, launcher_process
from horovod.common.joining.rendezvous import _Withdrawal, connect
from horovod.common.store import MemoryStore, StoreServer
from horovod.common.wire import encode_key, new_key
from tests.ports import reserved_port

LONG = 300.0
ROOT = Path(__file__).parents[2]
RANK = [sys.executable, "-m", "tests.common.meeting_rank"]
FOREIGN = (
    "HOROVOD_",
    "_HOROVOD_",
    "OMPI_",
    "PMI",
    "SLURM_",
    "MPI",
    "MV2_",
    "JSM_",
    "TORCHELASTIC_",
)
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def clean_environ(home: Path, **extra: str) -> dict[str, str]:
    """This process's environment without any launcher's variables."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(FOREIGN) and name not in TORCH
    }
    return {
        **environ,
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HOROVOD_START_TIMEOUT": "200",
        **extra,
    }


def reports(output: str) -> list[dict[str, Any]]:
    lines = (line[line.find("REPORT") :] for line in output.splitlines() if "REPORT" in line)
    return sorted((json.loads(line[6:]) for line in lines), key=lambda report: report["rank"])


def run(command: list[str], environ: dict[str, str]) -> list[dict[str, Any]]:
    result = subprocess.run(
        command,
        env=environ,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    return reports(result.stdout)


def start_ranks(environs: list[dict[str, str]]) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            RANK, env=e, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for e in environs
    ]


def run_ranks(environs: list[dict[str, str]]) -> list[dict[str, Any]]:
    processes = start_ranks(environs)
    outputs = [process.communicate(timeout=LONG)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return reports("\n".join(outputs))


def assert_met(found: list[dict[str, Any]], size: int, launcher: str) -> None:
    assert [report["rank"] for report in found] == list(range(size))
    assert len({tuple(report["pids"]) for report in found}) == 1
    assert len(set(found[0]["pids"])) == size
    assert {report["launcher"] for report in found} == {launcher}


@pytest.fixture
def port() -> Iterator[str]:
    with reserved_port() as found:
        yield str(found)


def slurm(rank: int, size: int, hosts: int) -> dict[str, str]:
    each = size // hosts
    return {
        "SLURM_JOB_ID": f"test-{os.getpid()}",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(size),
        "SLURM_LOCALID": str(rank % each),
        "SLURM_NODEID": str(rank // each),
        "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{hosts})",
    }


@pytest.fixture
def store_server() -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1", new_key())
    yield server
    server.close()


# Ways to meet


def test_alone() -> None:
    assert isinstance(connect(detect({}), Config(), {}), MemoryStore)


def test_horovodrun(tmp_path: Path) -> None:
    key = new_key()
    server = StoreServer("127.0.0.1", key)
    environs = [
        clean_environ(
            tmp_path,
            HOROVOD_RANK=str(rank),
            HOROVOD_SIZE="3",
            HOROVOD_LOCAL_RANK=str(rank),
            HOROVOD_LOCAL_SIZE="3",
            HOROVOD_GLOO_RENDEZVOUS_ADDR=server.address,
            HOROVOD_GLOO_RENDEZVOUS_PORT=str(server.port),
            _HOROVOD_SECRET_KEY=encode_key(key),
        )
        for rank in range(3)
    ]
    assert_met(run_ranks(environs), 3, "HOROVOD_* (horovodrun)")
    server.close()


@pytest.mark.skipif(
    shutil.which("mpirun", path=str(Path(sys.executable).parent)) is None,
    reason="there is no mpirun in this environment",
)
def test_open_mpi_on_one_host(tmp_path: Path) -> None:
    mpirun = [str(Path(sys.executable).with_name("mpirun")), "--oversubscribe", "-np", "3"]
    found = run([*mpirun, *RANK], mpi_environ(tmp_path))
    assert_met(found, 3, "Open MPI mpirun")
    assert not any(report["mpi"] for report in found), "one host needs no MPI to meet"
    assert list(tmp_path.iterdir()) == [], "nothing on disk"


@pytest.mark.skipif(
    shutil.which("mpirun", path=str(Path(sys.executable).parent)) is None,
    reason="there is no mpirun in this environment",
)
def test_open_mpi_on_several_hosts_meets_through_mpi(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    mpirun = [str(Path(sys.executable).with_name("mpirun")), "--oversubscribe", "-np", "2"]
    # Each rank believes to be alone on its host.
    alone = ["env", "OMPI_COMM_WORLD_LOCAL_SIZE=1", "OMPI_COMM_WORLD_LOCAL_RANK=0"]
    found = run([*mpirun, *alone, *RANK], mpi_environ(tmp_path, HOROVOD_GLOO_IFACE="lo"))
    assert_met(found, 2, "Open MPI mpirun")
    assert all(report["mpi"] for report in found)
    assert list(tmp_path.iterdir()) == []


def mpi_environ(home: Path, **extra: str) -> dict[str, str]:
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**clean_environ(home, **extra), **root}


def test_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = str(Path(__file__).with_name("meeting_rank.py"))
    found = run([*torchrun, "--nproc-per-node=2", script], clean_environ(tmp_path))
    assert_met(found, 2, "torchrun")


def test_kubeflow(tmp_path: Path, port: str) -> None:
    pytest.importorskip("torch")
    environs = [
        clean_environ(
            tmp_path,
            RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            HOROVOD_GLOO_IFACE="lo",
        )
        for rank in range(2)
    ]
    assert_met(run_ranks(environs), 2, "Kubeflow PyTorchJob")


def test_slurm_on_one_host(tmp_path: Path) -> None:
    found = run_ranks([clean_environ(tmp_path, **slurm(rank, 3, 1)) for rank in range(3)])
    assert_met(found, 3, "Slurm srun")
    assert not any(report["torch"] for report in found)
    assert list(tmp_path.iterdir()) == [], "nothing on disk"


def test_slurm_on_several_hosts_meets_through_the_home_directory(tmp_path: Path) -> None:
    environs = [
        clean_environ(tmp_path, HOROVOD_GLOO_IFACE="lo", **slurm(rank, 4, 2)) for rank in range(4)
    ]
    assert_met(run_ranks(environs), 4, "Slurm srun")
    jobs = tmp_path / ".horovod" / "jobs"
    assert jobs.stat().st_mode & 0o777 == 0o700
    assert list(jobs.iterdir()) == [], "the file is gone once all have met"


def test_what_an_earlier_run_left_behind_is_survived(tmp_path: Path, port: str) -> None:
    environs = [
        clean_environ(tmp_path, HOROVOD_GLOO_IFACE="lo", **slurm(rank, 2, 2)) for rank in range(2)
    ]
    job = detect(environs[0]).job_id()
    assert job is not None
    left_behind = {"address": "127.0.0.1", "port": int(port), "key": encode_key(new_key())}
    SharedFile(job, tmp_path / ".horovod" / "jobs").publish(json.dumps(left_behind), LONG)
    late = start_ranks(environs[1:])
    found = run_ranks(environs[:1])
    output, _ = late[0].communicate(timeout=LONG)
    assert late[0].returncode == 0, output
    assert_met([*found, *reports(output)], 2, "Slurm srun")


def test_slurm_with_address_and_key_given(tmp_path: Path, port: str) -> None:
    given = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "_HOROVOD_SECRET_KEY": encode_key(new_key()),
    }
    environs = [clean_environ(tmp_path, **given, **slurm(rank, 2, 2)) for rank in range(2)]
    assert_met(run_ranks(environs), 2, "Slurm srun")
    assert list(tmp_path.iterdir()) == []


# Failures


def test_missing_rank_zero_is_an_error_that_says_what_to_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = Config(start_timeout=0.2)
    for hosts, place in ((1, "@horovod-"), (2, str(tmp_path))):
        environ = slurm(1, 2, hosts)
        with pytest.raises(TimeoutError, match="rank 1 of 2") as caught:
            connect(detect(environ), config, environ)
        for text in ("Slurm srun", place, "0.2 s", "HOROVOD_START_TIMEOUT"):
            assert text in str(caught.value)


def test_missing_torch_store_is_an_error_that_names_it(port: str) -> None:
    pytest.importorskip("torch")
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with pytest.raises(ConnectionError, match=port) as caught:
        connect(detect(environ), Config(start_timeout=1.0), environ)
    assert "Kubeflow" in str(caught.value)


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_missing_master_variables(missing: str) -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    del environ[missing]
    with pytest.raises(ValueError, match=f"{missing}=nothing"):
        connect(detect(environ), Config(), environ)


def test_horovodrun_variables_that_do_not_suffice(store_server: StoreServer) -> None:
    environ = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}
    with pytest.raises(ValueError, match="HOROVOD_GLOO_RENDEZVOUS_ADDR"):
        connect(detect(environ), Config(), environ)
    environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = "127.0.0.1"
    with pytest.raises(ValueError, match="HOROVOD_GLOO_RENDEZVOUS_PORT=unset"):
        connect(detect(environ), Config(), environ)
    environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(store_server.port)
    with pytest.raises(ValueError, match="_HOROVOD_SECRET_KEY"):
        connect(detect(environ), Config(), environ)
    environ["_HOROVOD_SECRET_KEY"] = encode_key(new_key())
    with pytest.raises(PermissionError, match="differ"):
        connect(detect(environ), Config(), environ)


def test_hosts_without_a_common_name_are_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    environ = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    with pytest.raises(ValueError, match=r"mpi4py.*MASTER_ADDR"):
        connect(detect(environ), Config(), environ)


# Life in one process


def test_rank_zero_keeps_one_server_and_forked_children_get_none() -> None:
    environ = slurm(0, 2, 1)
    first = connect(detect(environ), Config(), environ)
    first.set("kept", b"yes")
    again = connect(detect(environ), Config(), environ)
    assert again.try_get("kept") == b"yes"
    (server, _) = next(iter(rendezvous._results.servers.values()))
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write_end, b"%d" % len(rendezvous._results.servers))
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read_end, 10) == b"0"
    os.close(read_end)
    os.close(write_end)
    socket.create_connection((server.address, server.port), timeout=LONG).close()


# The local socket


def test_local_socket_serves_everyone_once_and_ends() -> None:
    job = f"test-{os.getpid()}-ends"
    host = LocalSocket(job, 0, 3)
    host.publish('{"a": 1}', LONG)
    assert LocalSocket(job, 1, 3).fetch(LONG) == '{"a": 1}'
    assert LocalSocket(job, 1, 3).fetch(LONG) == '{"a": 1}', "a rank may ask again"
    assert LocalSocket(job, 2, 3).fetch(LONG) == '{"a": 1}'
    LocalSocket(job, 0, 3).publish('{"b": 2}', LONG)  # the name becomes free
    assert LocalSocket(job, 1, 3).fetch(LONG) == '{"b": 2}'


def test_local_socket_waits_for_rank_zero() -> None:
    job = f"test-{os.getpid()}-late"
    offers: list[str] = []
    thread = threading.Thread(target=lambda: offers.append(LocalSocket(job, 1, 2).fetch(LONG)))
    thread.start()
    LocalSocket(job, 0, 2).publish("{}", LONG)
    thread.join(LONG)
    assert offers == ["{}"]


def test_local_socket_in_use() -> None:
    job = f"test-{os.getpid()}-used"
    host = LocalSocket(job, 0, 2)
    host.publish("{}", LONG)
    with pytest.raises(TimeoutError, match="in use"):
        LocalSocket(job, 0, 2).publish("{}", 0.1)
    host.finish()
    LocalSocket(job, 0, 2).publish("{}", LONG)


def test_local_socket_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = f"test-{os.getpid()}-user"
    rank = LocalSocket(job, 1, 2)
    LocalSocket(job, 0, 2).publish('{"secret": 1}', LONG)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    with pytest.raises(TimeoutError):
        rank.fetch(0.2)


def test_shared_file_of_others_is_refused(tmp_path: Path) -> None:
    file = SharedFile("job", tmp_path)
    file.publish("{}", LONG)
    assert file.fetch(LONG) == "{}"
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(TimeoutError):
        file.fetch(0.1)
    file.finish()
    file.finish()
    assert list(tmp_path.iterdir()) == []


# The launcher among the ancestors


def test_launcher_process_is_the_same_for_all_its_children(tmp_path: Path) -> None:
    launcher = tmp_path / "mpiexec.hydra"
    shutil.copy("/bin/sh", launcher)
    ask = (
        f"{sys.executable} -c 'from horovod.common.joining.bootstraps import *; "
        "print(launcher_process())'"
    )
    command = f'{ask}; sh -c "{ask}; true"; true'
    result = subprocess.run(
        [str(launcher), "-c", command],
        env=clean_environ(tmp_path),
        capture_output=True,
        text=True,
        timeout=LONG,
        check=True,
    )
    first, second = result.stdout.split()
    assert first == second
    assert first != launcher_process()


def test_the_end_waits_for_a_thread_that_takes_the_offer_away():
    """Else Python ends while torch's store is at work, which aborts the process."""
    events: list[str] = []
    begun, may_end = threading.Event(), threading.Event()

    class Slow:
        def finish(self) -> None:
            begun.set()
            assert may_end.wait(LONG)
            events.append("finished")

    closing = _Withdrawal(Slow())  # type: ignore[arg-type]
    thread = threading.Thread(target=closing)
    thread.start()
    assert begun.wait(LONG)
    at_exit = threading.Thread(target=lambda: (closing(), events.append("ended")))
    at_exit.start()
    at_exit.join(0.2)
    assert at_exit.is_alive()
    may_end.set()
    thread.join(LONG)
    at_exit.join(LONG)
    assert events == ["finished", "ended"]
