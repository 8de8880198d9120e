"""docs/launch: every command on these pages is run, with stand-ins for other machines and srun.

Each block is run as one script. The ranks that it starts meet and report (`meeting_rank`, which
needs no torch); the script of the first page is run as it is there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from horovod.runner.options.arguments import make_options
from tests.common.test_rendezvous import clean_environ
from tests.ports import reserved_port
from tests.runner import stub_ssh

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "launch"
LONG = 280

SRUN = """
import os, subprocess, sys
ranks = []
for rank in range(4):
    place = {"PROCID": rank, "NTASKS": 4, "LOCALID": rank % 2, "NODEID": rank // 2}
    place |= {"JOB_ID": os.getppid(), "STEP_ID": 0, "STEP_TASKS_PER_NODE": "2(x2)"}
    env = {**os.environ, **{f"SLURM_{name}": str(value) for name, value in place.items()}}
    ranks.append(subprocess.Popen(sys.argv[1:], env=env))
sys.exit(max(rank.wait() for rank in ranks))
"""
PLAIN_TORCH = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("REPORT", total.item())
dist.destroy_process_group()
"""

# How many ranks report in each block of a page.
EXPECTED = {
    "laptop": [None, 7],  # the first runs the page's own script
    "ssh-cluster": [4, 8, 0, 8],
    "slurm": [4, 4],  # the rest is in tests/runner/test_slurm.py
    "lsf": [4, 0, 2],
    "pbs": [4],
    "mpi": [4, 0, 2, 2],
    "torchrun": [2, None, 2],  # the second needs two machines
    "kubernetes": [],
    "docker": [],  # tests/docs/test_dockerfile.py
}


def blocks(page: str, language: str) -> list[str]:
    text = (PAGES / f"{page}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def program(folder: Path, name: str, *command: str) -> None:
    path = folder / "bin" / name
    words = " ".join(f"'{word}'" for word in command)
    path.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    path.chmod(0o755)


@pytest.fixture
def desk(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A directory with a script to run, and the environment in which commands are typed there."""
    stub = stub_ssh.install(tmp_path)
    python = sys.executable
    program(tmp_path, "python", python)
    program(tmp_path, "horovodrun", python, "-m", "horovod.runner")
    program(tmp_path, "torchrun", python, "-m", "torch.distributed.run")
    (tmp_path / "srun.py").write_text(SRUN)
    program(tmp_path, "srun", python, str(tmp_path / "srun.py"))
    (tmp_path / "bin" / "scontrol").write_text('#!/bin/sh\nprintf "%s\\n" $NODES\n')
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    (tmp_path / "home" / ".ssh").mkdir()
    (tmp_path / "home" / ".ssh" / "cluster_key").touch()
    desk = tmp_path / "desk"
    desk.mkdir()
    shutil.copy(ROOT / "tests" / "common" / "meeting_rank.py", desk / "train.py")
    (desk / "plain_torch.py").write_text(PLAIN_TORCH)
    (desk / "hosts.txt").write_text("node1 slots=2\nnode2 slots=2\n")
    path = os.pathsep.join([stub.pop("PATH"), str(Path(python).parent)])
    mpi = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    slurm = {"SLURM_CPUS_PER_TASK": "1", "NODES": "node1 node2"}
    extra = {"HOROVOD_GLOO_IFACE": "lo", "PATH": path, **mpi, **slurm}
    return desk, clean_environ(tmp_path / "home", **extra) | stub


def type_in(desk: Path, env: dict[str, str], block: str) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=desk,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 0, f"{block}\n{done.stdout}"
    return done.stdout


def test_every_page_is_here():
    assert {path.stem for path in PAGES.iterdir()} == set(EXPECTED)
    for page, expected in EXPECTED.items():
        assert len(blocks(page, "bash")) == len(expected), page


@pytest.mark.parametrize(
    ("page", "number"),
    [
        (page, number)
        for page, expected in EXPECTED.items()
        for number, reports in enumerate(expected)
        if reports is not None
    ],
)
def test_commands(desk: tuple[Path, dict[str, str]], page: str, number: int):
    folder, env = desk
    if page == "mpi" and shutil.which("mpirun", path=env["PATH"]) is None:
        pytest.skip("there is no mpirun in this environment")
    if page == "pbs":
        (folder / "nodes").write_text("node1\nnode1\nnode2\nnode2\n")
        env |= {"PBS_JOBID": "77.head", "PBS_NODEFILE": str(folder / "nodes")}
    if page == "lsf":
        env |= {"LSB_JOBID": "1", "LSB_MCPU_HOSTS": "node1 2 node2 2"}
    block = blocks(page, "bash")[number]
    with reserved_port() as port:
        if "MASTER_ADDR" in block:  # of the first node, which is this machine here
            env["NODES"] = "localhost"
            block = block.replace("29400", str(port))
        output = type_in(folder, env, block)
    assert output.count("REPORT") == EXPECTED[page][number], output


def test_the_script_of_the_first_page(desk: tuple[Path, dict[str, str]]):
    folder, env = desk
    (folder / "train.py").write_text(blocks("laptop", "python")[0])
    output = type_in(folder, env, blocks("laptop", "bash")[0])
    assert "[0]<stdout>:loss 0.0000 on 2 ranks" in output


def test_the_function_of_the_first_page(desk: tuple[Path, dict[str, str]]):
    folder, env = desk
    (folder / "call.py").write_text(blocks("laptop", "python")[1])
    assert "[0.5, 0.5]" in type_in(folder, env, "python call.py")


def test_torchrun_on_several_machines_understands_its_command():
    from torch.distributed.run import parse_args

    words = blocks("torchrun", "bash")[1].split()
    found = parse_args(words[1:])
    assert (found.nnodes, found.node_rank, found.master_addr) == ("2", 0, "node1")
    assert found.training_script == "train.py"


def containers(job: dict, specs: str) -> dict[str, list[str]]:
    return {
        role: spec["template"]["spec"]["containers"][0]["command"]
        for role, spec in job["spec"][specs].items()
    }


def test_an_mpi_job_on_kubernetes(desk: tuple[Path, dict[str, str]]):
    folder, env = desk
    job = yaml.safe_load((ROOT / "examples" / "kubernetes" / "mpijob.yaml").read_text())
    workers = job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
    slots = job["spec"]["slotsPerWorker"]
    hostfile = folder / "hostfile"
    hostfile.write_text(
        "".join(f"train-worker-{n}.train.default.svc slots={slots}\n" for n in range(workers))
    )
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    line = " ".join([*launcher["command"], "python", "train.py"])
    output = type_in(folder, {**env, "OMPI_MCA_orte_default_hostfile": str(hostfile)}, line)
    assert output.count("REPORT") == workers * slots
    assert (
        f"horovodrun: MPI hostfile {hostfile}: {workers} nodes, {workers * slots} slots" in output
    )


def test_a_pytorch_job_on_kubernetes():
    job = yaml.safe_load(blocks("kubernetes", "yaml")[0])
    commands = containers(job, "pytorchReplicaSpecs")
    assert commands == {role: ["python", "train.py"] for role in ("Master", "Worker")}


def test_the_elastic_command_for_kubernetes(tmp_path: Path):
    script = tmp_path / "discover_hosts.sh"
    script.write_text("#!/bin/sh\necho train-worker-0\n")
    script.chmod(0o755)
    text = (PAGES / "kubernetes.md").read_text()
    (line,) = re.findall(r"^`(horovodrun .*)`\.$", text, re.MULTILINE)
    words = line.replace("/etc/mpi/discover_hosts.sh", str(script)).split()
    assert make_options(words[1:], {}).elastic


@pytest.mark.parametrize("page", EXPECTED)
def test_links_lead_somewhere(page: str):
    for target in re.findall(r"\]\(([^)]+)\)", (PAGES / f"{page}.md").read_text()):
        assert target.startswith("https://") or (PAGES / target.partition("#")[0]).is_file(), target
