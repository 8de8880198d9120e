"""Fragments: parts of a model that are synchronised at a time, after local steps.

A fragment knows its *anchor*, the parameters that all ranks had after the last synchronisation.
What the ranks exchange is how far each has moved from there, the outer gradient; the outer
optimizer moves the anchor, and the parameters follow. Used by `horovod.torch.optimizers.local`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from horovod.common.local_steps import LocalSchedule, OuterSGD, divide
from horovod.common.process_sets import ProcessSet
from horovod.torch.gradients.buckets import Named
from horovod.torch.ops.broadcast import broadcast_
from horovod.torch.optimizers.exchanger import Exchanger, Wait

Tensor = torch.Tensor
Content = dict[str, Any]  # what a checkpoint has of a fragment


class Piece:
    """The parameters of a fragment that are on one device, end to end in flat tensors.

    Anchor and momentum are at least float32: many small outer steps must add up.
    """

    def __init__(self, members: Sequence[Named], dtype: torch.dtype) -> None:
        self.members = list(members)
        self.anchor: Tensor | None = None
        self.momentum: Tensor | None = None
        self._dtype = dtype

    def flat(self) -> Tensor:
        """Return a copy of this rank's parameters, end to end."""
        return torch.cat([param.detach().reshape(-1).to(self._dtype) for _, param in self.members])

    def zeros(self) -> Tensor:
        """Return a flat tensor of zeros for all parameters."""
        return torch.zeros_like(self.flat())

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Return the parts of a flat tensor that belong to the parameters, in their shapes."""
        sizes = [param.numel() for _, param in self.members]
        return [
            part.view(param.shape)
            for part, (_, param) in zip(torch.split(flat, sizes), self.members, strict=True)
        ]

    def outer_gradient(self) -> Tensor:
        """Return how far this rank has moved from the anchor, with its sign turned round."""
        assert self.anchor is not None
        flat = self.flat()
        return torch.sub(self.anchor, flat, out=flat)

    def update(self, outer: OuterSGD, gradient: Tensor, local_share: float) -> None:
        """Take the outer step; the parameters keep `local_share` of their own values."""
        assert self.anchor is not None
        if outer.momentum and self.momentum is None:
            self.momentum = torch.zeros_like(self.anchor)
        outer.update(self.anchor, gradient, self.momentum if outer.momentum else None)
        self.write_parameters(local_share)

    def write_parameters(self, local_share: float = 0.0) -> None:
        """Write the anchor into the parameters, which keep `local_share` of their own values."""
        assert self.anchor is not None
        for part, (_, param) in zip(self.parts(self.anchor), self.members, strict=True):
            mix(param.detach(), part, local_share)


class Fragment:
    """Layers that are synchronised together: they begin at one step and are updated at another."""

    def __init__(self, number: int, members: Sequence[Named], start_at: int) -> None:
        self.number = number
        self.start_at = start_at  # the local step after which it is next sent
        self.apply_at: int | None = None  # the local step after which the result is applied
        self.num_syncs = 0
        by_kind: dict[tuple[torch.device, torch.dtype], list[Named]] = {}
        for name, param in members:
            dtype = torch.promote_types(param.dtype, torch.float32)
            by_kind.setdefault((param.device, dtype), []).append((name, param))
        self.pieces = [Piece(group, dtype) for (_, dtype), group in by_kind.items()]
        self._is_complete = True  # false while the anchor of an added parameter is this rank's own
        self._gradients: list[Tensor] = []  # outer gradients, under way or arrived
        self._others: list[tuple[Tensor, Tensor]] = []  # each tensor, and what will be its average
        self._waits: list[Wait] = []

    @property
    def members(self) -> list[Named]:
        """All parameters."""
        return [member for piece in self.pieces for member in piece.members]

    @property
    def has_anchor(self) -> bool:
        """Whether this rank knows where all ranks were after the last synchronisation."""
        return self._is_complete and all(piece.anchor is not None for piece in self.pieces)

    def take_anchor(self, root_rank: int | None, name: str, process_set: ProcessSet) -> None:
        """Make the parameters of `root_rank` the anchor of all ranks; None if there is only one."""
        for index, piece in enumerate(self.pieces):
            if piece.anchor is None:
                piece.anchor = piece.flat()
            if root_rank is not None:
                broadcast_(piece.anchor, root_rank, f"{name}.anchor.{index}", process_set)
        self._is_complete = True

    # -- synchronising ---------------------------------------------------------------------

    def start(
        self, name: str, exchanger: Exchanger | None, others: Sequence[Tensor], delay: int
    ) -> None:
        """Begin to exchange how far the ranks have moved, and to average the tensors `others`.

        Without an exchanger there is no other rank.
        """
        name, background = f"{name}.{self.number}", delay > 0
        self._gradients = [piece.outer_gradient() for piece in self.pieces]
        self._others = [(tensor, tensor.detach().clone()) for tensor in others]
        if exchanger is not None:
            self._waits = [exchanger.require_all(f"{name}.all", background)]
            for index, (piece, flat) in enumerate(zip(self.pieces, self._gradients, strict=True)):
                wait = exchanger.start(f"{name}.{index}", piece.members, flat, background)
                self._waits.append(wait)
            for index, alike in enumerate(_by_kind([copy for _, copy in self._others])):
                wait = exchanger.average(f"{name}.other.{index}", alike, background)
                self._waits.append(wait)
        self.apply_at = self.start_at + delay

    def wait(self) -> None:
        """Wait until what the ranks have sent has arrived."""
        while self._waits:
            self._waits[0]()
            del self._waits[0]

    def apply(self, outer: OuterSGD, local_share: float) -> None:
        """Take the outer step with what the ranks have exchanged."""
        self.wait()
        for piece, gradient in zip(self.pieces, self._gradients, strict=True):
            piece.update(outer, gradient, local_share)
        for tensor, average in self._others:
            mix(tensor.detach(), average, local_share)
        self._forget()
        self.num_syncs += 1

    def abandon(self) -> None:
        """Give up an exchange that is under way: it begins again with the next step."""
        if self.apply_at is not None:
            self._forget()

    def _forget(self) -> None:
        self.apply_at, self._gradients, self._others, self._waits = None, [], [], []

    # -- in checkpoints --------------------------------------------------------------------

    def content(self) -> Content:
        """Return all that a checkpoint needs to go on exactly. Waits for what is under way."""
        self.wait()
        return {
            "start_at": self.start_at,
            "apply_at": self.apply_at,
            "num_syncs": self.num_syncs,
            "anchors": self._by_name([piece.anchor for piece in self.pieces]),
            "momenta": self._by_name([piece.momentum for piece in self.pieces]),
            "gradients": self._by_name(self._gradients),
            "others": [average for _, average in self._others],
        }

    def load(self, content: Content, others: Sequence[Tensor]) -> None:
        """Go on from `content`. Parameters that it does not know begin where they are."""
        self._forget()
        self.start_at, self.num_syncs = content["start_at"], content["num_syncs"]
        names = {name for name, _ in self.members}
        self._is_complete = names <= content["anchors"].keys()
        for piece in self.pieces:
            piece.anchor = _assembled(piece, content["anchors"], piece.flat)
            piece.momentum = _assembled(piece, content["momenta"], piece.zeros)
        if content["apply_at"] is not None and names <= content["gradients"].keys():
            self.apply_at = content["apply_at"]
            gradients = [
                _assembled(piece, content["gradients"], piece.flat) for piece in self.pieces
            ]
            self._gradients = [gradient for gradient in gradients if gradient is not None]
            self._others = [
                (tensor, average.to(tensor, copy=True))
                # An optimizer that has not stepped yet has no state to average.
                for tensor, average in zip(others, content["others"], strict=False)
            ]

    def _by_name(self, flats: Sequence[Tensor | None]) -> dict[str, Tensor]:
        return {
            name: part
            for piece, flat in zip(self.pieces, flats, strict=False)
            if flat is not None
            for part, (name, _) in zip(piece.parts(flat), piece.members, strict=True)
        }


def mix(tensor: Tensor, shared: Tensor, local_share: float) -> None:
    """Write `shared` into `tensor`, which keeps `local_share` of its own values."""
    if local_share:
        shared = torch.lerp(shared, tensor.to(shared.dtype), local_share)
    tensor.copy_(shared)


def make_fragments(named: list[Named], schedule: LocalSchedule) -> list[Fragment]:
    """Return the fragments of a model, whose turns are spread over the local steps."""
    names, sizes = [name for name, _ in named], [param.numel() for _, param in named]
    return [
        Fragment(number, [named[index] for index in indices], schedule.first_turn(number))
        for number, indices in enumerate(divide(names, sizes, schedule.fragments))
    ]


def take_turns(
    fragments: Sequence[Fragment],
    now: int,
    schedule: LocalSchedule,
    start: Callable[[Fragment, int], None],
    apply: Callable[[Fragment], None],
) -> None:
    """Call `start` and `apply` for the fragments for which they are due after local step `now`."""
    for fragment in fragments:
        if fragment.apply_at is not None and now >= fragment.apply_at:
            apply(fragment)
        if fragment.apply_at is None and now >= fragment.start_at:
            fragment.start_at = now
            start(fragment, schedule.delay)
            if not schedule.delay:
                apply(fragment)


def load_fragments(
    fragments: Sequence[Fragment],
    contents: Sequence[Content],
    others: Callable[[Fragment], Sequence[Tensor]],
) -> None:
    """Let fragments go on from as many contents; `others` returns what `Fragment.load` takes."""
    if len(contents) != len(fragments):
        raise ValueError(
            f"the state that is loaded is of an optimizer with fragments={len(contents)}, and "
            f"this one has fragments={len(fragments)}"
        )
    everything = {
        key: {name: part for content in contents for name, part in content[key].items()}
        for key in ("anchors", "momenta", "gradients")
    }
    for fragment, content in zip(fragments, contents, strict=True):
        fragment.load({**content, **everything}, others(fragment))


def _assembled(
    piece: Piece, parts: dict[str, Tensor], fresh: Callable[[], Tensor]
) -> Tensor | None:
    """Return `parts` in one flat tensor, `fresh` where one is missing; None if all are missing."""
    if not any(name in parts for name, _ in piece.members):
        return None
    flat = fresh()
    for target, (name, param) in zip(piece.parts(flat), piece.members, strict=True):
        if name not in parts:
            continue
        if parts[name].shape != param.shape:
            raise ValueError(
                f"the state that is loaded has {list(parts[name].shape)} for parameter {name!r}, "
                f"which is {list(param.shape)}: is it of another model?"
            )
        target.copy_(parts[name])
    return flat


def _by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the tensors in lists, each of which one allreduce can take."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(alike.values())
