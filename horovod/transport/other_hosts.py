"""The ranks of other hosts, as a reduction in the memory of one host sees them.

`hierarchical` passes an `OtherHosts` to the transport inside the host, which calls it between its
own steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from horovod.common.exceptions import HorovodInternalError
from horovod.common.reduce_op import ReduceOp
from horovod.transport.base import Transport


class OtherHosts:
    """The ranks of our local index on the other hosts; an `Others` of `host.peer_reduction`.

    Args:
        cross: The transport that connects this rank with them.
        arguments: The operation, the scale and the wire type of the reduction.
        explain: A function that turns an error of `cross` into one for the host's transport.
    """

    def __init__(
        self,
        cross: Transport,
        arguments: tuple[ReduceOp, float, torch.dtype | None],
        explain: Callable[[HorovodInternalError], HorovodInternalError],
    ) -> None:
        self._cross, self._arguments, self._explain = cross, arguments, explain

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to reduce with the other hosts."""
        try:
            self._cross.begin_allreduce(tensors, *self._arguments)
        except HorovodInternalError as error:
            raise self._explain(error) from error

    def finish(self) -> None:
        """Wait until the reduction that was begun is done."""
        try:
            self._cross.finish_allreduce()
        except HorovodInternalError as error:
            raise self._explain(error) from error
