"""The optimizer for local_steps=H: ranks step alone, and synchronise their models now and then.

Each rank takes H steps with its own gradients. Then the ranks average how far they have moved, and
the outer optimizer takes one step with that (DiLoCo); without one, parameters are averaged (local
SGD). With `fragments` the model is divided by layers into parts that take turns, and with `delay`
a part is updated some steps after it was sent, so that it travels beside training (streaming
DiLoCo). Ordinary steps, in which gradients are averaged, may come first (`warmup_steps`), and may
go on inside of clusters (`within`).

All ranks must take equally many steps. The *anchor*, the parameters after the last synchronisation,
is bitwise the same on all ranks; without `delay` so are the parameters at that time.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from horovod.common.local_steps import AVERAGING, HOST, check_alike
from horovod.common.process_sets import ProcessSet
from horovod.common.topology import Topology
from horovod.engine.arguments import set_size
from horovod.engine.runtime import runtime
from horovod.torch.functions import broadcast_nested
from horovod.torch.gradients.buckets import Named
from horovod.torch.ops.objects import allgather_object
from horovod.torch.ops.untraced import calls_traced, untraced
from horovod.torch.optimizers.checks import takes_part
from horovod.torch.optimizers.exchanger import Exchanger
from horovod.torch.optimizers.fragments import Fragment, load_fragments, make_fragments, take_turns
from horovod.torch.optimizers.local_steps import set_of_this_host
from horovod.torch.optimizers.options import TorchOptions
from horovod.torch.optimizers.reducing import ReducingOptimizer

_KEY = "local_steps"  # under which a state_dict has what is ours

_num_named = 0  # the next optimizer's number: smaller ones are taken


class LocalStepsOptimizer(ReducingOptimizer):
    """Takes local steps; the new class derives from this and the optimizer's own class."""

    _kept = (*ReducingOptimizer._kept, "_progress")
    _progress: dict[str, Any] | None = None  # in a copy: the original's progress
    _fragments: list[Fragment] = []  # noqa: RUF012 (replaced, never changed)
    _num_steps = 0  # taken so far, those of the warm-up included

    def _configure(
        self, options: TorchOptions, named: list[Named], groups: list[list[Named]] | None
    ) -> None:
        before = self._shown_progress() if self._fragments else self._progress
        self._chosen = options.schedule
        within = self._chosen.within
        self._within = set_of_this_host() if within == HOST else within
        self._name = ""
        self._agreed_in: Topology | None = None  # the job whose ranks have agreed on the name
        self._fragments = make_fragments(named, self._chosen)
        super()._configure(options, named, groups)
        self._exchanger: Exchanger | None = None
        if takes_part(self.process_set):
            hook = self._communication_hook
            self._exchanger = Exchanger(self.process_set, self._compression, hook)
        if before is not None:
            self._load_progress(before)
        self._progress = None

    @property
    def _is_warm(self) -> bool:
        """Whether the warm-up, in which gradients are averaged over all ranks, is over."""
        return self._num_steps >= self._chosen.warmup_steps

    def _gradient_set(self) -> ProcessSet | None:
        if not self._is_warm:
            return super()._gradient_set()
        within = self._within
        return within if within is not None and takes_part(within) else None

    # -- stepping --------------------------------------------------------------------------

    @calls_traced
    def step(self, closure: Any = None) -> Any:
        """Update the parameters with this rank's gradients, and synchronise them every H steps."""
        self._begin_step()
        result = super().step(closure)
        self._end_step()
        return result

    step.hooked = True  # type: ignore[attr-defined]  # torch need not: it hooks the base's step

    def _share_found(self, found: dict[torch.device, torch.Tensor]) -> Any:
        """Return torch.amp.GradScaler's finding; count a step that it skips on this rank alone."""
        if self._is_warm and any(bool(tensor.item()) for tensor in found.values()):
            self._begin_step()
            self._end_step()
        return found

    @untraced
    def _begin_step(self) -> None:
        if not self._is_warm:
            return
        is_new = self._agreed_in is not runtime.topology
        if is_new or not all(fragment.has_anchor for fragment in self._fragments):
            self._prepare()

    @untraced
    @torch.no_grad()
    def _end_step(self) -> None:
        """Count the step, and do what is due after it."""
        warm_before = self._is_warm
        self._num_steps += 1
        if not self._is_warm:
            return
        if not warm_before:
            self._reattach()  # from now on gradients stay here
            return
        now = self._local_position()
        take_turns(self._fragments, now, self._chosen, self._start, self._apply)

    def _local_position(self) -> int:
        """Return the number of local steps so far."""
        return self._num_steps - self._chosen.warmup_steps

    def _start(self, fragment: Fragment, delay: int) -> None:
        fragment.start(self._name, self._exchanger, self._others(fragment), delay)

    def _apply(self, fragment: Fragment) -> None:
        fragment.apply(self._chosen.outer_sgd, self._chosen.local_share)
        fragment.start_at += self._chosen.steps

    def _others(self, fragment: Fragment) -> list[torch.Tensor]:
        """Return what is averaged beside the parameters: inner state, and buffers, once for all."""
        found: list[torch.Tensor] = []
        if self._chosen.average_state:
            for _, param in fragment.members:
                entries = self.state.get(param, {})
                found += [entries[key] for key in sorted(entries) if _is_averaged(entries[key])]
        model = self._chosen.average_buffers
        if model is not None and fragment.number == 0:
            found += [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        return found

    @untraced
    @torch.no_grad()
    def synchronize_parameters(self) -> None:
        """Average the parameters of all ranks now, wherever these are in their local steps.

        Call this at the end of training, and before the model is evaluated or saved for use:
        afterwards all ranks have the same parameters. All ranks must call it together. The outer
        optimizer takes no step, because its momentum is that of whole rounds of local steps. The
        count of local steps begins anew. In the warm-up nothing happens: parameters are equal.
        """
        if not self._is_warm:
            return
        self._begin_step()
        now = self._local_position()
        for fragment in self._fragments:
            if fragment.apply_at is not None:
                self._apply(fragment)
        for fragment in self._fragments:
            fragment.start_at = now
            self._start(fragment, delay=0)
            fragment.apply(AVERAGING, local_share=0.0)
            fragment.start_at = now + self._chosen.first_turn(fragment.number)

    # -- the ranks together ----------------------------------------------------------------

    def _prepare(self) -> None:
        """Agree on a name and on where all ranks begin. Collective."""
        global _num_named
        process_set = self.process_set
        anchored = all(fragment.has_anchor for fragment in self._fragments)
        root: int | None = None
        if self._exchanger is not None:
            mine = (_num_named, self._chosen.settings(), anchored)
            everyone = allgather_object(mine, "local_steps.agreement", process_set)
            ranks = process_set.ranks or list(range(set_size(process_set)))
            # In elastic jobs nobody has compared the settings before.
            check_alike(ranks, [settings for _, settings, _ in everyone])
            number = max(theirs for theirs, _, _ in everyone)
            _num_named = number + 1
            self._name = f"local_steps.{number}"
            holders = [rank for rank, theirs in zip(ranks, everyone, strict=True) if theirs[2]]
            if len(holders) < len(ranks):
                root = holders[0] if holders else ranks[0]
        if root is not None or not anchored:
            for fragment in self._fragments:
                name = f"{self._name}.{fragment.number}"
                fragment.take_anchor(root, name, process_set)
        self._agreed_in = runtime.topology

    # -- other ranks' progress -------------------------------------------------------------

    def _broadcast_progress(self, root_rank: int) -> None:
        """Go on where `root_rank` is. Collective, also on ranks that have not begun."""
        device = next(param.device for param in self._parameter_names)
        mine = self._shown_progress()
        progress = broadcast_nested(mine, root_rank, "local_steps.progress", device)
        if progress is not mine:
            self._load_progress(progress)

    def _num_syncs(self) -> int:
        """Return how many synchronisations the model has seen; -1 before local steps have begun."""
        if not all(fragment.has_anchor for fragment in self._fragments):
            return -1
        return sum(fragment.num_syncs for fragment in self._fragments)

    def _schedule(self) -> tuple[int, list[int]]:
        """Return the steps so far, and after which local step each fragment is sent next."""
        return self._num_steps, [fragment.start_at for fragment in self._fragments]

    def _adopt_schedule(self, schedule: tuple[int, list[int]]) -> None:
        self._num_steps, starts = schedule
        for fragment, start_at in zip(self._fragments, starts, strict=True):
            fragment.start_at = start_at

    @torch.no_grad()
    def _return_to_anchor(self) -> None:
        """Give up this rank's local steps: go back to where all ranks last were together."""
        for fragment in self._fragments:
            for piece in fragment.pieces:
                piece.write_parameters()

    # -- checkpoints -----------------------------------------------------------------------

    def _shown_progress(self) -> dict[str, Any]:
        return {
            "num_steps": self._num_steps,
            "fragments": [fragment.content() for fragment in self._fragments],
        }

    def _load_progress(self, progress: dict[str, Any]) -> None:
        was_warm = self._is_warm
        load_fragments(self._fragments, progress["fragments"], self._others)
        self._num_steps = progress["num_steps"]
        if self._is_warm != was_warm:
            self._reattach()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, and this rank's progress in the local steps.

        Ranks differ between synchronisations: let each save its own to go on bit for bit, or save
        one after `synchronize_parameters`.
        """
        return {**super().state_dict(), _KEY: self._shown_progress()}

    def load_state_dict(self, state_dict: Any) -> None:
        """Go on from `state_dict`, also from one of an optimizer without local steps."""
        super().load_state_dict(state_dict)
        progress = state_dict.get(_KEY)
        if progress is not None:
            self._load_progress(progress)
            return
        for fragment in self._fragments:
            fragment.abandon()
            for piece in fragment.pieces:  # the ranks begin where they are
                piece.anchor = piece.momentum = None

    def _restart(self) -> None:
        for fragment in self._fragments:
            fragment.abandon()
        super()._restart()

    def __reduce__(self) -> Any:
        self._progress = copy.deepcopy(self._shown_progress())
        try:
            return super().__reduce__()
        finally:
            self._progress = None


def _is_averaged(entry: Any) -> bool:
    """Return whether an entry of optimizer state is a tensor of averages, not a step count."""
    return isinstance(entry, torch.Tensor) and entry.dim() > 0 and entry.is_floating_point()
