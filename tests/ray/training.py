"""Functions that the tests' workers run; workers import this module."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any


def place() -> dict[str, Any]:
    """Who a worker is, without torch."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    return {
        "pid": os.getpid(),
        "node": node(),
        "host": os.environ["HOROVOD_HOSTNAME"],
        **{name.lower(): int(os.environ[f"HOROVOD_{name}"]) for name in names},
    }


def node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def join_elastic_job() -> int:
    """Take a place in an elastic job the way `hvd.init` does, but without torch; the rank."""
    from horovod.common.generations.membership import membership

    member = membership()
    assert member is not None

    def meet() -> None:
        world = member.generation
        assert world is not None
        world.set(f"here/{world.topology.rank}", b"")
        for rank in range(world.topology.size):
            world.get(f"here/{rank}", 300)
        world.mark_formed()

    member.form(meet, 300)
    assert member.generation is not None
    os.environ["HOROVOD_RANK"] = str(member.generation.topology.rank)
    return member.generation.topology.rank


def total(value: float) -> dict[str, Any]:
    """A sum over all ranks, and what the engine thinks of the job."""
    import torch

    import horovod.torch as hvd
    from horovod.engine.runtime import runtime
    from horovod.transport.select import by_host

    hvd.init()
    try:
        summed = hvd.allreduce(torch.tensor([value * (hvd.rank() + 1)]), op=hvd.Sum)
        return {
            "rank": hvd.rank(),
            "local_rank": hvd.local_rank(),
            "cross_rank": hvd.cross_rank(),
            "total": summed.item(),
            "hosts": by_host(runtime._running().identities),
            "transport": runtime.channel(0).transport.name,
        }
    finally:
        hvd.shutdown()


def train_through(sizes: Sequence[int], door: str = "") -> dict[str, Any]:
    """Train until the job has had these numbers of ranks, one after the other.

    Who comes while there is a file `door` waits, and joins when it is gone.
    """
    while door and os.path.exists(door):
        time.sleep(0.05)
    import torch

    import horovod.torch as hvd
    from horovod.ray import ray_logger

    hvd.init()
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, seen=())

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.seen != tuple(sizes):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            state.step += 1
            if not state.seen or state.seen[-1] != hvd.size():
                state.seen = (*state.seen, hvd.size())
            message = {"rank": hvd.rank(), "size": hvd.size(), "step": state.step}
            ray_logger.log({**message, "pid": os.getpid(), "node": node(), "time": time.time()})
            time.sleep(0.01)
            state.commit()

    train(state)
    weights = [p.detach().sum().item() for p in model.parameters()]
    return {"rank": hvd.rank(), "seen": state.seen, "step": state.step, "weights": weights}
