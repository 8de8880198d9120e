"""DistributedOptimizer trains as one process on all ranks' data would."""

from __future__ import annotations

import copy
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from tests.ranks import RankPool, run_ranks
from tests.torch.training import (
    MODELS,
    OPTIMIZERS,
    ROWS,
    assert_equal,
    batch_of,
    loss_of,
    make_model,
    my_rows,
    overlapping,
    train,
    weights_of,
)


def _equality(
    kind: str, optimizer_name: str, overlap: bool, options: dict[str, Any], tiny: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Weights after training distributed, and alone on everything."""
    make = OPTIMIZERS[optimizer_name]
    alone, together = make_model(kind), make_model(kind)
    with (
        overlapping(overlap),
        mock.patch("horovod.torch.gradients.bucketing.LARGEST_BUCKET", 100 if tiny else 1 << 25),
    ):
        optimizer = hvd.DistributedOptimizer(
            make(together.parameters()), together.named_parameters(), **options
        )
        train(together, optimizer, 4, my_rows)
    train(alone, make(alone.parameters()), 4, lambda batch: batch)
    assert isinstance(optimizer, type(make(alone.parameters())))
    return weights_of(together), weights_of(alone)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_one_process(pool2: RankPool, name: str):
    assert_equal(pool2.run(_equality, "mlp", name, False, {}), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("overlap", [False, True])
def test_models(pool2: RankPool, kind: str, overlap: bool, tiny: bool):
    wide = {"rtol": 2e-2, "atol": 2e-2} if kind == "mixed" else {"rtol": 1e-4, "atol": 1e-5}
    assert_equal(pool2.run(_equality, kind, "SGD", overlap, {}, tiny), **wide)


def test_three_ranks(pool3: RankPool):
    assert_equal(pool3.run(_equality, "mlp", "Adam", True, {}, True), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_predivide_factor": 2.0},
        {"groups": 1},
        {"groups": 3},
        {"groups": 99},
        {"groups": 2, "gradient_predivide_factor": 0.5},
    ],
    ids=str,
)
def test_options(pool2: RankPool, options: dict[str, Any], overlap: bool):
    assert_equal(pool2.run(_equality, "mlp", "SGD", overlap, options), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", ["mlp", "conv", "mixed"])
def test_compression(pool2: RankPool, kind: str, name: str):
    options = {"compression": getattr(hvd.Compression, name)}
    assert_equal(pool2.run(_equality, kind, "SGD", True, options), rtol=5e-2, atol=2e-2)


def _groups_as_lists(overlap: bool) -> Any:
    alone, together = make_model("mlp"), make_model("mlp")
    first, last = together[0], together[2]
    with overlapping(overlap):
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["SGD"](together.parameters()),
            together.named_parameters(),
            groups=[[last.bias, first.weight], (first.bias,)],
        )
        train(together, optimizer, 3, my_rows)
    train(alone, OPTIMIZERS["SGD"](alone.parameters()), 3, lambda batch: batch)
    return weights_of(together), weights_of(alone)


@pytest.mark.parametrize("overlap", [False, True])
def test_groups_as_lists(pool2: RankPool, overlap: bool):
    assert_equal(pool2.run(_groups_as_lists, overlap), rtol=1e-4, atol=1e-5)


def _sum() -> Any:
    alone, together = make_model("mlp"), make_model("mlp")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(together.parameters(), lr=0.1 / hvd.size()), op=hvd.Sum
    )
    train(together, optimizer, 3, my_rows)
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), 3, lambda batch: batch)
    return weights_of(together), weights_of(alone)


def test_sum(pool2: RankPool):
    assert_equal(pool2.run(_sum), rtol=1e-4, atol=1e-5)


def _two_optimizers(overlap: bool) -> Any:
    alone, together = make_model("mlp"), make_model("mlp")

    def make(model: Any) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(model[0].parameters(), lr=0.1),
            torch.optim.Adam(model[2].parameters(), lr=0.01),
        ]

    bases = make(alone)
    with overlapping(overlap):
        if hvd.rank() == 0:  # what one rank has made and dropped is no matter
            hvd.DistributedOptimizer(
                torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1),
                process_set=_AloneInSet(),
            )
        wrapped = [
            hvd.DistributedOptimizer(o, m.named_parameters())
            for o, m in zip(make(together), (together[0], together[2]), strict=True)
        ]
        for step in range(4):
            for o in (*wrapped, *bases):
                o.zero_grad()
            loss_of(together, my_rows(batch_of(step, hvd.size()))).backward()
            loss_of(alone, batch_of(step, hvd.size())).backward()
            for o in (*wrapped[:: -1 if step % 2 else 1], *bases):
                o.step()
    return weights_of(together), weights_of(alone)


def _AloneInSet() -> hvd.ProcessSet:
    only = hvd.ProcessSet([hvd.rank()])
    only.process_set_id = 77  # never used: it has one member
    return only


@pytest.mark.parametrize("overlap", [False, True])
def test_two_optimizers(pool2: RankPool, overlap: bool):
    assert_equal(pool2.run(_two_optimizers, overlap), rtol=1e-4, atol=1e-5)


def _some(rank: int, size: int) -> Any:
    chosen = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[chosen])
    model, alone = make_model("mlp"), make_model("mlp")
    options = {"process_set": chosen}
    first = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
    base = torch.optim.SGD(alone.parameters(), lr=0.1)
    assert bool(first._countdowns) == (rank != 1)
    whole = batch_of(0, 3)
    for _ in range(2):
        first.zero_grad()
        base.zero_grad()
        loss_of(model, my_rows(whole)).backward()
        first.step()
        parts = [rank] if rank == 1 else [0, 2]
        for part in parts:
            x = whole[part * ROWS : (part + 1) * ROWS]
            (loss_of(alone, x) / len(parts)).backward()
        base.step()
    copied_model, copied = copy.deepcopy((model, first))
    assert copied.process_set is chosen
    train(copied_model, copied, 1, my_rows)
    # An optimizer of everybody, though only some have made one before.
    everyone = make_model("mlp")
    last = hvd.DistributedOptimizer(torch.optim.SGD(everyone.parameters(), lr=0.1))
    train(everyone, last, 2, my_rows)
    with pytest.raises(NotImplementedError, match="global"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(everyone.parameters(), lr=0.1), op=hvd.Adasum, process_set=chosen
        )
    with pytest.raises(ValueError, match="not registered"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(everyone.parameters(), lr=0.1), process_set=hvd.ProcessSet([0, 1])
        )
    return weights_of(model), weights_of(alone), weights_of(everyone)


def test_process_set():
    results = run_ranks(_some, 3)
    assert_equal([results[0][:2], results[2][:2]], rtol=1e-4, atol=1e-5)
    assert_equal([results[1][:2]], rtol=0, atol=0)
    for _, _, everyone in results:
        assert all(torch.equal(a, b) for a, b in zip(everyone, results[0][2], strict=True))


def _single(rank: int, size: int) -> None:
    hvd.init()
    for name, make in OPTIMIZERS.items():
        plain, wrapped = make_model("mlp"), make_model("mlp")
        optimizer = hvd.DistributedOptimizer(
            make(wrapped.parameters()), wrapped.named_parameters(), backward_passes_per_step=2
        )
        train(wrapped, optimizer, 3, my_rows)
        train(plain, make(plain.parameters()), 3, my_rows)
        for mine, expected in zip(weights_of(wrapped), weights_of(plain), strict=True):
            assert torch.equal(mine, expected), name
        assert all(not p._post_accumulate_grad_hooks for p in wrapped.parameters())
        for _ in range(3):  # nobody counts backward passes
            loss_of(wrapped, batch_of(0, 1)).backward()
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss_of(wrapped, batch_of(0, 1)).backward()
            optimizer.synchronize()
            if name != "LBFGS":
                optimizer.step()
    adasum = hvd.DistributedOptimizer(make(make_model("mlp").parameters()), op=hvd.Adasum)
    assert not adasum._countdowns


def test_one_rank_is_the_plain_optimizer():
    run_ranks(_single, 1)


def test_machine_counts_differ_between_ranks(pool2: RankPool):
    """Ranks on unlike machines cut the same buckets."""

    def work() -> Any:
        return _equality("mlp", "SGD", hvd.rank() == 0, {}, hvd.rank() == 0)

    assert_equal(pool2.run(work), rtol=1e-4, atol=1e-5)


def _groups_without_rank_0(rank: int, size: int) -> Any:
    chosen = hvd.ProcessSet([1, 2])
    hvd.init(process_sets=[chosen])
    if rank == 0:
        return None
    results = []
    for groups in (2, "lists"):
        alone, together = make_model("mlp"), make_model("mlp")
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["SGD"](together.parameters()),
            together.named_parameters(),
            groups=[list(together[0].parameters())] if groups == "lists" else groups,
            process_set=chosen,
        )
        batch = batch_of(0, 3)
        base = OPTIMIZERS["SGD"](alone.parameters())
        for _ in range(2):
            for model, own, rows in (
                (together, optimizer, my_rows(batch)),
                (alone, base, batch[ROWS:]),
            ):
                own.zero_grad()
                loss_of(model, rows).backward()
                own.step()
        results.append((weights_of(together), weights_of(alone)))
    return results


def test_groups_in_a_process_set_without_rank_0():
    results = run_ranks(_groups_without_rank_0, 3)[1:]
    for pair in zip(*results, strict=True):
        assert_equal(list(pair), rtol=1e-4, atol=1e-5)


def _compiled(backend: str, overlap: bool) -> Any:
    alone, together = make_model("mlp"), make_model("mlp")
    with overlapping(overlap):
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["SGD"](together.parameters()), together.named_parameters()
        )
        train(torch.compile(together, backend=backend), optimizer, 4, my_rows)
    train(alone, OPTIMIZERS["SGD"](alone.parameters()), 4, lambda batch: batch)
    return weights_of(together), weights_of(alone)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_model(pool2: RankPool, backend: str, overlap: bool):
    results = pool2.run(_compiled, backend, overlap)
    assert_equal(results, rtol=1e-4, atol=1e-5)
