"""DistributedOptimizer as it works on devices, with CPU tensors and Gloo in NCCL's place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import horovod.torch as hvd
from tests.effort import examples
from tests.ranks import RankPool
from tests.torch.direct import Training, direct, distributed, lanes, own_device, parameters


@pytest.fixture(scope="module", params=[2, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    pool = RankPool(request.param, env=own_device)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    pool = RankPool(2, env=own_device)
    yield pool
    pool.close()


trainings = st.builds(
    Training,
    width=st.sampled_from([8, 37, 200]),
    channels_last=st.booleans(),
    half=st.booleans(),
    compression=st.sampled_from(["none", "none", "bf16", "fp16"]),
    predivide=st.sampled_from([1.0, 1.0, 2.0]),
    passes=st.integers(1, 2),
    keeps_gradients=st.booleans(),
    skips_extra=st.booleans(),
    groups=st.sampled_from([None, None, 1, 3]),
)


def train(training: Training) -> list[torch.Tensor]:
    model = training.model()
    with lanes():
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            model.named_parameters(),
            compression=getattr(hvd.Compression, training.compression),
            gradient_predivide_factor=training.predivide,
            backward_passes_per_step=training.passes,
            groups=training.groups,
        )
        for step in range(training.steps):
            optimizer.zero_grad(set_to_none=not training.keeps_gradients)
            for part in range(training.passes):
                training.loss(model, step, part, hvd.rank()).backward()
            optimizer.step()
        assert direct(optimizer).buckets
    return parameters(model)


def reference(training: Training, size: int) -> list[torch.Tensor]:
    """One process that computes the gradients of all ranks."""
    model = training.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(training.steps):
        optimizer.zero_grad(set_to_none=False)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        for rank in range(size):
            for part in range(training.passes):
                (training.loss(model, step, part, rank) / size).backward()
        optimizer.step()
    return parameters(model)


@settings(max_examples=examples(25), deadline=None)
@given(training=trainings)
def test_the_same_as_one_process_with_all_batches(pool: RankPool, training: Training) -> None:
    first, *others = pool.run(train, training)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    tolerance = 5e-2 if training.compression != "none" or training.half else 1e-5
    for found, expected in zip(first, reference(training, pool.size), strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def gradients_are_views() -> list[Any]:
    training = Training(width=37)  # so that there are gaps in the buffer
    model = training.model()
    found: list[Any] = []
    with lanes():
        optimizer = distributed(model)
        for keeps in (False, False, True, True):
            optimizer.zero_grad(set_to_none=not keeps)
            training.loss(model, 0, 0, hvd.rank()).backward()
            optimizer.step()
            assert all(p.grad.data_ptr() % 16 == 0 for p in model.parameters())
            storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
            found.append((len(direct(optimizer).buckets), len(storages), sorted(storages)))
    return found


def test_gradients_become_views_of_a_buffer_for_each_bucket(pair: RankPool) -> None:
    for found in pair.run(gradients_are_views):
        assert all(buckets == storages for buckets, storages, _ in found)
        assert found[2][2] == found[3][2], "kept gradients were copied"


def joins_early(epochs: int) -> tuple[list[float], list[torch.Tensor]]:
    """The first rank has fewer batches than the others."""
    training = Training()
    model = training.model()
    last = []
    with lanes():
        optimizer = distributed(model, lr=0.05)
        for epoch in range(epochs):
            for step in range(2 + hvd.rank()):
                optimizer.zero_grad()
                training.loss(model, 10 * epoch + step, 0, hvd.rank()).backward()
                optimizer.step()
            last.append(float(hvd.join()))
            hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
        direct(optimizer)
    return last, parameters(model)


def reference_of_join(size: int, epochs: int) -> list[torch.Tensor]:
    training = Training()
    model = training.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(epochs):
        for step in range(2 + size - 1):
            optimizer.zero_grad()
            for rank in range(size):
                if step < 2 + rank:
                    (training.loss(model, 10 * epoch + step, 0, rank) / size).backward()
            optimizer.step()
    return parameters(model)


def test_a_rank_that_has_joined_adds_zeros(pool: RankPool) -> None:
    results = pool.run(joins_early, 3)
    expected = reference_of_join(pool.size, 3)
    for last, found in results:
        assert last == [pool.size - 1.0] * 3
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def next_forward(delayed: bool, steps: int) -> tuple[int, int, list[torch.Tensor], list[float]]:
    training = Training(width=200)
    model = training.model()
    losses = []
    with lanes():
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=0.01),
            model.named_parameters(),
            **({"overlap_forward": model} if delayed else {}),
        )
        for step in range(steps):
            optimizer.zero_grad()
            loss = training.loss(model, step, 0, hvd.rank())
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if step % 7 == 3:  # somebody looks
                with torch.no_grad():
                    losses.append(float(training.loss(model, 99, 0, 0)))
                optimizer.state_dict()
        reducer = direct(optimizer)
        return reducer._num_early, len(reducer.buckets), parameters(model), losses


def test_overlap_forward_gives_the_same_parameters(pool: RankPool) -> None:
    plain = pool.run(next_forward, False, 25)
    delayed = pool.run(next_forward, True, 25)
    for (_, _, expected, losses), (_, _, found, found_losses) in zip(plain, delayed, strict=True):
        assert losses == found_losses
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def some_steps_without_gradients(delayed: bool) -> list[torch.Tensor]:
    """A rank that has no data in a step calls step() all the same."""
    training = Training(width=200)
    model = training.model()
    with lanes():
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01),
            model.named_parameters(),
            **({"overlap_forward": model} if delayed else {}),
        )
        for step in range(24):
            optimizer.zero_grad()
            if step % 5 != 3 or hvd.rank() == 0:
                training.loss(model, step, 0, hvd.rank()).backward()
            optimizer.step()
            if step == 20:
                optimizer.synchronize()
    return parameters(model)


def test_steps_in_which_a_rank_has_no_gradients(pool: RankPool) -> None:
    plain = pool.run(some_steps_without_gradients, False)
    delayed = pool.run(some_steps_without_gradients, True)
    for found in (*plain, *delayed):
        assert all(torch.equal(a, b) for a, b in zip(plain[0], found, strict=True))


def tunes_itself() -> tuple[bool, list[torch.Tensor]]:
    """Autotuning makes the buckets anew between two steps."""
    training = Training(width=200)
    model = training.model()
    with lanes():
        optimizer = distributed(model, lr=0.01)
        for step in range(200):
            optimizer.zero_grad()
            training.loss(model, step, 0, hvd.rank()).backward()
            optimizer.step()
        return optimizer._reducer.is_tuning(), parameters(model)


def test_autotuning() -> None:
    knobs = {
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "3",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "4",
    }
    pool = RankPool(2, env=lambda rank: own_device(rank) | knobs)
    (still, first), (_, second) = pool.run(tunes_itself)
    pool.close()
    assert not still
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def changes_a_gradient(how: str) -> str:
    training = Training()
    model = training.model()
    with lanes():
        optimizer = distributed(model)
        for step in range(3):
            optimizer.zero_grad()
            training.loss(model, step, 0, hvd.rank()).backward()
            if how == "after synchronize":
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                with optimizer.skip_synchronize():
                    optimizer.step()
                continue
            if step == 1 and how == "in place":
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            if step == 1 and how == "assigned":
                model.head.bias.grad = torch.zeros(4)
            try:
                optimizer.step()
            except RuntimeError as error:
                return str(error)
    return ""


@pytest.mark.parametrize("how", ["in place", "assigned"])
def test_changing_gradients_that_are_being_reduced_is_an_error(pair: RankPool, how: str) -> None:
    for message in pair.run(changes_a_gradient, how):
        assert "was changed between backward() and step()" in message
        assert "synchronize()" in message


def changes_before_the_bucket_begins(factor: float) -> list[torch.Tensor]:
    """The first rank lacks a gradient: its bucket waits for the step. It changes another one."""
    training = Training(skips_extra=True)
    model = training.model()
    with lanes():
        optimizer = distributed(model)
        for step in range(6):
            optimizer.zero_grad()
            training.loss(model, step, 0, hvd.rank()).backward()
            if step == 3 and hvd.rank() == 0:
                model.head.bias.grad *= factor
            optimizer.step()
        assert len(direct(optimizer).buckets) == 1
    return parameters(model)


def test_gradients_of_a_bucket_that_has_not_begun_may_be_changed(pair: RankPool) -> None:
    first, second = pair.run(changes_before_the_bucket_begins, 3.0)
    unchanged, _ = pair.run(changes_before_the_bucket_begins, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, unchanged, strict=True))


def test_after_synchronize_gradients_may_be_changed(pair: RankPool) -> None:
    assert pair.run(changes_a_gradient, "after synchronize") == ["", ""]


def thaws() -> list[torch.Tensor]:
    training = Training()
    model = training.model()
    model.body.requires_grad_(False)
    with lanes():
        optimizer = distributed(model)
        for step in range(5):
            model.body.requires_grad_(step >= 2)
            optimizer.zero_grad()
            training.loss(model, step, 0, hvd.rank()).backward()
            optimizer.step()
    return parameters(model)


def test_frozen_parameters_stay_until_they_are_thawed(pair: RankPool) -> None:
    first, second = pair.run(thaws)
    model = Training().model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        model.body.requires_grad_(step >= 2)
        optimizer.zero_grad()
        for rank in range(2):
            (Training().loss(model, step, 0, rank) / 2).backward()
        optimizer.step()
    for mine, theirs, expected in zip(first, second, parameters(model), strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


def in_a_graph() -> bool:
    """Gradients that are part of a graph, of backward(create_graph=True), stay themselves."""
    training = Training()
    model = training.model()
    with lanes():
        optimizer = distributed(model)
        for step in range(2):
            optimizer.zero_grad()
            training.loss(model, step, 0, hvd.rank()).backward(create_graph=step == 1)
            before = [param.grad for param in model.parameters()]
            optimizer.synchronize()
        return all(a is p.grad for a, p in zip(before, model.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_in_a_graph_are_not_replaced(pair: RankPool) -> None:
    assert pair.run(in_a_graph) == [True, True]


def two_optimizers() -> list[torch.Tensor]:
    """As in a GAN: each has a lane, and the second's gradients reach the first's parameters."""
    torch.manual_seed(1)
    maker, judge = nn.Linear(4, 6), nn.Linear(6, 1)
    with lanes():
        optimizers = [distributed(model) for model in (maker, judge)]
        for step in range(6):
            noise = torch.randn(5, 4, generator=torch.Generator().manual_seed(step + hvd.rank()))
            optimizers[1].zero_grad()
            judge(maker(noise).detach()).square().sum().backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            judge.requires_grad_(False)
            judge(maker(noise)).sum().backward()
            judge.requires_grad_(True)
            optimizers[0].step()
        names = {direct(optimizer).lane.name for optimizer in optimizers}
        assert len(names) == 2
    return [*parameters(maker), *parameters(judge)]


def test_two_optimizers(pair: RankPool) -> None:
    first, second = pair.run(two_optimizers)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
