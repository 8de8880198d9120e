"""Elastic training with JAX: ``hvd.elastic.run`` and `JaxState`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import torch

from horovod.common.elastic import ObjectState, State, run_fn
from horovod.common.exceptions import raise_our_errors
from horovod.elastic.worker import this_worker
from horovod.engine.runtime import runtime
from horovod.jax.arrays import check_one_device, device_of, to_torch
from horovod.jax.basics import init, shutdown
from horovod.jax.compiled import dispatch, primitive
from horovod.jax.functions import broadcast_object, broadcast_parameters, is_random_key
from horovod.jax.trees import paths_of
from horovod.torch.elastic.snapshot import Snapshots

__all__ = ["JaxState", "run"]

S = TypeVar("S", bound=State)
P = ParamSpec("P")
T = TypeVar("T")


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate the training function of an elastic job.

    When a rank is lost, the function is called again with the state of the last commit. When ranks
    are added or removed in an orderly way, it is called again with the present state. All
    collectives belong inside it, because a rank that joins later begins there. Without an elastic
    launcher the decorated function is called once, as usual.

    Args:
        func: Training function. Its first argument is the state, such as a `JaxState`.

    Returns:
        A function with the same arguments, which returns what `func` returns.
    """
    return run_fn(raise_our_errors()(func), _reset, this_worker)


def _reset() -> None:
    """Initialise Horovod again, with the ranks that are there now."""
    size = runtime.topology.size if runtime.is_initialized() else None
    shutdown()
    init()
    if dispatch.has_sized_programs and runtime.topology.size != size:
        jax.clear_caches()  # the shapes in some programs depend on the number of ranks


class JaxState(ObjectState):
    """State of an elastic job with JAX: trees of arrays, and other values.

    An attribute that contains an array is kept as a tree of arrays, random keys and numbers; assign
    the new tree after every step. Any other attribute is handled as in `ObjectState`. A commit
    copies the arrays into host memory, so that a step may donate its input arrays.

    Args:
        **kwargs: Attributes of the state with their first values, such as `params`, `opt_state` and
            `epoch`.

    Examples:
        >>> state = hvd.elastic.JaxState(params=params, opt_state=opt_state, epoch=0)
    """

    def __init__(self, **kwargs: Any) -> None:
        self._trees = [name for name, value in kwargs.items() if _has_array(value)]
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
        self._structure = structure
        self._forms = [_LeafForm(leaf) for leaf in leaves]

    def restore(self) -> None:
        """Return to the attributes that the last `save` has copied."""
        assert self._snapshots.current is not None, "taken by the constructor"
        primitive.forget_programs()
        values = self._snapshots.current.content
        leaves = [form.make_leaf(value) for form, value in zip(self._forms, values, strict=True)]
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
        self.save()  # so that a failure before the next commit does not restore older values

    def _check_forms(self, trees: dict[str, Any]) -> None:
        """Raise ValueError if this rank's trees cannot take the root's values.

        Only such a rank raises it; the others continue without that rank.
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


class _LeafForm:
    """Describes a leaf, so that it can be made again from the tensor in a snapshot."""

    def __init__(self, leaf: Any) -> None:
        self.number = type(leaf) if isinstance(leaf, (bool, int, float, complex)) else None
        self.key = jax.random.key_impl(leaf) if is_random_key(leaf) else None
        self.device = device_of(leaf) if isinstance(leaf, jax.Array) else None

    def make_leaf(self, value: torch.Tensor) -> Any:
        """Return a leaf of this form with the value."""
        if self.number is not None:
            return self.number(value.item())
        array = jax.dlpack.from_dlpack(value.clone())
        if self.device is not None and self.device != device_of(array):
            array = jax.device_put(array, self.device)
        return array if self.key is None else jax.random.wrap_key_data(array, impl=self.key)


def _host_value(leaf: Any) -> torch.Tensor:
    """Return the value of a leaf as a tensor."""
    if isinstance(leaf, (bool, int, float, complex)):
        return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None)
    if is_random_key(leaf):
        leaf = jax.random.key_data(leaf)
    array = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    check_one_device(array)
    return to_torch(array)


def _has_array(value: Any) -> bool:
    return any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(value))
