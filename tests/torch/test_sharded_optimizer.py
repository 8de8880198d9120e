"""DistributedOptimizer(shard_state=True): the same results with a part of the state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import horovod.torch as hvd
from tests.effort import examples
from tests.ranks import RankPool

Make = Callable[[Any], torch.optim.Optimizer]


def _made(name: str, **options: Any) -> Make:
    return lambda groups: getattr(torch.optim, name)(groups, **options)


NAMES = ["Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop"]
NAMES += ["Rprop", "SGD"]
OPTIMIZERS: dict[str, Make] = {
    "SGD": _made("SGD", lr=0.1),
    "SGD momentum": _made("SGD", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam amsgrad": _made("Adam", lr=0.01, amsgrad=True, weight_decay=0.1),
    "RMSprop centered": _made("RMSprop", lr=0.01, centered=True, momentum=0.9),
    **{
        f"{name}{variant}": _made(name, lr=0.01, **options)
        for variant, options in {"": {}, " foreach": {"foreach": True}}.items()
        for name in NAMES
        if (name, variant) != ("SGD", "")
    },
    **{f"{name} fused": _made(name, lr=0.01, fused=True) for name in ("Adagrad", "Adam", "AdamW")},
    "SGD fused": _made("SGD", lr=0.01, momentum=0.9, fused=True),
}

# Those that need whole parameters. Muon takes matrices only.
TENSORWISE: dict[str, Make] = {
    name: _made(name, lr=0.01) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)
}
if "Adafactor" in TENSORWISE:
    TENSORWISE["Adafactor foreach"] = _made("Adafactor", lr=0.01, foreach=True)
OPTIMIZERS |= TENSORWISE

Form = tuple[tuple[int, ...], str]  # shape and dtype


def _params(forms: list[Form]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    params = []
    for shape, dtype in forms:
        values = torch.randn(shape, generator=generator).to(getattr(torch, dtype))
        if len(shape) == 4:
            values = values.to(memory_format=torch.channels_last)
        params.append(nn.Parameter(values))
    return params


def _groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    """The parameters in two groups with options of their own."""
    groups = [{"params": params[0::2]}, {"params": params[1::2], "lr": 0.02}]
    return [group for group in groups if group["params"]]


def _backward(params: list[nn.Parameter], step: int, seed: int) -> None:
    """Gradients that depend on the parameters, the step and the rank."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    loss = torch.zeros(())
    for param in params:
        factor = torch.randn(param.shape, generator=generator)
        loss = loss + ((param.float() * factor).sin() * factor).sum()
    loss.backward()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Compares as NaNs and signs of zero do, too."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).clone()


def _same(ours: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(_bits(a), _bits(b)) for a, b in zip(ours, others, strict=True))


def _train(params: list[nn.Parameter], optimizer: Any, steps: range, seed: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        _backward(params, step, seed)
        optimizer.step()


def _pair(name: str, forms: list[Form], steps: int) -> tuple[bool, list[torch.Tensor]]:
    """Whether sharded and unsharded training agree, and what came of it."""
    results = []
    for shard in (True, False):
        params = _params(forms)
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS[name](_groups(params)), shard_state=shard)
        _train(params, optimizer, range(steps), hvd.rank())
        results.append(params)
    return _same(*results), [_bits(param) for param in results[0]]


def _assert_alike(results: list[tuple[bool, list[torch.Tensor]]], what: object) -> None:
    for same, bits in results:
        assert same, what
        assert _same(bits, results[0][1]), f"ranks differ: {what}"


FORMS: list[Form] = [
    ((200,), "float32"),
    ((7, 31), "float32"),
    ((), "float32"),
    ((4, 3, 5, 5), "float32"),
    ((333,), "float64"),
    ((0, 3), "float32"),
    ((129,), "bfloat16"),
    ((1999,), "float32"),
    ((1999,), "bfloat16"),
]


MATRICES: list[Form] = [((30, 20), "float32"), ((7, 31), "float32"), ((64, 64), "bfloat16")]
MATRICES += [((90, 110), "float32"), ((5, 1), "float32")]


def _forms_for(name: str) -> list[Form]:
    return MATRICES if name in TENSORWISE else FORMS


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(pool2: RankPool, name: str):
    _assert_alike(pool2.run(_pair, name, _forms_for(name), 4), name)


@pytest.mark.parametrize("name", TENSORWISE)
def test_more_ranks_than_parameters(pool4: RankPool, name: str):
    _assert_alike(pool4.run(_pair, name, MATRICES[:2], 2), name)


shapes = st.lists(st.integers(1, 12), max_size=3).map(tuple) | st.tuples(st.integers(1, 900))
forms = st.tuples(
    shapes | st.tuples(*[st.integers(1, 6)] * 4),
    st.sampled_from(["float32", "float64", "bfloat16"]),
)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_parameters(request: pytest.FixtureRequest, size: int):
    pool: RankPool = request.getfixturevalue(f"pool{size}")

    @settings(max_examples=examples(12), deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        name=st.sampled_from(sorted(OPTIMIZERS.keys() - TENSORWISE.keys())),
        forms=st.lists(forms, min_size=1, max_size=6),
    )
    def check(name: str, forms: list[Form]) -> None:
        _assert_alike(pool.run(_pair, name, forms, 3), (name, forms))

    check()


def _state_bytes(shard: bool) -> tuple[int, int]:
    params = _params([((300, 300), "float32"), ((300,), "float32"), ((300, 200), "float32")])
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(params), shard_state=shard)
    _train(params, optimizer, range(1), hvd.rank())
    tensors = [t for entries in optimizer.state.values() for t in entries.values()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values()), sum(p.nbytes for p in params)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_state_takes_a_share_of_the_memory(request: pytest.FixtureRequest, size: int):
    pool: RankPool = request.getfixturevalue(f"pool{size}")
    for state, params in pool.run(_state_bytes, False):
        assert state >= 2 * params
    for state, params in pool.run(_state_bytes, True):
        assert 2 * params / size * 0.99 < state < 2 * params / size * 1.01


def _owned_bytes() -> list[int]:
    """The bytes of state that each rank has."""
    params = _params([((64, 8 * count), "float32") for count in (1, 5, 2, 4, 3, 3)])
    optimizer = hvd.DistributedOptimizer(TENSORWISE["Muon"](params), shard_state=True)
    _train(params, optimizer, range(1), hvd.rank())
    mine = sum(t.nbytes for entries in optimizer.state.values() for t in entries.values())
    return hvd.allgather_object(mine)


@pytest.mark.skipif("Muon" not in TENSORWISE, reason="this version of torch has no Muon")
def test_each_matrix_has_one_owner_and_owners_have_equal_shares(pool3: RankPool):
    unit = 64 * 8 * 4
    for found in pool3.run(_owned_bytes):
        assert found == [6 * unit] * 3


# -- moving state between numbers of ranks ----------------------------------------------------

Saved = tuple[Any, list[torch.Tensor]]


def _go_on(
    saved: Saved, shard: bool, steps: range, name: str = "Adam amsgrad"
) -> tuple[Any, list[torch.Tensor]]:
    """Load, train on the same data on all ranks, and save."""
    state, values = saved
    params = [nn.Parameter(value.clone()) for value in values]
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[name](_groups(params)), shard_state=shard)
    if state is not None:
        optimizer.load_state_dict(state)
    _train(params, optimizer, steps, 7)
    last = hvd.size() - 1
    if shard:
        optimizer.consolidate_state_dict(to=last)
    state = optimizer.state_dict() if hvd.rank() == last else None
    return state, [param.detach() for param in params]


def _plain_goes_on(saved: Saved, steps: range, name: str) -> Saved:
    """The same with torch alone, in this process."""
    state, values = saved
    params = [nn.Parameter(value.clone()) for value in values]
    optimizer = OPTIMIZERS[name](_groups(params))
    optimizer.load_state_dict(copy.deepcopy(state))  # it works on what it loads
    _train(params, optimizer, steps, 7)
    return optimizer.state_dict(), [param.detach() for param in params]


def _assert_same_state(ours: Any, theirs: Any) -> None:
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for place, entries in ours["state"].items():
        assert entries.keys() == theirs["state"][place].keys()
        for key, value in entries.items():
            other = theirs["state"][place][key]
            assert (value.shape, value.dtype) == (other.shape, other.dtype)
            assert _same([value], [other]), (place, key)


@pytest.mark.parametrize("name", ["Adam amsgrad", *TENSORWISE])
def test_state_moves_between_numbers_of_ranks(
    pool2: RankPool, pool3: RankPool, pool4: RankPool, name: str
):
    forms = [form for form in _forms_for(name) if 0 not in form[0]]
    start: Saved = (None, [param.detach() for param in _params(forms)])
    saved = pool3.run(_go_on, start, True, range(3), name)[-1]
    unsharded = pool3.run(_go_on, start, False, range(3), name)[-1]
    _assert_same_state(saved[0], unsharded[0])
    # From here on averages are exact, whatever the number of ranks is.
    expected = _plain_goes_on(saved, range(3, 5), name)
    for pool, shard in ((pool2, True), (pool4, True), (pool2, False)):
        state, values = pool.run(_go_on, saved, shard, range(3, 5), name)[-1]
        assert _same(values, expected[1])
        _assert_same_state(state, expected[0])


def _incomplete() -> None:
    params = _params(FORMS)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(params, lr=0.1), shard_state=True)
    with pytest.raises(RuntimeError, match=r"consolidate_state_dict\(to=RANK\)"):
        optimizer.state_dict()
    with pytest.raises(ValueError, match=r"to=5 is not a rank.*\[0, 1\]"):
        optimizer.consolidate_state_dict(to=5)
    _train(params, optimizer, range(2), hvd.rank())
    optimizer.consolidate_state_dict(to=1)
    if hvd.rank() == 0:
        with pytest.raises(RuntimeError, match="rank 0 has a part"):
            optimizer.state_dict()
    else:
        optimizer.param_groups[0]["lr"] = 0.5  # options are those of now
        saved = optimizer.state_dict()
        assert saved["param_groups"][0]["lr"] == 0.5
        optimizer.param_groups[0]["lr"] = 0.1
    _train(params, optimizer, range(1), hvd.rank())
    with pytest.raises(RuntimeError, match="after the last step"):
        optimizer.state_dict()
    with pytest.raises(ValueError, match="number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})


def test_state_that_is_not_complete(pool2: RankPool):
    pool2.run(_incomplete)


def _resumed(saved: Any) -> tuple[bool, bool, bool]:
    """Only rank 0 has loaded the checkpoint, then its state is broadcast, as scripts do."""
    state, values = saved
    results, learning_rates = [], []
    for shard in (True, False):
        params = [nn.Parameter(value.clone()) for value in values]
        base = OPTIMIZERS["Adam amsgrad"](_groups(params))
        optimizer = hvd.DistributedOptimizer(base, shard_state=shard)
        if hvd.rank() == 0:
            optimizer.load_state_dict(state)
            optimizer.param_groups[0]["lr"] = 0.125
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        learning_rates.append(optimizer.param_groups[0]["lr"])
        if shard and hvd.rank() == 0:
            assert optimizer.state_dict()["state"].keys() == state["state"].keys()
        before = [param.detach().clone() for param in params]
        _train(params, optimizer, range(2), hvd.rank())
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)  # nothing to do but for the options
        _train(params, optimizer, range(2, 4), hvd.rank())
        results.append(params)
    untouched = _same(before, values)
    return _same(*results), learning_rates == [0.125, 0.125], untouched


def test_broadcast_of_a_loaded_state(pool2: RankPool, pool3: RankPool):
    start: Saved = (None, [param.detach() for param in _params(FORMS[:4])])
    saved = pool3.run(_go_on, start, True, range(2))[-1]
    for result in pool2.run(_resumed, saved):
        assert result == (True, True, True)


def _broadcast_of_nothing() -> bool:
    """A new job: scripts broadcast the state all the same."""
    results = []
    for shard in (True, False):
        params = _params(FORMS)
        optimizer = hvd.DistributedOptimizer(torch.optim.Adagrad(params), shard_state=shard)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        _train(params, optimizer, range(2), hvd.rank())
        results.append(params)
    return _same(*results)


def test_broadcast_of_a_new_state(pool2: RankPool):
    assert pool2.run(_broadcast_of_nothing) == [True, True]
