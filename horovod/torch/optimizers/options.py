"""TorchOptions: what a user has asked of DistributedOptimizer, and what is wrong with it.

Made by `horovod.torch.optimizer` and Lightning's strategies. These are the checks that a rank makes
by itself; `horovod.torch.optimizers.checks` calls them, and has all ranks compare their options.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from horovod.common.optimizer_options import OptimizerOptions
from horovod.common.process_sets import global_process_set
from horovod.common.reduce_op import Adasum
from horovod.engine.runtime import runtime
from horovod.torch.gradients.buckets import Named
from horovod.torch.gradients.dtensors import is_dtensor
from horovod.torch.gradients.layouts import is_dense
from horovod.torch.hooks.base import CommunicationHook, check_hook
from horovod.torch.optimizers.local_steps import NO_LOCAL_STEPS, LocalSteps
from horovod.torch.optimizers.update_kinds import UpdateKind, class_of, kind_of


@dataclass(frozen=True)
class TorchOptions(OptimizerOptions):
    """Adds the arguments that only DistributedOptimizer for torch has."""

    named_parameters: Iterable[Named] | None = None
    shard_state: bool = False
    communication_hook: CommunicationHook | None = None
    overlap_forward: torch.nn.Module | None = None
    schedule: LocalSteps = NO_LOCAL_STEPS


def check_combinations(optimizer: Any, options: TorchOptions, named: list[Named]) -> None:
    """Refuse options that do not go with each other, with the optimizer or its parameters."""
    if options.schedule.local_steps is not None:
        _check_local_steps(options)
    _check_dtensors(options, named)
    if options.shard_state:
        _check_shardable(optimizer, options, named)
    if options.overlap_forward is not None:
        _check_delayable(optimizer, options, named)


def _check_local_steps(options: TorchOptions) -> None:
    """Refuse what does not go with `local_steps`."""
    if options.shard_state:
        raise ValueError(
            "local_steps does not go with shard_state, with which no rank can step alone: leave "
            "one of them out"
        )
    if options.overlap_forward is not None:
        raise ValueError(
            "local_steps does not go with overlap_forward, which hides the time of gradients that "
            "are not sent here: leave overlap_forward out, and use delay"
        )
    schedule = options.schedule
    if options.communication_hook is not None and (schedule.warmup_steps or schedule.within):
        raise ValueError(
            "a communication_hook sends either gradients or what local steps exchange: leave it "
            "out, or warmup_steps and within"
        )


def check_values(optimizer: Any, options: TorchOptions) -> TorchOptions:
    """Return the options in their one form; refuse values that are wrong by themselves."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise ValueError(f"optimizer must be a torch.optim.Optimizer, not a {kind}")
    options = options.checked()
    check_hook(optimizer, options.communication_hook, options.compression, options.op)
    if options.op == Adasum:
        if options.process_set is not global_process_set:
            raise NotImplementedError("op=Adasum works on the global process set only")
        if isinstance(optimizer, torch.optim.LBFGS) and runtime.topology.size > 1:
            raise ValueError(
                "torch.optim.LBFGS evaluates the closure several times in a step, so op=Adasum, "
                "which combines steps, does not work with it: use op=Average"
            )
    return options


def _check_shardable(optimizer: Any, options: TorchOptions, named: list[Named]) -> None:
    """Refuse what `shard_state` cannot do."""
    if options.op == Adasum:
        raise ValueError(
            "shard_state=True does not go with op=Adasum, for which every rank makes a step of "
            "all parameters"
        )
    if runtime.config.elastic:
        raise ValueError(
            "shard_state=True does not work in elastic jobs: a lost rank would take its slice of "
            "the optimizer state with it"
        )
    if kind_of(optimizer) is UpdateKind.UNKNOWN:
        kind = class_of(optimizer).__name__
        raise ValueError(
            f"shard_state=True needs an optimizer that updates each element by itself, such as "
            f"Adam, or each parameter by itself, such as Muon; {kind} does not, as far as is known "
            f"here. If it does, set `{kind}.elementwise = True` or `{kind}.tensorwise = True`; "
            f"otherwise use shard_state=False"
        )
    for name, param in named:
        if not is_dense(param):
            raise ValueError(
                f"shard_state=True: the elements of parameter {name!r} have gaps or overlaps in "
                f"memory (shape {list(param.shape)}, strides {param.stride()}); make it contiguous"
            )


def _check_delayable(optimizer: Any, options: TorchOptions, named: list[Named]) -> None:
    """Refuse what `overlap_forward` cannot do."""
    model: Any = options.overlap_forward
    if not isinstance(model, torch.nn.Module):
        raise ValueError(
            f"overlap_forward must be the model, a torch.nn.Module, not {type(model).__name__}"
        )
    if options.op == Adasum:
        raise ValueError(
            "overlap_forward does not go with op=Adasum, which combines whole steps: use "
            "op=Average, or leave overlap_forward out"
        )
    for name in ("shard_state", "communication_hook"):
        if getattr(options, name):
            raise ValueError(f"overlap_forward does not go with {name}: leave one of them out")
    if kind_of(optimizer) is UpdateKind.UNKNOWN:
        kind = class_of(optimizer).__name__
        raise ValueError(
            f"overlap_forward needs an optimizer that updates each element by itself, such as "
            f"Adam, or each parameter by itself, such as Muon; {kind} does not, as far as is known "
            f"here. If it does, set `{kind}.elementwise = True` or `{kind}.tensorwise = True`"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError("overlap_forward does not go with an optimizer's differentiable=True")
    for name, module in model.named_modules():
        problem = _unseen(module)
        if problem is not None:
            raise ValueError(
                f"overlap_forward: {f'module {name!r}' if name else 'the model'} is {problem}; "
                f"leave overlap_forward out"
            )
    mine = {id(param) for param in model.parameters()}
    if not any(id(param) in mine for _, param in named):
        raise ValueError(
            "overlap_forward: the optimizer has no parameter of this model; pass the model whose "
            "parameters it was given"
        )


def _unseen(module: torch.nn.Module) -> str | None:
    """Return why we cannot notice that this module uses a parameter, if there is a reason."""
    if isinstance(module, torch.jit.ScriptModule):
        return "a TorchScript module, which uses parameters unseen"
    if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
        return "compiled, and compiled code uses parameters unseen"
    if isinstance(module, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        return f"wrapped in {type(module).__name__}, which copies parameters unseen"
    return None


def _check_dtensors(options: TorchOptions, named: list[Named]) -> None:
    """Refuse what a DistributedOptimizer cannot do with parameters that are DTensors."""
    first = next((name for name, param in named if is_dtensor(param)), None)
    if first is None:
        return
    what = f"parameter {first!r} is a DTensor"
    for name, param in named:
        if is_dtensor(param) and any(each.is_partial() for each in param.placements):  # type: ignore[attr-defined]
            raise ValueError(f"parameter {name!r} is a DTensor of sums that are not added up yet")
    if options.op == Adasum:
        raise ValueError(f"{what}, and op=Adasum combines whole models only: use op=Average")
    if options.shard_state:
        raise ValueError(
            f"{what}, whose optimizer state is a part of the whole already: leave shard_state out"
        )
    if options.overlap_forward is not None:
        raise ValueError(f"{what}, which is gathered unseen: leave overlap_forward out")
    if runtime.config.elastic:
        raise ValueError(f"{what}: in an elastic job a lost rank would take its part with it")
    if runtime.config.check_nan:
        raise ValueError(
            f"{what}, and HOROVOD_CHECK_NAN cannot tell the ranks that hold other parts: unset it"
        )
