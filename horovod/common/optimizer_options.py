"""OptimizerOptions: what a user has asked of a distributed optimizer or tape, in every framework.

The public functions of the bindings make the record of their arguments (`from_arguments`), have it
checked (`checked`) and hand it on whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any, TypeVar
from warnings import warn

from horovod.common.compression import NoneCompressor
from horovod.common.local_steps import NO_LOCAL_STEPS, LocalSchedule
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average, ReduceOp
from horovod.common.util import resolve_reduce_op, split_list

Options = TypeVar("Options", bound="OptimizerOptions")


@dataclass(frozen=True)
class OptimizerOptions:
    """Arguments of distributed optimizers and tapes, by their names.

    The docstrings of the public functions explain them. A binding that does not have an argument
    leaves its default.
    """

    name: str | None = None
    compression: Any = NoneCompressor
    sparse_as_dense: bool = False
    op: ReduceOp = Average
    gradient_predivide_factor: float = 1.0
    groups: int | Sequence[Sequence[Any]] | None = None
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    device_dense: str = ""
    device_sparse: str = ""
    schedule: LocalSchedule = NO_LOCAL_STEPS

    @classmethod
    def from_arguments(cls: type[Options], arguments: Mapping[str, Any]) -> Options:
        """Make the record of the `locals()` of the public function that a user has called.

        Those of local steps become the `schedule`, and `num_groups`, which is deprecated, `groups`.
        """
        chosen = _select(cls, arguments)
        if arguments.get("num_groups"):
            warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=3)
            if chosen.get("groups") is None:
                chosen["groups"] = arguments["num_groups"]
        schedule = type(cls.schedule)
        return cls(**chosen, schedule=schedule(**_select(schedule, arguments)))

    def checked(self: Options, *ops: ReduceOp) -> Options:
        """Return the options with `op` as a ReduceOp and `groups` as a number or lists.

        Args:
            *ops: The operations that this optimizer knows; all by default.

        Raises:
            ValueError: A value is wrong by itself, or does not go with another.
        """
        op = resolve_reduce_op(self.op, None)
        if ops and op not in ops:
            known = ", ".join(each.name.capitalize() for each in ops)
            raise ValueError(f"op must be one of {known}, not {self.op!r}")
        check_passes(self.backward_passes_per_step)
        if not callable(getattr(self.compression, "compress", None)):
            raise ValueError(
                f"compression must be a compressor such as hvd.Compression.fp16, not "
                f"{self.compression!r}"
            )
        factor = self.gradient_predivide_factor
        if not factor > 0:
            raise ValueError(f"gradient_predivide_factor must be a positive number, not {factor!r}")
        if factor != 1.0 and op is not Average:
            raise ValueError("gradient_predivide_factor needs op=Average")
        if self.schedule.check() and op is not Average:
            raise ValueError("local_steps averages models: leave op at hvd.Average")
        return replace(self, op=op, groups=_check_groups(self.groups))

    @property
    def predivide_factors(self) -> tuple[float, float]:
        """The factors before and after the sum. With `Average` the engine also divides by size."""
        return 1.0 / self.gradient_predivide_factor, self.gradient_predivide_factor

    @property
    def pass_divisor(self) -> int:
        """The number by which the sum of the gradients of a step's passes is divided."""
        return self.backward_passes_per_step if self.average_aggregated_gradients else 1

    def divide(
        self,
        indices: list[int],
        variables: Sequence[Any],
        key_of: Callable[[Any], int] = id,
    ) -> list[list[int]]:
        """Cut the indices of gradients into the groups that are reduced together.

        Variables that are in none of the user's lists form a group each. `key_of` returns what
        tells one variable from all others.
        """
        if self.groups is None or not indices:
            return [indices] if indices else []
        if isinstance(self.groups, int):
            return split_list(indices, self.groups)
        left = {key_of(variables[index]): index for index in indices}
        chosen = [[left.pop(k) for k in map(key_of, group) if k in left] for group in self.groups]
        grouped = {index for group in chosen for index in group}
        return [group for group in chosen if group] + [[i] for i in indices if i not in grouped]


def weights_of(local_layers: Any) -> list[Any]:
    """Return the weights of a Keras layer, or of several; none for None.

    Raises:
        ValueError: One of them is not a layer.
    """
    layers = local_layers if isinstance(local_layers, Iterable) else [local_layers]
    weights: list[Any] = []
    for layer in [] if local_layers is None else layers:
        if not hasattr(layer, "trainable_weights"):
            raise ValueError(f"local_layers must be Keras layers, not {type(layer).__name__}")
        weights += layer.trainable_weights
    return weights


def check_passes(backward_passes_per_step: Any) -> None:
    """Raise ValueError if the number of backward passes is not a positive integer."""
    passes = backward_passes_per_step
    if isinstance(passes, bool) or not isinstance(passes, Integral) or passes < 1:
        raise ValueError(f"backward_passes_per_step must be positive, not {passes!r}")


def _check_groups(groups: Any) -> int | list[list[Any]] | None:
    """Return `groups` as None, a positive number or a list of lists; ValueError if it is not."""
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        return groups
    if isinstance(groups, list) and all(isinstance(group, (list, tuple)) for group in groups):
        return [list(group) for group in groups]
    if groups is None:
        return None
    raise ValueError(
        f"groups must be a positive number or a list of lists, one for each group, not {groups!r}"
    )


def _select(record: type[Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are fields of a record."""
    names = (field.name for field in fields(record))
    return {name: arguments[name] for name in names if name in arguments}
