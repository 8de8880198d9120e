"""Which way leads to other hosts, and what it runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from horovod.runner.agents.starters import CommandStarter, Srun, Ssh, Starter, make_starter
from horovod.runner.options.arguments import make_options
from horovod.runner.slots.worker_env import HOST_VARIABLES, travelling_variables

PROGRAM = ["python", "-c", "print(1); print('2')"]


@pytest.fixture
def allocation(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "srun").symlink_to(sys.executable)
    return {
        "PATH": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "SLURM_GPUS_PER_TASK": "1",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_NTASKS": "4",
        "CUDA_VISIBLE_DEVICES": "0",
        "MINE": "yes",
    }


def starter(environ: dict[str, str], *arguments: str) -> Starter:
    options = make_options(["-np", "1", "-H", "a:1", *arguments, "train"], {})
    return make_starter(options, environ, 5.0)


def test_srun_inside_a_slurm_job_and_ssh_elsewhere(allocation: dict[str, str]):
    assert isinstance(starter(allocation), Srun)
    assert isinstance(starter(allocation, "-p", "2222"), Ssh), "a wish for ssh"
    assert isinstance(starter({**allocation, "PATH": "/nowhere"}), Ssh), "there is no srun"
    assert isinstance(starter({**allocation, "SLURM_JOB_ID": ""}), Ssh)
    named = starter(allocation, "--start-command", f"{sys.executable} {{host}} --")
    assert isinstance(named, CommandStarter)
    assert named.command("pod-1", PROGRAM) == [sys.executable, "pod-1", "--", *PROGRAM]
    assert named.name == Path(sys.executable).name


def test_an_agent_of_srun_gets_the_whole_node(allocation: dict[str, str]):
    """However the tasks of the job are cut: srun reads their shape from its environment."""
    srun = starter(allocation)
    command = srun.command("n2", PROGRAM)
    assert command[0] == f"{allocation['PATH']}/srun"
    assert {"--overlap", "--nodes=1", "--ntasks=1", "--nodelist=n2"} <= set(command)
    assert command[-len(PROGRAM) :] == PROGRAM
    assert srun.environment() == {
        name: allocation[name] for name in ("PATH", "SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES", "MINE")
    }


def test_workers_take_their_devices_from_the_node_and_not_from_the_launcher(
    allocation: dict[str, str],
):
    own_variables = starter(allocation).own_variables
    assert {"CUDA_VISIBLE_DEVICES", "SLURMD_NODENAME", *HOST_VARIABLES} <= set(own_variables)
    here = {**allocation, "SLURMD_NODENAME": "n1"}
    assert not set(travelling_variables(here, own_variables)) & set(own_variables)
    assert travelling_variables(here, own_variables)["MINE"] == "yes"


@pytest.mark.parametrize("name", ["-w", "--nodelist=x", "a b", "$(id)", ""])
def test_a_host_whose_name_could_be_an_option_is_refused(name: str, allocation: dict[str, str]):
    for each in (Srun(allocation), CommandStarter("kubectl exec -i {host} --"), Ssh()):
        with pytest.raises(ValueError, match="cannot be the name of a host"):
            each.command(name, PROGRAM)
