"""The optimizer for shard_state=True: each rank keeps the optimizer state of its slices only.

Gradients are reduced as ever and not merely reduce-scattered, so that clipping after `synchronize`,
scalers and accumulation see what they always see. Then the wrapped optimizer steps on this rank's
slices alone, as if they were its parameters, and the updated slices go to all ranks. So the state
takes 1/N of the memory on each of N ranks, and since the optimizer treats every element by itself,
results are bitwise those of an unsharded run. (On the CPU that holds with one thread. With several,
torch gives each a part of a tensor, and where a part ends may decide how the last bit is rounded.)
An optimizer that needs whole parameters, as Muon and Adafactor do, gets whole ones: each parameter
has one rank that updates it, and the bytes of all ranks are as equal as that allows.

The state is complete on no rank. To save it, all ranks bring it to one::

    optimizer.consolidate_state_dict(to=0)
    if hvd.rank() == 0:
        torch.save(optimizer.state_dict(), path)

That is the ordinary format, which every optimizer can load, sharded over any number of ranks or not
at all. Load it on all ranks, or load it on one and call `hvd.broadcast_optimizer_state`.

All ranks must take equally many steps. The slices of a rank that has called `hvd.join` would not be
updated, so before a step changes anything the ranks make sure that none has. If one has, the step
raises on all others, and `hvd.join` on that one.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from horovod.common.process_sets import global_process_set
from horovod.engine.arguments import set_id
from horovod.engine.collective import Collective, Kind
from horovod.engine.runtime import runtime
from horovod.torch.gradients.buckets import Named
from horovod.torch.gradients.layouts import in_memory_order
from horovod.torch.ops.objects import broadcast_object
from horovod.torch.ops.untraced import untraced
from horovod.torch.optimizers.options import TorchOptions
from horovod.torch.optimizers.reducing import ReducingOptimizer
from horovod.torch.optimizers.shards import Shards
from horovod.torch.optimizers.update_kinds import UpdateKind, kind_of
from horovod.torch.optimizers.wrapping import share_groups, step_of

Parameter = torch.nn.Parameter
State = defaultdict[torch.Tensor, Any]  # entries by parameter, as torch has it

_ALL_MUST_STEP = (
    "with shard_state=True each rank updates slices that no other rank can update. No parameter "
    "and no optimizer state has been changed by this step. Let all ranks take equally many steps, "
    "or use shard_state=False"
)


class ShardedOptimizer(ReducingOptimizer):
    """Divides optimizer state among ranks; the new class derives from this and the user's."""

    _shards: Shards | None = None
    _cut_for: tuple[int | None, int | None] | None = None  # rank and size in the process set

    def _configure(
        self, options: TorchOptions, named: list[Named], groups: list[list[Named]] | None
    ) -> None:
        super()._configure(options, named, groups)
        # The state of all parameters, while this rank has it: after loading or consolidating it,
        # until the next step.
        self._complete: State | None = None
        if self._cut_for not in (None, self._rank_and_size()):
            raise ValueError(
                f"this sharded optimizer was pickled for rank and size {self._cut_for} and has "
                f"the slices of that rank only; here these are {self._rank_and_size()}. Take "
                f"consolidate_state_dict() and state_dict() to move optimizer state"
            )
        if self._reducer is not None:
            state = self._slices_of_state()
            self._cut_for = self._rank_and_size()
            whole = kind_of(self) is UpdateKind.TENSORWISE
            self._shards = Shards(self.param_groups, self.process_set, whole)
            self._keep(state)

    def _rank_and_size(self) -> tuple[int | None, int | None]:
        """Return rank and size in the process set."""
        included = self.process_set.included()
        return self.process_set.rank() if included else None, self.process_set.size()

    # -- stepping --------------------------------------------------------------------------

    @untraced
    def _base_step(self, *closure: Any) -> Any:
        if self._shards is None:
            return super()._base_step(*closure)
        loss = None
        for evaluate in closure:  # before slices stand in for parameters: it may call zero_grad()
            with torch.enable_grad():
                loss = evaluate()
        # Raises if a rank has joined, on all ranks and before anything is changed.
        name, number = f"{self._name}.step", set_id(self.process_set)
        collective = Collective(Kind.REQUIRE_ALL, name, number, reason=_ALL_MUST_STEP)
        runtime.submit(collective, background=False).wait()
        self._step_on_slices()
        return loss

    @torch.optim.Optimizer.profile_hook_step
    def _step_on_slices(self) -> None:
        """Step on this rank's slices. Step hooks, before and after, see the user's parameters."""
        shards, groups = self._shards, self.param_groups
        assert shards is not None
        if self._cut_for != self._rank_and_size():
            raise RuntimeError(
                f"the slices of this optimizer were cut for rank and size {self._cut_for}, and now "
                f"these are {self._rank_and_size()}: make it anew and load a consolidated "
                f"state_dict()"
            )
        self._refuse_sparse()
        self._complete = None
        shards.attach()
        try:
            for param, view in shards.views.items():
                view.grad = self._gradient(param)
            mine = [
                {**group, "params": [shards.views[p] for p in group["params"] if p in shards.mine]}
                for group in groups
            ]
            self.param_groups = [group for group in mine if group["params"]]
            step_of(type(self).__bases__[1])(self)
        finally:
            self.param_groups = groups
            for view in shards.views.values():
                view.grad = None
        for group, used in zip(groups, mine, strict=True):  # some optimizers keep things there
            group.update({key: value for key, value in used.items() if key != "params"})
        shards.share(f"{self._name}.slices")

    @property
    def _name(self) -> str:
        """The name of the reducer, on which all ranks have agreed."""
        return getattr(self._reducer, "name", "")

    def _gradient(self, param: Parameter) -> torch.Tensor | None:
        """Return the gradient of this rank's slice."""
        assert self._shards is not None
        gradient = param.grad
        if gradient is None:
            return None
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        return self._shards.mine[param].of(gradient)

    def _refuse_sparse(self) -> None:
        """Raise for any sparse gradient, not only in our slices: every rank must raise."""
        if self.sparse_as_dense:
            return
        for param, name in self._parameter_names.items():
            if param.grad is not None and param.grad.is_sparse:
                raise ValueError(
                    f"parameter {name!r} has sparse gradients, which shard_state=True does not "
                    f"take: pass sparse_as_dense=True as well"
                )

    # -- state -----------------------------------------------------------------------------

    def _slices_of_state(self) -> State:
        """Return the state that this rank has, by the parameters it belongs to."""
        if self._shards is None:
            return self.state
        views = self._shards.views.items()
        mine = ((param, self.state[view]) for param, view in views if view in self.state)
        return defaultdict(dict, mine)

    def _keep(self, state: State) -> None:
        """Keep only this rank's slices of `state`, which has the entries of some parameters."""
        assert self._shards is not None
        self.state = defaultdict(dict)
        for param, piece in self._shards.mine.items():
            if param in state:
                entries = {key: piece.of_state(value) for key, value in state[param].items()}
                self.state[self._shards.views[param]] = entries
        share_groups(self)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the state on rank `to`, where `state_dict` then returns it. Collective."""
        shards = self._shards
        if shards is None:
            return
        ranks = self.process_set.ranks
        assert ranks is not None
        if to not in ranks:
            raise ValueError(f"to={to} is not a rank of the optimizer's process set, {ranks}")
        indices = self._indices()
        mine = {indices[param]: entries for param, entries in self._slices_of_state().items()}
        payloads = [b""] * shards.size
        payloads[ranks.index(to)] = _packed(mine)
        parts = self._exchange(payloads)
        if ranks[shards.rank] == to:
            self._complete = self._assembled([pickle.loads(part) for part in parts])

    def _assembled(self, parts: Sequence[Mapping[int, Mapping[str, Any]]]) -> State:
        """Return the state of whole parameters, put together from all ranks' slices."""
        assert self._shards is not None
        indices = self._indices()
        complete: State = defaultdict(dict)
        for piece in self._shards.slices:
            param = piece.param
            entries = parts[piece.owner].get(indices[param])
            if entries is None:
                continue
            if piece.is_whole:
                complete[param] = dict(entries)
                continue
            whole = complete[param]
            for key, value in entries.items():
                if isinstance(value, torch.Tensor) and value.shape == (piece.stop - piece.start,):
                    if key not in whole:
                        form = param.shape, param.stride()
                        whole[key] = torch.empty_strided(*form, dtype=value.dtype)
                    in_memory_order(whole[key], param)[piece.start : piece.stop] = value
                else:
                    whole[key] = value  # a number of steps, say: the same for all slices
        return complete

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the ordinary format, on the rank that has it consolidated."""
        if self._shards is None:
            return super().state_dict()
        if self._complete is None:
            raise RuntimeError(
                f"rank {runtime.topology.rank} has a part of the optimizer state only: call "
                f"optimizer.consolidate_state_dict(to=RANK) on all ranks first, after the last "
                f"step, and then state_dict() on rank RANK"
            )
        slices, self.state = self.state, self._complete
        try:
            return super().state_dict()
        finally:
            self.state = slices

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state in the ordinary format; this rank keeps its slices of it."""
        if self._shards is None:
            super().load_state_dict(state_dict)
            return
        own = _members(self.param_groups)
        known = dict(zip(_members(state_dict["param_groups"]), own, strict=False))
        state = {known[key]: v for key, v in state_dict["state"].items() if key in known}
        indices = {param: key for key, param in known.items()}
        sliced = {
            indices[param]: {key: piece.of_state(value) for key, value in state[param].items()}
            for param, piece in self._shards.mine.items()
            if param in state
        }
        super().load_state_dict({**state_dict, "state": sliced})
        self._keep(self.state)
        self._complete = defaultdict(dict, state)

    def _broadcast_state(self, root_rank: int) -> None:
        """Give all ranks the root's options, and the state if the root has all of it.

        The root has it after `load_state_dict`, until the next step. Otherwise the ranks' slices
        together are the only state, and there is nothing to make equal.
        """
        shards = self._shards
        assert shards is not None
        if self.process_set is not global_process_set:
            raise ValueError(
                "broadcast_optimizer_state does not work for a sharded optimizer of some ranks "
                "only: call load_state_dict() on all of them"
            )
        indices = self._indices()
        groups = [
            {**group, "params": [indices[param] for param in group["params"]]}
            for group in self.param_groups
        ]
        groups, has_all = broadcast_object((groups, self._complete is not None), root_rank)
        sliced = {indices[param]: entries for param, entries in self._slices_of_state().items()}
        if has_all:
            payloads = [b""] * shards.size
            if shards.rank == root_rank:
                payloads = [_packed(part) for part in self._parts(indices)]
            sliced = pickle.loads(self._exchange(payloads)[root_rank])
        super().load_state_dict({"state": sliced, "param_groups": groups})
        self._keep(self.state)
        if shards.rank != root_rank:
            self._complete = None

    def _parts(self, indices: Mapping[torch.Tensor, int]) -> list[dict[int, dict[str, Any]]]:
        """Return each rank's part of the complete state."""
        assert self._shards is not None
        assert self._complete is not None
        parts: list[dict[int, dict[str, Any]]] = [{} for _ in range(self._shards.size)]
        for piece in self._shards.slices:
            entries = self._complete.get(piece.param)
            if entries is not None:
                sliced = {key: piece.of_state(value) for key, value in entries.items()}
                parts[piece.owner][indices[piece.param]] = sliced
        return parts

    def _indices(self) -> dict[torch.Tensor, int]:
        return {param: index for index, param in enumerate(_members(self.param_groups))}

    def _exchange(self, payloads: Sequence[bytes]) -> list[bytes]:
        """Send each rank its payload; return the payloads that the ranks sent to us."""
        sent = torch.frombuffer(bytearray().join(payloads) or bytearray(1), dtype=torch.uint8)
        sizes = tuple(len(payload) for payload in payloads)
        number = set_id(self.process_set)
        collective = Collective(Kind.ALLTOALL, "ShardedOptimizer.state", number, splits=sizes)
        received, counts = runtime.submit(collective, [sent[: sum(sizes)]], background=False).wait()
        return [part.numpy().tobytes() for part in received.split(counts)]

    def __reduce__(self) -> Any:
        rebuild, (base, mixin, state, *rest) = super().__reduce__()
        state = {**state, "state": self._slices_of_state(), "_cut_for": self._cut_for}
        return rebuild, (base, mixin, state, *rest)


def _members(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(group["params"] for group in groups))


def _packed(state: Mapping[int, Mapping[str, Any]]) -> bytes:
    """Pickle state, with its tensors in host memory, and of views only what they show."""
    on_host = {
        index: {key: _on_host(value) for key, value in entries.items()}
        for index, entries in state.items()
    }
    buffer = io.BytesIO()
    pickle.dump(on_host, buffer, protocol=pickle.HIGHEST_PROTOCOL)
    return buffer.getvalue()


def _on_host(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()
