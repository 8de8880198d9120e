"""Every collective, dtype and form on device tensors, against what one process computes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import horovod.torch as hvd
from horovod.common.reduce_op import ReduceOp
from tests.accelerators import own_device
from tests.effort import examples
from tests.engine.test_adasum import reference as adasum_reference
from tests.gpu import JOBS, size_of
from tests.gpu.pools import GpuPools, few_examples
from tests.torch.reference import (
    COMPLEX,
    EVERY_DTYPE,
    ORDERED,
    Case,
    cases,
    every_dtype,
    lay_out,
    layouts,
    row_shapes,
)

Tensor = torch.Tensor

SCATTERED = (ReduceOp.SUM, ReduceOp.AVERAGE)


def placed(case: Case, device: torch.device, rank: int | None = None) -> Tensor:
    """A rank's tensor on the device, laid out there: a copy between devices closes gaps."""
    plain = dataclasses.replace(case, layout="contiguous").tensor(
        hvd.rank() if rank is None else rank
    )
    return lay_out(plain.to(device), case.layout)


def keywords(case: Case) -> dict[str, Any]:
    return {
        "op": case.op,
        "prescale_factor": case.prescale,
        "postscale_factor": case.postscale,
    }


def check_reduced(case: Case, result: Tensor, size: int) -> None:
    """Like one process's result; a device rounds factors to its own arithmetic."""
    if case.exact:
        case.check(result, size)
        return
    narrow = case.dtype.itemsize == 2
    tolerance = {"rtol": 2e-2, "atol": 1e-2} if narrow else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(result, case.expected(size), **tolerance)


def assert_same_bits(mine: Tensor, theirs: Tensor) -> None:
    assert mine.dtype is theirs.dtype
    assert mine.shape == theirs.shape
    assert torch.equal(bits_of(mine), bits_of(theirs)), "ranks differ"


def bits_of(tensor: Tensor) -> Tensor:
    """A copy, because an empty tensor may be contiguous with any stride."""
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


@contextlib.contextmanager
def busy_stream(device: torch.device) -> Iterator[None]:
    """A stream of the program's own that has much to do: what is made on it comes late."""
    if device.type == "cpu":
        yield
        return
    module = torch.get_device_module(device)
    with module.stream(module.Stream(device)):
        waste = torch.ones(2048, 2048, device=device)
        for _ in range(4):
            waste = waste @ waste * 1e-4
        yield


# -- allreduce ----------------------------------------------------------------------------------


def reduced_by_every_form(group: list[Case]) -> list[list[Tensor]]:
    device = own_device()
    results = []
    for number, case in enumerate(group):
        with busy_stream(device):
            tensor, options = placed(case, device), keywords(case)
            before = tensor.clone()
            name = f"case{number}"
            found = [
                hvd.allreduce(tensor, name=f"{name}.plain", **options),
                hvd.synchronize(hvd.allreduce_async(tensor, name=f"{name}.async", **options)),
                *hvd.grouped_allreduce([tensor, before], name=f"{name}.group", **options),
                *hvd.synchronize(
                    hvd.grouped_allreduce_async([tensor, before], name=f"{name}.ga", **options)
                ),
            ]
            assert torch.equal(tensor, before), "an input has changed"
            places = [lay_out(before.clone(), case.layout) for _ in range(4)]
            found.append(hvd.allreduce_(places[0], name=f"{name}.place", **options))
            handle = hvd.allreduce_async_(places[1], name=f"{name}.async place", **options)
            found.append(hvd.synchronize(handle))
            found += hvd.grouped_allreduce_(places[2:], name=f"{name}.group place", **options)
            assert all(mine is given for mine, given in zip(found[-4:], places, strict=True))
            assert {each.device for each in found} == {device}
            results.append([each.cpu() for each in found])
    return results


def check_every_form(gpus: GpuPools, job: str, group: list[Case]) -> None:
    outcomes = gpus.run(job, reduced_by_every_form, group)
    for results in outcomes:
        for case, found, first in zip(group, results, outcomes[0], strict=True):
            for mine, theirs in zip(found, first, strict=True):
                assert_same_bits(mine, theirs)
                check_reduced(case, mine, size_of(job))


@pytest.mark.parametrize("job", JOBS)
@few_examples
@given(group=st.lists(cases(), min_size=1, max_size=3))
def test_allreduce(gpus: GpuPools, job: str, group: list[Case]):
    check_every_form(gpus, job, group)


def every_reduction() -> list[Case]:
    """All dtypes with all operators that they have."""
    operators = [ReduceOp.SUM, ReduceOp.AVERAGE, *ORDERED]
    return [
        Case(dtype, (5, 3), op=op, seed=number)
        for number, dtype in enumerate(EVERY_DTYPE)
        for op in operators
        if not (op is ReduceOp.AVERAGE and dtype is torch.bool)
        if not (op in ORDERED and dtype in COMPLEX)
    ]


@pytest.mark.parametrize("job", JOBS)
def test_allreduce_of_every_dtype(gpus: GpuPools, job: str):
    check_every_form(gpus, job, every_reduction())


def reduced_group_of_all_dtypes() -> list[Tensor]:
    device = own_device()
    group = [placed(Case(dtype, (7, 2), seed=3), device) for dtype in EVERY_DTYPE]
    return [each.cpu() for each in hvd.grouped_allreduce(group, op=hvd.Sum, name="all dtypes")]


@pytest.mark.parametrize("job", JOBS)
def test_a_group_of_all_dtypes(gpus: GpuPools, job: str):
    for results in gpus.run(job, reduced_group_of_all_dtypes):
        for dtype, result in zip(EVERY_DTYPE, results, strict=True):
            Case(dtype, (7, 2), seed=3).check(result, size_of(job))


def reduced_at_once(count: int) -> list[float]:
    """Many handles before the first is waited for, submitted in another order on each rank."""
    device = own_device()
    order = list(range(count))
    order = order[hvd.rank() :] + order[: hvd.rank()]
    tensors = [torch.full((1 + 1000 * number,), float(number), device=device) for number in order]
    handles = {
        number: hvd.allreduce_async(tensor, name=f"many.{number}", op=hvd.Sum)
        for number, tensor in zip(order, tensors, strict=True)
    }
    results = [hvd.synchronize(handles[number]) for number in range(count)]
    assert all(bool((each == each[0]).all()) for each in results)
    return [float(each[0]) for each in results]


@pytest.mark.parametrize("job", JOBS)
def test_many_at_once_in_different_orders(gpus: GpuPools, job: str):
    for found in gpus.run(job, reduced_at_once, 30):
        assert found == [float(number * size_of(job)) for number in range(30)]


def largest_error(count: int) -> float:
    tensor = torch.arange(count, device=own_device(), dtype=torch.float32).remainder_(7)
    total = hvd.allreduce(tensor, name="large", op=hvd.Sum)
    return float((total - tensor * hvd.size()).abs().max())


@pytest.mark.parametrize("job", JOBS)
def test_a_tensor_larger_than_every_chunk(gpus: GpuPools, job: str):
    assert gpus.run(job, largest_error, 20_000_001) == [0.0] * size_of(job)


def reduced_again(steps: int) -> float:
    """Memory that the program frees and uses again while collectives are under way."""
    device, worst = own_device(), 0.0
    for step in range(steps):
        tensor = torch.full((1 << 18,), float(step), device=device)
        handle = hvd.allreduce_async(tensor, name="again")
        gathered = hvd.allgather(tensor, name="gathered again")
        del tensor
        torch.empty(1 << 19, device=device).fill_(-1.0)
        result = hvd.synchronize(handle)
        worst = max(worst, float((result - step).abs().max()), float((gathered - step).abs().max()))
    return worst


@pytest.mark.parametrize("job", JOBS)
def test_memory_is_used_again(gpus: GpuPools, job: str):
    assert gpus.run(job, reduced_again, 15) == [0.0] * size_of(job)


# -- what moves tensors -------------------------------------------------------------------------


@dataclass(frozen=True)
class Movement:
    """Rows of all ranks, and which of them go where."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: str
    rows: tuple[int, ...]  # of each rank, for allgather
    splits: tuple[tuple[int, ...], ...]  # of each rank to each, for alltoall
    scattered: int  # rows, for reducescatter
    root: int
    seed: int

    def mine(self, rank: int) -> Case:
        return Case(self.dtype, (self.rows[rank], *self.shape), self.layout, seed=self.seed)

    def sent(self, rank: int) -> Case:
        rows = sum(self.splits[rank]) + 1  # the last one stays
        return Case(self.dtype, (rows, *self.shape), self.layout, seed=self.seed)

    def same(self) -> Case:
        return Case(self.dtype, (3, *self.shape), self.layout, seed=self.seed)

    def reduced(self, op: ReduceOp) -> Case:
        return Case(self.dtype, (self.scattered, *self.shape), self.layout, op, seed=self.seed)


@st.composite
def movements(draw: st.DrawFn, size: int) -> Movement:
    return Movement(
        draw(every_dtype),
        draw(row_shapes),
        draw(layouts),
        draw(st.tuples(*[st.integers(0, 4)] * size)),
        draw(st.tuples(*[st.tuples(*[st.integers(0, 3)] * size)] * size)),
        draw(st.integers(0, 2 * size + 1)),
        draw(st.integers(0, size - 1)),
        draw(st.integers(0, 1000)),
    )


def moved(movement: Movement) -> dict[str, Any]:
    device, rank = own_device(), hvd.rank()
    found: dict[str, Any] = {}
    with busy_stream(device):
        rows = placed(movement.mine(rank), device)
        found["gathered"] = [
            hvd.allgather(rows, name="plain"),
            hvd.synchronize(hvd.allgather_async(rows, name="async")),
            *hvd.grouped_allgather([rows, rows.clone()], name="group"),
            *hvd.synchronize(hvd.grouped_allgather_async([rows], name="async group")),
        ]
        sent = placed(movement.sent(rank), device)
        splits = list(movement.splits[rank])
        on_device = torch.tensor(splits, dtype=torch.int32, device=device)
        pairs = [
            hvd.alltoall(sent, splits, name="list"),
            hvd.alltoall(sent, on_device, name="tensor"),
            hvd.synchronize(hvd.alltoall_async(sent, splits, name="async")),
        ]
        found["exchanged"] = [received for received, _ in pairs]
        found["counts"] = [counts.tolist() for _, counts in pairs]
        same = placed(movement.same(), device)
        place = same.clone()
        found["broadcast"] = [
            hvd.broadcast(same, movement.root, name="plain"),
            hvd.synchronize(hvd.broadcast_async(same, movement.root, name="async")),
            hvd.broadcast_(place, movement.root, name="place"),
        ]
        assert found["broadcast"][-1] is place
        for op in SCATTERED:
            if op is ReduceOp.AVERAGE and movement.dtype is torch.bool:
                continue
            whole = placed(movement.reduced(op), device)
            found[op.name] = [
                hvd.reducescatter(whole, op=op, name="plain"),
                hvd.synchronize(hvd.reducescatter_async(whole, op=op, name="async")),
                *hvd.grouped_reducescatter([whole, whole.clone()], op=op, name="group"),
            ]
        for key, tensors in found.items():
            if key != "counts":
                assert {each.device for each in tensors} == {device}, key
                found[key] = [each.cpu() for each in tensors]
    return found


def check_moved(gpus: GpuPools, job: str, movement: Movement) -> None:
    size = size_of(job)
    ranks = gpus.run(job, moved, movement)
    everybody = [movement.mine(rank).tensor(rank) for rank in range(size)]
    parts = [
        movement.sent(rank).tensor(rank).split([*movement.splits[rank], 1]) for rank in range(size)
    ]
    for rank, found in enumerate(ranks):
        for each in found["gathered"]:
            assert_same_bits(each, torch.cat(everybody))
        for each in found["exchanged"]:
            assert_same_bits(each, torch.cat([theirs[rank] for theirs in parts]))
        for counts in found["counts"]:
            assert counts == [row[rank] for row in movement.splits]
        for each in found["broadcast"]:
            assert_same_bits(each, movement.same().tensor(movement.root))
    for op in SCATTERED:
        for each in zip(*(found.get(op.name, ()) for found in ranks), strict=True):
            shares = [len(part) for part in each]
            rows, extra = divmod(movement.scattered, size)
            assert shares == [rows + (rank < extra) for rank in range(size)]
            check_reduced(movement.reduced(op), torch.cat(each), size)


@pytest.mark.parametrize("job", JOBS)
@few_examples
@given(data=st.data())
def test_moving(gpus: GpuPools, job: str, data: st.DataObject):
    check_moved(gpus, job, data.draw(movements(size_of(job))))


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_moving_every_dtype(gpus: GpuPools, dtype: torch.dtype):
    """With rows that differ, some of them none, and rows that do not divide."""
    splits = ((0, 1, 2), (3, 0, 0), (1, 1, 0))
    check_moved(
        gpus, "3 ranks", Movement(dtype, (2,), "contiguous", (2, 0, 3), splits, 7, 2, seed=1)
    )


@pytest.mark.parametrize("job", ["2 ranks", "2 hosts"])
def test_moving_one_element_of_a_wider_stride(gpus: GpuPools, job: str):
    """It counts as contiguous whatever its stride is, but cannot be viewed as bytes."""
    splits = ((3, 0), (0, 0))
    check_moved(gpus, job, Movement(torch.float32, (), "strided", (3, 1), splits, 1, 0, seed=1))


# -- gradients through collectives --------------------------------------------------------------


def differentiated() -> list[dict[str, list[float]]]:
    """On the device, and in host memory."""
    device, rank, size = own_device(), hvd.rank(), hvd.size()

    def gradient(where: torch.device, function: Any) -> list[float]:
        weight = torch.ones(size, 2, device=where, requires_grad=True)
        (function(weight * (rank + 1)) ** 2).sum().backward()
        assert weight.grad is not None
        assert weight.grad.device == where
        return weight.grad.cpu().view(-1).tolist()

    return [
        {
            "allreduce": gradient(where, lambda x: hvd.allreduce(x, op=hvd.Sum)),
            "grouped": gradient(where, lambda x: hvd.grouped_allreduce([x, 2 * x])[1]),
            "allgather": gradient(where, hvd.allgather),
            "broadcast": gradient(where, lambda x: hvd.broadcast(x, root_rank=0)),
            "alltoall": gradient(where, hvd.alltoall),
            "reducescatter": gradient(where, lambda x: hvd.reducescatter(x, op=hvd.Sum)),
        }
        for where in (device, torch.device("cpu"))
    ]


@pytest.mark.parametrize("job", JOBS)
def test_derivatives(gpus: GpuPools, job: str):
    for on_device, in_host_memory in gpus.run(job, differentiated):
        for name, expected in in_host_memory.items():
            assert on_device[name] == pytest.approx(expected), name


# -- some of the ranks --------------------------------------------------------------------------


def reduced_in_sets(members: list[list[int]]) -> dict[str, Any]:
    """Every set has a communicator of its own; ranks come to their sets in different orders."""
    device, rank = own_device(), hvd.rank()
    sets = [hvd.add_process_set(ranks) for ranks in members]
    try:
        numbers = [number for number, ranks in enumerate(members) if rank in ranks]
        order = numbers if rank % 2 else numbers[::-1]
        value = torch.full((1000,), float(rank), device=device)
        handles = {
            number: hvd.allreduce_async(value, op=hvd.Sum, name="x", process_set=sets[number])
            for number in order
        }
        world = hvd.allreduce_async(value, op=hvd.Sum, name="x")
        found: dict[str, Any] = {
            "world": float(hvd.synchronize(world)[0]),
            "sums": {number: float(hvd.synchronize(handles[number])[0]) for number in numbers},
        }
        for number in numbers:
            chosen, size = sets[number], len(members[number])
            mine = torch.full((chosen.rank() + 1, 2), float(rank), device=device)
            spread = torch.arange(size, device=device) + 10 * rank
            root = members[number][-1]
            found[f"set{number}"] = {
                "gathered": hvd.allgather(mine, process_set=chosen).cpu(),
                "broadcast": hvd.broadcast(mine[:1], root, process_set=chosen).cpu(),
                "exchanged": hvd.alltoall(spread, process_set=chosen).cpu(),
                "scattered": hvd.reducescatter(
                    value[: size + 1], op=hvd.Sum, process_set=chosen
                ).cpu(),
            }
    finally:
        for each in sets:
            hvd.remove_process_set(each)
    return found


SETS = {
    "2 ranks": [[0], [1]],
    "3 ranks": [[0, 1], [1, 2], [0, 2], [2]],
    "4 ranks": [[0, 1], [2, 3], [0, 2, 3], [1, 3]],
}


@pytest.mark.parametrize("job", SETS)
def test_process_sets(gpus: GpuPools, job: str):
    members = SETS[job]
    for _ in range(2):  # once more, with new communicators
        results = gpus.run(job, reduced_in_sets, members)
        for rank, found in enumerate(results):
            assert found["world"] == float(sum(range(size_of(job))))
            mine = {number: ranks for number, ranks in enumerate(members) if rank in ranks}
            assert found["sums"] == {number: float(sum(ranks)) for number, ranks in mine.items()}
            for number, ranks in mine.items():
                seen, index = found[f"set{number}"], ranks.index(rank)
                gathered = [torch.full((i + 1, 2), float(r)) for i, r in enumerate(ranks)]
                assert torch.equal(seen["gathered"], torch.cat(gathered))
                assert torch.equal(seen["broadcast"], torch.full((1, 2), float(ranks[-1])))
                assert seen["exchanged"].tolist() == [index + 10 * each for each in ranks]
                each, extra = divmod(len(ranks) + 1, len(ranks))
                expected = torch.full((each + (index < extra),), float(sum(ranks)))
                assert torch.equal(seen["scattered"], expected)


def joined(batches: list[list[int]]) -> list[Any]:
    """Epochs in which each rank has its own number of batches."""
    device = own_device()
    seen: list[Any] = []
    for numbers in batches:
        found = []
        for step in range(numbers[hvd.rank()]):
            value = torch.full((100,), 12.0, device=device)
            average = hvd.allreduce(value, name=f"batch.{step}")
            smallest = hvd.allreduce(value, op=hvd.Min, name=f"smallest.{step}")
            found.append((float(average.max()), float(smallest.max())))
        seen.append((found, hvd.join()))
    return seen


@pytest.mark.parametrize("job", JOBS)
@settings(few_examples, max_examples=examples(8))
@given(data=st.data())
def test_join(gpus: GpuPools, job: str, data: st.DataObject):
    """Averages divide by all ranks, also by those that have no data any more."""
    size = size_of(job)
    epoch = st.lists(st.integers(0, 3), min_size=size, max_size=size)
    batches = data.draw(st.lists(epoch, min_size=1, max_size=3))
    results = gpus.run(job, joined, batches)
    for rank, epochs in enumerate(results):
        for numbers, (found, last) in zip(batches, epochs, strict=True):
            there = [sum(each > step for each in numbers) for step in range(numbers[rank])]
            assert [smallest for _, smallest in found] == [12.0] * numbers[rank]
            averages = [average for average, _ in found]
            assert averages == pytest.approx([12.0 * count / size for count in there])
            assert last in range(size)
    assert len({tuple(last for _, last in epochs) for epochs in results}) == 1


def joined_while_busy() -> list[float]:
    """The first rank joins while its device has much to do, and what it freed is not zero."""
    device, results = own_device(), []
    for step in range(3):
        if hvd.rank() == 0:
            leftover = torch.full((1000,), 100.0, device=device)
            with busy_stream(device):
                del leftover
        else:
            ones = torch.ones(1000, device=device)
            results.append(float(hvd.allreduce(ones, op=hvd.Sum, name=f"busy{step}").max()))
        hvd.join()
    return results


@pytest.mark.parametrize("job", JOBS)
def test_a_joined_rank_adds_nothing_while_its_device_is_busy(gpus: GpuPools, job: str):
    others = size_of(job) - 1
    assert gpus.run(job, joined_while_busy)[1:] == [[float(others)] * 3] * others


# -- other reductions ---------------------------------------------------------------------------


def combined(case: Case) -> tuple[Tensor, str]:
    device = own_device()
    return hvd.allreduce(placed(case, device), op=hvd.Adasum).cpu(), device.type


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("job", [*JOBS, "4 hosts"])
def test_adasum(gpus: GpuPools, job: str, dtype: torch.dtype):
    """On GPUs the ranks of a host count as one, which has their average."""
    size = size_of(job)
    case = Case(dtype, (50, 3), seed=4)
    results = gpus.run(job, combined, case)
    inputs = [case.tensor(rank).double().view(-1).numpy() for rank in range(size)]
    if job.endswith("ranks") and results[0][1] == "cuda":
        inputs = [sum(inputs) / size]
    expected = torch.from_numpy(adasum_reference(inputs)).view(50, 3)
    tolerance = 2e-2 if dtype.itemsize == 2 else 1e-5
    for found, _ in results:
        assert_same_bits(found, results[0][0])
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def reduced_sparse(op: int, dtype: torch.dtype) -> Tensor:
    """Each rank has entries of its own and one that all have; the last rank has none."""
    device, rank, size = own_device(), hvd.rank(), hvd.size()
    dense = torch.zeros(size + 1, 3, dtype=dtype)
    if rank < size - 1:
        dense[rank], dense[size] = rank + 1, 6
    result = hvd.sparse_allreduce_async(dense.to(device).to_sparse(1), "sparse", op)()
    assert result.is_sparse
    assert result.device == device
    return result.to_dense().cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("job", JOBS)
def test_sparse_tensors(gpus: GpuPools, job: str, dtype: torch.dtype):
    size = size_of(job)
    expected = torch.zeros(size + 1, 3, dtype=dtype)
    for rank in range(size - 1):
        expected[rank] = rank + 1
        expected[size] += 6
    for found in gpus.run(job, reduced_sparse, hvd.Sum, dtype):
        torch.testing.assert_close(found, expected)


def reduced_objects() -> Any:
    """Objects with device tensors in them, which arrive as such."""
    device = own_device()
    mine = {"rank": hvd.rank(), "tensor": torch.full((3,), float(hvd.rank()), device=device)}
    everybody = hvd.allgather_object(mine)
    first = hvd.broadcast_object(mine if hvd.rank() == 0 else None)
    return [(each["rank"], each["tensor"].cpu()) for each in [*everybody, first]]


@pytest.mark.parametrize("job", JOBS)
def test_objects(gpus: GpuPools, job: str):
    numbers = [*range(size_of(job)), 0]
    for found in gpus.run(job, reduced_objects):
        assert [rank for rank, _ in found] == numbers
        for number, (_, tensor) in zip(numbers, found, strict=True):
            assert torch.equal(tensor, torch.full((3,), float(number)))


def transports() -> set[str]:
    from horovod.engine.runtime import runtime

    hvd.allreduce(torch.ones(1, device=own_device()))
    job = runtime._job
    assert job is not None
    return {each.name for each in job.channels[0]._executor._device_transports.values()}


@pytest.mark.parametrize("job", JOBS)
def test_nccl_carries_all_of_this(gpus: GpuPools, job: str):
    """All other tests would pass through host memory as well."""
    if gpus.run(job, own_device)[0].type == "cpu":
        pytest.skip("tensors are in host memory")
    assert gpus.run(job, transports) == [{"NCCL"}] * size_of(job)
