"""SyncBatchNorm on batches dealt out to ranks against torch's BatchNorm on the whole batch."""

from __future__ import annotations

import copy
import io
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

import horovod.torch as hvd
from horovod.torch.sync_batch_norm import SyncBatchNorm, _names
from tests.accelerators import accelerator as find_accelerator
from tests.effort import examples
from tests.ranks import RankPool, run_ranks

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
TOLERANCE = {
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
}


class Reference(_BatchNorm):
    """torch's batch normalisation of any number of dimensions."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass


@dataclass(frozen=True)
class Layer:
    """Options of a layer and what it is run on: `samples[rank]` rows of (features, *space)."""

    samples: tuple[int, ...]
    features: int = 3
    space: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    momentum: float | None = 0.1
    affine: bool = True
    track_running_stats: bool = True
    channels_last: bool = False
    offset: float = 0.0
    steps: int = 2
    seed: int = 0

    def module(self, cls: type[_BatchNorm]) -> _BatchNorm:
        module = cls(
            self.features,
            momentum=self.momentum,
            affine=self.affine,
            track_running_stats=self.track_running_stats,
        )
        if self.dtype is torch.float64:
            module.double()
        if self.affine:
            generator = torch.Generator().manual_seed(self.seed)
            with torch.no_grad():
                module.weight.uniform_(0.5, 2.0, generator=generator)
                module.bias.uniform_(-1.0, 1.0, generator=generator)
        return module

    def data(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole batch, and the gradient of the loss with respect to the output."""
        generator = torch.Generator().manual_seed(10 * self.seed + step)
        shape = (sum(self.samples), self.features, *self.space)
        batch = torch.randn(shape, generator=generator, dtype=torch.float64) * 2 + self.offset
        gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
        layout = torch.contiguous_format
        if self.channels_last:
            layout = {2: torch.channels_last, 3: torch.channels_last_3d}[len(self.space)]
        return tuple(
            each.to(self.dtype).contiguous(memory_format=layout) for each in (batch, gradient)
        )

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        return whole.split(list(self.samples))[rank]

    def run(
        self,
        module: _BatchNorm,
        rank: int | None,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> dict[str, Any]:
        """Train some steps on one rank's part, or on everything; perhaps in another type."""
        results: dict[str, Any] = {"outputs": [], "input gradients": []}
        module.to(device)
        for step in range(self.steps):
            batch, gradient = self.data(step)
            if dtype is not None:
                batch, gradient = batch.to(dtype), gradient.to(dtype)
            if rank is not None:
                batch, gradient = self.part(batch, rank), self.part(gradient, rank)
            batch = batch.clone(memory_format=torch.preserve_format).to(device).requires_grad_()
            output = module(batch)
            output.backward(gradient.to(device))
            results["outputs"].append(output.detach().cpu())
            results["input gradients"].append(batch.grad.cpu())
            if batch.numel():
                assert output.stride() == batch.stride()
        results["parameter gradients"] = [each.grad.cpu() for each in module.parameters()]
        results["statistics"] = [each.clone().cpu() for each in module.buffers()]
        return results


def _train(layer: Layer) -> dict[str, Any]:
    return layer.run(layer.module(SyncBatchNorm), hvd.rank())


def _check(layer: Layer, ranks: list[dict[str, Any]]) -> None:
    expected = layer.run(layer.module(Reference).double(), None, dtype=torch.float64)
    for key in ("outputs", "input gradients"):
        for step, whole in enumerate(expected[key]):
            together = torch.cat([results[key][step] for results in ranks])
            assert together.dtype is layer.dtype
            close = _tolerance(layer, step)
            torch.testing.assert_close(together.double(), whole, **close)
    # Each rank's part of what the whole batch gives: the optimizer will sum or average them.
    for index, whole in enumerate(expected["parameter gradients"]):
        total = sum(results["parameter gradients"][index] for results in ranks)
        steps = [_tolerance(layer, step) for step in range(layer.steps)]
        loose = {name: 10 * max(step[name] for step in steps) for name in ("rtol", "atol")}
        torch.testing.assert_close(total.double(), whole, **loose)
    for index, whole in enumerate(expected["statistics"]):
        mine = ranks[0]["statistics"][index]
        close = TOLERANCE[torch.float32]
        torch.testing.assert_close(mine, whole.to(mine.dtype), **close)
        assert all(torch.equal(mine, results["statistics"][index]) for results in ranks)


def _tolerance(layer: Layer, step: int) -> dict[str, float]:
    """Rounding errors grow with the inverse of a channel's variance, here and in torch."""
    batch, _ = layer.data(step)
    spread = batch.double().transpose(0, 1).flatten(1).var(1, correction=0)
    growth = float((spread + 1e-5).reciprocal().max().clamp(min=1)) * (1 + layer.offset)
    close = TOLERANCE[layer.dtype]
    return {"rtol": close["rtol"], "atol": close["atol"] * growth}


@st.composite
def layers(draw: st.DrawFn, size: int) -> Layer:
    space = draw(st.lists(st.integers(1, 4), max_size=3).map(tuple))
    samples = draw(st.tuples(*[st.integers(0, 5)] * size).filter(lambda rows: sum(rows) > 1))
    return Layer(
        samples,
        draw(st.integers(1, 5)),
        space,
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from([0.1, 1.0, None])),
        draw(st.booleans()),
        draw(st.booleans()),
        len(space) >= 2 and draw(st.booleans()),
        draw(st.sampled_from([0.0, 3.0])),
        draw(st.integers(1, 3)),
        draw(st.integers(0, 1000)),
    )


@given(layer=layers(3))
@example(layer=Layer((4, 0, 1), dtype=torch.float64))
@example(layer=Layer((0, 0, 2), 2, (3, 3), channels_last=True))
@settings(max_examples=examples(120), deadline=None)
def test_training_like_one_layer_on_the_whole_batch(pool3: RankPool, layer: Layer):
    _check(layer, pool3.run(_train, layer))


def _train_on_accelerator(layer: Layer) -> dict[str, Any]:
    device = find_accelerator()
    return layer.run(layer.module(SyncBatchNorm), hvd.rank(), f"{device.type}:0")


@pytest.mark.skipif(find_accelerator() is None, reason="needs an accelerator")
@given(layer=layers(2))
@example(layer=Layer((4, 0), 2, (3, 3), torch.bfloat16, channels_last=True))
@settings(max_examples=examples(60), deadline=None)
def test_two_ranks_on_one_accelerator(pool2: RankPool, layer: Layer):
    _check(layer, pool2.run(_train_on_accelerator, layer))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mean_far_from_zero_does_not_drown_the_variance(pool2: RankPool, dtype: torch.dtype):
    layer = Layer((40, 3), 4, (5,), dtype, offset=1000.0, steps=1)
    whole, _ = layer.data(0)
    exact = torch.nn.functional.batch_norm(
        whole.double(),
        None,
        None,
        *(p.double() for p in layer.module(Reference).parameters()),
        True,
    )
    ranks = pool2.run(_train, layer)
    together = torch.cat([results["outputs"][0] for results in ranks]).double()
    # The input's own rounding, a thousand times its spread.
    close = 1e-3 if dtype is torch.float32 else 1e-11
    torch.testing.assert_close(together, exact, rtol=0, atol=close)


def _no_samples_at_all() -> list[Any]:
    module = SyncBatchNorm(2)
    batch = torch.empty(0, 2, 3, requires_grad=True)
    module(batch).sum().backward()
    return [batch.grad.shape, module.running_mean.tolist(), module.running_var.tolist()]


def test_nobody_has_samples(pool2: RankPool):
    assert pool2.run(_no_samples_at_all) == [[(0, 2, 3), [0.0, 0.0], [1.0, 1.0]]] * 2


# -- when ranks do not communicate ------------------------------------------------------------


def _evaluate_on_one_rank() -> bool:
    module = SyncBatchNorm(3).eval()
    module.running_mean.fill_(2.0)
    if hvd.rank() == 1:  # alone: would wait for ever if it had to communicate
        batch = torch.randn(4, 3, 2)
        plain = torch.nn.functional.batch_norm(batch, module.running_mean, module.running_var)
        return torch.equal(module(batch), plain)
    return True


def test_evaluation_needs_no_other_rank(pool2: RankPool):
    assert pool2.run(_evaluate_on_one_rank) == [True, True]


def _evaluate_without_statistics() -> torch.Tensor:
    module = SyncBatchNorm(1, eps=0.0, track_running_stats=False, affine=False).eval()
    return module(torch.tensor([[float(hvd.rank())]]))


def test_without_running_statistics_evaluation_uses_all_batches(pool2: RankPool):
    assert [each.item() for each in pool2.run(_evaluate_without_statistics)] == [-1.0, 1.0]


def _alone(rank: int, size: int) -> dict[str, list[torch.Tensor]]:
    hvd.init(process_sets=[hvd.ProcessSet([0]), hvd.ProcessSet([1])] if size > 1 else None)
    mine = _set_of([rank]) if size > 1 else hvd.global_process_set
    layer = Layer((6,), 3, (2,))
    module = layer.module(SyncBatchNorm)
    module.process_set = mine
    return layer.run(module, None)


def _set_of(ranks: list[int]) -> hvd.ProcessSet:
    registered = hvd.mpi_ops._basics._get_process_set_ids_and_ranks()
    process_set = hvd.ProcessSet(ranks)
    process_set.process_set_id = next(i for i, r in registered.items() if r == ranks)
    return process_set


@pytest.mark.parametrize("size", [1, 2])
def test_a_set_of_one_is_ordinary(size: int):
    layer = Layer((6,), 3, (2,))
    expected = layer.run(layer.module(Reference), None)
    for results in run_ranks(_alone, size):
        for key, tensors in results.items():
            assert all(map(torch.equal, tensors, expected[key]))


# -- process sets, threads, and other ways to use a layer -------------------------------------


def _in_sets(rank: int, size: int) -> dict[str, Any] | None:
    pair, other = hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 2])
    hvd.init(process_sets=[pair, other])
    if rank == 2:  # its first layer is one that rank 0 does not have
        SyncBatchNorm(2, process_set=other)(torch.ones(1, 2))
    if rank == 1:
        with pytest.raises(ValueError, match="does not belong"):
            SyncBatchNorm(2, process_set=pair)(torch.ones(4, 2))
        SyncBatchNorm(2, process_set=other)(torch.ones(1, 2))
        return None
    layer = Layer((3, 2))
    module = layer.module(SyncBatchNorm)
    module.process_set = pair
    return layer.run(copy.deepcopy(module), pair.rank())


def test_a_process_set():
    ranks = run_ranks(_in_sets, 3)
    _check(Layer((3, 2)), [ranks[0], ranks[2]])


def _two_threads(jobs: list[Layer], copies: int) -> list[list[dict[str, Any]]]:
    modules = [[job.module(SyncBatchNorm)] for job in jobs]
    for several in modules:
        several += [copy.deepcopy(several[0]) for _ in range(copies)]
    results: list[Any] = [None, None]
    start = threading.Barrier(2)

    def work(index: int) -> None:
        start.wait()
        results[index] = [jobs[index].run(module, hvd.rank()) for module in modules[index]]

    order = [0, 1] if hvd.rank() == 0 else [1, 0]
    threads = [threading.Thread(target=work, args=(index,)) for index in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_two_layers_at_once_in_two_threads(pool2: RankPool):
    jobs = [Layer((3, 2), 4, (2,), seed=1), Layer((1, 4), 4, (2,), seed=2)]
    ranks = pool2.run(_two_threads, jobs, 20)
    for index, job in enumerate(jobs):
        for results in zip(*(rank[index] for rank in ranks), strict=True):
            _check(job, list(results))


def _with_a_model_of_its_own(layer: Layer) -> dict[str, Any]:
    if hvd.rank() == 0:
        SyncBatchNorm(layer.features)
    return _train(layer)


def test_a_rank_may_build_layers_that_others_do_not_have(pool2: RankPool):
    layer = Layer((3, 2))
    _check(layer, pool2.run(_with_a_model_of_its_own, layer))


def _with_given_names() -> list[float]:
    first, second = (SyncBatchNorm(1, affine=False) for _ in range(2))
    if hvd.rank() == 1:
        first, second = second, first
    first.name, second.name = "first", "second"
    means = []
    for module, value in ((first, 1.0), (second, 2.0)):
        worker = threading.Thread(target=module, args=(torch.full((2, 1), value),))
        worker.start()
        worker.join()
        means.append(float(module.running_mean))
    return means


def test_layers_made_in_different_orders_can_be_named(pool2: RankPool):
    assert pool2.run(_with_given_names) == [pytest.approx([0.1, 0.2])] * 2


def _names_in_two_lives(rank: int, size: int) -> list[list[str]]:
    survivor, seen = SyncBatchNorm(1), []
    for others in (2, 0):
        hvd.init()
        used = [SyncBatchNorm(1) for _ in range(others)] + [survivor]
        seen.append([_names.name_of(layer, (0,)) for layer in used * 2])
        hvd.shutdown()
    return seen


def test_a_new_init_matches_layers_anew():
    """Ranks that survived a lost one have a past, those that replace it have none."""
    ((before, after),) = run_ranks(_names_in_two_lives, 1)
    assert before[:3] == before[3:]
    assert len(set(before)) == 3
    assert after == [before[0]] * 2


def _shared_layer() -> list[torch.Tensor]:
    """One layer twice in a model, two batches accumulated, with and without checkpointing."""
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        norm = SyncBatchNorm(4)
        body = torch.nn.Sequential(torch.nn.Linear(4, 4), norm, torch.nn.ReLU(), norm)
        for step in range(2):
            batch = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(step))
            batch = batch[hvd.rank()].requires_grad_()
            output = checkpoint(body, batch, use_reentrant=False) if recompute else body(batch)
            output.square().sum().backward()
        found.append(torch.cat([each.grad.flatten() for each in body.parameters()]))
    return found


def _shared_layer_expected() -> torch.Tensor:
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(4)
    body = torch.nn.Sequential(torch.nn.Linear(4, 4), norm, torch.nn.ReLU(), norm)
    for step in range(2):
        batch = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(step))
        body(batch.flatten(0, 1)).square().sum().backward()
    return torch.cat([each.grad.flatten() for each in body.parameters()])


def test_reuse_accumulation_and_checkpointing(pool2: RankPool):
    ranks = pool2.run(_shared_layer)
    expected = _shared_layer_expected()
    for way in (0, 1):
        total = ranks[0][way] + ranks[1][way]
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


def _under_autocast() -> tuple[list[torch.dtype], torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), SyncBatchNorm(4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(torch.randn(2, 3, 4)[hvd.rank()])
    output.float().square().sum().backward()
    types = [output.dtype, *(each.grad.dtype for each in model.parameters())]
    return types, output.detach()


def test_under_autocast(pool2: RankPool):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(torch.randn(2, 3, 4).flatten(0, 1))
    ranks = pool2.run(_under_autocast)
    assert [types for types, _ in ranks] == [[torch.bfloat16] + [torch.float32] * 4] * 2
    torch.testing.assert_close(torch.cat([output for _, output in ranks]), expected)


def _penalty(module: torch.nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of the size of a gradient."""
    batch = batch.clone().requires_grad_()
    output = (module(batch) ** 3).sum()
    (gradient,) = torch.autograd.grad(output, batch, create_graph=True)
    gradient.square().sum().backward()
    return [batch.grad, module.weight.grad, module.bias.grad]


def _second_order(batches: list[torch.Tensor]) -> list[torch.Tensor]:
    return _penalty(SyncBatchNorm(3).double(), batches[hvd.rank()])


def test_second_derivatives(pool2: RankPool):
    whole = torch.randn(5, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ranks = pool2.run(_second_order, list(whole.split([4, 1])))
    to_input, *to_parameters = _penalty(torch.nn.BatchNorm1d(3).double(), whole)
    torch.testing.assert_close(torch.cat([found[0] for found in ranks]), to_input)
    for index, expected in enumerate(to_parameters, 1):
        torch.testing.assert_close(ranks[0][index] + ranks[1][index], expected)


def _until_joined() -> list[float]:
    module = SyncBatchNorm(1, momentum=1.0)
    means = []
    for _ in range(2 + hvd.rank()):
        batch = torch.tensor([[1.0], [3.0]], requires_grad=True)
        module(batch * (1 + hvd.rank())).sum().backward()
        means.append(float(module.running_mean))
    hvd.join()
    return means


def test_a_rank_that_has_joined_counts_for_nothing(pool2: RankPool):
    assert pool2.run(_until_joined) == [[3.0, 3.0], [3.0, 3.0, 4.0]]


# -- conversion, copies -----------------------------------------------------------------------


def _model() -> torch.nn.Module:
    shared = torch.nn.BatchNorm1d(6, eps=0.25, momentum=None)
    model = torch.nn.Sequential(
        torch.nn.Conv1d(3, 6, 1),
        shared,
        torch.nn.Sequential(shared, torch.nn.BatchNorm1d(6, affine=False)),
        torch.nn.BatchNorm1d(6, track_running_stats=False).eval(),
    ).double()
    model[1].weight.requires_grad_(False)
    return model


def test_conversion_keeps_what_layers_hold():
    model = _model()
    before, parameters = copy.deepcopy(model), dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    converted = SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    kinds = [type(each) for each in model.modules()]
    assert kinds.count(SyncBatchNorm) == 3
    assert torch.nn.BatchNorm1d not in kinds
    assert model[1] is model[2][0]
    assert all(each is parameters[name] for name, each in model.named_parameters())
    assert all(each is buffers[name] for name, each in model.named_buffers())
    assert model.state_dict().keys() == before.state_dict().keys()
    for name, old in before.named_modules():
        new = model.get_submodule(name)
        assert new.training is old.training
        if isinstance(old, _BatchNorm):
            assert new.extra_repr() == old.extra_repr()


def test_conversion_of_a_single_layer():
    layer = torch.nn.BatchNorm2d(3)
    sync = SyncBatchNorm.convert_sync_batchnorm(layer)
    assert isinstance(sync, SyncBatchNorm)
    assert sync.weight is layer.weight
    assert sync.process_set is hvd.global_process_set
    linear = torch.nn.Linear(2, 2)
    assert SyncBatchNorm.convert_sync_batchnorm(linear) is linear
    chosen = hvd.ProcessSet([0])
    assert SyncBatchNorm.convert_sync_batchnorm(layer, chosen).process_set is chosen
    with pytest.raises(ValueError, match="LazyBatchNorm1d"):
        SyncBatchNorm.convert_sync_batchnorm(torch.nn.LazyBatchNorm1d())


def _train_converted(layer: Layer) -> dict[str, Any]:
    return layer.run(SyncBatchNorm.convert_sync_batchnorm(layer.module(Reference)), hvd.rank())


def test_a_converted_layer_trains(pool2: RankPool):
    layer = Layer((3, 2), momentum=None, dtype=torch.float64)
    _check(layer, pool2.run(_train_converted, layer))


def test_copies_and_pickles_keep_their_process_set():
    chosen = hvd.ProcessSet([1, 0])
    for process_set in (hvd.global_process_set, chosen):
        layer = SyncBatchNorm(3, process_set=process_set)
        assert copy.deepcopy(layer).process_set is process_set
        assert copy.copy(layer).process_set is process_set
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert torch.equal(loaded.weight, layer.weight)
        if process_set is chosen:
            assert loaded.process_set.ranks == [0, 1]
        else:
            assert loaded.process_set is hvd.global_process_set


# -- what it refuses --------------------------------------------------------------------------


def _refusals() -> None:
    module = SyncBatchNorm(3)
    for mode in (True, False):
        with pytest.raises(ValueError, match="at least 2 dimensions"):
            module.train(mode)(torch.ones(3))
    module.train()
    with pytest.raises(ValueError, match="3 features"):
        module(torch.ones(2, 4))
    with pytest.raises(ValueError, match="floating point"):
        module(torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="not registered"):
        SyncBatchNorm(3, process_set=hvd.ProcessSet([0, 1]))(torch.ones(2, 3))
    with pytest.raises(ValueError, match="more than one value"):
        module(torch.ones(1 - hvd.rank(), 3))
    assert int(module.num_batches_tracked) == 0
    module(torch.ones(1, 3))


def test_refusals(pool2: RankPool):
    pool2.run(_refusals)


def test_training_needs_init():
    with pytest.raises(ValueError, match="not initialised"):
        SyncBatchNorm(3)(torch.ones(2, 3))
