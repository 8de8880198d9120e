"""Checks of what users pass to the collectives of any binding, before anything is enqueued.

The collectives call these first, so that a wrong argument raises a ValueError on the rank that
passed it, uses up no automatic name and leaves nothing behind. What depends on the state of the
engine (names in flight, membership, roots, splits) is checked when a request is submitted.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from horovod.common.exceptions import UndefinedOperationError
from horovod.common.process_sets import ProcessSet
from horovod.common.reduce_op import ReduceOp
from horovod.engine.collective import Reduction
from horovod.engine.runtime import NOT_INITIALISED, runtime

FLOATING = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
INTEGER = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
COMPLEX = frozenset({torch.complex64, torch.complex128})
MOVABLE = FLOATING | INTEGER | COMPLEX | {torch.bool}

REDUCIBLE = {
    ReduceOp.AVERAGE: FLOATING | INTEGER | COMPLEX,
    ReduceOp.SUM: MOVABLE,
    ReduceOp.ADASUM: FLOATING,
    ReduceOp.MIN: FLOATING | INTEGER | {torch.bool},
    ReduceOp.MAX: FLOATING | INTEGER | {torch.bool},
    ReduceOp.PRODUCT: FLOATING | INTEGER | {torch.bool},
}

# torch has these unsigned types but cannot move them, so they travel as signed types.
_SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}

# Tensors of these types have memory of their own, as nearly all have; others are looked at.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def reduction_input(tensor: torch.Tensor, op: ReduceOp, scaled: bool = False) -> torch.Tensor:
    """Return `tensor` as the engine takes it: contiguous, of a type that `op` is defined for.

    That is the same object if it already is so, a detached alias if it requires a gradient, and a
    copy if it is not contiguous.
    """
    try:
        is_defined = tensor.dtype in REDUCIBLE[op] and not (scaled and tensor.dtype is torch.bool)
        if is_defined and (type(tensor) in _PLAIN or not _is_wrapper(tensor)):
            if tensor.is_contiguous() and not _is_lazy(tensor):
                return tensor.detach() if tensor.requires_grad else tensor
            return plain_copy(tensor)
    except (AttributeError, RuntimeError):
        pass  # not a dense tensor: raised below
    raise _reduction_error(tensor, op, scaled)


def reduction_inputs(tensors: Sequence[torch.Tensor], reduction: Reduction) -> list[torch.Tensor]:
    """Return `tensors` as the engine takes them: see `reduction_input`."""
    return [reduction_input(tensor, reduction.op, reduction.is_scaled) for tensor in tensors]


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Return whether the values in memory are still to be conjugated or negated."""
    # is_conj() lets go of the interpreter lock, which costs most where other threads work.
    return tensor.is_neg() or (tensor.is_complex() and tensor.is_conj())


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has no memory itself but wraps tensors that do, as DTensors."""
    return hasattr(type(tensor), "__tensor_flatten__")


def _reduction_error(tensor: Any, op: ReduceOp, scaled: bool) -> ValueError:
    problem = _not_a_dense_tensor(tensor)
    if problem:
        return ValueError(problem)
    if scaled and tensor.dtype is torch.bool:
        return UndefinedOperationError(
            "prescale_factor and postscale_factor do not apply to torch.bool"
        )
    return UndefinedOperationError(
        f"{op.name.capitalize()} is not defined for tensors of type {tensor.dtype}"
    )


def movement_input(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as `reduction_input` does, for collectives that only move data."""
    try:
        if tensor.dtype in MOVABLE and (type(tensor) in _PLAIN or not _is_wrapper(tensor)):
            if tensor.is_contiguous() and not _is_lazy(tensor):
                return tensor.detach() if tensor.requires_grad else tensor
            return plain_copy(tensor)
    except (AttributeError, RuntimeError):
        pass
    raise ValueError(
        _not_a_dense_tensor(tensor) or f"tensors of type {tensor.dtype} cannot be sent"
    )


def movement_inputs(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return `movement_input` of all tensors; unsigned ones travel as signed ones."""
    return [
        movement_input(tensor.view(_SIGNED[tensor.dtype]) if tensor.dtype in _SIGNED else tensor)
        for tensor in tensors
    ]


def _not_a_dense_tensor(tensor: Any) -> str | None:
    if not isinstance(tensor, torch.Tensor):
        return f"expected a torch.Tensor, not {type(tensor).__name__}"
    if tensor.layout is not torch.strided:
        return (
            f"expected a dense tensor, not one with layout {tensor.layout}; "
            "sparse_allreduce_async takes sparse COO tensors"
        )
    if _is_wrapper(tensor):
        return (
            f"expected a tensor of this rank alone, not a {type(tensor).__name__}; pass "
            "tensor.to_local(), the part that this rank holds"
        )
    return None


def plain_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy without lazy conjugation or negation."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach())


def check_writable(tensor: torch.Tensor) -> None:
    """Refuse a result that cannot be written back because elements share memory."""
    if torch._debug_has_internal_overlap(tensor) == 1:
        raise ValueError(
            "the tensor's elements share memory (it was expanded), so it cannot be changed in "
            "place: pass tensor.contiguous()"
        )


def write_back(tensor: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy the result of an in-place operation from the engine's buffer into the user's tensor."""
    if tensor.data_ptr() != buffer.data_ptr():
        tensor.detach().copy_(buffer)


def check_group(tensors: Sequence[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
    """Return a group of tensors for one grouped operation."""
    if isinstance(tensors, torch.Tensor):
        raise ValueError("a grouped operation takes a list of tensors, not one tensor")
    tensors = list(tensors)
    if not tensors:
        raise ValueError("a grouped operation needs at least one tensor")
    return tensors


def check_splits(splits: Any) -> tuple[int, ...]:
    """Return `alltoall`'s splits, a list or an array of torch, numpy or JAX, as integers.

    Empty splits mean equal parts. An array may have any integer type, as what numpy computes is
    int64; a torch tensor must be int32.
    """
    if hasattr(splits, "dtype"):
        if isinstance(splits, torch.Tensor):
            if splits.dtype is not torch.int32:
                raise ValueError(f"splits must be of type torch.int32, not {splits.dtype}")
        elif splits.dtype.kind not in "iu":
            raise ValueError(f"splits must be of type int32, not {splits.dtype}")
        if splits.ndim > 1:
            raise ValueError(f"splits must have one dimension, not {splits.ndim}")
        splits = splits.reshape(-1).tolist()
    try:
        return tuple(operator.index(rows) for rows in splits)
    except TypeError:
        raise ValueError(f"splits must be integers, one for each rank, not {splits!r}") from None


def set_id(process_set: ProcessSet) -> int:
    """Return the id of a registered process set."""
    if process_set.process_set_id is None:
        raise unregistered(process_set)
    return process_set.process_set_id


def has_no_peers(process_set: ProcessSet) -> bool:
    """Return whether this rank has nobody to reduce with; False if that is not known yet."""
    if not runtime.is_initialized() or process_set.size() is None:
        return False
    return process_set.size() == 1 or not process_set.included()


def set_size(process_set: ProcessSet) -> int:
    """Return the number of ranks of a registered process set."""
    size = process_set.size()
    if size is None:
        raise unregistered(process_set)
    return size


def unregistered(process_set: ProcessSet) -> ValueError:
    """Return the error for a set that is not registered, perhaps because Horovod does not run."""
    if not runtime.is_initialized():
        return ValueError(NOT_INITIALISED)
    if runtime.is_elastic() and process_set.ranks:
        size = runtime.topology.size
        if process_set.ranks[-1] >= size:
            return ValueError(f"{process_set} is not registered: the job has only {size} ranks now")
    return ValueError(
        f"{process_set} is not registered: pass it to hvd.init(process_sets=[...]) or to "
        f"hvd.add_process_set"
    )
