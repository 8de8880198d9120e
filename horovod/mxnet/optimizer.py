"""Trains with the gradients of all ranks: an optimizer for Module, and a trainer for Gluon.

`horovod.mxnet` exports them to users.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import mxnet as mx

from horovod.common.optimizer_options import OptimizerOptions
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Average
from horovod.common.util import split_list
from horovod.engine.collective import Reduction
from horovod.engine.runtime import runtime
from horovod.engine.wait_for_all import wait_for_all
from horovod.mxnet.allreduce_ops import start_allreduce
from horovod.mxnet.arrays import check_one_device, mxnet_errors
from horovod.mxnet.compression import Compression, Compressor


def _options(arguments: dict[str, Any]) -> OptimizerOptions:
    """Return the options in the `locals()` of a constructor; ValueError if one is wrong.

    `num_groups` is left out: in MXNet it is not deprecated, and 0 has a meaning of its own.
    """
    num_groups = arguments["num_groups"]
    if num_groups < 0:
        raise ValueError(f"num_groups must not be negative, not {num_groups!r}")
    return OptimizerOptions.from_arguments({**arguments, "num_groups": 0}).checked(Average)


def _average(groups: Sequence[tuple[str, list[Any]]], options: OptimizerOptions) -> None:
    """Average arrays in place, with one operation for each named group, all in flight together."""
    process_set = options.process_set
    if process_set.size() == 1 or process_set.included() is False:
        return
    reduction = Reduction(options.op, *options.predivide_factors)
    with mxnet_errors():
        started = [start_allreduce(arrays, name, reduction, process_set) for name, arrays in groups]
        wait_for_all(started)


class DistributedOptimizer(mx.optimizer.Optimizer):
    """An optimizer that averages the gradients over the ranks before each update.

    It is for `Module.fit(..., optimizer=optimizer, kvstore=None)`; with gluon use
    `DistributedTrainer`.

    Args:
        optimizer: MXNet optimizer that makes the updates.
        gradient_predivide_factor: Divide the gradients by this number before the sum, and by size /
            number after it; the result is still the average. The default is 1.
        num_groups: Number of operations in which the gradients that MXNet passes together are
            reduced. The default is 0: one operation for each gradient.
        process_set: Ranks to average with. By default all; others train on their own gradients.

    Raises:
        ValueError: `gradient_predivide_factor` is not positive, or `num_groups` is negative.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=0.1))
    """

    def __init__(
        self,
        optimizer: Any,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self._optimizer = optimizer
        self._options = _options(locals())
        self._num_groups = num_groups
        self._counted_updates = optimizer.num_update  # the updates in the statistics

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # missing while the object is being unpickled
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def create_state(self, index: Any, weight: Any) -> Any:
        """Make the wrapped optimizer's state for a parameter.

        Args:
            index: Number of the parameter, or a list of numbers.
            weight: The parameter, or a list of them.
        """
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        """Make the wrapped optimizer's state for a parameter that may be of 16 bits.

        Args:
            index: Number of the parameter, or a list of numbers.
            weight: The parameter, or a list of them.
        """
        return self._optimizer.create_state_multi_precision(index, weight)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average gradients over the ranks, then update the parameters.

        Args:
            index: Number of the parameter, or a list of numbers.
            weight: The parameter, or a list of them.
            grad: Its gradient, or a list of them; averaged in place.
            state: The result of `create_state` for it.
        """
        self._reduce(index, grad)
        self._optimizer.update(index, weight, grad, state)
        self._count_step()

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average gradients, then update parameters that may be of 16 bits.

        Args:
            index: Number of the parameter, or a list of numbers.
            weight: The parameter, or a list of them.
            grad: Its gradient, or a list of them; averaged in place.
            state: The result of `create_state_multi_precision` for it.
        """
        self._reduce(index, grad)
        self._optimizer.update_multi_precision(index, weight, grad, state)
        self._count_step()

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the wrapped optimizer.

        Args:
            lr: The new learning rate.
        """
        self._optimizer.set_learning_rate(lr)

    def set_lr_mult(self, args_lr_mult: Any) -> None:
        """Set factors for the learning rates of single parameters.

        Args:
            args_lr_mult: Dict from a parameter's name or number to its factor.
        """
        self._optimizer.set_lr_mult(args_lr_mult)

    def set_wd_mult(self, args_wd_mult: Any) -> None:
        """Set factors for the weight decay of single parameters.

        Args:
            args_wd_mult: Dict from a parameter's name or number to its factor.
        """
        self._optimizer.set_wd_mult(args_wd_mult)

    def _count_step(self) -> None:
        """Count a step when MXNet's count of updates has grown.

        MXNet calls `update` for each parameter, and its count grows with the first one of a step.
        """
        count = self._optimizer.num_update
        if count != self._counted_updates:
            self._counted_updates = count
            runtime.statistics.end_step()

    def _reduce(self, index: Any, grad: Any) -> None:
        """Average one gradient, or a list of them in groups."""
        if not isinstance(index, (tuple, list)):
            _average([(str(index), [grad])], self._options)
            return
        pairs = list(zip(index, grad, strict=True))
        parts = split_list(pairs, self._num_groups) if self._num_groups else [[p] for p in pairs]
        groups = [
            (
                str(part[0][0]) if len(part) == 1 else f"{part[0][0]}:{part[-1][0]}",
                [array for _, array in part],
            )
            for part in parts
            if part
        ]
        _average(groups, self._options)


class DistributedTrainer(mx.gluon.Trainer):
    """A gluon trainer that averages the gradients over the ranks before each update.

    `trainer.step` takes the batch size of one rank.

    Args:
        params: Parameters to train: `block.collect_params()`, a dict or a list of gluon parameters.
            Each is on one device.
        optimizer: MXNet optimizer, or its name. If it is a `DistributedOptimizer`, the optimizer
            inside it is used, with a warning.
        optimizer_params: Dict of its arguments, if `optimizer` is a name. By default none.
        compression: Compressor for what is sent, such as `Compression.fp16`. By default none.
        gradient_predivide_factor: Divide the gradients by this number before the sum, and by size /
            number after it; the result is still the average. The default is 1.
        prefix: Text before the operations' names, to tell several trainers apart. By default none.
        num_groups: Number of operations in which the gradients are reduced; there are more if their
            types differ. The default is 0: one operation for each gradient.
        process_set: Ranks to average with. By default all; others train on their own gradients.

    Raises:
        ValueError: `params` is none of these, `gradient_predivide_factor` is not positive, or
            `num_groups` is negative.

    Examples:
        >>> trainer = hvd.DistributedTrainer(params, "sgd", {"learning_rate": 0.1 * hvd.size()})
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Any = None,
        compression: type[Compressor] = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            warnings.warn(
                "DistributedTrainer averages gradients itself: it uses the optimizer inside of the "
                "DistributedOptimizer that it was given",
                stacklevel=2,
            )
            optimizer = optimizer._optimizer
        self._options = _options(locals())
        self._num_groups = num_groups
        self._prefix = prefix or ""
        super().__init__(
            _sorted_parameters(params), optimizer, optimizer_params=optimizer_params, kvstore=None
        )

    def _allreduce_grads(self) -> None:
        sent = []  # tuples: index of the parameter, gradient, compressed gradient, context
        for index, parameter in enumerate(self._params):
            if parameter.grad_req == "null":
                continue
            (gradient,) = check_one_device(parameter.list_grad(), parameter.name)
            sent.append((index, gradient, *self._options.compression.compress(gradient)))
        groups = self._groups(sent)
        _average(groups, self._options)
        for _, gradient, array, context in sent:
            if array is not gradient:
                self._options.compression.decompress(array, context).copyto(gradient)
        runtime.statistics.end_step(len(groups))

    def _groups(self, sent: Sequence[tuple[int, Any, Any, Any]]) -> list[tuple[str, list[Any]]]:
        """Cut compressed gradients into named groups of one type each."""
        if not self._num_groups:
            return [(f"{self._prefix}{index}", [array]) for index, _, array, _ in sent]
        groups = []
        for part in split_list(list(sent), self._num_groups):
            by_type: dict[str, list[tuple[int, Any]]] = {}
            for index, _, array, _ in part:
                by_type.setdefault(str(array.dtype), []).append((index, array))
            for members in by_type.values():
                name = f"{self._prefix}{members[0][0]}:{members[-1][0]}"
                groups.append((name, [array for _, array in members]))
        return groups


def _sorted_parameters(params: Any) -> Any:
    """Return the parameters as a list in the same order on all ranks."""
    if isinstance(params, (dict, mx.gluon.parameter.ParameterDict)):
        return [params[key] for key in sorted(params.keys())]
    if isinstance(params, (list, tuple)):
        return sorted(params, key=lambda parameter: str(parameter.name))
    raise ValueError(
        f"params must be a dict, a ParameterDict or a list of parameters, not "
        f"{type(params).__name__}"
    )
