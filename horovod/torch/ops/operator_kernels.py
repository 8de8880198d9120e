"""What the operators of `horovod.torch.ops.operators` are to torch: schemas, kernels, fake forms.

A schema says what an operator reads and writes; its kernel runs when the graph does; its *fake*
form tells the compiler the shapes of results before. The compiler keeps graphs on disk, also for
other processes. So whatever differs between ranks or jobs and shapes a result is an argument: a
fake form may not look at the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from horovod.common.reduce_op import Adasum, Average, ReduceOp
from horovod.engine.arguments import (
    check_splits,
    check_writable,
    movement_input,
    reduction_input,
    write_back,
)
from horovod.engine.runtime import runtime
from horovod.engine.submission import check_scattered

Tensor = torch.Tensor

_SMALL = 16 * 1024  # bytes of a tensor for which a copy costs less than a request
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
    chosen = ReduceOp(op)
    if len(tensors) == 1 and tensors[0].nbytes <= _SMALL and name in runtime.prepared:
        (output,) = outputs
        output.copy_(tensors[0])
        if _reduce_again(output, name, chosen, prescale_factor, postscale_factor, process_set):
            return
    scaled = prescale_factor != 1.0 or postscale_factor != 1.0
    sources = [reduction_input(tensor, chosen, scaled) for tensor in tensors]
    _check_adasum(chosen, process_set)
    runtime.allreduce(
        sources,
        outputs,
        name,
        chosen,
        prescale=prescale_factor,
        postscale=postscale_factor,
        process_set_id=process_set,
        background=False,
    ).wait()


def _allreduce_in_place(
    tensors: list[Tensor],
    order: Tensor,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: int,
) -> None:
    chosen = ReduceOp(op)
    factors = prescale_factor, postscale_factor
    if len(tensors) == 1 and _reduce_again(tensors[0], name, chosen, *factors, process_set):
        return
    scaled = prescale_factor != 1.0 or postscale_factor != 1.0
    buffers = [reduction_input(tensor, chosen, scaled) for tensor in tensors]
    for tensor, buffer in zip(tensors, buffers, strict=True):
        if buffer is not tensor:
            check_writable(tensor)
    _allreduce(buffers, buffers, order, name, op, *factors, process_set)
    for tensor, buffer in zip(tensors, buffers, strict=True):
        if buffer is not tensor:
            write_back(tensor, buffer)


def _reduce_again(
    tensor: Tensor,
    name: str | None,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: int,
) -> bool:
    """Reduce a tensor in place the shortest way, if one like it went before under this name."""
    prepared = runtime.prepared.get(name)
    if prepared is None or prescale_factor != 1.0:
        return False
    return prepared.reduce(tensor, op, postscale_factor, process_set)


def _allgather_rows(
    tensor: Tensor, order: Tensor, ranks: int, name: str | None, process_set: int
) -> Tensor:
    mine = torch.tensor([movement_input(tensor).shape[0]])
    (rows,) = runtime.allgather([mine], name, process_set_id=process_set, background=False).wait()
    return _not_an_alias(rows, mine)


def _total_rows(rows: Tensor) -> int:
    return int(rows.sum())


def _allgather(
    tensor: Tensor, output: Tensor, order: Tensor, name: str | None, process_set: int
) -> None:
    source = movement_input(tensor)
    request = runtime.allgather([source], name, process_set_id=process_set, background=False)
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
    source = movement_input(tensor)
    runtime.broadcast(
        source, output, root_rank, name, process_set_id=process_set, background=False
    ).wait()


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
        sent = [share] * ranks
    else:
        sent = check_splits(splits)
    mine = torch.tensor(sent, dtype=torch.int32)
    counts, _ = runtime.alltoall(
        mine, None, name, process_set_id=process_set, background=False
    ).wait()
    return _not_an_alias(counts.to("cpu" if splits is None else splits.device), mine)


def _alltoall(
    tensor: Tensor,
    splits: Tensor | None,
    output: Tensor,
    order: Tensor,
    name: str | None,
    process_set: int,
) -> None:
    source = movement_input(tensor)
    rows = (None if splits is None else check_splits(splits)) or None
    request = runtime.alltoall(source, rows, name, process_set_id=process_set, background=False)
    output.copy_(request.wait()[0])


def _alltoall_gradient(
    gradient: Tensor,
    received: Tensor,
    output: Tensor,
    order: Tensor,
    name: str | None,
    process_set: int,
) -> None:
    source, splits = movement_input(gradient), check_splits(received)
    returned, _ = runtime.alltoall(
        source, splits, name, process_set_id=process_set, background=False
    ).wait()
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
    chosen = ReduceOp(op)
    check_scattered(chosen)
    scaled = prescale_factor != 1.0 or postscale_factor != 1.0
    reduced = runtime.reducescatter(
        [reduction_input(tensor, chosen, scaled) for tensor in tensors],
        name,
        chosen,
        prescale=prescale_factor,
        postscale=postscale_factor,
        process_set_id=process_set,
        background=False,
    ).wait()
    for output, mine in zip(outputs, reduced, strict=True):
        output.copy_(mine)


def _barrier(order: Tensor, process_set: int) -> None:
    runtime.barrier(process_set, background=False).wait()


def _check_adasum(op: ReduceOp, process_set: int) -> None:
    if op is Adasum and process_set != 0:
        raise NotImplementedError("Adasum works on the global process set only")


def _not_an_alias(result: Tensor, source: Tensor) -> Tensor:
    """Return the result, or a copy where it is the source itself, which torch does not allow."""
    is_alias = result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return result.clone() if is_alias and result.numel() else result


# -- fake forms -----------------------------------------------------------------------------


def _nothing(*arguments: object) -> None:
    """Results go into tensors that the caller has made."""


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

# A CUDA graph of the compiler's (mode="reduce-overhead") must not record a collective, with which
# ranks agree before they begin. torch 2.9 and newer then cut their graphs there.
_unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
for _schema in _SCHEMAS:
    _library.define(_schema, tags=() if _unsafe is None else (_unsafe,))
for _name, (_implementation, _fake) in _OPERATORS.items():
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"horovod::{_name}", _fake, lib=_library)
