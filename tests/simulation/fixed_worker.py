"""A rank of a simulated job with fixed ranks: the engine over TCP, and a chain of digests.

The model is a digest of all steps, as in `worker`.
"""

from __future__ import annotations

import time

import simulated  # what the simulation offers
import torch

from horovod.common.reduce_op import Sum
from horovod.engine.collective import WORLD, Collective, Kind, Reduction
from horovod.engine.runtime import runtime


def main() -> None:
    """Train to the end."""
    plan = simulated.plan
    runtime.init()
    rank, size = runtime.topology.rank, runtime.topology.size
    simulated.formed(rank, size)
    digest = ""
    for step in range(plan.steps):
        time.sleep(plan.pace * simulated.jitter())
        if simulated.fails:
            raise SystemExit(3)
        tensor = torch.tensor([float(step * size + rank)], dtype=torch.float64)
        total = Collective(Kind.ALLREDUCE, "sum", WORLD, Reduction(Sum))
        request = runtime.submit(total, [tensor], [tensor], background=simulated.flip())
        gathered = runtime.submit(Collective(Kind.ALLGATHER, "ranks"), [torch.tensor([rank])])
        ranks = gathered.wait()[0].tolist()
        (found,) = request.wait()[0].tolist()
        if ranks != list(range(size)):
            simulated.breach(f"step {step} was taken by ranks {ranks}, not by all {size}")
        digest = simulated.digest(digest, step, found)
        simulated.check_alike("after a step", [digest, ranks])
    simulated.finished([digest])
    runtime.shutdown()
