"""HOROVOD_CHECK_NAN: who brought the NaN, said on every rank before anything is changed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from tests.ranks import RankPool, run_ranks
from tests.torch.training import batch_of, loss_of, my_rows, overlapping

CHECKED = {"HOROVOD_CHECK_NAN": "1"}


@pytest.fixture(scope="module")
def checking2() -> Iterator[RankPool]:
    """Two ranks that look for NaN."""
    pool = RankPool(2, CHECKED)
    yield pool
    pool.close()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def _wrap(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    return loss_of(model, my_rows(batch_of(step, hvd.size())))


def _spoil(param: nn.Parameter, value: float) -> Any:
    """Have the gradient of `param` contain `value`, until the handle is removed."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[-1] = value
        return gradient

    return param.register_hook(spoil)


def _everything(model: nn.Module, optimizer: Any) -> list[Any]:
    state = [[t.tolist() for t in entries.values()] for entries in optimizer.state.values()]
    return [[param.tolist() for param in model.parameters()], state]


def _found(value: float, ranks: list[int], how: str, options: dict[str, Any]) -> Any:
    """The error of a step with a bad gradient on some ranks; training goes on after it."""
    model = _model()
    with overlapping(how != "late"):
        optimizer = _wrap(model, **options)
        for step in range(2):
            optimizer.zero_grad()
            _loss(model, step).backward()
            optimizer.step()
        before = _everything(model, optimizer)
        optimizer.zero_grad()
        spoilt = [_spoil(p, value) for p in model[2].parameters() if hvd.rank() in ranks]

        def closure() -> torch.Tensor:
            loss = _loss(model, 2)
            loss.backward()
            return loss

        def attempt() -> None:
            if how == "closure":
                optimizer.step(closure)
                return
            closure()
            if how != "clipping":
                optimizer.step()
                return
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()

        with pytest.raises(FloatingPointError) as caught:
            attempt()
        for handle in spoilt:
            handle.remove()
        assert _everything(model, optimizer) == before
        optimizer.zero_grad()
        _loss(model, 3).backward()
        optimizer.step()
    assert _everything(model, optimizer) != before
    return str(caught.value), [param.tolist() for param in model.parameters()]


@pytest.mark.parametrize("how", ["late", "early", "closure", "clipping"])
@pytest.mark.parametrize(
    ("value", "ranks"), [(torch.nan, [1]), (torch.inf, [0]), (-torch.inf, [0, 1])]
)
def test_rank_and_parameters_are_named(
    checking2: RankPool, value: float, ranks: list[int], how: str
):
    _check_found(checking2, value, ranks, how, {})


@pytest.mark.parametrize(
    "options",
    [
        {"op": hvd.Adasum},
        {"shard_state": True},
        {"groups": 2},
        {"compression": hvd.Compression.fp16},
        {"op": hvd.Sum},
    ],
    ids=str,
)
def test_with_options(checking2: RankPool, options: dict[str, Any]):
    _check_found(checking2, torch.nan, [1], "early", options)


def _check_found(
    pool: RankPool, value: float, ranks: list[int], how: str, options: dict[str, Any]
) -> None:
    results = pool.run(_found, value, ranks, how, options)
    parts = "; ".join(f"rank {rank}: 2.weight, 2.bias" for rank in ranks)
    for message, weights in results:
        assert f"gradients of {parts}. The step was not made" in message
        assert weights == results[0][1]


def _other_gradients() -> Any:
    """Gradients that no backward pass has brought, and sparse ones."""
    layer, own = nn.Embedding(5, 2, sparse=True), nn.Parameter(torch.ones(3, dtype=torch.float16))
    params = [("layer", layer.weight), ("own", own)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in params], lr=0.1), params)
    own.grad = torch.full((3,), 60000.0, dtype=torch.float16)  # large, but finite
    layer(torch.tensor([1, 2])).sum().backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    messages = []
    for which in (0, 1):
        optimizer.zero_grad()
        own.grad = torch.ones(3, dtype=torch.float16)
        factor = 1.0
        if hvd.rank() == which:
            own.grad[1] = torch.nan
            factor = torch.inf
        (layer(torch.tensor([1, 2])).sum() * factor).backward()
        with pytest.raises(FloatingPointError) as caught:
            optimizer.step()
        messages.append(str(caught.value))
    return messages


def test_gradients_of_other_kinds(checking2: RankPool):
    for messages in checking2.run(_other_gradients):
        for rank, message in enumerate(messages):
            assert f"rank {rank}: layer, own." in message


def _many() -> str:
    params = [(f"p{number}", nn.Parameter(torch.ones(1))) for number in range(9)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in params], lr=0.1), params)
    sum(param.sum() for _, param in params).mul(torch.nan).backward()
    with pytest.raises(FloatingPointError) as caught:
        optimizer.step()
    return str(caught.value)


def test_long_lists_are_cut_short(checking2: RankPool):
    for message in checking2.run(_many):
        assert "rank 1: p0, p1, p2, p3, p4, p5 and 3 more." in message


def _scaled(fused: bool, how: str) -> list[float]:
    """A scaler means to meet infinities: the step is skipped everywhere, without an error."""
    model = _model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01, fused=fused), model.named_parameters()
    )
    scaler = torch.amp.GradScaler(device="cpu", init_scale=1024.0)
    scales = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            optimizer.zero_grad()
            loss = _loss(model, step)
            bad = step == 1 and hvd.rank() == hvd.size() - 1
            scaler.scale(loss * torch.inf if bad else loss).backward()
            if how == "synchronize":
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                if how == "unscale":
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    # Without a scaler the check is on again.
    optimizer.zero_grad()
    (_loss(model, 3) * torch.nan).backward()
    with pytest.raises(FloatingPointError):
        optimizer.step()
    return scales


@pytest.mark.parametrize("how", ["", "unscale", "synchronize"])
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_is_left_alone(checking2: RankPool, fused: bool, how: str):
    for scales in checking2.run(_scaled, fused, how):
        assert scales == [1024.0, 512.0, 512.0]


def _joined() -> None:
    model = _model()
    optimizer = _wrap(model)
    _loss(model, 0).backward()
    optimizer.step()
    if hvd.rank() == 0:
        for bad in (False, True):
            optimizer.zero_grad()
            (_loss(model, 1) * (torch.nan if bad else 1.0)).backward()
            if bad:
                with pytest.raises(FloatingPointError, match=r"rank 0: 0\.weight"):
                    optimizer.step()
            else:
                optimizer.step()
    hvd.join()


def test_while_a_rank_has_joined(checking2: RankPool):
    checking2.run(_joined)


def _single(rank: int, size: int) -> None:
    hvd.init()
    model = _model()
    optimizer = _wrap(model)
    before = _everything(model, optimizer)
    (_loss(model, 0) * torch.nan).backward()
    with pytest.raises(FloatingPointError, match=r"rank 0: 0\.weight"):
        optimizer.step()
    assert _everything(model, optimizer) == before
    for fused in (False, True):
        for how in ("", "unscale"):
            assert _scaled(fused, how) == [1024.0, 512.0, 512.0]


def test_one_rank():
    run_ranks(_single, 1, env=CHECKED)


def _differing(rank: int, size: int) -> None:
    os.environ["HOROVOD_CHECK_NAN"] = str(rank)
    hvd.init()
    with pytest.raises(ValueError, match="HOROVOD_CHECK_NAN of DistributedOptimizer differs"):
        _wrap(_model())


def test_set_on_one_rank_only():
    run_ranks(_differing, 2)


def _unchecked() -> bool:
    model = _model()
    optimizer = _wrap(model)
    (_loss(model, 0) * torch.nan).backward()
    optimizer.step()
    return bool(model[0].weight.isnan().any())


def test_off_by_default(pool2: RankPool):
    assert pool2.run(_unchecked) == [True, True]
