"""Buckets on a device: gradients that are reduced together, in one flat buffer.

`horovod.torch.gradients.direct_reducer` makes them and says when. As soon as backward has made all
gradients of a bucket, they are copied into a new flat tensor by one kernel, and multiplied by the
factor of the average by another. From then on each *is* a view of that tensor, so that nothing is
copied back: `param.grad` is another tensor than the one that backward made. The memory can
be used again as soon as the program drops the gradients, as with `zero_grad(set_to_none=True)`. A
program that keeps them (`set_to_none=False`) lets the next backward add to the views, and then
nothing is copied.

Each part begins at a multiple of 16 bytes, as memory of its own would: torch.compile makes kernels
that fail where a tensor does not, and others are slower there. What lies between the parts is
reduced along, and nobody reads it.

Gradients that cannot be replaced, because they are part of a graph, and those that travel in a
narrower type are copied back into their own memory instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import accumulate
from operator import add
from typing import Any, NamedTuple, NoReturn

import torch

from horovod.observe.statistics.lane_timing import LaneTiming
from horovod.observe.timeline.recorder import shortened
from horovod.torch.gradients.buckets import Named
from horovod.torch.gradients.layouts import is_dense, laid_out_like
from horovod.transport.device.process_group import DeviceWork

Tensor = torch.Tensor

ALIGNMENT = 16  # bytes

CHANGED = (
    "{what} was changed between backward() and step(), while it was being "
    "reduced: call optimizer.synchronize() before you change gradients (clipping, for example), "
    "and then step() inside `with optimizer.skip_synchronize():`; or set HOROVOD_OVERLAP_BACKWARD=0"
)


class LaneReduction(NamedTuple):
    """How the gradients of an optimizer are reduced on a lane."""

    prescale_factor: float  # the factor that gradients are multiplied by before they are summed up
    scale: float  # the factor that sums are multiplied by
    wire: torch.dtype | None  # the narrower type in which gradients travel, if any


class DeviceBucket:
    """Parameters of one type on one device whose gradients are reduced together.

    Args:
        name: Name for people, in the timeline and in errors.
        params: The parameters with their names, in the order in which they lie in the buffer.
        reduction: The factors and the type on the wire, which counts only where it is narrower.
    """

    def __init__(self, name: str, params: Sequence[Named], reduction: LaneReduction) -> None:
        self.name = name
        self.params = list(params)
        first = params[0][1]
        self.device, self.dtype = first.device, first.dtype
        wire = reduction.wire
        self.wire = None if wire is None or wire.itemsize >= first.dtype.itemsize else wire
        counts = [param.numel() for _, param in params]
        self.num_elements = sum(counts)  # of all gradients
        self.nbytes = self.num_elements * first.dtype.itemsize
        self._prescale_factor, self._scale = reduction.prescale_factor, reduction.scale
        self._contiguous = all(param.is_contiguous() for _, param in params)
        gaps = [*(-count % (ALIGNMENT // first.dtype.itemsize) for count in counts[:-1]), 0]
        self._offsets = [0, *accumulate(map(add, counts, gaps))]
        self.count = self._offsets.pop()  # elements of the buffer, with the gaps between its parts
        self._buffer_bytes: int = self.count * first.dtype.itemsize
        self._forms: list[Tensor] = []  # tensors of the shapes of all parts and gaps in the buffer
        self._parts_at: list[int] = []  # which of them are parts
        for (_, param), gap in zip(params, gaps, strict=True):
            self._parts_at.append(len(self._forms))
            self._forms += [param, torch.empty(gap, device="meta")] if gap else [param]
        self.reset()

    def reset(self) -> None:
        """Forget this step."""
        self.awaited = len(self.params)  # gradients that have not arrived yet
        self.work: DeviceWork | None = None
        self.timing: LaneTiming | None = None  # notes how long the device waits for the reduction
        self._flat: Tensor | None = None  # what is reduced
        self._buffer: Tensor | None = None  # what is reduced, if gradients are views of it
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
        """Bring all gradients into one flat tensor, which is then to be reduced.

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
        packed = self._flat.data
        if self._prescale_factor != 1.0:
            packed.mul_(self._prescale_factor)
        return packed

    def _pack_anew(self, params: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
        """Copy the gradients into a new buffer, of which they are views from now on."""
        buffer = torch.empty(self.count, dtype=self.dtype, device=self.device)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        noted: list[Tensor | None] = []
        for param, gradient, view in zip(params, gradients, self._parts(buffer), strict=True):
            if gradient is None:
                view.zero_()
            else:
                targets.append(view)
                sources.append(gradient.detach())
            if gradient is not None and (gradient.requires_grad or gradient.dtype != self.dtype):
                self._copies.append((sources[-1], view))
            elif param.requires_grad:
                param.grad = view
            noted.append(param.grad)
        if targets:
            torch._foreach_copy_(targets, sources)
        self._note(buffer, noted)
        return buffer

    def _pack_narrow(self, params: Sequence[Tensor], gradients: list[Tensor | None]) -> Tensor:
        """Copy the gradients into a buffer of a narrower type; they get the result in the end."""
        for index, param in enumerate(params):
            if gradients[index] is None and param.requires_grad:
                param.grad = gradients[index] = torch.zeros_like(param)
        buffer = torch.empty(self.count, dtype=self.wire, device=self.device)
        parts = self._parts(buffer)
        pairs = [(g.detach(), v) for g, v in zip(gradients, parts, strict=True) if g is not None]
        if len(pairs) < len(parts):
            buffer.zero_()
        torch._foreach_copy_([view for _, view in pairs], [gradient for gradient, _ in pairs])
        self._copies = pairs
        self._note(None, [param.grad for param in params])
        return buffer

    def _buffer_of(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """Return the flat tensor of which all gradients are views already, if there is one."""
        first = gradients[0]
        if self.wire is not None or first is None:
            return None
        if len(gradients) > 1 and first.untyped_storage().nbytes() != self._buffer_bytes:
            return None
        start = first.data_ptr()
        for (_, param), gradient, offset in zip(self.params, gradients, self._offsets, strict=True):
            if (
                gradient is None
                or gradient.data_ptr() != start + offset * self.dtype.itemsize
                or gradient.dtype is not param.dtype
                or gradient.requires_grad
                or laid_out_like(param, gradient) is not gradient
            ):
                return None
        return first.detach().as_strided((self.count,), (1,))

    def _parts(self, buffer: Tensor) -> list[Tensor]:
        """Return the parts of a flat tensor, shaped and laid out like the parameters."""
        if self._contiguous:
            unflatten: Any = torch._utils._unflatten_dense_tensors
            parts = unflatten(buffer, self._forms)
            return [parts[index] for index in self._parts_at]
        flat_parts = torch.split_with_sizes(buffer, [form.numel() for form in self._forms])
        return [
            part.as_strided(param.shape, param.stride(), part.storage_offset())
            if is_dense(param)
            else part.view(param.shape)
            for (_, param), part in zip(
                self.params, (flat_parts[index] for index in self._parts_at), strict=True
            )
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
            self._raise_changed()

    def _raise_changed(self) -> NoReturn:
        """Raise that one of the gradients was changed, where nobody knows which."""
        names = [repr(name) for name, _ in self.params]
        what = f"the gradient of {names[0]}"
        if len(names) > 1:
            what = f"one of the gradients of {shortened(names, 6)}"
        raise RuntimeError(CHANGED.format(what=what))

    def settle(self) -> Exception | None:
        """Let the current stream wait until the gradients are reduced; return what went wrong."""
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

    def is_reduced(self) -> bool:
        """Return whether the device has finished the reduction."""
        return self.work is None or self.work.is_completed()


def _gradient(param: Tensor) -> Tensor | None:
    """Return a trained parameter's gradient; a sparse one becomes dense, as all were at first."""
    gradient = param.grad
    if gradient is None or not param.requires_grad:
        return None
    if gradient.is_sparse:
        param.grad = gradient = gradient.to_dense()
    return gradient
