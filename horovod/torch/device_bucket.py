"""Buckets on a device: gradients that are reduced together, in one flat buffer.

`horovod.torch.direct_reducer` makes them and says when. A bucket's gradients are copied into a new
flat tensor, in one kernel, and from then on *are* views of it, so that nothing is copied back:
`param.grad` is another tensor than the one that backward made. The memory is torch's to reuse as
soon as the program drops the gradients, as with `zero_grad(set_to_none=True)`. A program that keeps
them (`set_to_none=False`) lets the next backward add to the views, and then nothing is copied.

Gradients that cannot be replaced, because they are part of a graph, and those that travel in a
narrower type are copied back into their own memory instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from horovod.engine.lane_timing import LaneTiming
from horovod.engine.timeline import shortened
from horovod.torch.buckets import Named
from horovod.torch.layouts import flat, is_dense, laid_out_like
from horovod.transport.process_group import DeviceWork

Tensor = torch.Tensor

CHANGED = (
    "{what} was changed between backward() and step(), while it was being "
    "reduced: call optimizer.synchronize() before you change gradients (clipping, for example), "
    "and then step() inside `with optimizer.skip_synchronize():`; or set HOROVOD_OVERLAP_BACKWARD=0"
)


class DeviceBucket:
    """Parameters of one type on one device whose gradients are reduced together.

    Args:
        name: What people read, in the timeline and in errors.
        params: The parameters with their names, in the order in which they lie in the buffer.
        wire: The type in which gradients travel; None for their own.
    """

    def __init__(self, name: str, params: Sequence[Named], wire: torch.dtype | None) -> None:
        self.name = name
        self.params = list(params)
        first = params[0][1]
        self.device, self.dtype = first.device, first.dtype
        narrow = wire is not None and wire.itemsize < first.dtype.itemsize
        self.wire = wire if narrow else None
        self.counts = [param.numel() for _, param in params]
        self.count = sum(self.counts)
        self.nbytes = self.count * first.dtype.itemsize
        self._contiguous = all(param.is_contiguous() for _, param in params)
        self.reset()

    def reset(self) -> None:
        """Forget this step."""
        self.awaited = len(self.params)  # gradients that have not arrived yet
        self.work: DeviceWork | None = None
        self.timing: LaneTiming | None = None  # where it is noted how long it is waited for
        self._scale = 1.0
        self._flat: Tensor | None = None  # what is reduced
        self._buffer: Tensor | None = None  # the same, if gradients are views of it
        self._version = 0
        self._noted: list[Tensor | None] = []
        self._versions: list[int] = []
        self._copies: list[tuple[Tensor, Tensor]] = []  # gradients, and what they get in the end

    @property
    def wire_dtype(self) -> torch.dtype:
        """The type of the buffer that is reduced."""
        return self.wire or self.dtype

    # -- in a step -------------------------------------------------------------------------

    def pack(self) -> Tensor:
        """Bring the gradients into one flat tensor, which is then to be reduced.

        A parameter without a gradient counts as zeros: other ranks may have one. Changes that are
        made through the tensor do not count as the program's: see `check_unchanged`.
        """
        params = [param for _, param in self.params]
        gradients = [_gradient(param) for param in params]
        self._flat = self._buffer_of(gradients)
        if self._flat is not None:
            self._note(self._flat, gradients)
        elif self.wire is not None:
            self._flat = self._pack_narrow(params, gradients)
        else:
            self._flat = self._pack_anew(params, gradients)
        return self._flat.data

    def _pack_anew(self, params: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
        """Copy the gradients into a new buffer and let its parts take their place."""
        sources: list[Tensor] = []
        kept: list[int] = []  # the places of gradients that stay
        for place, (param, gradient) in enumerate(zip(params, gradients, strict=True)):
            if gradient is None:
                sources.append(param.new_zeros(param.numel()))
                continue
            source = gradient.detach() if gradient.requires_grad else gradient
            if gradient.requires_grad or gradient.dtype is not param.dtype:
                source = source.to(param.dtype)
                kept.append(place)
            sources.append(flat(laid_out_like(param, source)))
        buffer = torch.cat(sources)
        views = self._views(buffer)
        noted: list[Tensor | None] = list(views)
        for place, param in enumerate(params):
            gradient = gradients[place]
            if place in kept and gradient is not None:
                self._copies.append((gradient.detach(), views[place]))
                noted[place] = gradient
            elif param.requires_grad:
                param.grad = views[place]
            else:
                noted[place] = param.grad
        self._note(buffer, noted)
        return buffer

    def _pack_narrow(self, params: Sequence[Tensor], gradients: list[Tensor | None]) -> Tensor:
        """Copy the gradients into a buffer of a narrower type; they get the result in the end."""
        for place, param in enumerate(params):
            if gradients[place] is None and param.requires_grad:
                param.grad = gradients[place] = torch.zeros_like(param)
        buffer = torch.empty(self.count, dtype=self.wire, device=self.device)
        parts = self._views(buffer)
        pairs = [(g.detach(), v) for g, v in zip(gradients, parts, strict=True) if g is not None]
        if len(pairs) < len(parts):
            buffer.zero_()
        torch._foreach_copy_([view for _, view in pairs], [gradient for gradient, _ in pairs])
        self._copies = pairs
        self._note(None, [param.grad for param in params])
        return buffer

    def _buffer_of(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """The flat tensor of which all gradients are views already, if there is one."""
        first = gradients[0]
        if self.wire is not None or first is None:
            return None
        if len(gradients) > 1 and first.untyped_storage().nbytes() != self.nbytes:
            return None
        address = first.data_ptr()
        for (_, param), gradient, count in zip(self.params, gradients, self.counts, strict=True):
            if (
                gradient is None
                or gradient.data_ptr() != address
                or gradient.dtype is not param.dtype
                or gradient.requires_grad
                or laid_out_like(param, gradient) is not gradient
            ):
                return None
            address += count * self.dtype.itemsize
        return first.detach().as_strided((self.count,), (1,))

    def _views(self, buffer: Tensor) -> list[Tensor]:
        """The parts of a flat tensor, shaped and laid out like the parameters."""
        params = [param for _, param in self.params]
        if self._contiguous:
            unflatten: Any = torch._utils._unflatten_dense_tensors
            return list(unflatten(buffer, params))
        parts = torch.split_with_sizes(buffer, self.counts)
        return [
            part.as_strided(param.shape, param.stride(), part.storage_offset())
            if is_dense(param)
            else part.view(param.shape)
            for part, param in zip(parts, params, strict=True)
        ]

    def _note(self, buffer: Tensor | None, gradients: Sequence[Tensor | None]) -> None:
        """Remember what the gradients are now, for `check_unchanged`."""
        self._noted = list(gradients)
        self._versions = [g._version for g in gradients if g is not None] if buffer is None else []
        self._buffer = buffer
        self._version = 0 if buffer is None else buffer._version

    def check_unchanged(self) -> None:
        """Raise if the program has changed a gradient that was being reduced.

        torch counts the changes of a tensor and of all its views together.
        """
        buffer = self._buffer
        touched = buffer is not None and buffer._version != self._version
        versions = iter(self._versions)
        for (name, param), gradient in zip(self.params, self._noted, strict=True):
            changed = param.grad is not gradient
            if self._versions and gradient is not None:
                changed = changed or gradient._version != next(versions)
            if changed:
                raise RuntimeError(CHANGED.format(what=f"the gradient of {name!r}"))
        if touched:
            names = [repr(name) for name, _ in self.params]
            what = f"the gradient of {names[0]}"
            if len(names) > 1:
                what = f"one of the gradients of {shortened(names, 6)}"
            raise RuntimeError(CHANGED.format(what=what))

    def settle(self) -> Exception | None:
        """Let the current stream wait until the gradients are reduced. Returns what went wrong."""
        work, self.work = self.work, None
        try:
            if work is not None:
                with contextlib.nullcontext() if self.timing is None else self.timing.waiting():
                    work.wait()
                self.check_unchanged()
                if self._scale != 1.0 and self._flat is not None:
                    self._flat.mul_(self._scale)
                if self._copies:
                    targets, parts = zip(*self._copies, strict=True)
                    torch._foreach_copy_(list(targets), list(parts))
        except Exception as error:
            return error
        finally:
            self.reset()
        return None

    def begin(self, work: DeviceWork, scale: float) -> None:
        """The reduction is under way; its result is to be multiplied by `scale` in the end."""
        self.work, self._scale = work, scale

    def is_reduced(self) -> bool:
        """Whether the device has finished the reduction."""
        return self.work is None or self.work.is_completed()


def _gradient(param: Tensor) -> Tensor | None:
    """The gradient that counts; a sparse one, where all were dense at first, becomes dense."""
    gradient = param.grad
    if gradient is None or not param.requires_grad:
        return None
    if gradient.is_sparse:
        param.grad = gradient = gradient.to_dense()
    return gradient
