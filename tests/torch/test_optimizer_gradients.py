"""DistributedOptimizer and gradients that are sparse, missing, accumulated or oddly laid out."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from tests.ranks import RankPool
from tests.torch.training import (
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


def _accumulated(overlap: bool, ragged: bool, how: str) -> Any:
    """Five batches, two to a step; one rank may have four."""
    alone, together = make_model("mlp"), make_model("mlp")
    passes = 2 if how == "passes" else 1
    with overlapping(overlap):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(together.parameters(), lr=0.1),
            together.named_parameters(),
            backward_passes_per_step=1 if how == "changed" else passes,
        )
        if how == "changed":
            optimizer.set_backward_passes_per_step(2)
        base = torch.optim.SGD(alone.parameters(), lr=0.1)
        for start in (0, 2, 4):
            optimizer.zero_grad()
            base.zero_grad()
            both = (start, start + 1) if start < 4 else (start,)
            for number in both:
                batch = batch_of(number, hvd.size())
                last = number == both[-1]
                if how == "no_sync" and not last:
                    with optimizer.no_sync():
                        loss_of(together, my_rows(batch)).backward()
                elif not (ragged and number == 4 and hvd.rank() == 1):
                    loss_of(together, my_rows(batch)).backward()
                share = batch[:ROWS] if ragged and number == 4 else batch
                (loss_of(alone, share) / (hvd.size() if share is not batch else 1)).backward()
            optimizer.step()
            base.step()
    return weights_of(together), weights_of(alone)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("how", ["passes", "changed", "no_sync"])
def test_accumulation(pool2: RankPool, how: str, ragged: bool, overlap: bool):
    assert_equal(pool2.run(_accumulated, overlap, ragged, how), rtol=1e-4, atol=1e-5)


def _sparse(as_dense: bool, unused: bool, name: str, overlap: bool) -> Any:
    torch.manual_seed(0)
    alone, together = (nn.Embedding(10, 3, sparse=True) for _ in range(2))
    together.load_state_dict(alone.state_dict())
    heads = [nn.Linear(3, 1, bias=False) for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    make = getattr(torch.optim, name)
    base = make(alone.parameters(), lr=0.1)
    plain = torch.optim.SGD(heads[0].parameters(), lr=0.1)
    named = [("embedding", together.weight)]
    with overlapping(overlap):
        optimizer = hvd.DistributedOptimizer(
            make(together.parameters(), lr=0.1), named, sparse_as_dense=as_dense
        )
        other = hvd.DistributedOptimizer(torch.optim.SGD(heads[1].parameters(), lr=0.1))
        layouts = set()
        for step in range(3):
            # Ranks use rows of their own and, for some, the same ones; different numbers of them.
            rows = [[1, 2, 2], [2, 7]] if not unused else [[1, 2, 2], []]
            for o in (optimizer, other, base, plain):
                o.zero_grad()
            mine = rows[hvd.rank()]
            if mine:
                heads[1](together(torch.tensor(mine) + step)).sum().backward()
            optimizer.step()
            other.step()
            for part in rows:
                if part:
                    (heads[0](alone(torch.tensor(part) + step)).sum() / 2).backward()
            base.step()
            plain.step()
            layouts.add(together.weight.grad.layout)
    assert layouts == {torch.sparse_coo}
    return [together.weight.detach(), heads[1].weight.detach()], [
        alone.weight.detach(),
        heads[0].weight.detach(),
    ]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("unused", [False, True])
# As dense, rows without gradient are entries too, and SparseAdam updates all entries.
@pytest.mark.parametrize(
    ("name", "as_dense"), [("SGD", False), ("SGD", True), ("SparseAdam", False)]
)
def test_sparse(pool2: RankPool, as_dense: bool, unused: bool, name: str, overlap: bool):
    assert_equal(pool2.run(_sparse, as_dense, unused, name, overlap), rtol=1e-3, atol=1e-4)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 4)
        self.branches = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](self.trunk(x))


def _unused(overlap: bool, reverse: bool) -> Any:
    """Each rank takes its own branch, or they alternate, so all meet zeros now and then."""
    torch.manual_seed(0)
    together = Branches()
    alone = copy.deepcopy(together)
    base = torch.optim.SGD(alone.parameters(), lr=0.1)
    with overlapping(overlap), mock.patch("horovod.torch.gradients.bucketing.LARGEST_BUCKET", 60):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(together.parameters(), lr=0.1), together.named_parameters()
        )
        for step in range(4):
            batch = batch_of(step, 2)
            optimizer.zero_grad()
            base.zero_grad()
            branch = [(0 if reverse else step) % 2, 1]
            together(my_rows(batch), branch[hvd.rank()]).square().mean().backward()
            for rank in range(2):
                part = batch[rank * ROWS : (rank + 1) * ROWS]
                (alone(part, branch[rank]).square().mean() / 2).backward()
            optimizer.step()
            base.step()
    return weights_of(together), weights_of(alone)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_parameters_unused_on_one_rank(pool2: RankPool, overlap: bool, reverse: bool):
    assert_equal(pool2.run(_unused, overlap, reverse), rtol=1e-4, atol=1e-5)


def _toggled(overlap: bool, frozen_first: bool) -> Any:
    alone, together = make_model("mlp"), make_model("mlp")
    models = [together, alone]

    def freeze(frozen: bool) -> None:
        for model in models:
            model[0].requires_grad_(not frozen)

    freeze(frozen_first)
    base = torch.optim.SGD(alone.parameters(), lr=0.1)
    with overlapping(overlap):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(together.parameters(), lr=0.1), together.named_parameters()
        )
        for frozen in (frozen_first, not frozen_first, frozen_first, not frozen_first):
            freeze(frozen)
            before = weights_of(together[0])
            train(together, optimizer, 2, my_rows)
            train(alone, base, 2, lambda batch: batch)
            same = [torch.equal(a, b) for a, b in zip(before, weights_of(together[0]), strict=True)]
            assert all(same) if frozen else not any(same)
    return weights_of(together), weights_of(alone)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("frozen_first", [False, True])
def test_requires_grad_toggled(pool2: RankPool, overlap: bool, frozen_first: bool):
    assert_equal(pool2.run(_toggled, overlap, frozen_first), rtol=1e-4, atol=1e-5)


def _tied_names() -> Any:
    alone, together = make_model("tied"), make_model("tied")
    named = list(together.named_parameters(remove_duplicate=False))
    assert len(named) == 2
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(together.parameters(), lr=0.1), named)
    train(together, optimizer, 3, my_rows)
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), 3, lambda batch: batch)
    return weights_of(together), weights_of(alone)


def test_tied_weights_under_both_names(pool2: RankPool):
    assert_equal(pool2.run(_tied_names), rtol=1e-4, atol=1e-5)


def _layouts() -> Any:
    """Gradients that the user sets, laid out differently on each rank."""
    parameter = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    expanded = nn.Parameter(torch.zeros(4, 6)[:, ::2])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter, expanded], lr=1.0))
    values = torch.arange(120.0).view(2, 3, 4, 5)
    slices = torch.arange(12.0).view(4, 3)
    if hvd.rank() == 0:
        parameter.grad, expanded.grad = values.clone(), slices.clone()
    else:
        parameter.grad = values.clone(memory_format=torch.channels_last)
        expanded.grad = slices.t().contiguous().t()
    optimizer.step()
    return [parameter.detach(), expanded.detach()], [-values, -slices]


def test_layouts_of_gradients(pool2: RankPool):
    for together, expected in pool2.run(_layouts):
        for mine, right in zip(together, expected, strict=True):
            assert torch.equal(mine, right)


def _bucket_bytes(smallest: int, largest: int) -> list[int]:
    """Sizes of the buckets of a model with eight equal layers of 400 bytes."""
    model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(8)))
    bounds = mock.patch.multiple(
        "horovod.torch.gradients.bucketing", SMALLEST_HOST_BUCKET=smallest, LARGEST_BUCKET=largest
    )
    with overlapping(True), bounds:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(2, 10)).sum().backward()
        optimizer.step()
    return [sum(p.nbytes for _, p in bucket.params) for bucket in optimizer._reducer._buckets]


@pytest.mark.parametrize(
    ("smallest", "largest", "expected"),
    [(1, 1 << 20, [800] * 4), (1600, 1 << 20, [1600] * 2), (1, 400, [400] * 8)],
)
def test_buckets_are_a_quarter_of_the_model_within_bounds(
    pool2: RankPool, smallest: int, largest: int, expected: list[int]
):
    assert pool2.run(_bucket_bytes, smallest, largest) == [expected] * 2


def _uneven(overlap: bool) -> list[torch.Tensor]:
    """Rank 1 has no batch in the first epoch; later all take part."""
    model = make_model("mlp")
    with overlapping(overlap), mock.patch("horovod.torch.gradients.bucketing.LARGEST_BUCKET", 100):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        for epoch in range(3):
            train(model, optimizer, 0 if epoch == 0 and hvd.rank() == 1 else 2, my_rows)
            if epoch == 1 and hvd.rank() == 0:
                train(model, optimizer, 1, my_rows)
            hvd.join()
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return weights_of(model)


def _ends_early(overlap: bool) -> Any:
    """Rank 1 has one batch and rank 0 has three: who has joined counts as zeros in the average."""
    together, alone = make_model("mlp"), make_model("mlp")
    base = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    with overlapping(overlap), mock.patch("horovod.torch.gradients.bucketing.LARGEST_BUCKET", 100):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(together.parameters(), lr=0.1, momentum=0.9),
            together.named_parameters(),
        )
        train(together, optimizer, 3 if hvd.rank() == 0 else 1, my_rows)
        assert hvd.join() == 0
        hvd.broadcast_parameters(together.state_dict(), root_rank=0)
    for step in range(3):
        batch = batch_of(step, 2)
        base.zero_grad()
        loss = loss_of(alone, batch) if step == 0 else loss_of(alone, batch[:ROWS]) / 2
        loss.backward()
        base.step()
    return weights_of(together), weights_of(alone)


@pytest.mark.parametrize("overlap", [False, True])
def test_uneven_numbers_of_batches(pool2: RankPool, overlap: bool):
    assert_equal(pool2.run(_ends_early, overlap), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("overlap", [False, True])
def test_join(pool2: RankPool, overlap: bool):
    first, second = pool2.run(_uneven, overlap)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _compressed_sparse(as_dense: bool, unused: bool) -> tuple[list[str], torch.Tensor]:
    """Types of the values that come back from the others, and how far the weights moved."""
    came: list[str] = []

    class Noting(hvd.Compression.fp16):
        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            came.append(str(tensor.dtype))
            return hvd.Compression.fp16.decompress(tensor, ctx)

    torch.manual_seed(0)
    layer = nn.Embedding(10, 3, sparse=True)
    before = layer.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layer.parameters(), lr=0.1),
        layer.named_parameters(),
        compression=Noting,
        sparse_as_dense=as_dense,
    )
    for _ in range(2):
        optimizer.zero_grad()
        if not (unused and hvd.rank() == 1):
            rows = torch.tensor([1, 2] if hvd.rank() == 0 else [2, 7, 7])
            (layer(rows) * (1 + 2**-12)).sum().backward()
        optimizer.step()
    gradient = layer.weight.grad
    assert gradient is not None
    assert (gradient.is_sparse, gradient.dtype) == (True, torch.float32)
    return came, (before - layer.weight.detach()) / 0.1


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients_are_compressed(pool2: RankPool, as_dense: bool, unused: bool):
    expected = torch.zeros(10, 3)
    expected[1], expected[2], expected[7] = 1.0, 1.0 if unused else 2.0, 0.0 if unused else 2.0
    for came, moved in pool2.run(_compressed_sparse, as_dense, unused):
        assert came == ["torch.float16"] * 2
        torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-3)


class Words(nn.Module):
    """A sparse layer and two dense ones, of which a rank may use one only."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4, sparse=True)
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])

    def forward(self, rows: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.words(rows))


def _grouped(as_dense: bool, overlap: bool, by_number: bool) -> Any:
    """Groups honour pre-division, sparse gradients and gradients that are missing."""
    torch.manual_seed(0)
    together = Words()
    alone = copy.deepcopy(together)
    base = torch.optim.SGD(alone.parameters(), lr=0.1)
    one, other = together.heads
    groups: Any = 2 if by_number else [[together.words.weight, one.weight, other.weight]]
    with overlapping(overlap):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(together.parameters(), lr=0.1),
            together.named_parameters(),
            groups=groups,
            gradient_predivide_factor=2.0,
            sparse_as_dense=as_dense,
        )
        for step in range(3):
            optimizer.zero_grad()
            base.zero_grad()
            rows = [torch.tensor([step, 3]), torch.tensor([4])]
            together(rows[hvd.rank()], hvd.rank()).square().sum().backward()
            for rank in range(2):
                (alone(rows[rank], rank).square().sum() / 2).backward()
            optimizer.step()
            base.step()
    return weights_of(together), weights_of(alone)


@pytest.mark.parametrize("by_number", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("as_dense", [False, True])
def test_groups_with_everything(pool2: RankPool, as_dense: bool, overlap: bool, by_number: bool):
    assert_equal(pool2.run(_grouped, as_dense, overlap, by_number), rtol=1e-4, atol=1e-5)
