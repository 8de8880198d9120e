"""DistributedOptimizer trains as one process on all ranks' data would."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import horovod.torch as hvd
from tests.ranks import RankPool, run_ranks

ROWS = 4  # of each rank's batch


class Tied(nn.Module):
    """Input and output share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 6, bias=False)
        self.decode = nn.Linear(6, 6, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(torch.tanh(self.encode(x)))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        return self.last(checkpoint(self.first, x, use_reentrant=self.reentrant))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def _conv() -> nn.Module:
    model = nn.Sequential(
        nn.Unflatten(1, (3, 1, 2)), nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten()
    )
    return model.to(memory_format=torch.channels_last)


class Mixed(nn.Module):
    """Parameters of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3, dtype=torch.float64)
        self.scale = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).double()) * self.scale


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": _mlp,
    "conv": _conv,
    "tied": Tied,
    "mixed": Mixed,
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed reentrant": lambda: Checkpointed(True),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=5, line_search_fn="strong_wolfe"),
}


def _data(step: int, size: int) -> torch.Tensor:
    """All ranks' inputs of one step."""
    return torch.randn(size * ROWS, 6, generator=torch.Generator().manual_seed(step))


def _mine(batch: torch.Tensor) -> torch.Tensor:
    return batch[hvd.rank() * ROWS : (hvd.rank() + 1) * ROWS]


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - 1).square().mean()


def _model(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[kind]()


def _weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@contextmanager
def _overlapping(overlap: bool) -> Iterator[None]:
    """With cores to spare (or none), whatever this machine has."""
    with mock.patch("os.cpu_count", return_value=64 if overlap else 1):
        yield


def _train(model: nn.Module, optimizer: Any, steps: int, pick: Callable[..., Any]) -> None:
    for step in range(steps):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = _loss(model, pick(_data(step, hvd.size())))
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def _equality(
    kind: str, optimizer_name: str, overlap: bool, options: dict[str, Any], tiny: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Weights after training distributed, and alone on everything."""
    make = OPTIMIZERS[optimizer_name]
    alone, together = _model(kind), _model(kind)
    with (
        _overlapping(overlap),
        mock.patch("horovod.torch.gradients.LARGEST_BUCKET", 100 if tiny else 1 << 25),
    ):
        optimizer = hvd.DistributedOptimizer(
            make(together.parameters()), together.named_parameters(), **options
        )
        _train(together, optimizer, 4, _mine)
    _train(alone, make(alone.parameters()), 4, lambda batch: batch)
    assert isinstance(optimizer, type(make(alone.parameters())))
    return _weights(together), _weights(alone)


def _assert_equal(results: list[Any], **tolerance: float) -> None:
    for together, alone in results:
        for mine, theirs, expected in zip(together, results[0][0], alone, strict=True):
            assert torch.equal(mine, theirs), "ranks differ"
            torch.testing.assert_close(mine, expected, **tolerance)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_one_process(pool2: RankPool, name: str):
    _assert_equal(pool2.run(_equality, "mlp", name, False, {}), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("overlap", [False, True])
def test_models(pool2: RankPool, kind: str, overlap: bool, tiny: bool):
    wide = {"rtol": 2e-2, "atol": 2e-2} if kind == "mixed" else {"rtol": 1e-4, "atol": 1e-5}
    _assert_equal(pool2.run(_equality, kind, "SGD", overlap, {}, tiny), **wide)


def test_three_ranks(pool3: RankPool):
    _assert_equal(pool3.run(_equality, "mlp", "Adam", True, {}, True), rtol=1e-3, atol=1e-4)


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
    _assert_equal(pool2.run(_equality, "mlp", "SGD", overlap, options), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", ["mlp", "conv", "mixed"])
def test_compression(pool2: RankPool, kind: str, name: str):
    options = {"compression": getattr(hvd.Compression, name)}
    _assert_equal(pool2.run(_equality, kind, "SGD", True, options), rtol=5e-2, atol=2e-2)


def _groups_as_lists(overlap: bool) -> Any:
    alone, together = _model("mlp"), _model("mlp")
    first, last = together[0], together[2]
    with _overlapping(overlap):
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["SGD"](together.parameters()),
            together.named_parameters(),
            groups=[[last.bias, first.weight], (first.bias,)],
        )
        _train(together, optimizer, 3, _mine)
    _train(alone, OPTIMIZERS["SGD"](alone.parameters()), 3, lambda batch: batch)
    return _weights(together), _weights(alone)


@pytest.mark.parametrize("overlap", [False, True])
def test_groups_as_lists(pool2: RankPool, overlap: bool):
    _assert_equal(pool2.run(_groups_as_lists, overlap), rtol=1e-4, atol=1e-5)


def _sum() -> Any:
    alone, together = _model("mlp"), _model("mlp")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(together.parameters(), lr=0.1 / hvd.size()), op=hvd.Sum
    )
    _train(together, optimizer, 3, _mine)
    _train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), 3, lambda batch: batch)
    return _weights(together), _weights(alone)


def test_sum(pool2: RankPool):
    _assert_equal(pool2.run(_sum), rtol=1e-4, atol=1e-5)


def _accumulated(overlap: bool, ragged: bool, how: str) -> Any:
    """Five batches, two to a step; one rank may have four."""
    alone, together = _model("mlp"), _model("mlp")
    passes = 2 if how == "passes" else 1
    with _overlapping(overlap):
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
                batch = _data(number, hvd.size())
                last = number == both[-1]
                if how == "no_sync" and not last:
                    with optimizer.no_sync():
                        _loss(together, _mine(batch)).backward()
                elif not (ragged and number == 4 and hvd.rank() == 1):
                    _loss(together, _mine(batch)).backward()
                share = batch[:ROWS] if ragged and number == 4 else batch
                (_loss(alone, share) / (hvd.size() if share is not batch else 1)).backward()
            optimizer.step()
            base.step()
    return _weights(together), _weights(alone)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("how", ["passes", "changed", "no_sync"])
def test_accumulation(pool2: RankPool, how: str, ragged: bool, overlap: bool):
    _assert_equal(pool2.run(_accumulated, overlap, ragged, how), rtol=1e-4, atol=1e-5)


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
    with _overlapping(overlap):
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
    _assert_equal(pool2.run(_sparse, as_dense, unused, name, overlap), rtol=1e-3, atol=1e-4)


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
    with _overlapping(overlap), mock.patch("horovod.torch.gradients.LARGEST_BUCKET", 60):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(together.parameters(), lr=0.1), together.named_parameters()
        )
        for step in range(4):
            batch = _data(step, 2)
            optimizer.zero_grad()
            base.zero_grad()
            branch = [(0 if reverse else step) % 2, 1]
            together(_mine(batch), branch[hvd.rank()]).square().mean().backward()
            for rank in range(2):
                part = batch[rank * ROWS : (rank + 1) * ROWS]
                (alone(part, branch[rank]).square().mean() / 2).backward()
            optimizer.step()
            base.step()
    return _weights(together), _weights(alone)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_parameters_unused_on_one_rank(pool2: RankPool, overlap: bool, reverse: bool):
    _assert_equal(pool2.run(_unused, overlap, reverse), rtol=1e-4, atol=1e-5)


def _toggled(overlap: bool, frozen_first: bool) -> Any:
    alone, together = _model("mlp"), _model("mlp")
    models = [together, alone]

    def freeze(frozen: bool) -> None:
        for model in models:
            model[0].requires_grad_(not frozen)

    freeze(frozen_first)
    base = torch.optim.SGD(alone.parameters(), lr=0.1)
    with _overlapping(overlap):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(together.parameters(), lr=0.1), together.named_parameters()
        )
        for frozen in (frozen_first, not frozen_first, frozen_first, not frozen_first):
            freeze(frozen)
            before = _weights(together[0])
            _train(together, optimizer, 2, _mine)
            _train(alone, base, 2, lambda batch: batch)
            same = [torch.equal(a, b) for a, b in zip(before, _weights(together[0]), strict=True)]
            assert all(same) if frozen else not any(same)
    return _weights(together), _weights(alone)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("frozen_first", [False, True])
def test_requires_grad_toggled(pool2: RankPool, overlap: bool, frozen_first: bool):
    _assert_equal(pool2.run(_toggled, overlap, frozen_first), rtol=1e-4, atol=1e-5)


def _tied_names() -> Any:
    alone, together = _model("tied"), _model("tied")
    named = list(together.named_parameters(remove_duplicate=False))
    assert len(named) == 2
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(together.parameters(), lr=0.1), named)
    _train(together, optimizer, 3, _mine)
    _train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), 3, lambda batch: batch)
    return _weights(together), _weights(alone)


def test_tied_weights_under_both_names(pool2: RankPool):
    _assert_equal(pool2.run(_tied_names), rtol=1e-4, atol=1e-5)


def _two_optimizers(overlap: bool) -> Any:
    alone, together = _model("mlp"), _model("mlp")

    def make(model: Any) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(model[0].parameters(), lr=0.1),
            torch.optim.Adam(model[2].parameters(), lr=0.01),
        ]

    bases = make(alone)
    with _overlapping(overlap):
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
            _loss(together, _mine(_data(step, hvd.size()))).backward()
            _loss(alone, _data(step, hvd.size())).backward()
            for o in (*wrapped[:: -1 if step % 2 else 1], *bases):
                o.step()
    return _weights(together), _weights(alone)


def _AloneInSet() -> hvd.ProcessSet:
    only = hvd.ProcessSet([hvd.rank()])
    only.process_set_id = 77  # never used: it has one member
    return only


@pytest.mark.parametrize("overlap", [False, True])
def test_two_optimizers(pool2: RankPool, overlap: bool):
    _assert_equal(pool2.run(_two_optimizers, overlap), rtol=1e-4, atol=1e-5)


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


def _closure() -> Any:
    alone, together = _model("mlp"), _model("mlp")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(together.parameters(), lr=0.1))
    base = torch.optim.SGD(alone.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        batch = _data(step, hvd.size())

        def evaluate(model: nn.Module, own: Any, x: torch.Tensor) -> torch.Tensor:
            own.zero_grad()
            loss = _loss(model, x)
            loss.backward()
            return loss

        mine = _mine(batch)
        expected = _loss(together, mine).item()
        losses.append(
            optimizer.step(lambda x=mine: evaluate(together, optimizer, x)).item() == expected
        )
        base.step(lambda x=batch: evaluate(alone, base, x))
    assert all(losses)
    return _weights(together), _weights(alone)


def test_closure(pool2: RankPool):
    _assert_equal(pool2.run(_closure), rtol=1e-4, atol=1e-5)


def _scheduled(before: bool, load: bool) -> Any:
    alone, together = _model("mlp"), _model("mlp")
    plain = torch.optim.SGD(together.parameters(), lr=0.1, momentum=0.9)
    if before:
        scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(plain, together.named_parameters())
    if not before:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    base = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    base_scheduler = torch.optim.lr_scheduler.StepLR(base, 1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            _train(together, optimizer, 1, _mine)
            _train(alone, base, 1, lambda batch: batch)
            scheduler.step()
            base_scheduler.step()
            if load:
                optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == base.param_groups[0]["lr"] == 0.0125
    return _weights(together), _weights(alone)


@pytest.mark.parametrize("load", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_learning_rate_scheduler(pool2: RankPool, before: bool, load: bool):
    _assert_equal(pool2.run(_scheduled, before, load), rtol=1e-4, atol=1e-5)


def _restored(how: str, overlap: bool) -> Any:
    """Train, save, and go on with what was restored."""
    alone, together = _model("mlp"), _model("mlp")
    make = OPTIMIZERS["Adam"]
    calls = []
    with _overlapping(overlap):
        optimizer = hvd.DistributedOptimizer(
            make(together.parameters()), together.named_parameters(), backward_passes_per_step=2
        )
        optimizer.set_backward_passes_per_step(1)
        _train(together, optimizer, 2, _mine)
        if how == "state_dict":
            buffer = io.BytesIO()
            torch.save(optimizer.state_dict(), buffer)
            buffer.seek(0)
            optimizer = hvd.DistributedOptimizer(
                make(together.parameters()), together.named_parameters()
            )
            optimizer.load_state_dict(torch.load(buffer))
        elif how == "pickle":
            together, optimizer = pickle.loads(pickle.dumps((together, optimizer)))
        else:
            if hvd.rank() == 1:  # ranks need not copy equally often
                copy.deepcopy((together, optimizer))
            kept = together, optimizer
            together, optimizer = copy.deepcopy(kept)
            _train(*kept, 1, _mine)  # the original lives on
        assert type(optimizer).__name__ == "Adam"
        assert optimizer.process_set is hvd.global_process_set
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        _train(together, optimizer, 2, _mine)
    assert len(calls) == 2
    base = make(alone.parameters())
    _train(alone, base, 2, lambda batch: batch)
    _train(alone, base, 2, lambda batch: batch)
    return _weights(together), _weights(alone)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
def test_restored(pool2: RankPool, how: str, overlap: bool):
    _assert_equal(pool2.run(_restored, how, overlap), rtol=1e-4, atol=1e-4)


def _clipped(how: str) -> Any:
    alone, together = _model("mlp"), _model("mlp")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(together.parameters(), lr=0.1))
    base = torch.optim.SGD(alone.parameters(), lr=0.1)
    caught: list[Any] = []
    for step in range(2):
        optimizer.zero_grad()
        base.zero_grad()
        _loss(together, _mine(_data(step, hvd.size()))).backward()
        _loss(alone, _data(step, hvd.size())).backward()
        optimizer.synchronize()
        for model in (together, alone):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if how == "skip":
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        caught.append([str(w.message) for w in seen])
        base.step()
    for messages in caught:
        assert len(messages) == (0 if how == "skip" else 1), messages
        assert how == "skip" or "skip_synchronize" in messages[0]
    return _weights(together), _weights(alone)


@pytest.mark.parametrize("how", ["skip", "warn"])
def test_clipping(pool2: RankPool, how: str):
    _assert_equal(pool2.run(_clipped, how), rtol=1e-4, atol=1e-5)


def _scaled(name: str, unscale: bool, op: str, overlap: bool) -> Any:
    """Rank 1 alone meets infinity in the second step: nobody makes it, and all go on."""
    model = _model("mlp")
    with _overlapping(overlap):
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS[name](model.parameters()), model.named_parameters(), op=getattr(hvd, op)
        )
        scaler = torch.amp.GradScaler(device="cpu", init_scale=1024.0)
        moved, scales = [], []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(4):
                optimizer.zero_grad()
                before = _weights(model)
                loss = _loss(model, _mine(_data(step, hvd.size())))
                if step == 1 and hvd.rank() == 1:
                    loss = loss * torch.inf
                scaler.scale(loss).backward()
                if unscale:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                after = _weights(model)
                moved.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
                scales.append(scaler.get_scale())
    assert moved == [True, False, True, True]
    assert scales == [1024.0, 512.0, 512.0, 512.0]
    return _weights(model)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("op", ["Average", "Adasum"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adam fused"])
def test_grad_scaler(pool2: RankPool, name: str, op: str, unscale: bool, overlap: bool):
    first, second = pool2.run(_scaled, name, unscale, op, overlap)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(weight.isfinite().all() for weight in first)


def _scaled_value() -> Any:
    alone, together = _model("mlp"), _model("mlp")
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(together.parameters(), lr=0.1))
    base = torch.optim.SGD(alone.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device="cpu", init_scale=1024.0)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(_loss(together, _mine(_data(step, hvd.size())))).backward()
        scaler.step(optimizer)
        scaler.update()
    _train(alone, base, 3, lambda batch: batch)
    return _weights(together), _weights(alone)


def test_grad_scaler_gives_the_same_weights(pool2: RankPool):
    _assert_equal(pool2.run(_scaled_value), rtol=1e-4, atol=1e-5)


def _added_group() -> Any:
    alone, together = _model("mlp"), _model("mlp")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(together[2].parameters(), lr=0.1), together[2].named_parameters()
    )
    base = torch.optim.SGD(alone[2].parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": together[0].parameters(), "lr": 0.01})
            base.add_param_group({"params": alone[0].parameters(), "lr": 0.01})
        together.zero_grad()
        alone.zero_grad()
        _loss(together, _mine(_data(step, hvd.size()))).backward()
        _loss(alone, _data(step, hvd.size())).backward()
        optimizer.step()
        base.step()
    return _weights(together), _weights(alone)


def test_added_param_group(pool2: RankPool):
    _assert_equal(pool2.run(_added_group), rtol=1e-4, atol=1e-5)


def _adasum(kind: str, restore: str) -> Any:
    """One step with SGD is the Adasum of the ranks' own steps."""
    model, own = _model(kind), _model(kind)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=hvd.Adasum
    )
    if restore == "pickle":
        model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    elif restore == "deepcopy":
        model, optimizer = copy.deepcopy((model, optimizer))
    before = _weights(own)
    _train(own, torch.optim.SGD(own.parameters(), lr=0.1), 1, _mine)
    expected = [
        start + hvd.allreduce((end - start).contiguous(), op=hvd.Adasum)
        for start, end in zip(before, _weights(own), strict=True)
    ]
    batch = _mine(_data(0, hvd.size()))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = _loss(model, batch)
        loss.backward()
        return loss

    loss = _loss(model, batch).item()
    assert optimizer.step(closure).item() == loss
    optimizer.synchronize()
    with pytest.raises(AssertionError), optimizer.skip_synchronize():
        pass
    with optimizer.no_sync():
        _loss(model, batch).backward()
    return _weights(model), expected


@pytest.mark.parametrize("restore", ["", "pickle", "deepcopy"])
@pytest.mark.parametrize("kind", ["mlp", "conv", "mixed"])
def test_adasum(pool2: RankPool, kind: str, restore: str):
    wide = {"rtol": 1e-2, "atol": 1e-2} if kind == "mixed" else {"rtol": 1e-4, "atol": 1e-6}
    _assert_equal(pool2.run(_adasum, kind, restore), **wide)


def _some(rank: int, size: int) -> Any:
    chosen = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[chosen])
    model, alone = _model("mlp"), _model("mlp")
    options = {"process_set": chosen}
    first = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
    base = torch.optim.SGD(alone.parameters(), lr=0.1)
    assert bool(first._hooks) == (rank != 1)
    whole = _data(0, 3)
    for _ in range(2):
        first.zero_grad()
        base.zero_grad()
        _loss(model, _mine(whole)).backward()
        first.step()
        parts = [rank] if rank == 1 else [0, 2]
        for part in parts:
            x = whole[part * ROWS : (part + 1) * ROWS]
            (_loss(alone, x) / len(parts)).backward()
        base.step()
    copied_model, copied = copy.deepcopy((model, first))
    assert copied.process_set is chosen
    _train(copied_model, copied, 1, _mine)
    # An optimizer of everybody, though only some have made one before.
    everyone = _model("mlp")
    last = hvd.DistributedOptimizer(torch.optim.SGD(everyone.parameters(), lr=0.1))
    _train(everyone, last, 2, _mine)
    with pytest.raises(NotImplementedError, match="global"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(everyone.parameters(), lr=0.1), op=hvd.Adasum, process_set=chosen
        )
    with pytest.raises(ValueError, match="not registered"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(everyone.parameters(), lr=0.1), process_set=hvd.ProcessSet([0, 1])
        )
    return _weights(model), _weights(alone), _weights(everyone)


def test_process_set():
    results = run_ranks(_some, 3)
    _assert_equal([results[0][:2], results[2][:2]], rtol=1e-4, atol=1e-5)
    _assert_equal([results[1][:2]], rtol=0, atol=0)
    for _, _, everyone in results:
        assert all(torch.equal(a, b) for a, b in zip(everyone, results[0][2], strict=True))


def _single(rank: int, size: int) -> None:
    hvd.init()
    for name, make in OPTIMIZERS.items():
        plain, wrapped = _model("mlp"), _model("mlp")
        optimizer = hvd.DistributedOptimizer(
            make(wrapped.parameters()), wrapped.named_parameters(), backward_passes_per_step=2
        )
        _train(wrapped, optimizer, 3, _mine)
        _train(plain, make(plain.parameters()), 3, _mine)
        for mine, expected in zip(_weights(wrapped), _weights(plain), strict=True):
            assert torch.equal(mine, expected), name
        assert all(not p._post_accumulate_grad_hooks for p in wrapped.parameters())
        for _ in range(3):  # nobody counts backward passes
            _loss(wrapped, _data(0, 1)).backward()
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _loss(wrapped, _data(0, 1)).backward()
            optimizer.synchronize()
            if name != "LBFGS":
                optimizer.step()
    adasum = hvd.DistributedOptimizer(make(_model("mlp").parameters()), op=hvd.Adasum)
    assert not adasum._hooks


def test_one_rank_is_the_plain_optimizer():
    run_ranks(_single, 1)


def _uneven(overlap: bool) -> list[torch.Tensor]:
    """Rank 1 has no batch in the first epoch; later all take part."""
    model = _model("mlp")
    with _overlapping(overlap), mock.patch("horovod.torch.gradients.LARGEST_BUCKET", 100):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        )
        for epoch in range(3):
            _train(model, optimizer, 0 if epoch == 0 and hvd.rank() == 1 else 2, _mine)
            if epoch == 1 and hvd.rank() == 0:
                _train(model, optimizer, 1, _mine)
            hvd.join()
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return _weights(model)


@pytest.mark.parametrize("overlap", [False, True])
def test_join(pool2: RankPool, overlap: bool):
    first, second = pool2.run(_uneven, overlap)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_machine_counts_differ_between_ranks(pool2: RankPool):
    """Ranks on unlike machines cut the same buckets."""

    def train() -> Any:
        return _equality("mlp", "SGD", hvd.rank() == 0, {}, hvd.rank() == 0)

    _assert_equal(pool2.run(train), rtol=1e-4, atol=1e-5)
