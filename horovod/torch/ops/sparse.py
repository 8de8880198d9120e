"""allreduce of sparse COO tensors, by gathering everybody's indices and values.

Exported to users by `horovod.torch.mpi_ops`; DistributedOptimizer uses it for sparse gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average, ReduceOp
from horovod.common.util import resolve_reduce_op
from horovod.engine.arguments import movement_input, set_size
from horovod.torch.ops.allgather import start_allgather
from horovod.torch.ops.untraced import breaks_graph


@breaks_graph("call it outside of compiled code")
def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Start reducing a sparse tensor; call what it returns to wait for the sparse result.

    The result is not coalesced: where several ranks have an index, it appears several times.

    Args:
        tensor: A sparse COO tensor; its number of entries may differ between ranks.
        name: Ranks match operations by name, or by the order of their calls if it is left out.
        op: `Average` divides by the number of ranks; every other operator adds.
        process_set: The ranks that take part.

    Raises:
        ValueError: The tensor is not sparse.

    Examples:
        >>> wait = hvd.sparse_allreduce_async(gradient, name="rows", op=hvd.Sum)
        >>> summed = wait().coalesce()
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        raise ValueError("sparse_allreduce_async takes a sparse COO tensor")
    op = resolve_reduce_op(op, None)
    indices_name, values_name = (
        (None, None) if name is None else (f"{name}.indices", f"{name}.values")
    )
    num_ranks = set_size(process_set)
    # The number of entries becomes the first dimension, because ranks may differ in it.
    indices = tensor._indices().t()
    values = movement_input(tensor._values())
    indices_request = start_allgather([indices], indices_name, process_set)
    values_request = start_allgather([values], values_name, process_set)

    def wait() -> torch.Tensor:
        (values,) = values_request.wait()
        (indices,) = indices_request.wait()
        if op is Average:
            exact = values.is_floating_point() or values.is_complex()
            values = values.div_(num_ranks, rounding_mode=None if exact else "trunc")
        return sparse_tensor(indices.t(), values, tensor.shape)

    return wait


def sparse_tensor(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return a sparse tensor of indices that are known to be right.

    `torch.sparse_coo_tensor` of torch 2.11 would warn, even if told not to check them.
    """
    made: torch.Tensor = torch.ops.aten._sparse_coo_tensor_unsafe(indices, values, shape)
    return made
