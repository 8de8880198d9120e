"""DistributedOptimizer: a torch optimizer whose gradients are averaged over all ranks.

The wrapped optimizer becomes an instance of a new class with the same name that derives from the
optimizer's own, so isinstance checks, learning-rate schedulers and checkpoints go on working.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from horovod.common import process_sets
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.reduce_op import Adasum, Average, ReduceOp
from horovod.common.util import split_list
from horovod.engine.runtime import runtime
from horovod.torch.allreduce_ops import allreduce
from horovod.torch.compression import Compression, Compressor
from horovod.torch.gradients import GradientReducer, Named
from horovod.torch.objects import allgather_object

Parameter = torch.nn.Parameter


class _DistributedOptimizer(torch.optim.Optimizer):
    """What the new class adds to the optimizer's own. Its methods are copied into that class."""

    def _configure(self, arguments: dict[str, Any], check: bool = True) -> None:
        self._arguments = arguments
        self.backward_passes_per_step: int = arguments["backward_passes_per_step"]
        self.op: ReduceOp = arguments["op"]
        self.gradient_predivide_factor: float = arguments["gradient_predivide_factor"]
        self.sparse_as_dense: bool = arguments["sparse_as_dense"]
        self.process_set: ProcessSet = arguments["process_set"]
        self._compression: type[Compressor] = arguments["compression"]
        named, groups = check_arguments(arguments, self.param_groups, self._takes_part(), check)
        self._parameter_names = {param: name for name, param in named}
        self._passes_left = {param: self.backward_passes_per_step for _, param in named}
        self._synchronized = False
        self._reduced_for_scaler = False
        self._should_synchronize = True
        self._accumulating = False
        self._hooks: list[Any] = []
        self._reducer: GradientReducer | None = None
        if not self._takes_part():
            return
        self._reducer = GradientReducer(
            named,
            groups,
            self._compression,
            self.op,
            self.gradient_predivide_factor,
            self.sparse_as_dense,
            self.process_set,
        )
        self._register_hooks()
        reduce_before_unscaling()

    def _takes_part(self) -> bool:
        """Whether there is anybody to reduce gradients with."""
        included, size = self.process_set.included(), self.process_set.size()
        if size is None:
            raise ValueError(f"{self.process_set} is not registered: see hvd.add_process_set")
        return bool(included) and (size > 1 or runtime.config.elastic)

    def _register_hooks(self) -> None:
        """Notice gradients as they arrive, of parameters that require them now."""
        hooked = {id(param) for param, _ in self._hooks}
        this = weakref.ref(self)

        def on_gradient(param: torch.Tensor) -> None:
            optimizer = this()
            if optimizer is not None:
                optimizer._on_gradient(param)

        for param in self._parameter_names:
            if param.requires_grad and id(param) not in hooked:
                hook = param.register_post_accumulate_grad_hook(on_gradient)
                self._hooks.append((param, hook))

    def _on_gradient(self, param: Any) -> None:
        if self._reducer is None or param not in self._passes_left:
            return
        if self._accumulating and self._passes_left[param] > 0:
            return
        left = self._passes_left[param] = self._passes_left[param] - 1
        if left < 0:
            raise AssertionError(
                f"the gradient of {self._parameter_names[param]!r} was computed more often than "
                f"backward_passes_per_step={self.backward_passes_per_step} times before step(): "
                f"raise backward_passes_per_step to accumulate gradients over more passes"
            )
        self._synchronized = self._reduced_for_scaler = False
        if left == 0:
            self._reducer.arrived(param)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate gradients over `passes` backward passes from now on."""
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step must be positive, not {passes}")
        self.backward_passes_per_step = passes
        self._arguments["backward_passes_per_step"] = passes
        for param in self._passes_left:
            self._passes_left[param] = passes

    def synchronize(self) -> None:
        """Reduce all gradients that are not reduced yet, and wait until they are."""
        if self._reducer is not None:
            try:
                self._reducer.finish()
            finally:
                for param in self._passes_left:
                    self._passes_left[param] = self.backward_passes_per_step
            self._register_hooks()  # for parameters that were frozen before
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` use the gradients as they are, after `synchronize` was called explicitly."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: backward passes inside do not count and reduce nothing."""
        earlier, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = earlier

    def step(self, closure: Any = None) -> Any:
        """Update the parameters with the gradients of all ranks."""
        note_step(self)
        if closure is not None:
            return self._base_step(self._synchronizing(closure))
        if self._should_synchronize:
            if self._synchronized and self._reducer is not None:
                if not self._reduced_for_scaler:
                    warnings.warn(
                        "optimizer.step() after optimizer.synchronize() uses the gradients that "
                        "are reduced already; write `with optimizer.skip_synchronize(): "
                        "optimizer.step()` to say that this is meant",
                        stacklevel=2,
                    )
            else:
                self.synchronize()
        self._synchronized = self._reduced_for_scaler = False
        return self._base_step()

    step.hooked = True  # type: ignore[attr-defined]  # torch need not: it hooks the base's step

    def _synchronizing(self, closure: Any) -> Any:
        """`closure`, whose gradients are reduced each time that the optimizer evaluates it."""

        def evaluate() -> Any:
            loss = closure()
            if self._should_synchronize:
                self.synchronize()
                self._synchronized = False
                if isinstance(self, torch.optim.LBFGS) and self._reducer is not None:
                    # It goes by the loss, so everybody must see the same.
                    mine = torch.as_tensor(loss).detach()
                    return allreduce(mine, op=self.op, process_set=self.process_set)
            return loss

        return evaluate

    def _base_step(self, *arguments: Any) -> Any:
        return super(self.__class__, self).step(*arguments)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients; not while they are being reduced."""
        if self._reducer is not None and self._reducer.in_flight():
            raise AssertionError(
                "zero_grad() was called after backward() and before step() or synchronize(), "
                "while gradients are being reduced: they would be lost"
            )
        self._synchronized = self._reduced_for_scaler = False
        super(self.__class__, self).zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Optimize more parameters from now on; all ranks must do so together."""
        if self._reducer is not None and self._reducer.in_flight():
            raise AssertionError("add_param_group() was called between backward() and step()")
        super(self.__class__, self).add_param_group(param_group)
        number = len(self.param_groups) - 1
        added = [
            (f"allreduce.noname.{number}.{index}", param)
            for index, param in enumerate(self.param_groups[-1]["params"])
            if param not in self._parameter_names
        ]
        for _, hook in self._hooks:
            hook.remove()
        named = _pairs(self._parameter_names) + added
        self._configure({**self._arguments, "named_parameters": named})

    def load_state_dict(self, state_dict: Any) -> None:
        if self._reducer is not None:
            self._reducer.forget()
        self._synchronized = False
        for param in self._passes_left:
            self._passes_left[param] = self.backward_passes_per_step
        super(self.__class__, self).load_state_dict(state_dict)
        share_groups(self)

    def __reduce__(self) -> Any:
        return rebuilding(self, _DistributedOptimizer)


def note_step(wrapped: Any) -> None:
    """Tell a scheduler that was made for the original optimizer that a step happens."""
    original = wrapped._original()
    if original is not None:
        original._opt_called = True


def share_groups(wrapped: Any) -> None:
    """Let such a scheduler set the learning rates of the groups that were loaded."""
    original = wrapped._original()
    if original is not None:
        original.param_groups, original.state = wrapped.param_groups, wrapped.state


def reduce_before_unscaling() -> None:
    """Have torch.amp.GradScaler look at what is the same on all ranks.

    It decides by the gradients whether to skip a step. Decided on each rank's own, some ranks
    would step while others skip; so a scaler that asks first has them reduced. Where gradients
    stay local, ranks share what the scaler found.
    """
    unscale = torch.amp.GradScaler._unscale_grads_
    if getattr(unscale, "reduces_first", False):
        return

    @functools.wraps(unscale)
    def reduce_and_unscale(self: Any, optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
        if getattr(optimizer, "_reducer", None) is not None and not optimizer._synchronized:
            optimizer.synchronize()
            optimizer._reduced_for_scaler = True
        found = unscale(self, optimizer, *arguments, **keywords)
        share = getattr(optimizer, "_share_found", None)
        return found if share is None else share(found)

    reduce_and_unscale.reduces_first = True  # type: ignore[attr-defined]
    torch.amp.GradScaler._unscale_grads_ = reduce_and_unscale


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[Named] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Wrap `optimizer` so that `step` first averages the gradients over all ranks.

    `named_parameters`: usually ``model.named_parameters()``; names appear in errors and the
    timeline. `compression`: e.g. ``hvd.Compression.fp16`` on the wire. With
    `backward_passes_per_step` n, gradients of n passes are added up locally before they are
    reduced. `op`: Average, Sum or Adasum. `gradient_predivide_factor` f divides by f before and by
    size / f after the sum. `groups`: a number of groups, or lists of parameters, that are reduced
    together. `sparse_as_dense` reduces sparse gradients as dense ones. `process_set`: the ranks to
    reduce with; others train on their own.
    """
    if hasattr(optimizer, "_parameter_names"):
        raise ValueError("the optimizer is a DistributedOptimizer already: wrap it once")
    if backward_passes_per_step <= 0:
        raise ValueError(
            f"backward_passes_per_step must be positive, not {backward_passes_per_step}"
        )
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor needs op=Average")
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=2)
        groups = groups if groups is not None else num_groups
    arguments = {
        "named_parameters": None if named_parameters is None else list(named_parameters),
        "compression": compression,
        "backward_passes_per_step": backward_passes_per_step,
        "op": ReduceOp(op),
        "gradient_predivide_factor": gradient_predivide_factor,
        "groups": groups,
        "sparse_as_dense": sparse_as_dense,
        "process_set": process_set,
    }
    if op == Adasum and runtime.topology.size > 1:
        from horovod.torch.adasum_optimizer import make_adasum_optimizer

        return make_adasum_optimizer(optimizer, arguments)
    return adopt(optimizer, _DistributedOptimizer, arguments)


def adopt(optimizer: torch.optim.Optimizer, mixin: type, arguments: dict[str, Any]) -> Any:
    """An instance of the new class that takes over everything the optimizer has."""
    wrapped = _new(type(optimizer), mixin)
    # A scheduler made before wraps the old object's step(), which must not shadow ours.
    wrapped.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})
    wrapped._original = weakref.ref(optimizer)
    wrapped._configure(arguments)
    return wrapped


def _new(base: type, mixin: type) -> Any:
    methods = {
        name: value
        for name, value in vars(mixin).items()
        if name not in ("__dict__", "__weakref__")
    }
    made = type(base.__name__, (base,), methods)
    return made.__new__(made)


def rebuilding(optimizer: Any, mixin: type) -> Any:
    """What `__reduce__` returns: for pickle and deepcopy."""
    base = optimizer.__class__.__bases__[0]
    named = _pairs(optimizer._parameter_names)
    chosen = optimizer.process_set
    number = 0 if chosen is global_process_set else chosen.process_set_id
    arguments = {**optimizer._arguments, "named_parameters": named, "process_set": number}
    own = ("param_groups", "state", "defaults")
    state = {key: optimizer.__dict__[key] for key in own}
    return _rebuild, (base, mixin, state, arguments)


def _rebuild(base: type, mixin: type, state: Any, arguments: dict[str, Any]) -> Any:
    """Unpickle. All ranks need not do so together, so nothing is checked among them."""
    optimizer = _new(base, mixin)
    optimizer.__setstate__(state)
    optimizer._original = _no_original
    optimizer._configure(
        {**arguments, "process_set": _process_set(arguments["process_set"])}, check=False
    )
    return optimizer


def _no_original() -> None:
    """Stands for the reference to the optimizer that was wrapped, where there is none."""


def _process_set(number: int | None) -> ProcessSet:
    if number == 0:
        return global_process_set
    for known in process_sets._registered:
        if known.process_set_id == number:
            return known
    raise ValueError(f"the optimizer belongs to process set {number}, which is not registered here")


def _pairs(names: dict[Parameter, str]) -> list[Named]:
    return [(name, param) for param, name in names.items()]


def _named(named: list[Named] | None, groups: list[dict[str, Any]]) -> list[Named]:
    """The optimizer's parameters with their names, in the order of the names."""
    own = [
        (f"allreduce.noname.{number}.{index}", param)
        for number, group in enumerate(groups)
        for index, param in enumerate(group["params"])
    ]
    if named is None:
        return list({param: (name, param) for name, param in reversed(own)}.values())[::-1]
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
    """`groups` as lists of named parameters; those not listed are groups of their own."""
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups <= 0:
            raise ValueError(f"groups must be a positive number or lists of tensors, not {groups}")
        return split_list(list(reversed(named)), groups)
    if not isinstance(groups, list) or not all(isinstance(g, (list, tuple)) for g in groups):
        raise ValueError("groups must be a positive number or a list of lists of parameters")
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


def check_arguments(
    arguments: dict[str, Any], param_groups: list[dict[str, Any]], takes_part: bool, check: bool
) -> tuple[list[Named], list[list[Named]] | None]:
    """The parameters and groups; an error on every rank if one has an error or ranks differ."""
    problem: ValueError | None = None
    named: list[Named] = []
    groups: list[list[Named]] | None = None
    try:
        named = _named(arguments["named_parameters"], param_groups)
        groups = _grouped(arguments["groups"], named)
    except ValueError as error:
        problem = error
    if check and takes_part:
        settings = {
            key: getattr(value, "__qualname__", str(value))
            for key, value in arguments.items()
            if key not in ("named_parameters", "groups", "process_set", "backward_passes_per_step")
        }
        grouping = groups and [[name for name, _ in group] for group in groups]
        _check_alike(named, {**settings, "groups": grouping}, problem, arguments["process_set"])
    if problem is not None:
        raise problem
    return named, groups


def _check_alike(
    named: list[Named],
    settings: dict[str, Any],
    problem: ValueError | None,
    process_set: ProcessSet,
) -> None:
    """Refuse to train models that differ between ranks, on every rank and before the first step."""
    params = [
        (name, tuple(p.shape), str(p.dtype).removeprefix("torch."), p.stride()) for name, p in named
    ]
    mine = (None if problem is None else str(problem), params, settings)
    digest = hashlib.blake2b(repr(mine).encode(), digest_size=8).hexdigest()
    collective = "optimizer.parameters"
    if len(set(allgather_object(digest, collective, process_set=process_set))) == 1:
        return
    everyone = allgather_object(mine, collective, process_set=process_set)
    if problem is not None:
        return  # it is raised
    ranks = process_set.ranks or list(range(len(everyone)))
    for rank, (theirs, _, _) in zip(ranks, everyone, strict=True):
        if theirs is not None:
            raise ValueError(f"rank {rank} could not make its DistributedOptimizer: {theirs}")
    odd = next(index for index, theirs in enumerate(everyone) if theirs != everyone[0])
    (_, first, chosen), (_, second, chosen_there) = everyone[0], everyone[odd]
    if first != second:
        raise ValueError(
            f"the models differ between ranks {ranks[0]} and {ranks[odd]}: "
            + _first_difference(first, second)
        )
    setting = next(key for key in chosen if chosen[key] != chosen_there[key])
    raise ValueError(
        f"{setting} of DistributedOptimizer differs between ranks {ranks[0]} and {ranks[odd]}: "
        f"{chosen[setting]} and {chosen_there[setting]}"
    )


def _first_difference(one: list[Any], other: list[Any]) -> str:
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
            return (
                f"parameter {left[0]!r} is {left[2]}{list(left[1])} with strides {left[3]} and "
                f"{right[2]}{list(right[1])} with strides {right[3]}"
            )
    return "they have the same parameters in another order"
