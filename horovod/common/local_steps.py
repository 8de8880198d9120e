"""The part of local steps that all bindings share: when ranks synchronise, and the outer step.

Users ask for it with ``DistributedOptimizer(..., local_steps=H, outer=hvd.OuterSGD())``. How far
the ranks have moved since the last synchronisation, on average and with its sign turned round, is a
gradient: the *outer gradient*. `OuterSGD` is SGD with momentum on it (DiLoCo).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from horovod.common.process_sets import ProcessSet

HOST: Final = "host"  # a value of `within`: the ranks of each host form a cluster


@dataclass(frozen=True)
class OuterSGD:
    """SGD on outer gradients: how far all ranks have moved, on average, in their local steps.

    With ``lr=1`` and ``momentum=0`` a synchronisation averages the ranks' parameters.

    Args:
        lr: Learning rate of the outer step, 0.7 by default.
        momentum: Momentum of the outer step, 0.9 by default; 0 keeps no momentum.
        nesterov: Whether momentum is Nesterov's, as it is by default.

    Examples:
        >>> hvd.DistributedOptimizer(optimizer, local_steps=50, outer=hvd.OuterSGD(lr=0.7))
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def check(self) -> None:
        """Raise ValueError for numbers with which nothing can be trained."""
        lr: Any = self.lr
        momentum: Any = self.momentum
        if not isinstance(lr, (int, float)) or not 0 < lr < float("inf"):
            raise ValueError(f"lr of hvd.OuterSGD must be a positive number, not {lr!r}")
        if not isinstance(momentum, (int, float)) or not 0 <= momentum < 1:
            raise ValueError(
                f"momentum of hvd.OuterSGD must be at least 0 and less than 1, not {momentum!r}"
            )

    def update(self, anchor: Any, gradient: Any, momentum: Any) -> tuple[Any, Any]:
        """Move `anchor` against `gradient`, the outer one.

        Tensors of torch and arrays of numpy are changed in place, `gradient` too. Arrays of JAX
        cannot change, so the returned ones are new.

        Args:
            anchor: The parameters that all ranks had after the last synchronisation.
            gradient: The outer gradient.
            momentum: The momentum after the last outer step, zeros before the first one. None if
                the optimizer keeps no momentum.

        Returns:
            The new anchor, and the new momentum or None.
        """
        if momentum is not None:
            momentum *= self.momentum
            momentum += gradient
            if self.nesterov:
                gradient += self.momentum * momentum
            else:
                gradient = momentum
        anchor -= self.lr * gradient
        return anchor, momentum


AVERAGING = OuterSGD(lr=1.0, momentum=0.0, nesterov=False)


@dataclass(frozen=True)
class LocalSchedule:
    """Arguments of DistributedOptimizer that say when and how local steps are synchronised."""

    local_steps: int | None = None
    outer: OuterSGD | None = None
    warmup_steps: int = 0
    average_state: bool = False
    fragments: int = 1
    delay: int = 0
    alpha: float | None = None
    within: ProcessSet | Literal["host"] | None = None

    @property
    def steps(self) -> int:
        """The number of local steps between two synchronisations."""
        assert self.local_steps is not None
        return self.local_steps

    @property
    def outer_sgd(self) -> OuterSGD:
        """The outer optimizer; averaging of parameters where none was given."""
        return AVERAGING if self.outer is None else self.outer

    @property
    def local_share(self) -> float:
        """The share of a rank's own parameters that a synchronisation keeps, from 0 to 1."""
        return (0.5 if self.delay else 0.0) if self.alpha is None else self.alpha

    def first_turn(self, number: int) -> int:
        """Return after how many local steps the fragment `number` is sent first: turns are spread.

        It is sent again every `steps` local steps from then on.
        """
        return (number + 1) * self.steps // self.fragments

    def settings(self) -> dict[str, str]:
        """Return the settings that must be equal on all ranks, by the names of the arguments."""
        shown = {field.name: str(getattr(self, field.name)) for field in fields(self)}
        if isinstance(self.within, ProcessSet):
            shown["within"] = "a process set"  # each rank has one of its own
        return shown

    def check(self) -> bool:
        """Return whether there are local steps; ValueError if an argument makes no sense."""
        if self.local_steps is None:
            for field in fields(self):
                if getattr(self, field.name) != field.default:
                    raise ValueError(
                        f"{field.name} needs local_steps: say how many there are to be"
                    )
            return False
        check_count("local_steps", self.local_steps, 1)
        check_count("warmup_steps", self.warmup_steps, 0)
        outer: Any = self.outer
        if outer is not None:
            if not isinstance(outer, OuterSGD):
                raise ValueError(f"outer must be a hvd.OuterSGD object or None, not {outer!r}")
            outer.check()
        self._check_fragments()
        return True

    def _check_fragments(self) -> None:
        check_count("fragments", self.fragments, 1)
        check_count("delay", self.delay, 0)
        if self.fragments > self.steps:
            raise ValueError(
                f"fragments={self.fragments} must not exceed local_steps={self.steps}: in each "
                f"step one fragment at most begins to be synchronised"
            )
        if self.delay >= self.steps:
            raise ValueError(
                f"delay={self.delay} must be less than local_steps={self.steps}: a fragment must "
                f"have arrived before it is sent again"
            )
        alpha: Any = self.alpha
        if alpha is not None:
            if not isinstance(alpha, (int, float)) or not 0 <= alpha < 1:
                raise ValueError(f"alpha must be at least 0 and less than 1, not {alpha!r}")
            if not self.delay:
                raise ValueError("alpha needs delay: without it there are no later steps to mix in")


NO_LOCAL_STEPS = LocalSchedule()


def check_count(name: str, value: Any, minimum: int) -> None:
    """Raise ValueError if the argument `name` is not a whole number of at least `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name} must be a number of at least {minimum}, not {value!r}")


def check_alike(ranks: Sequence[int], settings: Sequence[dict[str, str]]) -> None:
    """Raise ValueError if ranks have different `settings`, which are in the order of `ranks`."""
    for name in settings[0]:
        values = {rank: each[name] for rank, each in zip(ranks, settings, strict=True)}
        if len(set(values.values())) > 1:
            values_text = ", ".join(f"{value} on rank {rank}" for rank, value in values.items())
            raise ValueError(f"{name} of DistributedOptimizer differs between ranks: {values_text}")


def divide(names: Sequence[str], sizes: Sequence[int], count: int) -> list[list[int]]:
    """Divide a model by layers into fragments of about the same number of elements.

    The largest layers are dealt out first, each to the fragment that is smallest then.

    Args:
        names: The names of the parameters, such as ``encoder.0.weight``.
        sizes: Their numbers of elements.
        count: The number of fragments.

    Returns:
        The indices of each fragment's parameters.

    Raises:
        ValueError: There are more fragments than layers.
    """
    layers = _layers(names)
    if count > len(layers):
        raise ValueError(
            f"fragments must not exceed the number of layers, {len(layers)}, and is {count}"
        )
    totals = [0] * count
    chosen: list[list[int]] = [[] for _ in range(count)]
    numbers = [sum(sizes[index] for index in layer) for layer in layers]
    for index in sorted(range(len(layers)), key=lambda index: -numbers[index]):
        smallest = min(range(count), key=lambda index: (len(chosen[index]) > 0, totals[index]))
        chosen[smallest].append(index)
        totals[smallest] += numbers[index]
    return [[member for index in sorted(own) for member in layers[index]] for own in chosen]


def _layers(names: Sequence[str]) -> list[list[int]]:
    """Group parameters by the module that they belong to, in the order of the modules.

    A parameter whose name has no module, or that has no name, is a layer of its own.
    """
    layers: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        module = name.rpartition(".")[0]
        key = name if not module or name.startswith("allreduce.noname.") else module
        layers.setdefault(key, []).append(index)
    return list(layers.values())
