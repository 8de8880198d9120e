"""What the operators of `horovod.torch.ops.operators` are to torch: schemas, kernels, fake forms.

A schema says what an operator reads and writes; its kernel runs when the graph does; its *fake*
form tells the compiler the shapes of results before. The compiler keeps graphs on disk, also for
other processes. So a fake form may not look at the engine: what differs between ranks or jobs, and
decides the shape of a result, is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from horovod.common.reduce_op import Average, ReduceOp
from horovod.engine.arguments import (
    check_splits,
    check_writable,
    movement_input,
    reduction_inputs,
    write_back,
)
from horovod.engine.collective import Collective, Kind, Reduction
from horovod.engine.runtime import runtime
from horovod.engine.submission import check_scattered
from horovod.torch.ops.shortcuts import shorten

Tensor = torch.Tensor

SMALL = 16 * 1024  # bytes: to copy as many in host memory costs less than a request
_library: Any = torch.library.Library("horovod", "FRAGMENT")  # type: ignore[no-untyped-call]

_FACTORS = "str? name, int op, float prescale_factor, float postscale_factor, int process_set"
_SCHEMAS = (
    f"allreduce(Tensor[] tensors, Tensor(a!)[] outputs, Tensor(b!) order, {_FACTORS}) -> ()",
    f"allreduce_(Tensor(a!)[] tensors, Tensor(b!) order, {_FACTORS}) -> ()",
    "allgather_rows(Tensor tensor, Tensor(b!) order, int ranks, str? name, int process_set)"
    " -> Tensor",
    "total_rows(Tensor rows) -> SymInt",
    "allgather(Tensor tensor, Tensor(a!) output, Tensor(b!) order, str? name, int process_set)"
    " -> ()",
    "allgather_gradient(Tensor gradient, Tensor(a!) output, Tensor(b!) order, str? name,"
    " int process_set) -> ()",
    "broadcast(Tensor tensor, Tensor(a!) output, Tensor(b!) order, int root_rank, str? name,"
    " int process_set) -> ()",
    "broadcast_(Tensor(a!) tensor, Tensor(b!) order, int root_rank, str? name,"
    " int process_set) -> ()",
    "alltoall_rows(Tensor tensor, Tensor? splits, Tensor(b!) order, int ranks, str? name,"
    " int process_set) -> Tensor",
    "alltoall(Tensor tensor, Tensor? splits, Tensor(a!) output, Tensor(b!) order, str? name,"
    " int process_set) -> ()",
    "alltoall_gradient(Tensor gradient, Tensor received, Tensor(a!) output, Tensor(b!) order,"
    " str? name, int process_set) -> ()",
    f"reducescatter(Tensor[] tensors, Tensor(a!)[] outputs, Tensor(b!) order, {_FACTORS}) -> ()",
    "barrier(Tensor(b!) order, int process_set) -> ()",
)


def rows_name(name: str | None) -> str | None:
    """Return the name of the collective that tells how many rows the one called `name` has."""
    return None if name is None else f"{name}.rows"


# -- kernels --------------------------------------------------------------------------------


def _allreduce(
    tensors: list[Tensor],
    outputs: list[Tensor],
    order: Tensor,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: int,
) -> None:
    factors = prescale_factor, postscale_factor
    if _allreduce_again(tensors, outputs, order, name, op, *factors, process_set):
        return
    reduction = Reduction(ReduceOp(op), *factors)
    _reduce(reduction_inputs(tensors, reduction), outputs, name, reduction, process_set)


def _allreduce_in_place(
    tensors: list[Tensor],
    order: Tensor,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: int,
) -> None:
    factors = prescale_factor, postscale_factor
    if _allreduce_in_place_again(tensors, order, name, op, *factors, process_set):
        return
    reduction = Reduction(ReduceOp(op), *factors)
    buffers = reduction_inputs(tensors, reduction)
    for tensor, buffer in zip(tensors, buffers, strict=True):
        if buffer is not tensor:
            check_writable(tensor)
    _reduce(buffers, buffers, name, reduction, process_set)
    for tensor, buffer in zip(tensors, buffers, strict=True):
        if buffer is not tensor:
            write_back(tensor, buffer)


def _reduce(
    sources: Sequence[Tensor],
    outputs: Sequence[Tensor],
    name: str | None,
    reduction: Reduction,
    process_set: int,
) -> None:
    collective = Collective(Kind.ALLREDUCE, name, process_set, reduction)
    runtime.submit(collective, sources, outputs, background=False).wait()


def _allreduce_again(
    tensors: list[Tensor],
    outputs: list[Tensor],
    order: Tensor,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: int,
) -> bool:
    """Reduce a copy of a tensor the shortest way, if one like it had this name before."""
    if len(tensors) != 1 or name not in runtime.prepared:
        return False
    if tensors[0].is_cpu and tensors[0].nbytes > SMALL:
        return False
    outputs[0].copy_(tensors[0])
    factors = prescale_factor, postscale_factor
    return _allreduce_in_place_again(outputs, order, name, op, *factors, process_set)


def _allreduce_in_place_again(
    tensors: list[Tensor],
    order: Tensor,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: int,
) -> bool:
    """Reduce a tensor in place the shortest way, if one like it had this name before."""
    prepared = runtime.prepared.get(name)
    if prepared is None or prescale_factor != 1.0 or len(tensors) != 1:
        return False
    return prepared.reduce(tensors[0], op, postscale_factor, process_set)


def _allgather_rows(
    tensor: Tensor, order: Tensor, ranks: int, name: str | None, process_set: int
) -> Tensor:
    mine = torch.tensor([movement_input(tensor).shape[0]])
    collective = Collective(Kind.ALLGATHER, name, process_set)
    (rows,) = runtime.submit(collective, [mine], background=False).wait()
    return _not_an_alias(rows, mine)


def _total_rows(rows: Tensor) -> int:
    return int(rows.sum())


def _allgather(
    tensor: Tensor, output: Tensor, order: Tensor, name: str | None, process_set: int
) -> None:
    collective = Collective(Kind.ALLGATHER, name, process_set)
    request = runtime.submit(collective, [movement_input(tensor)], background=False)
    output.copy_(request.wait()[0])


def _allgather_gradient(
    gradient: Tensor, output: Tensor, order: Tensor, name: str | None, process_set: int
) -> None:
    averaged = torch.empty_like(gradient, memory_format=torch.contiguous_format)
    _allreduce([gradient], [averaged], order, name, int(Average), 1.0, 1.0, process_set)
    group = runtime.group(process_set)
    rows = _allgather_rows(output, order, group.size, rows_name(name), process_set)
    first = int(rows[: group.rank].sum())
    output.copy_(averaged.narrow(0, first, output.shape[0]))


def _broadcast(
    tensor: Tensor,
    output: Tensor,
    order: Tensor,
    root_rank: int,
    name: str | None,
    process_set: int,
) -> None:
    collective = Collective(Kind.BROADCAST, name, process_set, root_rank=root_rank)
    runtime.submit(collective, [movement_input(tensor)], [output], background=False).wait()


def _broadcast_in_place(
    tensor: Tensor, order: Tensor, root_rank: int, name: str | None, process_set: int
) -> None:
    buffer = movement_input(tensor)
    if buffer is not tensor:
        check_writable(tensor)
    _broadcast(buffer, buffer, order, root_rank, name, process_set)
    if buffer is not tensor:
        write_back(tensor, buffer)


def _alltoall_rows(
    tensor: Tensor,
    splits: Tensor | None,
    order: Tensor,
    ranks: int,
    name: str | None,
    process_set: int,
) -> Tensor:
    if splits is None:
        share, left = divmod(tensor.shape[0], ranks)
        if left:
            raise ValueError(f"{tensor.shape[0]} rows cannot be divided equally by {ranks} ranks")
        sent = (share,) * ranks
    else:
        sent = check_splits(splits)
    mine = torch.tensor(sent, dtype=torch.int32)
    collective = Collective(Kind.ALLTOALL, name, process_set)
    counts, _ = runtime.submit(collective, [mine], background=False).wait()
    return _not_an_alias(counts.to("cpu" if splits is None else splits.device), mine)


def _alltoall(
    tensor: Tensor,
    splits: Tensor | None,
    output: Tensor,
    order: Tensor,
    name: str | None,
    process_set: int,
) -> None:
    rows = None if splits is None else check_splits(splits)
    output.copy_(_exchange(tensor, rows, name, process_set))


def _exchange(
    tensor: Tensor, splits: tuple[int, ...] | None, name: str | None, process_set: int
) -> Tensor:
    collective = Collective(Kind.ALLTOALL, name, process_set, splits=splits)
    received: Tensor = runtime.submit(
        collective, [movement_input(tensor)], background=False
    ).wait()[0]
    return received


def _alltoall_gradient(
    gradient: Tensor,
    received: Tensor,
    output: Tensor,
    order: Tensor,
    name: str | None,
    process_set: int,
) -> None:
    returned = _exchange(gradient, check_splits(received), name, process_set)
    output[: returned.shape[0]] = returned
    output[returned.shape[0] :] = 0  # rows that were sent to nobody


def _reducescatter(
    tensors: list[Tensor],
    outputs: list[Tensor],
    order: Tensor,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: int,
) -> None:
    reduction = Reduction(ReduceOp(op), prescale_factor, postscale_factor)
    check_scattered(reduction.op)
    collective = Collective(Kind.REDUCESCATTER, name, process_set, reduction)
    sources = reduction_inputs(tensors, reduction)
    reduced = runtime.submit(collective, sources, background=False).wait()
    for output, mine in zip(outputs, reduced, strict=True):
        output.copy_(mine)


def _barrier(order: Tensor, process_set: int) -> None:
    runtime.barrier(process_set, background=False).wait()


def _not_an_alias(result: Tensor, source: Tensor) -> Tensor:
    """Return the result, or a copy where it is the source itself, which torch does not allow."""
    is_alias = result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return result.clone() if is_alias and result.numel() else result


# -- fake forms -----------------------------------------------------------------------------


def _nothing(*arguments: object) -> None:
    """Make nothing: results go into tensors that the caller has made."""


def _fake_allgather_rows(
    tensor: Tensor, order: Tensor, ranks: int, name: str | None, process_set: int
) -> Tensor:
    return torch.empty(ranks, dtype=torch.int64)


def _fake_total_rows(rows: Tensor) -> int:
    total: Any = torch.library.get_ctx().new_dynamic_size()
    return total  # type: ignore[no-any-return]  # a symbol


def _fake_alltoall_rows(
    tensor: Tensor,
    splits: Tensor | None,
    order: Tensor,
    ranks: int,
    name: str | None,
    process_set: int,
) -> Tensor:
    device = torch.device("cpu") if splits is None else splits.device
    return torch.empty(ranks, dtype=torch.int32, device=device)


_OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "allreduce": (_allreduce, _nothing),
    "allreduce_": (_allreduce_in_place, _nothing),
    "allgather_rows": (_allgather_rows, _fake_allgather_rows),
    "total_rows": (_total_rows, _fake_total_rows),
    "allgather": (_allgather, _nothing),
    "allgather_gradient": (_allgather_gradient, _nothing),
    "broadcast": (_broadcast, _nothing),
    "broadcast_": (_broadcast_in_place, _nothing),
    "alltoall_rows": (_alltoall_rows, _fake_alltoall_rows),
    "alltoall": (_alltoall, _nothing),
    "alltoall_gradient": (_alltoall_gradient, _nothing),
    "reducescatter": (_reducescatter, _nothing),
    "barrier": (_barrier, _nothing),
}

# A CUDA graph of the compiler's (mode="reduce-overhead") must not record a collective, because the
# ranks agree before each. With this tag torch 2.9 and newer end their CUDA graphs before it.
_unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
for _schema in _SCHEMAS:
    _library.define(_schema, tags=() if _unsafe is None else (_unsafe,))
shorten(torch.ops.horovod.allreduce.default, _allreduce_again)
shorten(torch.ops.horovod.allreduce_.default, _allreduce_in_place_again)
for _name, (_implementation, _fake) in _OPERATORS.items():
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"horovod::{_name}", _fake, lib=_library)
