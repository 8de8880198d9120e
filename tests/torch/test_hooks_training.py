"""Communication hooks at work in DistributedOptimizer."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from horovod.torch import hooks
from tests.accelerators import accelerator as find_accelerator
from tests.ranks import RankPool, run_ranks
from tests.torch.training import overlapping, weights_of

Tensor = torch.Tensor

PAGE = Path(__file__).resolve().parents[2] / "docs" / "communication_hooks.md"
HOOKS: dict[str, Callable[[], hooks.CommunicationHook]] = {
    "FP16": hooks.FP16,
    "BF16": hooks.BF16,
    "PowerSGD": lambda: hooks.PowerSGD(2),
    "TopK": lambda: hooks.TopK(0.05),
    "EightBit": hooks.EightBit,
}


class Double(hooks.CommunicationHook):
    """A user's hook, exact enough to compare with; remembers what it was given."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[str], list[torch.Size]]] = []

    def start(self, bucket: hooks.GradientBucket) -> Callable[[], None]:
        self.seen.append((bucket.name, bucket.names, bucket.shapes))
        wide = [gradient.double() for gradient in bucket.gradients]
        wait = bucket.allreduce(wide)

        def finish() -> None:
            wait()
            for gradient, result in zip(bucket.gradients, wide, strict=True):
                gradient.copy_(result)

        return finish


# -- learning ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, ...]:
    """Images and labels to train with, images and labels to test with."""
    from sklearn.datasets import load_digits  # here: collecting tests takes long enough

    raw = load_digits()
    order = torch.randperm(len(raw.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(raw.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(raw.target)[order]
    return images[:1280], labels[:1280], images[1280:], labels[1280:]


def _learn(name: str | None, data: tuple[Tensor, ...]) -> float:
    """The share of test images that are recognised after training."""
    images, labels, test_images, test_labels = data
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    hook = None if name is None else HOOKS[name]()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        model.named_parameters(),
        communication_hook=hook,
    )
    for epoch in range(12):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for batch in order[hvd.rank() :: hvd.size()].split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return float((model(test_images).argmax(1) == test_labels).float().mean())


@pytest.fixture(scope="module")
def uncompressed(pool2: RankPool, digits: tuple[Tensor, ...]) -> float:
    return pool2.run(_learn, None, digits)[0]


@pytest.mark.parametrize("name", HOOKS)
def test_learns_the_digits(pool2: RankPool, digits: Any, uncompressed: float, name: str):
    first, second = pool2.run(_learn, name, digits)
    assert first == second
    assert first >= 0.93
    assert first >= uncompressed - 0.02


# -- in the optimizer ----------------------------------------------------------------------


class Various(nn.Module):
    """Types, layouts and sizes of parameters; one that only the first rank uses."""

    def __init__(self) -> None:
        super().__init__()
        convolution = nn.Conv2d(3, 12, 3, padding=1)
        self.convolution = convolution.to(memory_format=torch.channels_last)
        self.wide = nn.Linear(48, 40, dtype=torch.float64)
        self.narrow = nn.Linear(40, 30, dtype=torch.bfloat16)
        self.sometimes = nn.Linear(30, 20)
        self.last = nn.Linear(30, 20)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x).flatten(1).double()
        x = self.narrow(self.wide(x).bfloat16()).float()
        return self.sometimes(x) if hvd.rank() == 0 else self.last(x)


def _batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + hvd.rank())
    return torch.randn(4, 3, 2, 2, generator=generator)


def _train(
    make: Callable[[], Any] | None, options: dict[str, Any], overlap: bool, steps: int = 3
) -> list[Tensor]:
    torch.manual_seed(0)
    model = Various()
    passes = options.get("backward_passes_per_step", 1)
    with overlapping(overlap), mock.patch("horovod.torch.gradients.bucketing.LARGEST_BUCKET", 2000):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01),
            model.named_parameters(),
            communication_hook=None if make is None else make(),
            **options,
        )
        for step in range(steps):
            optimizer.zero_grad()
            with optimizer.no_sync():
                model(_batch(100 + step)).square().mean().backward()
            for part in range(passes):
                model(_batch(passes * step + part)).square().mean().backward()
            optimizer.step()
    return weights_of(model)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"op": hvd.Sum},
    {"groups": 3},
    {"gradient_predivide_factor": 2.0},
    {"backward_passes_per_step": 2},
    {"shard_state": True},
]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_own_hook_gives_what_allreduce_gives(pool2: RankPool, options: Any, overlap: bool):
    mine = pool2.run(_train, Double, options, overlap)
    plain = pool2.run(_train, None, options, overlap)
    for a, b, expected in zip(*mine, plain[0], strict=True):
        assert torch.equal(a, b), "ranks differ"
        torch.testing.assert_close(a, expected)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", HOOKS)
def test_ranks_stay_equal(pool2: RankPool, name: str, overlap: bool):
    plain = pool2.run(_train, None, {}, overlap)[0]
    for options in OPTIONS:
        first, second = pool2.run(_train, HOOKS[name], options, overlap)
        for mine, theirs in zip(first, second, strict=True):
            assert torch.equal(mine, theirs), options
            assert mine.isfinite().all()
    wide = {"rtol": 0.05, "atol": 0.05}  # the steps are small: it is the same way, if not as far
    for mine, expected in zip(pool2.run(_train, HOOKS[name], {}, overlap)[0], plain, strict=True):
        torch.testing.assert_close(mine, expected, **wide)


def _called() -> list[Any]:
    """What a hook is called with while gradients arrive in different orders."""
    first, second = nn.Linear(7, 8), nn.Linear(7, 9, bias=False)
    second.weight.data = torch.randn(7, 9).t()
    hook = Double()
    named = [*first.named_parameters("first"), *second.named_parameters("second")]
    with overlapping(True), mock.patch("horovod.torch.gradients.bucketing.LARGEST_BUCKET", 4):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([param for _, param in named], lr=0.1), named, communication_hook=hook
        )
        for _ in range(2):
            optimizer.zero_grad()
            losses = [layer(torch.ones(1, 7)).sum() for layer in (first, second)]
            for loss in losses[:: 1 if hvd.rank() == 0 else -1]:
                loss.backward()
            optimizer.step()
    return hook.seen


def test_called_in_the_same_order_with_names_and_shapes(pool2: RankPool):
    seen, others = pool2.run(_called)
    assert seen == others
    assert len(seen) == 6
    shapes = {names[0]: tuple(sizes[0]) for _, names, sizes in seen}
    # Outermost in memory first: the second weight is a transposed matrix.
    assert shapes == {"first.weight": (8, 7), "first.bias": (8,), "second.weight": (7, 9)}


def _embedded(sparse_as_dense: bool) -> tuple[bool, list[str], Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 10, sparse=True), nn.Linear(10, 3))
    hook = Double()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        sparse_as_dense=sparse_as_dense,
        communication_hook=hook,
    )
    index = torch.tensor([1, 3 + hvd.rank()])
    before = model[0].weight.detach().clone()
    model(index).sum().backward()
    local = model[0].weight.grad.to_dense()
    optimizer.step()
    moved = before - model[0].weight.detach()
    return model[0].weight.grad.is_sparse, hook.seen[0][1], moved, 0.1 * local


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_gradients_take_their_own_way(pool2: RankPool, sparse_as_dense: bool):
    results = pool2.run(_embedded, sparse_as_dense)
    mean = (results[0][3] + results[1][3]) / 2
    for is_sparse, names, moved, _ in results:
        assert is_sparse
        assert ("0.weight" in names) == sparse_as_dense
        torch.testing.assert_close(moved, mean, rtol=1e-4, atol=1e-6)


def _scaled(name: str) -> tuple[list[bool], list[Tensor]]:
    """An inf on one rank, in the second step."""
    torch.manual_seed(0)
    model = nn.Linear(30, 20)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), communication_hook=HOOKS[name]()
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    moved = []
    for step in range(4):
        optimizer.zero_grad()
        before = weights_of(model)
        generator = torch.Generator().manual_seed(10 * step + hvd.rank())
        loss = model(torch.randn(4, 30, generator=generator)).square().mean()
        if step == 1 and hvd.rank() == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        pairs = zip(before, weights_of(model), strict=True)
        moved.append(any(not torch.equal(a, b) for a, b in pairs))
    return moved, weights_of(model)


@pytest.mark.parametrize("name", HOOKS)
def test_grad_scaler(pool2: RankPool, name: str):
    (moved, first), (other, second) = pool2.run(_scaled, name)
    assert moved == other == [True, False, True, True]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(weight.isfinite().all() for weight in first)


def _copied(way: str) -> bool:
    """Whether a copy of model and optimizer goes on as they do."""
    torch.manual_seed(0)
    model = nn.Linear(30, 20)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), communication_hook=hooks.TopK(0.1)
    )
    pairs = [(model, optimizer)]
    for step in range(4):
        if step == 2:
            whole = (model, optimizer)
            pairs.append(
                copy.deepcopy(whole) if way == "deepcopy" else pickle.loads(pickle.dumps(whole))
            )
        generator = torch.Generator().manual_seed(10 * step + hvd.rank())
        batch = torch.randn(4, 30, generator=generator)
        for each, its_optimizer in pairs:
            its_optimizer.zero_grad()
            each(batch).square().mean().backward()
            its_optimizer.step()
    return all(torch.equal(a, b) for a, b in zip(*(weights_of(m) for m, _ in pairs), strict=True))


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_go_on_with_the_state(pool2: RankPool, way: str):
    assert pool2.run(_copied, way) == [True, True]


def _with_joined_rank(name: str) -> str:
    """Rank 1 has a batch less in every epoch."""
    torch.manual_seed(0)
    model = nn.Linear(30, 20)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), communication_hook=HOOKS[name]()
    )
    failure = ""
    for _ in range(2):
        for batch in range(3 - hvd.rank()):
            optimizer.zero_grad()
            model(torch.full((1, 30), float(batch + hvd.rank()))).square().mean().backward()
            try:
                optimizer.step()
            except hvd.HorovodInternalError as error:
                failure = str(error)
        hvd.join()
    return failure


@pytest.mark.parametrize("name", HOOKS)
def test_join(pool2: RankPool, name: str):
    failure, other = pool2.run(_with_joined_rank, name)
    assert other == ""
    if name in ("TopK", "EightBit"):
        assert "rank 1" in failure
        assert "has joined" in failure
    else:
        assert failure == ""


def _among_some(rank: int, size: int) -> list[Tensor]:
    chosen = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[chosen])
    torch.manual_seed(0)
    model = nn.Linear(30, 20)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        process_set=chosen,
        communication_hook=hooks.EightBit(),
    )
    for step in range(3):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(4, 30, generator=generator)).square().mean().backward()
        optimizer.step()
    return weights_of(model)


def test_process_set():
    first, outside, third = run_ranks(_among_some, 3)
    assert all(torch.equal(a, b) for a, b in zip(first, third, strict=True))
    assert not torch.equal(first[0], outside[0])


def _added_group() -> tuple[bool, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10))
    hook = hooks.TopK(0.1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model[1].parameters(), lr=0.1), communication_hook=hook
    )
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": model[0].parameters()})
        model.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + hvd.rank())
        model(torch.randn(4, 30, generator=generator)).square().mean().backward()
        optimizer.step()
    return len(hook.state_dict()["residuals"]) == 4, weights_of(model)


def test_added_param_group(pool2: RankPool):
    (known, first), (_, second) = pool2.run(_added_group)
    assert known
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.skipif(find_accelerator() is None, reason="needs an accelerator")
@pytest.mark.parametrize("name", HOOKS)
def test_accelerator(pool2: RankPool, name: str):
    """Gradients on a device that the ranks share give what they give in host memory."""

    def train(where: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 20)).to(where)
        with mock.patch("horovod.torch.gradients.bucketing.LARGEST_BUCKET", 2000):
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), communication_hook=HOOKS[name]()
            )
            for step in range(5):
                optimizer.zero_grad()
                generator = torch.Generator().manual_seed(10 * step + hvd.rank())
                model(torch.randn(4, 30, generator=generator).to(where)).square().mean().backward()
                optimizer.step()
        return [weight.cpu() for weight in weights_of(model)]

    device = find_accelerator()
    assert device is not None
    first, second = pool2.run(train, device.type)
    expected = pool2.run(train, "cpu")[0]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for mine, host in zip(first, expected, strict=True):
        torch.testing.assert_close(mine, host, rtol=0.02, atol=0.02)


# -- bad input -----------------------------------------------------------------------------


def _refused(options: Callable[[], dict[str, Any]]) -> str:
    with pytest.raises(ValueError) as caught:
        hvd.DistributedOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), **options())
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (lambda: {"communication_hook": hooks.FP16}, "must be a CommunicationHook object"),
        (lambda: {"communication_hook": "fp16"}, "must be a CommunicationHook object"),
        (
            lambda: {"communication_hook": hooks.FP16(), "compression": hvd.Compression.fp16},
            "pass one of them",
        ),
        (
            lambda: {"communication_hook": hooks.TopK(), "op": hvd.Adasum},
            "needs op=Average or op=Sum, not Adasum",
        ),
        (
            lambda: {"communication_hook": hooks.TopK(), "op": hvd.Max},
            "needs op=Average or op=Sum, not Max",
        ),
        (
            lambda: {"communication_hook": hooks.TopK(0.1 * (1 + hvd.rank()))},
            "communication_hook of DistributedOptimizer differs between ranks 0 and 1",
        ),
        (
            lambda: {"communication_hook": hooks.FP16() if hvd.rank() else None},
            "communication_hook of DistributedOptimizer differs between ranks 0 and 1",
        ),
    ],
)
def test_bad_arguments(pool2: RankPool, options: Callable[[], dict[str, Any]], said: str):
    for message in pool2.run(_refused, options):
        assert said in message


def _shared() -> str:
    hook = hooks.PowerSGD()
    first = hvd.DistributedOptimizer(
        torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), communication_hook=hook
    )
    message = _refused(lambda: {"communication_hook": hook})
    assert first is not None
    return message


def test_a_hook_serves_one_optimizer(pool2: RankPool):
    for message in pool2.run(_shared):
        assert "serves another optimizer" in message


def _after_a_refusal() -> bool:
    hook = hooks.PowerSGD()
    _refused(lambda: {"communication_hook": hook, "groups": -1})
    model = nn.Linear(2, 2)
    return bool(
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), communication_hook=hook
        )
    )


def test_a_refused_optimizer_does_not_keep_the_hook(pool2: RankPool):
    assert pool2.run(_after_a_refusal) == [True, True]


# -- the documentation ---------------------------------------------------------------------


def _execute(programs: list[str]) -> list[str]:
    names: dict[str, Any] = {}
    for program in programs:
        exec(compile(program, str(PAGE), "exec"), names)
    return sorted(names)


def test_programs_of_the_page_run(pool2: RankPool):
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(programs) == 3
    assert "Double" in pool2.run(_execute, programs)[0]


def test_numbers_of_the_page():
    """Its table: kilobytes that a rank sends for a weight of 1024 x 1024."""
    rows = re.findall(r"^\| `([^`]+)` \| ([\d., |]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 6
    for call, numbers in rows:
        hook = eval(f"hooks.{call}") if call != "None" else None
        for size, number in zip((2, 8, 64), numbers.split("|"), strict=True):
            plain = 2 * 4 * 1024**2 * (size - 1) / size
            sent = hook.traffic((1024, 1024), torch.float32, size) if hook else plain
            assert f"{sent / 1000:,.0f}" == number.strip(), call
