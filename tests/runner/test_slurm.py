"""horovodrun and srun in a real Slurm: see tests/slurm.py."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tests.runner.horovodrun import HANG, ROOT, command, environment
from tests.slurm import Slurm

WHERE = "import os; print(os.environ['HOROVOD_HOSTNAME'], os.environ['SLURMD_NODENAME'])"
MARK = "horovod-slurm-test"
"""In the command line of workers that would run on: a test looks that none is left."""
SLEEP = f"import time; print('up', flush=True); time.sleep(1000)  # {MARK}"


def launch(*options: str, program: str) -> list[str]:
    return command(*options, sys.executable, "-c", program)


def test_agents_come_by_srun_inside_an_allocation(slurm: Slurm):
    """One rank for each task; srun does not take the shape of the tasks for that of the agents."""
    shape = ["-N2", "--ntasks-per-node=2", "--cpus-per-task=1", "--mem-per-cpu=1"]
    done = slurm.run(
        *("salloc", "--quiet", *shape),
        *launch(program=WHERE),
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    lines = {line for line in done.stdout.splitlines() if line.startswith("[")}
    assert lines == {f"[{rank}]<stdout>:n{rank // 2 + 1} n{rank // 2 + 1}" for rank in range(4)}
    slurm.wait_until_idle()


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
    job.communicate(timeout=HANG)
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
    job.communicate(timeout=HANG)
    slurm.wait_for(lambda: not slurm.processes(MARK), "the end of the workers")
    slurm.wait_until_idle()


def test_two_jobs_share_an_allocation(slurm: Slurm):
    first, second = (
        shlex.join(launch("-np", "2", "-H", "n1:1,n2:1", program=WHERE)) for _ in range(2)
    )
    both = f"{first} & {second}; status=$?; wait $! && exit $status"
    done = slurm.run("salloc", "--quiet", "-N2", "sh", "-c", both, env=environment())
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(
        2 * ["[0]<stdout>:n1 n1", "[1]<stdout>:n2 n2"]
    )


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
            *launch("-np", "2", "-H", "n1:1,n2:1", "--start-timeout", "1", program=SLEEP),
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


TRAINING = """
import os, sys, time
import torch
import horovod.torch as hvd

hvd.init()
folder = sys.argv[1]
state = hvd.elastic.TorchState(step=0, checkpoint_dir=os.path.join(folder, "checkpoints"))

@hvd.elastic.run
def train(state):
    print(f"from step {state.step} with {hvd.size()}", flush=True)
    while not os.path.exists(os.path.join(folder, "end")):
        hvd.allreduce(torch.ones(1))
        state.step += 1
        state.commit()
        time.sleep(0.02)

train(state)
print("end", flush=True)
"""


class BatchJob:
    """The training above, started by one of the examples' scripts."""

    def __init__(self, slurm: Slurm, script: str, folder: Path, *options: str) -> None:
        self._slurm, self._folder = slurm, folder
        program = folder / "train.py"
        program.write_text(TRAINING)
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        (bin_folder / "horovodrun").write_text(f'#!/bin/sh\nexec {shlex.join(command())} "$@"\n')
        (bin_folder / "horovodrun").chmod(0o755)
        path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
        done = slurm.run(
            *("sbatch", "--parsable", *options, str(ROOT / "examples" / "slurm" / script)),
            *(sys.executable, str(program), str(folder)),
            env=environment({"PATH": path, "HOME": str(folder)}),
            cwd=folder,
        )
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip()

    def output(self) -> str:
        """What it has printed so far."""
        return "".join(file.read_text() for file in sorted(self._folder.glob("*.out")))

    def wait_for(self, condition: Callable[[str], object], what: str) -> None:
        """Wait until the condition holds of its output."""
        try:
            self._slurm.wait_for(lambda: condition(self.output()), what)
        except AssertionError as error:
            raise AssertionError(f"{error}\nand the job says\n{self.output()}") from None

    def end(self) -> str:
        """Let the training end.

        Returns:
            Everything that it has printed.
        """
        (self._folder / "end").touch()
        self._slurm.wait_until_idle()
        assert not self._slurm.processes("train.py")
        return self.output()


def test_a_preempted_job_goes_on_from_its_last_commit(slurm: Slurm, tmp_path: Path):
    """It loses a node, goes on without it, is preempted, and starts again on both."""
    job = BatchJob(slurm, "elastic.sbatch", tmp_path, "--nodelist=n1,n2")
    job.wait_for(lambda text: text.count("from step 0 with 2\n") == 2, "two ranks")
    slurm.ask("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    job.wait_for(lambda text: " with 1\n" in text, "a job without n2")
    slurm.restart_node("n2")
    slurm.wait_for(lambda: (tmp_path / "checkpoints").exists(), "a commit")
    slurm.requeue(job.id)
    left = "leaves the job, as it was told to"
    job.wait_for(lambda text: text.partition(left)[2].count(" with 2\n") == 2, "two ranks again")
    first, _, second = job.end().partition(left)
    assert "the connection to n2 is lost" in first
    assert "from step 0 " not in second
    assert second.count("<stdout>:end\n") == 2


def test_a_node_that_comes_back_joins_again(slurm: Slurm, tmp_path: Path):
    """Each task of an array brings a node; one of them is preempted."""
    job = BatchJob(slurm, "array.sbatch", tmp_path, "--array=0-1", "--exclusive")
    job.wait_for(lambda text: " with 2\n" in text, "both nodes")
    slurm.requeue(f"{job.id}_1")
    job.wait_for(lambda text: "has left the job" in text, "the loss of a node")
    before = job.output().count(" with 2\n")
    job.wait_for(lambda text: text.count(" with 2\n") > before, "both nodes again")
    assert job.end().count("<stdout>:end\n") == 2
    assert not (tmp_path / ".horovod" / f"array-{job.id}").exists()
