"""``--mpi`` and ``--jsrun``: real Open MPI and MPICH; stand-ins that record their call."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from horovod.runner.mpi_run import mpi_available

import horovod
from horovod.runner.functions.run_function import RemoteError
from horovod.runner.jobs import controllers, mpi_launch
from horovod.runner.options.arguments import make_options
from tests.forked_python import forked_python
from tests.runner.horovodrun import HANG, ROOT, command, environment, run

VERSIONS = {
    "Open MPI": "mpirun (Open MPI) 4.1.4\n",
    "IBM Spectrum MPI": "mpirun (IBM Spectrum MPI) 10.3.1 based on Open MPI 3.1\n",
    "Intel MPI": "Intel(R) MPI Library for Linux* OS, Version 2021.9\nCopyright Intel\n",
    "MVAPICH": "HYDRA build details:\n    Version: 4.0 (MVAPICH)\n",
    "MPICH": "HYDRA build details:\n    Version:      4.1\n    Release Date: 2023\n",
}
SECRET = "do-not-tell-anybody"
BIN = Path(sys.executable).parent
real_mpirun = pytest.mark.skipif(
    shutil.which("mpirun", path=str(BIN)) is None, reason="there is no mpirun in this environment"
)


def install(folder: Path, program: str, version: str = "", status: int = 0) -> dict[str, str]:
    """A program that writes its arguments and environment to folder/call and exits."""
    (folder / "version").write_text(version)
    path = folder / "bin" / program
    path.parent.mkdir()
    path.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys\n"
        f"if sys.argv[1:] == ['--version']: print(open({str(folder / 'version')!r}).read())\n"
        "elif '--nrs' in sys.argv: print('shape 40 4')\n"
        "else:\n"
        f"    json.dump([sys.argv[1:], dict(os.environ)], open({str(folder / 'call')!r}, 'w'))\n"
        f"    sys.exit({status})\n"
    )
    path.chmod(0o755)
    return {"PATH": f"{path.parent}:/usr/bin:/bin"}


def recorded(folder: Path) -> tuple[list[str], dict[str, str]]:
    arguments, env = json.loads((folder / "call").read_text())
    return arguments, env


def after(arguments: list[str], flag: str) -> list[str]:
    """What stands behind every occurrence of a flag."""
    return [arguments[i + 1] for i, word in enumerate(arguments) if word == flag]


def parameters(arguments: list[str]) -> dict[str, str]:
    return {arguments[i + 1]: arguments[i + 2] for i, w in enumerate(arguments) if w == "--mca"}


@pytest.mark.parametrize("kind", VERSIONS)
def test_every_mpi_gets_processes_hosts_and_names_of_variables(tmp_path: Path, kind: str):
    stub = install(tmp_path, "mpirun", VERSIONS[kind], status=7)
    command = ["python", "train me.py", "$(touch pwned);'\"\n`touch pwned`"]
    env = {**stub, "API_TOKEN": SECRET, "BASH_FUNC_x%%": "() { :; }", "SSH_AUTH_SOCK": "/x"}
    env |= {"RANK": "5", "WORLD_SIZE": "6", "ODD": "$(touch pwned)\n'\""}
    done = run(
        *("-np", "4", "-H", "alpha:2,beta:2", "--mpi", "--cycle-time-ms", "5"),
        *("--network-interfaces", "eth7", "-p", "2222", "--", *command),
        env=env,
        cwd=tmp_path,
    )
    assert done.returncode == 7, done.stderr
    arguments, seen = recorded(tmp_path)
    assert arguments[-3:] == command
    assert not (tmp_path / "pwned").exists()
    assert after(arguments, "-np") == ["4"]
    assert SECRET not in " ".join(arguments)
    assert seen["API_TOKEN"] == SECRET
    assert seen["ODD"] == env["ODD"]
    assert "RANK" not in seen, "that was the rank in another job"
    assert seen["HOROVOD_CYCLE_TIME"] == "5.0"
    if kind in ("Open MPI", "IBM Spectrum MPI"):
        assert after(arguments, "-H") == ["alpha:2,beta:2"]
        names = after(arguments[:-3], "-x")
        assert parameters(arguments)["btl_tcp_if_include"] == "eth7"
        assert parameters(arguments)["plm_rsh_args"] == "-p 2222"
    else:
        assert after(arguments, "-hosts") == ["alpha,beta"]
        assert after(arguments, "-ppn") == ["2"]
        assert after(arguments, "-iface") == ["eth7"]
        assert after(arguments, "-bootstrap") == ["ssh"]
        (names,) = (text.split(",") for text in after(arguments, "-genvlist"))
        extra = {"Intel MPI": "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"}
        assert seen[extra.get(kind, "HYDRA_LAUNCHER_EXTRA_ARGS")] == "-p 2222"
    assert names == sorted(names)
    assert {"API_TOKEN", "HOROVOD_CYCLE_TIME", "NCCL_SOCKET_IFNAME", "PATH"} <= set(names)
    assert not {"BASH_FUNC_x%%", "SSH_AUTH_SOCK", "HOME"} & set(names)


@pytest.mark.parametrize(
    ("kind", "options", "wanted", "parameter"),
    [
        ("Open MPI", [], ["--bind-to", "none", "--map-by", "slot"], ("pml", "ob1")),
        ("Open MPI", ["--binding-args=--bind-to core"], ["--bind-to", "core"], ("btl", "^openib")),
        ("Open MPI", ["--mpi-args=--mca pml ucx"], ["pml", "ucx"], ("pml", "ucx")),
        ("Open MPI", ["--prefix-output-with-timestamp"], ["--timestamp-output"], ("pml", "ob1")),
        ("IBM Spectrum MPI", ["--tcp"], ["-tcp"], ()),
        ("IBM Spectrum MPI", [], ["-bind-to", "socket", "-map-by", "socket"], ()),
    ],
)
def test_binding_and_further_arguments(
    tmp_path: Path, kind: str, options: list[str], wanted: list[str], parameter: tuple[str, ...]
):
    stub = install(tmp_path, "mpirun", VERSIONS[kind])
    assert run("-np", "2", "--mpi", *options, "true", env=stub).returncode == 0
    arguments, env = recorded(tmp_path)
    start = arguments.index(wanted[0])
    assert arguments[start : start + len(wanted)] == wanted
    if parameter:
        assert parameters(arguments)[parameter[0]] == parameter[1]
    assert arguments.count("pml") <= 1
    assert env.get("NCCL_IB_DISABLE") == ("1" if "--tcp" in options else None)


def test_many_hosts_are_not_started_as_a_tree(tmp_path: Path):
    stub = install(tmp_path, "mpirun", VERSIONS["Open MPI"])
    assert run("-np", "64", "-H", "n[1-64]:1", "--mpi", "true", env=stub).returncode == 0
    found = parameters(recorded(tmp_path)[0])
    assert found["plm_rsh_no_tree_spawn"] == "true"
    assert found["plm_rsh_num_concurrent"] == "64"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-H", "alpha:1,beta:2"], "MPICH starts equally many processes on every host"),
        (["-H", "alpha:3", "--network-interfaces", "a,b"], "uses one network interface"),
        (["--output-ranks", "0"], "--output-ranks: not possible with --mpi"),
        (["--cpu-bind", "core"], "use --binding-args"),
        (["--mpi-args=it's"], "No closing quotation"),
        (["--prefix-output-with-timestamp"], "cannot put the time"),
    ],
)
def test_what_an_mpi_cannot_do_is_said(tmp_path: Path, options: list[str], words: str):
    stub = install(tmp_path, "mpirun", VERSIONS["MPICH"])
    done = run("-np", "3", "--mpi", *options, "true", env=stub)
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / "call").exists()


def test_files_for_output(tmp_path: Path):
    stub = install(tmp_path, "mpirun", VERSIONS["MPICH"])
    folder = tmp_path / "new" / "logs"
    run("-np", "2", "--mpi", "--output-filename", str(folder), "true", env=stub)
    assert folder.is_dir()
    assert after(recorded(tmp_path)[0], "-outfile-pattern") == [f"{folder}/rank.%r.stdout"]


def test_no_mpi_or_an_unknown_one(tmp_path: Path):
    done = run("-np", "2", "--mpi", "true", env={"PATH": "/usr/bin:/bin"})
    if done.returncode == 127:  # unless the system has one
        assert "needs mpirun, which is not on PATH; install an MPI" in done.stderr
        assert "leave --mpi out" in done.stderr
        assert not mpi_available({"PATH": "/usr/bin:/bin"})
    stub = install(tmp_path, "mpirun", "HAL 9000")
    assert not mpi_available(stub)
    done = run("-np", "2", "--mpi", "true", env=stub)
    assert done.returncode == 1
    assert "is of no MPI that is known here" in done.stderr
    assert "it says: HAL 9000" in done.stderr


@pytest.mark.skipif(not Path("/bin").is_symlink(), reason="/bin is no link to /usr/bin here")
def test_open_mpi_is_not_called_by_a_path_that_makes_the_root_its_folder(
    monkeypatch: pytest.MonkeyPatch,
):
    """As found where PATH has /bin before /usr/bin."""
    called = []

    def answer(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        called.append(command[0])
        return subprocess.CompletedProcess(command, 0, "mpirun (Open MPI) 4.1.6", "")

    monkeypatch.setattr(mpi_launch.shutil, "which", lambda *_, **__: "/bin/mpirun")
    monkeypatch.setattr(mpi_launch.subprocess, "run", answer)
    assert mpi_launch.find_mpi() == ("/usr/bin/mpirun", mpi_launch.Mpi.OPEN_MPI)
    assert called == ["/usr/bin/mpirun"]


def test_a_dry_run_starts_nothing(tmp_path: Path):
    stub = install(tmp_path, "mpirun", VERSIONS["Open MPI"])
    options = ["-np", "2", "--mpi", "--dry-run", "--output-filename", "logs"]
    done = run(*options, "--cycle-time-ms", "5", "true", env=stub)
    assert done.returncode == 0
    assert "--map-by slot" in done.stdout
    assert "HOROVOD_CYCLE_TIME=5.0" in done.stdout
    assert not (tmp_path / "call").exists()
    assert not Path("logs").exists()


def test_jsrun(tmp_path: Path):
    stub = install(tmp_path, "jsrun", status=5)
    lsf = {"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "c01 2 c02 2"}
    options = ["--tcp", "--mpi-args=-async", "--binding-args=--bind none", "--output-filename"]
    output = str(tmp_path / "logs")
    done = run(*options, output, "train", env={**stub, **lsf, "TMPDIR": str(tmp_path)})
    assert done.returncode == 5, done.stderr
    arguments, _ = recorded(tmp_path)
    (erf,) = after(arguments, "--erf_input")
    assert Path(erf).stat().st_mode & 0o077 == 0
    assert Path(erf).read_text() == (
        "overlapping_rs: allow\n"
        "cpu_index_using: logical\n\n"
        "rank: 0: { hostname: c01; cpu: {0-9}; gpu: *; mem: * }\n"
        "rank: 1: { hostname: c01; cpu: {10-19}; gpu: *; mem: * }\n"
        "rank: 2: { hostname: c02; cpu: {0-9}; gpu: *; mem: * }\n"
        "rank: 3: { hostname: c02; cpu: {10-19}; gpu: *; mem: * }\n"
    )
    assert after(arguments, "--smpiargs") == ["-tcp -async"]
    assert after(arguments, "--stdio_stdout") == [f"{output}/stdout"]
    assert arguments[-3:] == ["--bind", "none", "train"]


def test_jsrun_refuses_more_processes_than_gpus(tmp_path: Path):
    stub = install(tmp_path, "jsrun")
    lsf = {"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "c01 42"}
    done = run("-np", "5", "--jsrun", "train", env={**stub, **lsf})
    assert done.returncode == 2
    assert "5 processes are to run on c01, but a host here has 4 GPUs" in done.stderr


@pytest.mark.parametrize(
    ("flags", "environ", "jsrun", "wanted"),
    [
        ([], {}, False, controllers.GLOO),
        (["--gloo"], {"LSB_JOBID": "1"}, True, controllers.GLOO),
        (["--mpi"], {"LSB_JOBID": "1"}, True, controllers.MPI),
        ([], {"LSB_JOBID": "1"}, True, controllers.JSRUN),
        ([], {"LSB_JOBID": "1"}, False, controllers.GLOO),
        (["--min-np", "1"], {"LSB_JOBID": "1"}, True, controllers.GLOO),
        (
            ["-H", "worker-0:2"],
            {"OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh"},
            False,
            controllers.MPI,
        ),
        ([], {"OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh"}, False, controllers.GLOO),
    ],
)
def test_who_starts_the_processes(
    tmp_path: Path, flags: list[str], environ: dict[str, str], jsrun: bool, wanted: str
):
    path = install(tmp_path, "jsrun")["PATH"] if jsrun else str(tmp_path)
    options = make_options(["-np", "2", *flags, "train"], environ)
    assert controllers.choose(options, {**environ, "PATH": path}) == wanted


def test_an_mpi_job_of_kubeflow(tmp_path: Path):
    """The launcher pod: a hostfile, and a script in the place of ssh that only mpirun can use."""
    stub = install(tmp_path, "mpirun", VERSIONS["Open MPI"])
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("train-worker-0 slots=2\ntrain-worker-1 slots=2\n")
    operator = {
        "OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh",
        "OMPI_MCA_orte_default_hostfile": str(hostfile),
    }
    done = run("-np", "4", "--hostfile", str(hostfile), "train", env={**stub, **operator})
    assert done.returncode == 0, done.stderr
    assert "mpirun starts the processes here" in done.stderr
    arguments, env = recorded(tmp_path)
    assert after(arguments, "-H") == ["train-worker-0:2,train-worker-1:2"]
    assert env["OMPI_MCA_plm_rsh_agent"] == "/etc/mpi/kubexec.sh"
    assert not any(name.startswith("OMPI_") for name in after(arguments, "-x"))


MEET = """
import os, sys, torch
import horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
place = f"{hvd.rank()} {hvd.size()} {hvd.local_size()} {total} {os.environ['OMP_NUM_THREADS']}"
os.write(1, f"found {place}\\n".encode())  # as one piece
hvd.barrier()  # mpirun ends all when one has failed
hvd.shutdown()
sys.exit(6)
"""


@real_mpirun
def test_with_a_real_mpirun():
    env = {"PATH": f"{BIN}:{os.environ['PATH']}"}
    done = run("-np", "2", "--mpi", *forked_python(), "-c", MEET, env=env)
    assert done.returncode == 6, done.stderr
    found = sorted(line.partition("found ")[2] for line in done.stdout.splitlines())
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert found == [f"{rank} 2 2 3.0 {threads}" for rank in range(2)]


@real_mpirun
def test_a_function_with_a_real_mpirun(monkeypatch: pytest.MonkeyPatch):
    for name, value in environment({"PATH": f"{BIN}:{os.environ['PATH']}"}).items():
        monkeypatch.setenv(name, value)

    def rank(fail: bool) -> int:
        if fail:
            raise LookupError("nothing there")
        return int(os.environ["OMPI_COMM_WORLD_RANK"])

    assert horovod.run(rank, (False,), num_proc=2, use_mpi=True) == [0, 1]
    with pytest.raises(LookupError, match="nothing there") as caught:
        horovod.run(rank, (True,), num_proc=2, use_mpi=True)
    assert isinstance(caught.value.__cause__, RemoteError)


def test_an_mpirun_that_fails_without_a_word_of_the_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stub = install(tmp_path, "mpirun", VERSIONS["Open MPI"], status=3)
    monkeypatch.setenv("PATH", stub["PATH"])
    with pytest.raises(RemoteError, match="mpirun failed with exit code 3"):
        horovod.run(os.getpid, num_proc=2, use_mpi=True)
    arguments, env = recorded(tmp_path)
    key = env["_HOROVOD_SECRET_KEY"]
    assert "_HOROVOD_SECRET_KEY" in after(arguments, "-x")
    assert key not in " ".join(arguments)
    assert env["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1"
    assert str(ROOT) in env["PYTHONPATH"]


def mpich() -> str:
    """The folder of MPICH's programs; it is kept apart, because Open MPI's have the same names."""
    kept = ROOT / ".venv-mpich" / "bin"
    if (kept / "mpiexec.hydra").exists():
        return str(kept)
    found = shutil.which("mpiexec.mpich")
    if found is None:
        pytest.skip("MPICH is not installed: make .venv-mpich, or apt-get install mpich")
    return str(Path(found).parent)


@pytest.mark.parametrize("how", ["mpiexec", "horovodrun --mpi"])
def test_with_a_real_mpich(how: str):
    """The processes meet without MPI's library, which only its launcher is needed for."""
    folder = mpich()
    env = environment({"PATH": f"{folder}:{os.environ['PATH']}"})
    starting = ["mpiexec", "-n", "2"] if how == "mpiexec" else [*command("-np", "2", "--mpi")]
    program = str(ROOT / "tests" / "common" / "meeting_rank.py")
    done = subprocess.run(
        [shutil.which(starting[0], path=env["PATH"]) or "", *starting[1:], sys.executable, program],
        env=env,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("REPORT") == 2
