"""Exchanger: averages the flat tensors of models over ranks. Used by `fragments` beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from horovod.common.process_sets import ProcessSet
from horovod.common.reduce_op import Average
from horovod.engine.arguments import set_id
from horovod.engine.collective import Collective, Kind, Reduction
from horovod.engine.runtime import runtime
from horovod.torch.compression import Compressor, NoneCompressor, is_eight_bit, wire_type_of
from horovod.torch.gradients.buckets import Named
from horovod.torch.hooks.base import CommunicationHook, GradientBucket
from horovod.torch.hooks.eightbit import eight_bit_hook

Tensor = torch.Tensor
Wait = Callable[[], object]

_ALL_MUST_STEP = (
    "local_steps averages the models of all ranks. Let all ranks take equally many steps, and call "
    "optimizer.synchronize_parameters() on all of them before hvd.join()"
)


class Exchanger:
    """Sends what local steps exchange, as the user has chosen with compression or a hook."""

    def __init__(
        self,
        process_set: ProcessSet,
        compression: type[Compressor],
        hook: CommunicationHook | None,
    ) -> None:
        self._process_set = process_set
        self._compression = compression
        self._hook = hook

    def require_all(self, name: str, background: bool) -> Wait:
        """Begin to check that no rank has joined; return a function that waits and raises."""
        number = set_id(self._process_set)
        collective = Collective(Kind.REQUIRE_ALL, name, number, reason=_ALL_MUST_STEP)
        return runtime.submit(collective, background=background).wait

    def start(self, name: str, members: Sequence[Named], flat: Tensor, background: bool) -> Wait:
        """Begin to average `flat`, the outer gradients of `members` end to end, in place.

        Without `background` the caller waits at once.

        Returns:
            A function that waits until the average is there.
        """
        wire = wire_type_of(self._compression, flat)
        hook = self._hook
        if hook is None and wire is None and is_eight_bit(self._compression):
            hook = eight_bit_hook(self._compression)
        if hook is not None:
            return self._start_hook(hook, name, members, flat)
        sent, context = flat, None
        if wire is None and self._compression is not NoneCompressor:
            sent, context = self._compression.compress(flat)
        wait = self.average(name, [sent], background, wire)
        if sent is flat:
            return wait

        def finish() -> None:
            wait()
            flat.copy_(self._compression.decompress(sent, context))

        return finish

    def average(
        self,
        name: str,
        tensors: list[Tensor],
        background: bool,
        wire: torch.dtype | None = None,
    ) -> Wait:
        """Begin to average tensors of one device in place, sent between hosts as `wire`."""
        reduction = Reduction(Average, wire=wire)
        collective = Collective(Kind.ALLREDUCE, name, set_id(self._process_set), reduction)
        return runtime.submit(collective, tensors, tensors, background=background).wait

    def _start_hook(
        self, hook: CommunicationHook, name: str, members: Sequence[Named], flat: Tensor
    ) -> Wait:
        return hook.start(
            GradientBucket(
                name,
                [name for name, _ in members],
                [param.shape for _, param in members],
                torch.split(flat, [param.numel() for _, param in members]),
                Reduction(Average),
                self._process_set,
            )
        )
