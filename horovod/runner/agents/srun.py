"""The srun command line that starts a program on a node of a Slurm job: a `starter.Starter`.

The agent is a job step of its own, which shares the job's resources with the workers' other steps
(``--overlap``). It gets all cores and devices that the job has on the node, however the job was
submitted: `environment` takes away what would give srun another default.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from horovod.runner.agents.starter import check_name
from horovod.runner.slots.allocation import slurm_groups
from horovod.runner.slots.worker_env import HOSTS_OWN

NODES_OWN = (
    *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK"),
    *("SLURMD_NODENAME", "SLURM_CPUS_ON_NODE", "SLURM_JOB_GPUS"),
    *("SLURM_STEP_GPUS", "SLURM_TOPOLOGY_ADDR"),
)
"""What Slurm tells about a node to the processes there."""

_SHAPES = (
    *("SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPUS", "SLURM_GPUS_PER_TASK"),
    *("SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_SOCKET", "SLURM_GPU_BIND", "SLURM_CPU_BIND"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_GPU"),
    *("SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_CORE", "SLURM_DISTRIBUTION"),
    *("SLURM_EXACT", "SLURM_EXCLUSIVE", "SLURM_HINT", "SLURM_CORE_SPEC", "SLURM_THREADS"),
    *("SLURM_LABELIO", "SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_STDERRMODE"),
    *("SLURM_UNBUFFEREDIO", "SLURM_EXPORT_ENV", "SLURM_STEP_GRES", "SLURM_MEM_PER_CPU"),
    *("SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    *("SLURM_WAIT", "SLURM_KILL_BAD_EXIT", "SLURM_OPEN_MODE", "SLURM_TIMELIMIT"),
)
"""Variables that srun reads as if they were options: those of the job's tasks, not of an agent."""


@dataclass(frozen=True)
class Srun:
    """How to start a step in the Slurm job that ``environ`` describes."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    name = "srun"
    keeps = (*HOSTS_OWN, *NODES_OWN)

    def command(self, host: str, program: Sequence[str]) -> list[str]:
        check_name(host)
        return [
            shutil.which("srun", path=self.environ.get("PATH")) or "srun",
            "--quiet",
            "--overlap",
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={host}",
            *self._group(host),
            "--cpu-bind=none",
            "--mpi=none",
            "--export=ALL",
            "--job-name=horovodrun",
            *program,
        ]

    def _group(self, host: str) -> list[str]:
        """Of a heterogeneous job srun knows the nodes of its first group, unless it is told."""
        groups = slurm_groups(self.environ)
        found = [n for n, hosts in enumerate(groups) if host in {each.name for each in hosts}]
        return [f"--het-group={number}" for number in found[:1]]

    def environment(self) -> dict[str, str]:
        return {name: value for name, value in self.environ.items() if name not in _SHAPES}


def is_allocation(environ: Mapping[str, str]) -> bool:
    """Whether this process is in a Slurm job, from which srun can start steps."""
    has_srun = shutil.which("srun", path=environ.get("PATH")) is not None
    return bool(environ.get("SLURM_JOB_ID")) and has_srun
