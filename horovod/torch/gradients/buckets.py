"""Buckets: parameters whose gradients are reduced together, and where their reduction stands.

`horovod.torch.gradients.reducer` makes them, `horovod.torch.gradients.submission` starts their
reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from horovod.engine.execution.prepared import PreparedAllreduce
from horovod.engine.request import Request
from horovod.engine.wait_for_all import wait_for_all

Named = tuple[str, torch.nn.Parameter]


class Bucket:
    """Parameters whose gradients are reduced together."""

    def __init__(self, name: str, params: Sequence[Named]) -> None:
        self.name = name
        self.params = list(params)
        # Set only if all parameters share dtype, device and contiguity. `prepared` repeats the
        # first reduction.
        first = params[0][1]
        forms = {(param.dtype, param.device, param.is_contiguous()) for _, param in params}
        self.dtype = first.dtype if forms == {(first.dtype, first.device, True)} else None
        self.prepared: PreparedAllreduce | None = None
        self.nbytes = sum(param.nbytes for _, param in params)
        self.is_held = False  # whether it waits for the step, although complete before
        self.reset()

    def gradients(self) -> list[torch.Tensor] | None:
        """Return all gradients, if they are there and can be reduced as they are."""
        dtype = self.dtype
        found = []
        for _, param in self.params:
            gradient = param.grad
            if (
                gradient is None
                or gradient.dtype is not dtype
                or gradient.layout is not torch.strided
                or not gradient.is_contiguous()
                or gradient.requires_grad  # of backward(create_graph=True)
                or not param.requires_grad
            ):
                return None
            found.append(gradient.data if self.watched else gradient)
        return found if len(found) > 1 else [found[0].view(-1)]

    def watch(self) -> None:
        """Remember the gradients, which are about to be reduced while the program goes on.

        torch counts the changes of a tensor, except those through `Tensor.data`, as the engine's.
        """
        self.watched = [
            (name, param, param.grad, param.grad._version)
            for name, param in self.params
            if param.grad is not None and param.is_cpu
        ]

    def check_unchanged(self) -> None:
        """Raise if the program has changed a gradient that was being reduced."""
        for name, param, gradient, version in self.watched:
            if param.grad is not gradient or gradient._version != version:
                raise RuntimeError(
                    f"the gradient of {name!r} was changed between backward() and step(), while it "
                    f"was being reduced: call optimizer.synchronize() before you change gradients "
                    f"(clipping, for example), and then step() inside `with "
                    f"optimizer.skip_synchronize():`; or set HOROVOD_OVERLAP_BACKWARD=0"
                )

    def is_reduced(self) -> bool:
        """Return whether nobody would have to wait for the gradients."""
        return all(request.done() for request in self.requests)

    def settle(self) -> Exception | None:
        """Wait until the gradients are reduced, and return the first failure, if there was one."""
        requests = [request.wait for request in self.requests]
        try:
            wait_for_all([*requests, self.check_unchanged, *self.finishers])
        except Exception as error:
            return error
        finally:
            self.reset()
        return None

    def reset(self) -> None:
        self.awaited = len(self.params)  # gradients that have not arrived yet
        self.started = False
        self.watched = []
        self.requests: list[Request] = []
        self.finishers: list[Callable[[], object]] = []
