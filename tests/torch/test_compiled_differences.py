"""Compiled code that runs other collectives on one rank than on the others, and what is said."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import horovod.torch as hvd
from tests.ranks import RankPool, listen, start_ranks, tell

Tensor = torch.Tensor


def _two(x: Tensor, is_swapped: bool) -> Tensor:
    for name in ("second", "first") if is_swapped else ("first", "second"):
        x = hvd.allreduce(x, name=name)
    return x


def _differing(is_order: bool) -> str:
    """The error of ranks of which the second has compiled its code anew."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graph = torch.compile(_two, backend="eager", fullgraph=True)
    graph(torch.ones(2), False)
    is_other = hvd.rank() == 1
    with ThreadPoolExecutor() as idle:
        idle.submit(int).result()  # leaves a thread with nothing to do, as other backends do
        with pytest.raises(hvd.HorovodInternalError) as caught:
            graph(torch.ones(3 if is_other and not is_order else 2), is_other and is_order)
    return str(caught.value)


@pytest.mark.parametrize("is_order", [True, False], ids=["order", "shape"])
def test_an_error_says_that_one_rank_compiled_anew(pool2: RankPool, is_order: bool):
    for text in pool2.run(_differing, is_order):
        assert "torch.compile has made 1 graph on rank 0 and 2 on rank 1: " in text
        assert "first" in text
        if is_order:
            assert "rank 1 waits for allreduce 'second'" in text


def _skipping(rank: int, size: int) -> float:
    """A condition on data keeps rank 1 from an allreduce, which it makes when it is told to."""
    hvd.init()

    @torch.compile(backend="eager")
    def function(x: Tensor) -> Tensor:
        x = x * 2
        if x.sum() > 0:
            x = hvd.allreduce(x, name="on positive data", op=hvd.Sum)
        return x

    result = function(torch.ones(1) if rank == 0 else -torch.ones(1))
    if rank == 1:
        listen()
        result = hvd.allreduce(result, name="on positive data", op=hvd.Sum)
    tell("done")
    return result.item()


def test_a_collective_that_one_rank_skips_is_reported():
    with start_ranks(_skipping, 2, env={"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}) as ranks:
        text = ranks.wait_for_output(0, "torch.compile has made [0-9]+ graphs? on rank 0")
        assert "1: [allreduce.on positive data]" in text
        assert "may have compiled code that skips these operations" in text
        ranks.say()
        assert ranks.results() == [0.0, 0.0]
