"""The collectives on accelerator tensors: ranks that share one device, and one rank alone.

Two ranks on one GPU are refused by NCCL, so they exercise staging through host memory; one rank
exercises NCCL itself in a world of one. tests/gpu has several ranks that talk through NCCL. Skipped
where there is no accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.engine.runtime import runtime
from tests.accelerators import accelerator as find_accelerator
from tests.effort import examples
from tests.ranks import RankPool
from tests.torch.reference import Case, cases

accelerator = find_accelerator()
pytestmark = pytest.mark.skipif(accelerator is None, reason="needs an accelerator")


@pytest.fixture(scope="module", params=[1, 2])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    pool = RankPool(request.param)
    yield pool
    pool.close()


def device() -> torch.device:
    assert accelerator is not None
    return torch.device(accelerator.type, 0)


def reduce_all(group: list[Case]) -> list[torch.Tensor]:
    """Every case by every form of allreduce, on a busy side stream; results come home."""
    results = []
    module = torch.get_device_module(device())
    with module.stream(module.Stream(device())):
        for index, case in enumerate(group):
            keywords = {
                "op": case.op,
                "prescale_factor": case.prescale,
                "postscale_factor": case.postscale,
            }
            tensor = case.tensor(hvd.rank()).to(device())
            waste = torch.ones(2048, 2048, device=device())
            for _ in range(4):  # the input is not ready yet when the request is submitted
                waste = waste @ waste * 1e-4
            tensor = tensor.clone()
            handle = hvd.allreduce_async(tensor, name=f"async{index}", **keywords)
            results.append(hvd.synchronize(handle).cpu())
            results.append(hvd.allreduce_(tensor.clone(), name=f"place{index}", **keywords).cpu())
            grouped = hvd.grouped_allreduce([tensor, tensor.clone()], **keywords)
            results += [each.cpu() for each in grouped]
    return results


@settings(max_examples=examples(12), deadline=None)
@given(group=st.lists(cases(), min_size=1, max_size=4))
def test_allreduce(pool: RankPool, group: list[Case]) -> None:
    outcomes = pool.run(reduce_all, group)
    for result in outcomes[1:]:
        for mine, theirs in zip(outcomes[0], result, strict=True):
            assert torch.equal(mine, theirs) or bool(mine.isnan().any())
    for index, case in enumerate(group):
        for result in outcomes[0][4 * index : 4 * index + 4]:
            # A device rounds scale factors to its own arithmetic.
            torch.testing.assert_close(
                result,
                case.expected(pool.size),
                rtol=2e-2 if case.dtype.itemsize == 2 else 1e-5,
                atol=1e-2 if case.dtype.itemsize == 2 else 1e-5,
            )


def large(count: int) -> tuple[float, float]:
    tensor = torch.arange(count, device=device(), dtype=torch.float32).remainder_(7)
    total = hvd.allreduce(tensor, name="large", op=hvd.Sum)
    return float((total - tensor * hvd.size()).abs().max()), float(total.sum())


def test_a_tensor_larger_than_every_chunk(pool: RankPool) -> None:
    for worst, _ in pool.run(large, 30_000_001):
        assert worst == 0.0


def everything_else() -> dict[str, object]:
    rank, size, where = hvd.rank(), hvd.size(), device()
    rows = torch.full((rank + 1, 3), float(rank), device=where)
    splits = torch.tensor([1] * size, dtype=torch.int32, device=where)
    sent = torch.arange(size * 2, device=where, dtype=torch.float64).view(size, 2) + 100 * rank
    received, counts = hvd.alltoall(sent, splits=splits)
    value = torch.full((4,), float(rank), device=where)
    weight = torch.ones(3, device=where, requires_grad=True)
    hvd.allreduce(weight * (rank + 1), op=hvd.Sum).sum().backward()
    on_device = [rows, received, value, counts]
    return {
        "gathered": hvd.allgather(rows).cpu(),
        "received": received.cpu(),
        "counts device": counts.device.type,
        "broadcast": hvd.broadcast(value, root_rank=size - 1).cpu(),
        "scattered": hvd.reducescatter(torch.ones(size + 1, 2, device=where), op=hvd.Sum).cpu(),
        "gradient": weight.grad.cpu(),
        "adasum": hvd.allreduce(torch.ones(5, device=where), op=hvd.Adasum).cpu(),
        "devices": {tensor.device.type for tensor in on_device},
        "transport": {t.name for t in _device_transports()},
    }


def _device_transports() -> list[object]:
    job = runtime._job
    assert job is not None
    return list(job.channels[0]._executor._device_transports.values())


def test_the_other_collectives(pool: RankPool) -> None:
    size = pool.size
    for rank, seen in enumerate(pool.run(everything_else)):
        gathered = torch.cat([torch.full((r + 1, 3), float(r)) for r in range(size)])
        assert torch.equal(seen["gathered"], gathered)
        expected = torch.stack(
            [torch.tensor([2.0 * rank, 2.0 * rank + 1]).double() + 100 * r for r in range(size)]
        )
        assert torch.equal(seen["received"], expected)
        assert torch.equal(seen["broadcast"], torch.full((4,), float(size - 1)))
        each, extra = divmod(size + 1, size)
        assert torch.equal(seen["scattered"], torch.full((each + (rank < extra), 2), float(size)))
        assert torch.equal(seen["gradient"], torch.full((3,), float(size * (rank + 1))))
        torch.testing.assert_close(seen["adasum"], torch.ones(5))
        assert seen["devices"] == {accelerator.type}
        assert seen["counts device"] == accelerator.type
        assert seen["transport"] == ({"NCCL"} if size == 1 else {"HOST_COPY"})


def adasum_of_orthogonal() -> list[float]:
    mine = torch.zeros(hvd.size(), device=device())
    mine[hvd.rank()] = 1.0
    return hvd.allreduce(mine, op=hvd.Adasum).tolist()


def test_for_adasum_the_gpus_of_a_host_count_as_one(pool: RankPool) -> None:
    """Scripts take `hvd.local_size()` times the learning rate there."""
    each = 1.0 / pool.size if accelerator.type == "cuda" else 1.0
    assert pool.run(adasum_of_orthogonal) == [[each] * pool.size] * pool.size


def join_early() -> float:
    value = torch.full((3,), 2.0, device=device())
    result = 0.0
    for step in range(2 if hvd.rank() == 0 else 3):
        result = float(hvd.allreduce(value, op=hvd.Min, name=f"step{step}")[0])
    hvd.join()
    return result


def join_a_busy_device() -> list[float]:
    """The first rank joins while its device has much to do, and what it freed is not zero."""
    results = []
    for step in range(4):
        if hvd.rank() == 0:
            leftover = torch.full((1000,), 100.0, device=device())
            matrix = torch.ones(4096, 4096, device=device())
            for _ in range(30):
                matrix = matrix @ matrix
            del leftover
        else:
            ones = torch.ones(1000, device=device())
            results.append(float(hvd.allreduce(ones, op=hvd.Sum, name=f"busy{step}").max()))
        hvd.join()
    return results


def mixed_places() -> str:
    place = device() if hvd.rank() == 0 else torch.device("cpu")
    try:
        hvd.allreduce(torch.ones(2, device=place), name="places")
    except HorovodInternalError as error:
        return str(error)
    return ""


def test_a_joined_rank_adds_nothing_while_its_device_is_busy(pool: RankPool) -> None:
    if pool.size == 1:
        pytest.skip("a rank that joins alone leaves nobody behind")
    assert pool.run(join_a_busy_device)[1:] == [[pool.size - 1.0] * 4] * (pool.size - 1)


def test_join_and_mixed_places(pool: RankPool) -> None:
    assert pool.run(join_early) == [2.0] * pool.size
    if pool.size > 1:
        assert all("mismatched device" in message for message in pool.run(mixed_places))
    for worst, _ in pool.run(large, 1000):
        assert worst == 0.0
