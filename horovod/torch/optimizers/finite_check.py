"""Finding the rank and the parameters whose gradients are not finite (HOROVOD_CHECK_NAN).

After the reduction every rank has the NaN, and nobody knows where it came from. So each gradient
is looked at while it still is the rank's own, and before the step the ranks exchange one flag. Only
if it is set they exchange which rank and which parameters. Used by DistributedOptimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from horovod.common.process_sets import ProcessSet
from horovod.common.reduce_op import Max
from horovod.engine.runtime import runtime
from horovod.torch.ops.allreduce import allreduce_

MOST_NAMES = 6  # of each rank's parameters in an error


class FiniteCheck:
    """What one optimizer has seen of this step's gradients."""

    def __init__(
        self, names: Mapping[torch.nn.Parameter, str], together: ProcessSet | None
    ) -> None:
        self._names = names
        self._together = together  # the ranks that exchange findings; None: only this one
        self._finite: dict[torch.nn.Parameter, torch.Tensor] = {}

    def look(self, param: torch.nn.Parameter) -> None:
        """Check the gradient of `param`, which is complete and still this rank's own."""
        if param.grad is None:
            return
        values = param.grad.detach()
        if values.is_sparse:
            values = values._values()
        # One pass and no waiting for a device: a sum is finite if and only if all elements are,
        # unless it overflows, which takes gradients that no training survives.
        wide = torch.float32 if values.dtype is torch.float16 else None
        self._finite[param] = values.sum(dtype=wide).isfinite()

    def look_at_rest(self) -> None:
        """Check the gradients not seen yet, which are complete now and not reduced yet."""
        for param in self._names:
            if param not in self._finite and param.requires_grad:
                self.look(param)

    def forget(self) -> None:
        """Start afresh, for the gradients of another step."""
        self._finite.clear()

    def raise_if_found(self) -> None:
        """Raise FloatingPointError on every rank if one has found something. Collective."""
        bad = self._bad_params()
        self.forget()
        flags = [param in bad for param in self._names]
        if self._together is None:
            findings = {runtime.topology.rank: flags}
        else:
            findings = _exchanged(flags, self._together)
        found = [f"rank {rank}: {self._listed(row)}" for rank, row in findings.items() if any(row)]
        if found:
            raise FloatingPointError(
                f"NaN or infinity in gradients of {'; '.join(found)}. The step was not made: "
                f"parameters and optimizer state are as before (HOROVOD_CHECK_NAN)"
            )

    def _bad_params(self) -> set[torch.nn.Parameter]:
        by_device: dict[torch.device, list[torch.nn.Parameter]] = {}
        for param, finite in self._finite.items():
            by_device.setdefault(finite.device, []).append(param)
        bad: set[torch.nn.Parameter] = set()
        for params in by_device.values():
            finite_here = torch.stack([self._finite[param] for param in params]).tolist()
            bad.update(p for p, finite in zip(params, finite_here, strict=True) if not finite)
        return bad

    def _listed(self, flags: Sequence[bool]) -> str:
        names = [name for name, bad in zip(self._names.values(), flags, strict=True) if bad]
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        return ", ".join(names[:MOST_NAMES]) + more


def _exchanged(flags: Sequence[bool], together: ProcessSet) -> dict[int, list[bool]]:
    """Return all ranks' flags, or nothing if none is set. Works while a rank has joined."""
    ranks, own_rank = together.ranks, together.rank()
    assert ranks is not None
    assert own_rank is not None
    if not _maximum(torch.tensor([any(flags)], dtype=torch.uint8), "flag", together)[0]:
        return {}
    table = torch.zeros(len(ranks), len(flags), dtype=torch.uint8)
    table[own_rank] = torch.tensor(flags, dtype=torch.uint8)
    rows = _maximum(table, "table", together)
    return {rank: row.bool().tolist() for rank, row in zip(ranks, rows, strict=True)}


def _maximum(tensor: torch.Tensor, what: str, together: ProcessSet) -> torch.Tensor:
    # Steps are made one after the other, so one name does for all.
    return allreduce_(tensor, name=f"FiniteCheck.{what}", op=Max, process_set=together)
