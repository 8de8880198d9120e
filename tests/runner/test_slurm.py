"""horovodrun and srun in a real Slurm: see tests/slurm.py."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.runner.horovodrun import command, environment
from tests.slurm import Slurm

WHERE = "import os; print(os.environ['HOROVOD_HOSTNAME'], os.environ['SLURMD_NODENAME'])"
MARK = "horovod-slurm-test"
"""In the command line of workers that would run on: a test looks that none is left."""
SLEEP = f"import time; print('up', flush=True); time.sleep(1000)  # {MARK}"


def launch(*options: str, program: str) -> list[str]:
    return command(*options, sys.executable, "-c", program)


def test_agents_come_by_srun_inside_an_allocation(slurm: Slurm):
    """Also where the job gives each task one core, and variables that srun takes for options."""
    shape = ["-N2", "--ntasks-per-node=2", "--cpus-per-task=1", "--mem-per-cpu=1"]
    done = slurm.run(
        *("salloc", "--quiet", *shape),
        *launch("-np", "4", "-H", "n1:2,n2:2", program=WHERE),
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    lines = {line for line in done.stdout.splitlines() if line.startswith("[")}
    assert lines == {f"[{rank}]<stdout>:n{rank // 2 + 1} n{rank // 2 + 1}" for rank in range(4)}
    assert not slurm.ask("squeue", "--noheader")


def test_the_first_failure_is_told_and_nothing_is_left(slurm: Slurm):
    program = (
        f"import os, sys, time  # {MARK}\n"
        "if os.environ['RANK'] == '2': sys.exit('the disk is full')\n"
        "time.sleep(1000)"
    )
    done = slurm.run(
        *("salloc", "--quiet", "-N2", *launch("-np", "4", "-H", "n1:2,n2:2", program=program)),
        env=environment(),
    )
    assert done.returncode == 1
    assert "rank 2 on n2 failed" in done.stderr
    assert "the disk is full" in done.stderr
    slurm.wait_until_idle()
    assert not slurm.processes(MARK)


def test_a_killed_launcher_leaves_nothing(slurm: Slurm):
    job = slurm.popen(
        *("salloc", "--quiet", "-N2", *launch("-np", "2", "-H", "n1:1,n2:1", program=SLEEP)),
        env=environment(),
    )
    assert job.stdout is not None
    for _ in range(2):
        assert job.stdout.readline().endswith("<stdout>:up\n")
    (launcher,) = set(slurm.processes("-m\0horovod.runner\0-np")) - {job.pid}
    os.kill(launcher, signal.SIGKILL)
    job.communicate(timeout=60)
    slurm.wait_for(lambda: not slurm.processes(MARK), "the end of the workers")
    slurm.wait_until_idle()


def test_the_end_of_an_allocation_ends_the_job(slurm: Slurm):
    job = slurm.popen(
        *("salloc", "--quiet", "-N2", *launch("-np", "2", "-H", "n1:1,n2:1", program=SLEEP)),
        env=environment(),
    )
    assert job.stdout is not None
    for _ in range(2):
        assert job.stdout.readline().endswith("<stdout>:up\n")
    (number,) = slurm.ask("squeue", "--noheader", "--format=%A").split()
    slurm.ask("scancel", number)
    job.communicate(timeout=60)
    slurm.wait_for(lambda: not slurm.processes(MARK), "the end of the workers")
    slurm.wait_until_idle()


def test_a_host_outside_the_allocation_is_named(slurm: Slurm):
    done = slurm.run(
        *("salloc", "--quiet", "-N1", "-w", "n1"),
        *launch("-np", "2", "-H", "n1:1,n3:1", program=SLEEP),
        env=environment(),
    )
    assert done.returncode == 1
    assert "cannot start on n3" in done.stderr
    slurm.wait_until_idle()
    assert not slurm.processes(MARK)


def test_a_node_that_does_not_answer_is_named(slurm: Slurm):
    slurm.stop_node("n2")
    try:
        done = slurm.run(
            *("salloc", "--quiet", "-N2", "-w", "n1,n2"),
            *launch("-np", "2", "-H", "n1:1,n2:1", "--start-timeout", "2", program=SLEEP),
            env=environment(),
        )
    finally:
        slurm.start_node("n2")
    assert done.returncode == 1
    assert "cannot start on n2" in done.stderr, done.stderr
    assert not slurm.processes(MARK)


def test_ranks_of_srun_find_each_other(slurm: Slurm, tmp_path: Path):
    """The ranks of two nodes meet through a file in the home directory."""
    program = (
        "import torch, horovod.torch as hvd; hvd.init()\n"
        "total = hvd.allreduce(torch.ones(1) * hvd.rank(), op=hvd.Sum).item()\n"
        "print(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_rank(), total)"
    )
    done = slurm.run(
        *("srun", "-N2", "-n2", sys.executable, "-c", program),
        env=environment({"HOME": str(tmp_path)}),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} 2 0 {rank} 1.0" for rank in range(2)]
