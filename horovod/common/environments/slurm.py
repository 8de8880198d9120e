"""Slurm's srun.

Only a job *step* has ranks. A batch script, or the shell that salloc opens, sees most of the same
variables but is one process; and a program that mpirun starts inside Slurm has MPI's ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from horovod.common.environments.base import Environment, RendezvousMethod, Variables

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Step numbers from here on are the batch script, the interactive shell and Slurm's own steps."""

_NODE_GROUP = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_MAX_NODES = 1_000_000


def tasks_per_node(text: str) -> list[int]:
    """Return the list that a text of Slurm means: ``[4, 4, 3]`` for ``"4(x2),3"``.

    Raises:
        ValueError: The text is not such a list.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _NODE_GROUP.fullmatch(part.strip())
        if match is None or len(match[1]) > 9 or len(match[2] or "") > 9:
            raise ValueError(f"{text!r} is not a list of tasks per node such as '4(x2),3'")
        repeat = int(match[2] or 1)
        if repeat < 1 or len(counts) + repeat > _MAX_NODES:
            raise ValueError(f"{text!r} names an impossible number of nodes")
        counts += [int(match[1])] * repeat
    return counts


class Slurm(Environment):
    """SLURM_PROCID and SLURM_STEP_NUM_TASKS, in a job step."""

    name = "Slurm srun"
    rendezvous = RendezvousMethod.SHARED_HOME
    variables = Variables(
        rank="SLURM_PROCID",
        size="SLURM_NTASKS",
        local_rank="SLURM_LOCALID",
        local_size="SLURM_TASKS_PER_NODE",
    )
    job_variables = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")

    @classmethod
    def detects(cls, environ: Mapping[str, str]) -> bool:
        step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
        return (
            step.isdecimal()
            and int(step) < _FIRST_SPECIAL_STEP
            and bool(environ.get(cls.variables.rank))
        )

    def claim(self) -> tuple[int, int]:
        size = self._of_step("SLURM_STEP_NUM_TASKS", self.variables.size)
        return self._pair(self.variables.rank, size)

    def local(self) -> tuple[int, int]:
        counts, node = self._nodes()
        local_rank = self._integer(self.variables.local_rank)
        if local_rank >= counts[node]:
            raise self._error(
                "gives a local rank that is not below the node's tasks",
                self.variables.local_rank,
                "SLURM_NODEID",
                self._counts_name(),
            )
        return local_rank, counts[node]

    def cross(self) -> tuple[int, int]:
        counts, node = self._nodes()
        local_rank = self._integer(self.variables.local_rank)
        peers = [index for index, count in enumerate(counts) if count > local_rank]
        return peers.index(node), len(peers)

    def _nodes(self) -> tuple[list[int], int]:
        """Return the number of tasks of each node, and the index of this node."""
        name = self._counts_name()
        self._require("SLURM_NODEID", self.variables.local_rank, name)
        try:
            counts = tasks_per_node(self.environ[name])
        except ValueError as error:
            raise self._error(f"gives no list of tasks: {error}", name) from None
        node, size = self._integer("SLURM_NODEID"), self.claim()[1]
        if sum(counts) != size or node >= len(counts):
            size_name = self._of_step("SLURM_STEP_NUM_TASKS", self.variables.size)
            raise self._error(
                f"describes {sum(counts)} tasks on {len(counts)} nodes for {size} ranks",
                size_name,
                name,
                "SLURM_NODEID",
            )
        return counts, node

    def _counts_name(self) -> str:
        """Return the name of the variable that lists the tasks of each node."""
        return self._of_step("SLURM_STEP_TASKS_PER_NODE", self.variables.local_size)

    def _of_step(self, step_name: str, job_name: str) -> str:
        """Return the step's variable if it is set: the job may have more tasks than this step."""
        return step_name if self.environ.get(step_name) else job_name
