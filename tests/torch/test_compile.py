"""Collectives in code that torch.compile or torch.func looks into."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from horovod.torch.ops import operator_kernels, operators
from tests.effort import LONG
from tests.ranks import RankPool

Tensor = torch.Tensor

SIZE = 2
WHOLE = operators.ARE_TRACED  # older versions of torch leave their graph for a collective


def _splits() -> Tensor:
    """How many of five rows each of two ranks gets; the ranks send different numbers."""
    return torch.tensor([[4, 1], [2, 3]][hvd.rank()], dtype=torch.int32)


def _in_place(x: Tensor) -> list[Tensor]:
    changed, row = x.detach().clone(), x.detach()[0].clone()
    hvd.allreduce_(changed, op=hvd.Max)
    hvd.grouped_allreduce_([changed, row], op=hvd.Sum, name="both")
    hvd.broadcast_(row, root_rank=1)
    return [changed, row]


# Each takes five rows of three and returns tensors.
COLLECTIVES: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "allreduce": lambda x: [hvd.allreduce(x), hvd.allreduce(x, op=hvd.Sum, name="named")],
    "other operators": lambda x: [hvd.allreduce(x, op=op) for op in (hvd.Min, hvd.Max)],
    "factors": lambda x: [hvd.allreduce(x, prescale_factor=0.5, postscale_factor=3.0)],
    "compression": lambda x: [hvd.allreduce(x, compression=hvd.Compression.fp16)],
    "grouped_allreduce": lambda x: hvd.grouped_allreduce([x, 2 * x[0]], op=hvd.Sum),
    "transposed": lambda x: [hvd.allreduce(x.t())],
    "allgather": lambda x: [hvd.allgather(x[: 1 + 3 * hvd.rank()])],
    "grouped_allgather": lambda x: list(hvd.grouped_allgather([x, x[: 1 + hvd.rank()]])),
    "broadcast": lambda x: [hvd.broadcast(x, root_rank=1)],
    "reducescatter": lambda x: [hvd.reducescatter(x), hvd.reducescatter(x, op=hvd.Sum)],
    "grouped_reducescatter": lambda x: hvd.grouped_reducescatter([x, x[:3]], op=hvd.Sum),
    "alltoall": lambda x: list(hvd.alltoall(x, splits=_splits())),
    "equal alltoall": lambda x: [hvd.alltoall(x[:4])],
    "in place": _in_place,
}


def _inputs() -> Tensor:
    generator = torch.Generator().manual_seed(hvd.rank())
    return torch.randn(5, 3, generator=generator).requires_grad_()


def _results(function: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
    """What it returns, and its gradient where there is one."""
    inputs = _inputs()
    outputs = function(inputs)
    loss = sum(output.square().sum() for output in outputs if output.requires_grad)
    found = [output.detach() for output in outputs]
    if isinstance(loss, Tensor):
        loss.backward()
        found.append(inputs.grad)
    return found


def compiled(name: str, backend: str) -> tuple[list[Tensor], list[Tensor]]:
    """The results of a collective as it is, and compiled into one graph, which is run twice."""
    torch._dynamo.reset()
    collective = COLLECTIVES[name]
    graph = torch.compile(collective, backend=backend, fullgraph=WHOLE)
    expected = _results(collective)
    _results(graph)
    return expected, _results(graph)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_compiled_collective_gives_the_same_bits(pool2: RankPool, name: str):
    for expected, found in pool2.run(compiled, name, "aot_eager"):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


# What the default backend sees in a short run: making programs of its kernels takes seconds each.
REPRESENTATIVE = ["grouped_allreduce", "transposed", "alltoall", "in place"]


def test_the_same_by_the_default_backend(pool2: RankPool):
    """One function with many of them, all in a long run, and with a result that one rank drops."""
    names = list(COLLECTIVES) if LONG else REPRESENTATIVE
    # On a busy machine a C++ compiler takes minutes.
    for expected, found in pool2.run(in_one_graph, names, timeout=500):
        for mine, other in zip(expected, found, strict=True):
            torch.testing.assert_close(mine, other)


def in_one_graph(names: list[str]) -> tuple[list[Tensor], list[Tensor]]:
    torch._dynamo.reset()

    def several(x: Tensor) -> list[Tensor]:
        y = x.sin()
        unused = hvd.allreduce(x.detach(), op=hvd.Sum, name="of use to one rank")
        results = [result for name in names for result in COLLECTIVES[name](y)]
        return [unused, *results] if hvd.rank() == 0 else results

    return _results(several), _results(torch.compile(several, fullgraph=WHOLE))


@pytest.mark.skipif(
    not hasattr(torch.Tag, "cudagraph_unsafe"), reason="this torch records whatever it compiles"
)
def test_cuda_graphs_of_the_compiler_leave_collectives_out():
    names = [schema.partition("(")[0] for schema in operator_kernels._SCHEMAS]
    for name in names:
        overload = getattr(torch.ops.horovod, name).default
        assert torch.Tag.cudagraph_unsafe in overload.tags, name
    assert "allreduce" in names


def used_by_one_rank(backend: str) -> list[float]:
    """The second rank drops a result, and does not use another one in its loss."""

    def function(x: Tensor, uses: bool) -> Tensor:
        average = hvd.allreduce(x.sum(), name="average")
        total = hvd.allreduce(x.detach().sum(), op=hvd.Sum, name="total")
        hvd.barrier()
        return x.square().sum() + (average + total if uses else 0)

    torch._dynamo.reset()
    graph = torch.compile(function, backend=backend, fullgraph=WHOLE)
    x = torch.ones(2, requires_grad=True)
    graph(x, uses=hvd.rank() == 0).detach()
    return [float(value) for value in hvd.allgather(x.detach())]


@pytest.mark.parametrize("backend", ["aot_eager", *(["inductor"] if LONG else [])])
def test_a_result_that_one_rank_does_not_use(pool2: RankPool, backend: str):
    """A compiler would remove it there, and the other rank would wait for ever."""
    assert pool2.run(used_by_one_rank, backend) == [[1.0] * 4] * SIZE


def in_process_set(ranks: list[int]) -> float:
    members = hvd.add_process_set(ranks)
    torch._dynamo.reset()

    def function(x: Tensor) -> Tensor:
        return hvd.allreduce(x, op=hvd.Sum, process_set=members) * hvd.size()

    try:
        graph = torch.compile(function, backend="eager", fullgraph=WHOLE)
        return float(graph(torch.ones(1))) if hvd.rank() in ranks else 0.0
    finally:
        hvd.remove_process_set(members)


def test_process_sets(pool2: RankPool):
    pool = RankPool(SIZE, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
    assert pool.run(in_process_set, [1]) == [0.0, 2.0]
    pool.close()


def transformed() -> list[Any]:
    """torch.func: a gradient, a batch, and gradients of a batch."""
    rank = hvd.rank()

    def total(x: Tensor) -> Tensor:
        return hvd.allreduce(x * (rank + 1), op=hvd.Sum, name="total").sum()

    batch = torch.arange(6.0).view(3, 2) + rank
    batched = torch.func.vmap(lambda row: hvd.allreduce(row, name="row"), in_dims=1)(batch)
    gathered = torch.func.vmap(lambda row: hvd.allgather(row, name="rows"))(batch)
    scattered = torch.func.vmap(lambda row: hvd.reducescatter(row, op=hvd.Sum))(batch)
    return [
        torch.func.grad(total)(torch.ones(2)).tolist(),
        batched.tolist(),
        gathered.tolist(),
        scattered.tolist(),
        torch.func.vmap(torch.func.grad(total))(torch.ones(2, 2)).tolist(),
    ]


def test_functional_transforms(pool2: RankPool):
    for rank, found in enumerate(pool2.run(transformed)):
        gradient, batched, gathered, scattered, gradients = found
        # A gradient is reduced as the tensor was: two ranks add up 1, and multiply by their factor.
        assert gradient == [2.0 * (rank + 1)] * 2
        assert gradients == [[2.0 * (rank + 1)] * 2] * 2
        assert batched == [[0.5, 2.5, 4.5], [1.5, 3.5, 5.5]]
        assert gathered == [[0, 1, 1, 2], [2, 3, 3, 4], [4, 5, 5, 6]]
        assert scattered == [[2.0 * value + rank * 2 + 1] for value in (0, 2, 4)]


# Each takes five rows of three and returns a handle; what to use where the graph may not be left.
ASYNCHRONOUS: dict[str, tuple[Callable[[Tensor], int], str]] = {
    "allreduce_async": (hvd.allreduce_async, "use hvd.allreduce"),
    "allreduce_async_": (hvd.allreduce_async_, "use hvd.allreduce_"),
    "grouped_allreduce_async": (
        lambda x: hvd.grouped_allreduce_async([x, x[0]]),
        "use hvd.grouped_allreduce",
    ),
    "grouped_allreduce_async_": (
        lambda x: hvd.grouped_allreduce_async_([x, x[0].clone()]),
        "use hvd.grouped_allreduce_",
    ),
    "allgather_async": (hvd.allgather_async, "use hvd.allgather"),
    "grouped_allgather_async": (
        lambda x: hvd.grouped_allgather_async([x, x[0]]),
        "use hvd.grouped_allgather",
    ),
    "broadcast_async": (lambda x: hvd.broadcast_async(x, 1), "use hvd.broadcast"),
    "broadcast_async_": (lambda x: hvd.broadcast_async_(x, 1), "use hvd.broadcast_"),
    "reducescatter_async": (hvd.reducescatter_async, "use hvd.reducescatter"),
    "grouped_reducescatter_async": (
        lambda x: hvd.grouped_reducescatter_async([x, x[:3]]),
        "use hvd.grouped_reducescatter",
    ),
    "alltoall_async": (lambda x: hvd.alltoall_async(x[:4]), "use hvd.alltoall"),
}


def asynchronous(name: str) -> tuple[bool, int]:
    """Whether the results are those without a compiler, and the number of graphs."""
    collective, _ = ASYNCHRONOUS[name]

    def function(x: Tensor) -> list[Tensor]:
        handle = collective(x.sin())
        twice = x * 2  # while the other ranks are waited for
        results = hvd.synchronize(handle)
        return [twice, *(results if isinstance(results, tuple) else [results])]

    torch._dynamo.reset()
    x = _inputs().detach()
    expected = function(x)
    graph = torch.compile(function, backend="eager")
    torch._dynamo.utils.counters.clear()
    equal = all(
        torch.equal(a, b) for _ in range(3) for a, b in zip(expected, graph(x), strict=True)
    )
    return equal, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", ["allreduce_async", "grouped_allreduce_async_", "allgather_async"])
def test_an_asynchronous_collective_leaves_the_graph(pool2: RankPool, name: str):
    for equal, graphs in pool2.run(asynchronous, name):
        assert equal
        # One before it, one after it, and the latter again for other handles. If the compiler
        # looked into the engine there would be many more. A group is made in a graph as well.
        assert graphs <= 4


def _refusal(function: Callable[[], Any]) -> str:
    """The line of the error with which torch refuses a function in a graph."""
    torch._dynamo.reset()
    try:
        torch.compile(function, backend="eager", fullgraph=True)()
    except torch._dynamo.exc.Unsupported as error:
        return next(
            (line for line in str(error).splitlines() if "cannot be traced" in line), str(error)
        )
    return "not refused"


def refused() -> list[str]:
    x, weights, sparse = torch.ones(5, 3), {"weight": torch.ones(2)}, torch.eye(2).to_sparse()
    collectives = [collective for collective, _ in ASYNCHRONOUS.values()]
    return [
        *(_refusal(lambda each=each: each(x)) for each in collectives),  # type: ignore[misc]
        _refusal(lambda: hvd.poll(1)),
        _refusal(lambda: hvd.synchronize(1)),
        _refusal(hvd.join),
        _refusal(lambda: hvd.broadcast_object(1)),
        _refusal(lambda: hvd.allgather_object(1)),
        _refusal(lambda: hvd.broadcast_parameters(weights, 0)),
        _refusal(lambda: hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)),
    ]


@pytest.mark.skipif(
    "reason" not in inspect.signature(torch.compiler.disable).parameters,
    reason="this torch names the function, and takes no words of ours",
)
def test_what_cannot_be_in_a_graph(pool2: RankPool):
    """The error of fullgraph=True says in one line what to use."""
    blocking = "use blocking collectives, such as hvd.allreduce"
    outside = "call it outside of compiled code"
    expected = {name: instead for name, (_, instead) in ASYNCHRONOUS.items()}
    expected |= {"poll": blocking, "synchronize": blocking, "join": outside}
    expected |= {"broadcast_object": outside, "allgather_object": outside}
    expected |= {"broadcast_parameters": outside, "sparse_allreduce_async": outside}
    for refusals in pool2.run(refused):
        for (name, instead), refusal in zip(expected.items(), refusals, strict=True):
            assert f"hvd.{name} cannot be traced with fullgraph=True: {instead}" in refusal
