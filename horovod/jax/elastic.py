"""Elastic training with JAX: ``hvd.elastic.run`` and `JaxState`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import torch

from horovod.common.elastic import ObjectState, State, run_fn
from horovod.common.exceptions import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    error_in_text,
)
from horovod.elastic.worker import this_worker
from horovod.engine.runtime import runtime
from horovod.jax import dispatch, primitive
from horovod.jax.arrays import check_one_device, device_of, to_torch
from horovod.jax.basics import init, shutdown
from horovod.jax.functions import broadcast_object, broadcast_parameters, is_random_key
from horovod.jax.trees import paths_of
from horovod.torch.elastic.snapshot import Snapshots

__all__ = ["JaxState", "run"]

S = TypeVar("S", bound=State)
P = ParamSpec("P")
T = TypeVar("T")


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate the training function of an elastic job.

    The function is called again with the state of the last commit when a rank is lost, and with the
    present state when ranks come or go. Collectives belong inside of it: a rank that joins later
    begins there. Without an elastic launcher the decorated function is a plain call.

    Args:
        func: Training function. Its first argument is the state, such as a `JaxState`.

    Returns:
        A function with the same arguments, which returns what `func` returns.
    """

    @functools.wraps(func)
    def with_our_errors(state: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return func(state, *args, **kwargs)
        except (HorovodInternalError, HostsUpdatedInterrupt):
            raise
        except Exception as error:  # out of a compiled step comes an error of JAX's
            ours = error_in_text(error)
            if ours is None:
                raise
            raise ours from error

    return run_fn(with_our_errors, _reset, this_worker)


def _reset() -> None:
    size = runtime.topology.size if runtime.is_initialized() else None
    shutdown()
    init()
    if dispatch.size_matters and runtime.topology.size != size:
        jax.clear_caches()  # programs that have the number of ranks in their shapes


class JaxState(ObjectState):
    """State of an elastic job with JAX: trees of arrays, and other values.

    An attribute that has an array in it is kept as a tree of arrays, random keys and numbers;
    assign the new tree after every step. Any other attribute is handled as in `ObjectState`. A
    commit copies the arrays into host memory, so that steps may donate theirs.

    Args:
        **kwargs: Attributes of the state with their first values, such as `params`, `opt_state` and
            `epoch`.

    Examples:
        >>> state = hvd.elastic.JaxState(params=params, opt_state=opt_state, epoch=0)
    """

    def __init__(self, **kwargs: Any) -> None:
        self._trees: dict[str, Any] = {  # structures and forms of those of the snapshot
            name: None for name, value in kwargs.items() if _has_array(value)
        }
        self._snapshots = Snapshots()
        for name in self._trees:
            setattr(self, name, kwargs[name])
        plain = {name: value for name, value in kwargs.items() if name not in self._trees}
        super().__init__(broadcast_object, lambda: runtime.topology.rank, **plain)
        self.save()

    def save(self) -> None:
        """Copy the attributes into host memory, for `restore`."""
        trees = {name: getattr(self, name) for name in self._trees}
        leaves, structure = jax.tree.flatten(trees)
        values = [_host_value(leaf) for leaf in leaves]
        self._snapshots.prepare(values)
        super().save()
        self._snapshots.publish()
        self._trees = trees and dict.fromkeys(trees)
        self._structure = structure
        self._likes = [_Like(leaf) for leaf in leaves]

    def restore(self) -> None:
        """Go back to the attributes that `save` has copied last."""
        assert self._snapshots.current is not None, "taken by the constructor"
        primitive.forget_programs()
        values = self._snapshots.current.content
        leaves = [like.made_of(value) for like, value in zip(self._likes, values, strict=True)]
        for name, tree in self._structure.unflatten(leaves).items():
            setattr(self, name, tree)
        super().restore()

    def sync(self) -> None:
        """Give all ranks the attributes of the rank whose state is newest, and save them.

        Raises:
            ValueError: The trees of this rank have other shapes or types than the root's.
        """
        trees = {name: getattr(self, name) for name in self._trees}
        self._check_forms(trees)
        for name, tree in broadcast_parameters(trees, self._root, "elastic.trees").items():
            setattr(self, name, tree)
        super().sync()
        self.save()  # a failure before the next commit must not bring back what was before

    def _check_forms(self, trees: dict[str, Any]) -> None:
        """`ValueError` on a rank whose trees cannot take the root's values.

        Only there: the others go on without it.
        """
        leaves, structure = jax.tree.flatten(trees)
        forms = [str(jnp.shape(leaf)) + str(jnp.result_type(leaf)) for leaf in leaves]
        ours = dict(zip(paths_of(structure), forms, strict=True))
        roots = self._bcast_object(ours, root_rank=self._root)
        differing = [path for path in {**ours, **roots} if ours.get(path) != roots.get(path)]
        if differing:
            shown = "; ".join(
                f"{path} is {ours.get(path, 'missing')} here and {roots.get(path, 'missing')} there"
                for path in differing[:6]
            )
            raise ValueError(
                f"the states of rank {runtime.topology.rank} and rank {self._root} differ: "
                f"{shown}. All ranks must make the same model and optimizer"
            )


class _Like:
    """How a leaf of a snapshot becomes what it was."""

    def __init__(self, leaf: Any) -> None:
        self.number = type(leaf) if isinstance(leaf, (bool, int, float, complex)) else None
        self.key = jax.random.key_impl(leaf) if is_random_key(leaf) else None
        self.device = device_of(leaf) if isinstance(leaf, jax.Array) else None

    def made_of(self, value: torch.Tensor) -> Any:
        if self.number is not None:
            return self.number(value.item())
        array = jax.dlpack.from_dlpack(value.clone())
        if self.device is not None and self.device != device_of(array):
            array = jax.device_put(array, self.device)
        return array if self.key is None else jax.random.wrap_key_data(array, impl=self.key)


def _host_value(leaf: Any) -> torch.Tensor:
    if isinstance(leaf, (bool, int, float, complex)):
        return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None)
    if is_random_key(leaf):
        leaf = jax.random.key_data(leaf)
    array = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    check_one_device(array)
    return to_torch(array)


def _has_array(value: Any) -> bool:
    return any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(value))
