"""DistributedOptimizer with parameters on devices, with every option that changes what travels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import horovod.torch as hvd
from horovod.torch import hooks
from tests.accelerators import own_device
from tests.effort import examples
from tests.gpu import JOBS, size_of
from tests.gpu.pools import GpuPools, few_examples
from tests.gpu.training import (
    TIGHT,
    WIDE,
    Twins,
    assert_alike,
    assert_same,
    precise,
    sgd,
    weights_of,
)
from tests.torch.training import MODELS, OPTIMIZERS, batch_of, loss_of, make_model, my_rows

Tensor = torch.Tensor

COMPRESSIONS = {
    "none": hvd.Compression.none,
    "fp16": hvd.Compression.fp16,
    "bf16": hvd.Compression.bf16,
}


# -- like one process ---------------------------------------------------------------------------


def trained(how: dict[str, Any]) -> Any:
    passes = how["passes"]
    twins = Twins(
        how["model"],
        OPTIMIZERS[how["optimizer"]],
        compression=COMPRESSIONS[how["compression"]],
        backward_passes_per_step=passes,
        **how["options"],
    )
    for step in range(4):
        twins.zero_grad(set_to_none=not how["zeros"])
        for part in range(passes):
            twins.backward(passes * step + part)
        twins.step()
    return twins.results()


@pytest.mark.parametrize("job", JOBS)
@few_examples
@given(
    model=st.sampled_from(sorted(MODELS)),
    # Others divide by small numbers, and make many digits of a weight of a gradient's last one.
    optimizer=st.sampled_from([name for name in sorted(OPTIMIZERS) if name.startswith("SGD")]),
    compression=st.sampled_from(sorted(COMPRESSIONS)),
    passes=st.integers(1, 2),
    zeros=st.booleans(),
    options=st.sampled_from([{}, {"groups": 2}, {"gradient_predivide_factor": 2.0}]),
)
def test_like_one_process(gpus: GpuPools, job: str, **how: Any):
    narrow = how["compression"] != "none" or how["model"] == "mixed"
    results = gpus.run(job, trained, how)
    assert_alike(results, **(WIDE if narrow else {"rtol": 1e-3, "atol": 1e-4}))


def trained_by(optimizer: str) -> Any:
    twins = Twins("mlp", OPTIMIZERS[optimizer])
    for step in range(4):

        def evaluate(own: Any, model: nn.Module, x: Tensor) -> Tensor:
            own.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss

        rows, batch = twins.rows(step), twins.batch(step)
        if optimizer == "LBFGS":
            twins.optimizer.step(lambda rows=rows: evaluate(twins.optimizer, twins.together, rows))
            twins.base.step(lambda batch=batch: evaluate(twins.base, twins.alone, batch))
        else:
            twins.train([step])
    return twins.results()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("job", ["2 ranks", "3 ranks"])
def test_every_optimizer(gpus: GpuPools, job: str, optimizer: str):
    assert_alike(gpus.run(job, trained_by, optimizer), rtol=1e-2, atol=1e-3)


def compressed(name: str) -> tuple[list[Tensor], list[Tensor], float]:
    """Gradients of whole numbers, which half precision adds up exactly; and how far that is."""
    device = own_device()
    model = nn.Linear(40, 30).to(device)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model.named_parameters(),
        op=hvd.Sum,
        compression=COMPRESSIONS[name],
    )
    x = torch.full((1, 40), float(hvd.rank() + 1), device=device)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    total = -3.0 * sum(range(1, hvd.size() + 1))
    gradients = {param.grad.dtype for param in model.parameters()}
    assert gradients == {torch.float32}
    return weights_of(model), [torch.full((30, 40), total)], float(model.bias.detach()[0])


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize("job", JOBS)
def test_compression(gpus: GpuPools, job: str, name: str):
    for (weight, _), (expected,), bias in gpus.run(job, compressed, name):
        assert torch.equal(weight, expected)
        assert bias == -3.0 * size_of(job)


# -- torch.compile ------------------------------------------------------------------------------


def compiled(mode: str) -> tuple[list[Tensor], list[Tensor]]:
    """Train with a compiled step and with the same step as it is; the weights of both."""
    device = own_device()

    def make_step() -> tuple[nn.Module, Callable[[Tensor], None]]:
        torch.manual_seed(0)
        # Odd sizes: a gradient that followed the one before at once would not be aligned.
        model = nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 7)).to(device)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
        )

        def step(batch: Tensor) -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        return model, step

    (model, step), (reference, plain_step) = make_step(), make_step()
    generator = torch.Generator().manual_seed(hvd.rank())
    batches = [torch.randn(16, 20, generator=generator).to(device) for _ in range(6)]
    step(batches[0])  # so that there are momenta, which no CUDA graph may own
    torch._dynamo.reset()
    fast_step = torch.compile(step, mode=mode)
    for batch in batches[1:]:
        fast_step(batch)
    for batch in batches:
        plain_step(batch)
    return weights_of(model), weights_of(reference)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_step(gpus: GpuPools, mode: str):
    results = gpus.run("2 ranks", compiled, mode, timeout=180)
    for weights, expected in results:
        assert all(map(torch.equal, weights, results[0][0]))
        for one, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# -- accumulation -------------------------------------------------------------------------------


def accumulated(how: str) -> Any:
    """Two batches to a step."""
    twins = Twins("mlp", backward_passes_per_step=2 if how == "passes" else 1)
    if how == "changed":
        twins.train([0])
        twins.optimizer.set_backward_passes_per_step(2)
    for start in (2, 4, 6):
        twins.zero_grad()
        if how == "no_sync":
            with twins.optimizer.no_sync():
                twins.backward(start)
        else:
            twins.backward(start)
        twins.backward(start + 1)
        twins.step()
    return twins.results()


@pytest.mark.parametrize("how", ["passes", "changed", "no_sync"])
@pytest.mark.parametrize("job", JOBS)
def test_accumulation(gpus: GpuPools, job: str, how: str):
    assert_alike(gpus.run(job, accumulated, how))


# -- hooks --------------------------------------------------------------------------------------


HOOKS: dict[str, Callable[[], hooks.CommunicationHook]] = {
    "FP16": hooks.FP16,
    "BF16": hooks.BF16,
    "PowerSGD": lambda: hooks.PowerSGD(2),
    "TopK": lambda: hooks.TopK(0.05),
    "EightBit": hooks.EightBit,
}


def hooked(name: str, on_device: bool) -> list[Tensor]:
    device = precise() if on_device else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 20)).to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        communication_hook=HOOKS[name](),
    )
    for step in range(5):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + hvd.rank())
        model(torch.randn(4, 30, generator=generator).to(device)).square().mean().backward()
        optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("job", JOBS)
def test_hooks_give_what_they_give_in_host_memory(gpus: GpuPools, job: str, name: str):
    found, in_host_memory = (gpus.run(job, hooked, name, where) for where in (True, False))
    assert_same(found)
    for mine, expected in zip(found[0], in_host_memory[0], strict=True):
        torch.testing.assert_close(mine, expected, rtol=0.02, atol=0.02)


# -- sparse gradients ---------------------------------------------------------------------------


class Words(nn.Module):
    """A sparse layer and a dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(12, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.words(rows))


def trained_sparsely(as_dense: bool) -> Any:
    """Rows of a rank's own, rows that all have, and one rank without any in a step."""
    twins = Twins(Words, lambda params: torch.optim.SGD(params, lr=0.1), sparse_as_dense=as_dense)
    size = hvd.size()
    for step in range(4):
        everybody = [[rank, rank, 5 + step] for rank in range(size)]
        if step == 2:
            everybody[-1] = []
        twins.zero_grad()
        for rank, rows in enumerate(everybody):
            if rows:
                indices = torch.tensor(rows, device=twins.device)
                (twins.alone(indices).square().sum() / size).backward()
                if rank == hvd.rank():
                    twins.together(indices).square().sum().backward()
        twins.step()
        assert twins.together.words.weight.grad.is_sparse
    return twins.results()


@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("job", JOBS)
def test_sparse_gradients(gpus: GpuPools, job: str, as_dense: bool):
    assert_alike(gpus.run(job, trained_sparsely, as_dense), rtol=1e-3, atol=1e-4)


# -- uneven data --------------------------------------------------------------------------------


def joined(batches: list[list[int]]) -> Any:
    """In each epoch every rank has its own number of batches; who has none left adds zeros."""
    twins = Twins("mlp", lambda params: torch.optim.SGD(params, lr=0.1))
    size, number = hvd.size(), 0
    for numbers in batches:
        for step in range(max(numbers)):
            if step < numbers[hvd.rank()]:
                twins.optimizer.zero_grad()
                loss_of(twins.together, twins.rows(number + step)).backward()
                twins.optimizer.step()
            twins.base.zero_grad()
            for rank in range(size):
                if step < numbers[rank]:
                    rows = twins.rows(number + step, rank)
                    (loss_of(twins.alone, rows) / size).backward()
            twins.base.step()
        number += max(numbers)
        hvd.join()
        # Who joined early has missed the updates after that.
        longest = numbers.index(max(numbers))
        hvd.broadcast_parameters(twins.together.state_dict(), root_rank=longest)
    return twins.results()


@pytest.mark.parametrize("job", JOBS)
@settings(few_examples, max_examples=examples(6))
@given(data=st.data())
def test_join(gpus: GpuPools, job: str, data: st.DataObject):
    """Several epochs, in which the ranks have different numbers of batches."""
    size = size_of(job)
    epoch = st.lists(st.integers(0, 3), min_size=size, max_size=size)
    batches = data.draw(st.lists(epoch, min_size=1, max_size=3))
    assert_alike(gpus.run(job, joined, batches))


# -- Adasum -------------------------------------------------------------------------------------


def combined(model: str) -> Any:
    """One step of SGD is the Adasum of the ranks' own steps."""
    device = precise()
    together, own = (make_model(model).to(device) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(together.parameters(), lr=0.1), together.named_parameters(), op=hvd.Adasum
    )
    base = torch.optim.SGD(own.parameters(), lr=0.1)
    before = [param.detach().clone() for param in own.parameters()]
    for net, stepper in ((together, optimizer), (own, base)):
        stepper.zero_grad()
        loss_of(net, my_rows(batch_of(0, hvd.size())).to(device)).backward()
        stepper.step()
    expected = [
        (start + hvd.allreduce((param.detach() - start).contiguous(), op=hvd.Adasum)).cpu()
        for start, param in zip(before, own.parameters(), strict=True)
    ]
    result = weights_of(together), expected
    for step in range(1, 4):
        optimizer.zero_grad()
        loss_of(together, my_rows(batch_of(step, hvd.size())).to(device)).backward()
        optimizer.step()
    return result, weights_of(together)


@pytest.mark.parametrize("model", ["mlp", "conv", "mixed"])
@pytest.mark.parametrize("job", [*JOBS, "4 hosts"])
def test_adasum(gpus: GpuPools, job: str, model: str):
    results = gpus.run(job, combined, model)
    assert_alike([first for first, _ in results], **(WIDE if model == "mixed" else TIGHT))
    assert_same([later for _, later in results])


# -- sharded state ------------------------------------------------------------------------------


SHARDED: dict[str, Any] = {
    "SGD": sgd,
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def sharded(name: str) -> tuple[list[Tensor], list[Tensor], int, int]:
    """Weights with and without the option, and the elements of state that this rank keeps."""
    found, kept = [], []
    for shard in (True, False):
        device = precise()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 31), nn.Linear(31, 3))
        model.to(device)
        optimizer = hvd.DistributedOptimizer(
            SHARDED[name](model.parameters()), model.named_parameters(), shard_state=shard
        )
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, my_rows(batch_of(step, hvd.size())).to(device)).backward()
            optimizer.step()
        found.append(weights_of(model))
        state = optimizer.__dict__["state"].values()
        kept.append(sum(t.numel() for each in state for t in each.values() if torch.is_tensor(t)))
    return found[0], found[1], *kept


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("job", JOBS)
def test_sharded_state(gpus: GpuPools, job: str, name: str):
    results = gpus.run(job, sharded, name)
    assert_same([mine for mine, _, _, _ in results])
    for mine, plain, kept, all_of_it in results:
        for found, expected in zip(mine, plain, strict=True):
            if size_of(job) == 2:  # there is one order only in which two numbers can be added
                assert torch.equal(found, expected)
            torch.testing.assert_close(found, expected, **TIGHT)
        assert kept < all_of_it


# -- scalers, several optimizers, process sets --------------------------------------------------


def scaled(unscale: bool) -> tuple[list[bool], list[float], list[Tensor]]:
    """The last rank alone meets infinity in the second step: nobody makes it, and all go on."""
    device = precise()
    model = make_model("mlp").to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.01), model.named_parameters()
    )
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    moved, scales = [], []
    for step in range(4):
        optimizer.zero_grad()
        before = weights_of(model)
        narrow = torch.float16 if device.type == "cuda" else torch.bfloat16
        with torch.autocast(device.type, narrow):
            loss = loss_of(model, my_rows(batch_of(step, hvd.size())).to(device))
        if step == 1 and hvd.rank() == hvd.size() - 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        pairs = zip(before, weights_of(model), strict=True)
        moved.append(any(not torch.equal(a, b) for a, b in pairs))
        scales.append(scaler.get_scale())
    return moved, scales, weights_of(model)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("job", JOBS)
def test_a_scaler_skips_on_all_ranks_alike(gpus: GpuPools, job: str, unscale: bool):
    results = gpus.run(job, scaled, unscale)
    for moved, scales, _ in results:
        assert moved == [True, False, True, True]
        assert scales == [1024.0, 512.0, 512.0, 512.0]
    assert_same([weights for _, _, weights in results])


def two_players(distributed: bool) -> tuple[list[Tensor], list[float]]:
    """A tiny GAN: gradients of one player pass through the other, which does not want them."""
    device = precise()
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)).to(device)
    judge = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    optimizers: list[Any] = []
    for player, name in ((maker, "maker"), (judge, "judge")):
        base = sgd(player.parameters())
        named = player.named_parameters(prefix=name)
        optimizers.append(hvd.DistributedOptimizer(base, named) if distributed else base)
    make, learn = optimizers
    losses = []
    score = nn.functional.binary_cross_entropy_with_logits
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        real = torch.randn(hvd.size(), 4, 6, generator=generator).to(device)
        noise = torch.randn(hvd.size(), 4, 4, generator=generator).to(device)
        mine = (lambda x: x[hvd.rank()]) if distributed else (lambda x: x.flatten(0, 1))
        learn.zero_grad()
        truths, lies = judge(mine(real)), judge(maker(mine(noise)).detach())
        loss = score(truths, torch.ones_like(truths)) + score(lies, torch.zeros_like(lies))
        loss.backward()
        learn.step()
        make.zero_grad()
        judge.requires_grad_(False)
        lies = judge(maker(mine(noise)))
        score(lies, torch.ones_like(lies)).backward()
        make.step()
        judge.requires_grad_(True)
        losses.append(float(loss.detach()))
    return [*weights_of(maker), *weights_of(judge)], losses


@pytest.mark.parametrize("job", JOBS)
def test_two_optimizers_in_one_program(gpus: GpuPools, job: str):
    together, alone = (gpus.run(job, two_players, distributed) for distributed in (True, False))
    pairs = [(mine, own) for (mine, _), (own, _) in zip(together, alone, strict=True)]
    assert_alike(pairs, rtol=1e-2, atol=1e-3)


def among_some(ranks: list[int]) -> list[Tensor]:
    device = precise()
    chosen = hvd.add_process_set(ranks)
    try:
        model = make_model("mlp").to(device)
        optimizer = hvd.DistributedOptimizer(
            sgd(model.parameters()), model.named_parameters(), process_set=chosen
        )
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, my_rows(batch_of(step, hvd.size())).to(device)).backward()
            optimizer.step()
    finally:
        hvd.remove_process_set(chosen)
    return weights_of(model)


@pytest.mark.parametrize(("job", "ranks"), [("3 ranks", [0, 2]), ("4 ranks", [0, 1, 3])])
def test_a_process_set(gpus: GpuPools, job: str, ranks: list[int]):
    results = gpus.run(job, among_some, ranks)
    assert_same([results[rank] for rank in ranks])
    outside = next(rank for rank in range(size_of(job)) if rank not in ranks)
    assert not torch.equal(results[outside][0], results[ranks[0]][0])


# -- what ranks start from ----------------------------------------------------------------------


def broadcast(name: str) -> tuple[list[Tensor], list[Tensor]]:
    """Ranks begin with other weights and states; then all have the last rank's."""
    device, root = own_device(), hvd.size() - 1
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).to(device)
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(1 + hvd.rank()):
        optimizer.zero_grad()
        loss_of(model, batch_of(step, 1).to(device)).backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    state = [
        value
        for own in optimizer.state.values()
        for _, value in sorted(own.items())
        if torch.is_tensor(value)
    ]
    for param, own in optimizer.state.items():
        kinds = {t.device for t in own.values() if torch.is_tensor(t) and t.dim()}
        assert kinds <= {param.device}
    assert {each.device for each in model.state_dict().values()} == {device}
    # A step after that, of everybody alike.
    optimizer.zero_grad()
    loss_of(model, batch_of(9, 1).to(device)).backward()
    optimizer.step()
    return [each.cpu() for each in model.state_dict().values()], [each.cpu() for each in state]


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adam fused", "RMSprop"])
@pytest.mark.parametrize("job", JOBS)
def test_broadcast_of_parameters_and_state(gpus: GpuPools, job: str, name: str):
    results = gpus.run(job, broadcast, name)
    for part in (0, 1):
        assert_same([found[part] for found in results])
    assert results[0][1], "there is a state"
