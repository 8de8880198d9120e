"""join: ranks without data stand aside while the others go on."""

from __future__ import annotations

import pytest
import torch

import horovod.torch as hvd
from horovod.common.reduce_op import ReduceOp
from tests.ranks import RankPool, run_ranks


def _uneven_epochs(repetitions: int) -> list[object]:
    """Rank r has r + 1 batches; everybody averages while there is somebody."""
    seen: list[object] = []
    for _ in range(repetitions):
        batches = []
        for _ in range(hvd.rank() + 1):
            batches.append(float(hvd.allreduce(torch.tensor([6.0]), name="batch")))
        seen.append((batches, hvd.join()))
    return seen


def test_averages_divide_by_all_ranks(pool3: RankPool):
    batches = [6.0, 4.0, 2.0]
    for rank, seen in enumerate(pool3.run(_uneven_epochs, 5)):
        assert seen == [(batches[: rank + 1], 2)] * 5


def _with_joined_rank(op: ReduceOp, dtype: torch.dtype, value: int) -> int | None:
    if hvd.rank() == 1:
        hvd.join()
        return None
    tensor = torch.full((2, 3), value, dtype=dtype)
    result = hvd.allreduce(tensor, op=op, name="reduced")
    assert result.dtype is dtype
    assert len(set(result.flatten().tolist())) == 1
    hvd.join()
    return int(result[0, 0])


@pytest.mark.parametrize(
    ("op", "dtype", "value", "expected"),
    [
        (hvd.Sum, torch.int32, 5, 10),
        (hvd.Average, torch.int32, 5, 3),  # 10 / 3
        (hvd.Average, torch.int64, -5, -3),
        (hvd.Average, torch.float32, 6, 4),
        (hvd.Min, torch.int8, 5, 5),
        (hvd.Min, torch.float16, 5, 5),
        (hvd.Min, torch.bool, 1, 1),
        (hvd.Max, torch.int64, -5, -5),
        (hvd.Max, torch.bfloat16, -5, -5),
        (hvd.Max, torch.uint8, 0, 0),
        (hvd.Product, torch.float64, -5, 25),
        (hvd.Product, torch.int16, 5, 25),
        (hvd.Product, torch.bool, 1, 1),
        (hvd.Sum, torch.bool, 0, 0),
    ],
)
def test_a_joined_rank_changes_nothing(pool3: RankPool, op, dtype, value, expected):
    assert pool3.run(_with_joined_rank, op, dtype, value) == [expected, None, expected]


def _scaled_and_grouped() -> list[float] | None:
    if hvd.rank() == 0:
        hvd.join()
        return None
    pair = [torch.ones(2), torch.ones(3, dtype=torch.float64)]
    group = hvd.grouped_allreduce(
        pair, name="pair", op=hvd.Sum, prescale_factor=3.0, postscale_factor=0.5
    )
    handle = hvd.allreduce_async_(torch.ones(1), name="async", op=hvd.Sum)
    totals = [float(tensor.sum()) for tensor in group]
    totals.append(float(hvd.synchronize(handle)))
    hvd.join()
    return totals


def test_groups_factors_and_async_operations(pool3: RankPool):
    assert pool3.run(_scaled_and_grouped) == [None, [6.0, 9.0, 2.0], [6.0, 9.0, 2.0]]


REFUSED = {
    "allgather": lambda: hvd.allgather(torch.ones(2), name="refused"),
    "broadcast": lambda: hvd.broadcast(torch.ones(2), hvd.size() - 1, name="refused"),
    "alltoall": lambda: hvd.alltoall(torch.ones(6), name="refused"),
    "reducescatter": lambda: hvd.reducescatter(torch.ones(6), name="refused"),
}


def _refused(kind: str) -> tuple[float, list[int]]:
    if hvd.rank() == 0:
        hvd.join()
    else:
        with pytest.raises(hvd.HorovodInternalError, match="joined"):
            REFUSED[kind]()
        hvd.join()
    everyone = hvd.allgather_object(hvd.rank())
    return float(hvd.allreduce(torch.ones(1), op=hvd.Sum)), everyone


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_other_collectives_fail_and_the_job_goes_on(pool3: RankPool, kind: str):
    assert pool3.run(_refused, kind) == [(3.0, [0, 1, 2])] * 3


def _root_differs() -> bool:
    if hvd.rank() != 0:
        with pytest.raises(hvd.HorovodInternalError):
            hvd.broadcast(torch.ones(2), hvd.rank(), name="roots")
    return hvd.join() in range(3)


def test_differing_roots_while_a_rank_has_joined(pool3: RankPool):
    assert pool3.run(_root_differs) == [True] * 3


def _last(order: list[int]) -> int:
    """Ranks join one after the other: each tells the next through an allreduce it takes part in."""
    for turn in order:
        if hvd.rank() == turn:
            return hvd.join()
        hvd.allreduce(torch.ones(1), name=f"turn {turn}")
    raise AssertionError("every rank has a turn")


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_the_last_to_join_is_known_to_all(pool3: RankPool, order: list[int]):
    assert pool3.run(_last, order) == [order[-1]] * 3


def _unnamed(repetitions: int) -> list[float]:
    """Automatic names agree again after a join, though ranks have used different numbers."""
    seen = []
    for repetition in range(repetitions):
        for _ in range(hvd.rank() * (repetition + 1)):
            hvd.allreduce(torch.ones(1))
        hvd.join()
        seen.append(float(hvd.allreduce(torch.ones(1), op=hvd.Sum)))
    return seen


def test_unnamed_operations_around_a_join(pool3: RankPool):
    assert pool3.run(_unnamed, 3) == [[3.0] * 3] * 3


def _all_at_once() -> tuple[int, int]:
    first = hvd.join(-1)
    return first, hvd.join(device=-1)


def test_everybody_joins_at_once(pool2: RankPool):
    (first, second), other = pool2.run(_all_at_once)
    assert other == (first, second)
    assert first in (0, 1)
    assert second in (0, 1)


def _train_and_join(rank: int, size: int, delay: bool, steps: list[int]) -> list[float]:
    """Some steps, a join, and more steps: what the weights become, while all take the same steps.

    Between hosts the first steps measure the network, which takes all ranks.
    """
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(20, 20) for _ in range(3)])
    options = {"overlap_forward": model} if delay else {}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters(), **options
    )

    def train(num_steps: int) -> None:
        for _ in range(num_steps):
            optimizer.zero_grad()
            model(torch.ones(4, 20)).mean().backward()
            optimizer.step()

    train(steps[rank])
    hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(30)
    result = [float(param.detach().sum()) for param in model.parameters()]
    assert not optimizer._reducer.is_tuning()
    hvd.shutdown()
    return result


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("steps", [[4, 13], [7, 2], [12, 31], [11, 14]])
def test_join_while_an_optimizer_measures_the_network(delay: bool, steps: list[int]):
    network = {"HOROVOD_CPU_OPERATIONS": "gloo"}
    first, second = run_ranks(_train_and_join, 2, delay, steps, env=network)
    assert first == second
