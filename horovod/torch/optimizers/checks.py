"""The checks of DistributedOptimizer's arguments, made together by all ranks.

A wrong argument on one rank must not leave the others waiting for it, and models that differ
between ranks must not be trained. So every rank first finds its own problems, then all compare,
and if there is anything wrong anywhere, all of them raise. Called when an optimizer is made, and
when parameters are added to it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import torch

from horovod.common.process_sets import ProcessSet
from horovod.common.util import split_list
from horovod.engine.arguments import set_size
from horovod.engine.runtime import runtime
from horovod.torch.gradients.buckets import Named
from horovod.torch.gradients.dtensors import part_of
from horovod.torch.hooks.base import CommunicationHook
from horovod.torch.ops.objects import allgather_object
from horovod.torch.optimizers.local_steps import check_local_steps
from horovod.torch.optimizers.options import TorchOptions, check_combinations, check_values

# These may differ between ranks, or are compared in another form.
_NOT_COMPARED = (
    *("named_parameters", "groups", "process_set", "backward_passes_per_step"),
    "schedule",
)


def takes_part(process_set: Any) -> bool:
    """Return whether there is anybody to reduce gradients with.

    An unregistered set raises at once: its other ranks, who could be told, are not known.
    """
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set must be a hvd.ProcessSet, not {process_set!r}")
    size = set_size(process_set)
    return bool(process_set.included()) and (size > 1 or runtime.config.elastic)


def check_options(
    optimizer: Any,
    options: TorchOptions,
    problem: Exception | None = None,
    agree: bool = True,
) -> tuple[TorchOptions, list[Named], list[list[Named]] | None]:
    """Check the options of an optimizer, on all ranks together.

    Args:
        optimizer: The optimizer that is wrapped.
        options: The options that its user has chosen.
        problem: A problem that this rank has found before, if any.
        agree: Whether every rank raises if a rank has a problem or the ranks differ. False checks
            this rank alone.

    Returns:
        The options in their one form, the parameters with their names, and the groups, if the user
        has given any.
    """
    several = takes_part(options.process_set)
    named: list[Named] = []
    groups: list[list[Named]] | None = None
    try:
        if problem is not None:
            raise problem
        options = check_values(optimizer, options)
        named = _named(options.named_parameters, optimizer.param_groups)
        groups = _grouped(options.groups, named)
        check_local_steps(options.schedule, named, options.process_set)
        check_combinations(optimizer, options, named)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = error
    if agree and several and not runtime.is_elastic():  # a rank that joins later comes alone
        settings = {
            name: _comparable(value)
            for name, value in vars(options).items()
            if name not in _NOT_COMPARED
        }
        settings |= options.schedule.settings()
        settings["HOROVOD_CHECK_NAN"] = runtime.config.check_nan
        settings["groups"] = groups and [[name for name, _ in group] for group in groups]
        _check_alike(named, settings, problem, options.process_set)
    if problem is not None:
        raise problem
    return options, named, groups


def _comparable(value: Any) -> Any:
    """Return something that is equal on two ranks if they were given the same setting."""
    if isinstance(value, type):
        return value.__qualname__
    if value is None or isinstance(value, (bool, int, float, str, CommunicationHook)):
        return str(value)
    return type(value).__qualname__


def default_names(groups: list[dict[str, Any]], first: int = 0) -> list[Named]:
    """Return the parameters of the groups from number `first` on, named by their position."""
    return [
        (f"allreduce.noname.{number}.{index}", param)
        for number, group in enumerate(groups)
        if number >= first
        for index, param in enumerate(group["params"])
    ]


def _named(named: Any, groups: list[dict[str, Any]]) -> list[Named]:
    """Return the optimizer's parameters with their names, in the order of the names."""
    own = default_names(groups)
    if named is None:
        return list({param: (name, param) for name, param in reversed(own)}.values())[::-1]
    named = list(named)
    if any(not isinstance(entry, tuple) or len(entry) != 2 for entry in named):
        raise ValueError(
            "named_parameters must be (name, parameter) tuples: pass model.named_parameters()"
        )
    twice = [str(name) for name, times in Counter(name for name, _ in named).items() if times > 1]
    if twice:
        raise ValueError(f"named_parameters has names more than once: {', '.join(twice)}")
    known = {id(param) for _, param in named}
    unnamed = [f"{name} {list(param.shape)}" for name, param in own if id(param) not in known]
    if unnamed:
        raise ValueError(
            f"named_parameters misses {len(unnamed)} parameters of the optimizer: "
            f"{', '.join(unnamed[:6])}{' ...' if len(unnamed) > 6 else ''}"
        )
    mine = {id(param) for _, param in own}
    # Tied weights may come under several names; they are one parameter.
    first = {id(param): (name, param) for name, param in reversed(named) if id(param) in mine}
    return list(first.values())[::-1]


def _grouped(groups: Any, named: list[Named]) -> list[list[Named]] | None:
    """Return `groups` as lists of named parameters; those not listed are groups of their own."""
    if groups is None:
        return None
    if isinstance(groups, int):
        return split_list(list(reversed(named)), groups)
    entry_of = {id(param): (name, param) for name, param in named}
    result: list[list[Named]] = []
    for group in groups:
        for param in group:
            if not isinstance(param, torch.Tensor):
                raise ValueError(f"groups must contain parameters, not {type(param).__name__}")
            if id(param) not in entry_of:
                raise ValueError("groups has a parameter twice, or one that is not optimized")
        result.append([entry_of.pop(id(param)) for param in dict.fromkeys(group)])
        if len(result[-1]) < len(group):
            raise ValueError("groups has a parameter twice")
    return result + [[entry] for entry in entry_of.values()]


def _check_alike(
    named: list[Named],
    settings: dict[str, Any],
    problem: Exception | None,
    process_set: ProcessSet,
) -> None:
    """Refuse to train models that differ between ranks, on every rank and before the first step."""
    params = [
        (name, tuple(p.shape), str(p.dtype).removeprefix("torch."), p.stride(), part_of(p))
        for name, p in named
    ]
    mine = (None if problem is None else _told(problem), params, settings)
    digest = hashlib.blake2b(repr(mine).encode(), digest_size=8).hexdigest()
    collective = "optimizer.parameters"
    if len(set(allgather_object(digest, collective, process_set=process_set))) == 1:
        return
    everyone = allgather_object(mine, collective, process_set=process_set)
    if problem is not None:
        return  # our caller raises it
    ranks = process_set.ranks or list(range(len(everyone)))
    for rank, (theirs, _, _) in zip(ranks, everyone, strict=True):
        if theirs is not None:
            raise ValueError(f"rank {rank} could not make its DistributedOptimizer: {theirs}")
    odd = next(index for index, theirs in enumerate(everyone) if theirs != everyone[0])
    (_, first, chosen), (_, second, chosen_there) = everyone[0], everyone[odd]
    if first != second:
        raise ValueError(
            f"the models differ between ranks {ranks[0]} and {ranks[odd]}: "
            + first_difference(first, second)
        )
    setting = next(key for key in chosen if chosen[key] != chosen_there[key])
    raise ValueError(
        f"{setting} of DistributedOptimizer differs between ranks {ranks[0]} and {ranks[odd]}: "
        f"{chosen[setting]} and {chosen_there[setting]}"
    )


def _told(problem: Exception) -> str:
    known = isinstance(problem, (ValueError, NotImplementedError))
    return str(problem) if known else f"{type(problem).__name__}: {problem}"


def first_difference(one: list[Any], other: list[Any]) -> str:
    names, others = [entry[0] for entry in one], [entry[0] for entry in other]
    only = [name for name in names if name not in others]
    extra = [name for name in others if name not in names]
    if only or extra:
        return (
            f"{len(one)} and {len(other)} parameters; only the first has {only[:6]}, "
            f"only the second has {extra[:6]}"
        )
    for left, right in zip(one, other, strict=True):
        if left != right:
            if left[0] != right[0]:
                return f"parameter {left[0]!r} comes where the other has {right[0]!r}"
            if left[:4] == right[:4]:
                return (
                    f"they hold different parts of parameter {left[0]!r}, a DTensor; pass "
                    f"process_set, the ranks that hold the same part of other copies of the model"
                )
            return (
                f"parameter {left[0]!r} is {left[2]}{list(left[1])} with strides {left[3]} and "
                f"{right[2]}{list(right[1])} with strides {right[3]}"
            )
    return "they have the same parameters in another order"
