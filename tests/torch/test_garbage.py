"""Steps and collectives leave no tensor to Python's collector: memory is free when it is let go.

A tensor in a cycle of references lives until the collector finds it. With such gradients every step
begins with fresh memory, which costs more than reducing them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import horovod.torch as hvd
from tests.ranks import run_ranks

WAYS = {
    "shared memory": {},
    "shared memory, overlapped": {"HOROVOD_OVERLAP_BACKWARD": "1"},
    "TCP": {"HOROVOD_CPU_OPERATIONS": "gloo"},
    "TCP, overlapped": {"HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_OVERLAP_BACKWARD": "1"},
}


def _left_behind(function: Callable[[], None], times: int) -> list[str]:
    """The tensors that only the collector can free after so many calls; the first may set up."""
    function()
    gc.collect()
    gc.disable()
    try:
        for _ in range(times):
            function()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return [str(each.shape) for each in gc.garbage if isinstance(each, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def _train(rank: int, size: int, **options: object) -> list[str]:
    hvd.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 10))
    if options.pop("forward", False):
        options["overlap_forward"] = model
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        **options,
    )
    inputs, labels = torch.randn(8, 300), torch.zeros(8, dtype=torch.long)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    for _ in range(15):  # until the ways to reduce have been tried
        step()
    return _left_behind(step, 5)


@pytest.mark.parametrize("way", WAYS)
def test_steps(way: str):
    assert run_ranks(_train, 2, env=WAYS[way]) == [[], []]


def _train_with_forward(rank: int, size: int) -> list[str]:
    return _train(rank, size, forward=True)


def test_steps_that_the_next_forward_hides():
    assert run_ranks(_train_with_forward, 2, env=WAYS["TCP, overlapped"]) == [[], []]


def _train_narrow(rank: int, size: int) -> list[str]:
    return _train(rank, size, compression=hvd.Compression.bf16)


def test_steps_that_are_compressed():
    assert run_ranks(_train_narrow, 2, env=WAYS["TCP"]) == [[], []]


def _two_hosts(rank: int) -> dict[str, str]:
    return {"HOROVOD_HOSTNAME": f"host{rank // 2}"}


def _collectives(rank: int, size: int) -> list[str]:
    hvd.init()

    def all_of_them() -> None:
        big, small = torch.ones(size * 100_000), torch.ones(size * 2)
        for tensor in (big, small):
            hvd.allreduce(tensor, name="reduced")
            hvd.grouped_allreduce([tensor, tensor + 1], name="group")
            hvd.allgather(tensor, name="gathered")
            hvd.broadcast(tensor, 0, name="sent")
            hvd.alltoall(tensor, name="exchanged")
            hvd.reducescatter(tensor, name="scattered")
            hvd.synchronize(hvd.allreduce_async(tensor, name="later"))

    return _left_behind(all_of_them, 2)


@pytest.mark.parametrize("way", ["shared memory", "TCP"])
def test_collectives(way: str):
    assert run_ranks(_collectives, 2, env=WAYS[way]) == [[], []]


def test_collectives_between_hosts_of_two_ranks():
    assert run_ranks(_collectives, 4, env=_two_hosts) == [[]] * 4


def test_steps_between_hosts_of_two_ranks():
    assert run_ranks(_train, 4, env=_two_hosts) == [[]] * 4
