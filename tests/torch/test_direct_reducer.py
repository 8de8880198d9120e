"""DistributedOptimizer as it works on devices, with CPU tensors and Gloo in NCCL's place."""

from __future__ import annotations

import contextlib
import gc
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.engine.lane import Lane, LanePlan
from horovod.engine.runtime import runtime
from horovod.transport.farewells import await_farewells
from tests.ranks import RankPool, listen, run_ranks, start_ranks, tell
from tests.torch.direct import direct, lanes, own_device, parameters
from tests.transport import device_stand_in


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


class Model(nn.Module):
    """Parameters of several sizes, layouts and types, one of them not used in every step."""

    def __init__(self, width: int, channels_last: bool = False, half: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.Sequential(nn.Linear(8 * 16, width), nn.Tanh(), nn.Linear(width, width))
        self.extra = nn.Linear(width, width)
        self.head = nn.Linear(width, 4)
        if channels_last:
            self.conv = self.conv.to(memory_format=torch.channels_last)
        if half:
            self.extra = self.extra.to(torch.bfloat16)

    def forward(self, inputs: torch.Tensor, uses_extra: bool = True) -> torch.Tensor:
        x = self.body(torch.tanh(self.conv(inputs)).flatten(1))
        if uses_extra:
            x = x + self.extra(x.to(self.extra.weight.dtype)).to(x.dtype)
        return self.head(torch.tanh(x))


@dataclass(frozen=True)
class Training:
    """A training that is the same on one process and on many, within rounding."""

    width: int = 40
    channels_last: bool = False
    half: bool = False
    compression: str = "none"
    predivide: float = 1.0
    passes: int = 1
    keeps_gradients: bool = False
    skips_extra: bool = False  # in every other step, on the first rank only
    groups: int | None = None
    steps: int = 4

    def model(self) -> Model:
        torch.manual_seed(1)
        return Model(self.width, self.channels_last, self.half)

    def batch(self, step: int, part: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
        return (
            torch.randn(4, 3, 4, 4, generator=generator),
            torch.randint(4, (4,), generator=generator),
        )

    def uses_extra(self, step: int, rank: int) -> bool:
        return not (self.skips_extra and step % 2 and rank == 0)

    def loss(self, model: Model, step: int, part: int, rank: int) -> torch.Tensor:
        inputs, targets = self.batch(step, part, rank)
        return F.cross_entropy(model(inputs, self.uses_extra(step, rank)), targets)


def distributed(model: nn.Module, lr: float = 0.1) -> Any:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr), model.named_parameters()
    )


trainings = st.builds(
    Training,
    width=st.sampled_from([8, 40, 200]),
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


@settings(max_examples=25, deadline=None)
@given(training=trainings)
def test_the_same_as_one_process_with_all_batches(pool: RankPool, training: Training) -> None:
    first, *others = pool.run(train, training)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    tolerance = 5e-2 if training.compression != "none" or training.half else 1e-5
    for found, expected in zip(first, reference(training, pool.size), strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def gradients_are_views() -> list[Any]:
    model = Training().model()
    found: list[Any] = []
    with lanes():
        optimizer = distributed(model)
        for keeps in (False, False, True, True):
            optimizer.zero_grad(set_to_none=not keeps)
            Training().loss(model, 0, 0, hvd.rank()).backward()
            optimizer.step()
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


def ends_differently(rank: int, size: int, how: str) -> str:
    hvd.init()
    training = Training()
    model = training.model()
    with lanes():
        optimizer = distributed(model)
        for step in range(100):
            optimizer.zero_grad()
            training.loss(model, step, 0, rank).backward()
            if step == 3:
                tell("in the middle of a step")
            try:
                if rank == 1 and step == 3 and how == "other operation":
                    hvd.broadcast(torch.ones(3), root_rank=1, name="something else")
                if rank == 1 and step == 3 and how == "is killed":
                    signal.pause()
                if rank == 1 and step == 3 and how == "leaves":
                    hvd.shutdown()
                    return ""
                optimizer.step()
            except HorovodInternalError as error:
                return str(error)
    return "it went on"


def test_a_killed_rank_is_named() -> None:
    with start_ranks(ends_differently, 3, "is killed", env=own_device) as ranks:
        for rank in range(3):
            assert ranks.heard(rank) == "in the middle of a step"
        ranks.signal(1, signal.SIGKILL)
        outcomes = ranks.wait(ranks=[0, 2])
    for outcome in outcomes:
        assert outcome.error is None, outcome.describe()
        assert "rank 1" in outcome.result
        assert "died" in outcome.result


def test_a_rank_that_does_something_else_is_named() -> None:
    first, second = run_ranks(ends_differently, 2, "other operation", env=own_device)
    for message in (first, second):
        assert "'something else'" in message
        assert "'DistributedOptimizer.0'" in message


def test_a_rank_that_leaves_is_named() -> None:
    first, _ = run_ranks(ends_differently, 2, "leaves", env=own_device)
    assert "rank 1 has shut down Horovod" in first


def many_optimizers(count: int) -> tuple[int, int]:
    """As in a search for parameters: each optimizer is dropped before the next is made."""
    for _ in range(count):
        model = nn.Linear(3, 2)
        optimizer = distributed(model)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
        direct(optimizer)
        del model, optimizer
        gc.collect()
    await_farewells()
    job = runtime._job
    assert job is not None
    executor = job.channels[0]._executor
    return len(job.channels[0].lanes), len(executor._lanes)


def lanes_of_many_optimizers() -> tuple[int, int]:
    with lanes():
        return many_optimizers(8)


def test_lanes_are_closed_when_their_optimizers_are_gone(pair: RankPool) -> None:
    before, after = pair.run(lanes_of_many_optimizers), pair.run(lanes_of_many_optimizers)
    assert before == after, "communicators are leaking"


def has_a_broken_device(rank: int, size: int) -> str:
    """Rank 1's device fails in the middle of a step, of which its program says nothing."""
    hvd.init()
    training = Training()
    model = training.model()
    with lanes():
        optimizer = distributed(model)
        for step in range(3):
            optimizer.zero_grad()
            training.loss(model, step, 0, rank).backward()
            optimizer.step()
        tell("trained")
        if rank == 1:
            error = RuntimeError("device-side assert triggered")
            with mock.patch.object(device_stand_in.Work, "is_completed", side_effect=error):
                listen()
            return ""
        optimizer.zero_grad()
        training.loss(model, 3, 0, rank).backward()
        try:
            optimizer.step()
        except HorovodInternalError as error:
            return str(error)
    return "it went on"


def test_a_device_that_fails_is_named_on_the_other_ranks() -> None:
    with start_ranks(has_a_broken_device, 3, env=own_device) as ranks:
        for rank in range(3):
            assert ranks.heard(rank) == "trained"
        outcomes = ranks.wait(ranks=[0, 2])
        ranks.say()
    for outcome in outcomes:
        assert outcome.error is None, outcome.describe()
        assert "rank 1 failed in GLOO on cpu: device-side assert triggered" in outcome.result


def ends_at_once(rank: int, size: int) -> str:
    """Every rank shuts down right after its last step, to which the second comes later."""
    hvd.init()
    training = Training()
    model = training.model()
    confirm = Lane.confirm

    def confirm_late(lane: Lane, plan: LanePlan) -> Any:
        listen()
        return confirm(lane, plan)

    with lanes():
        optimizer = distributed(model)
        for step in range(4):
            optimizer.zero_grad()
            training.loss(model, step, 0, rank).backward()
            # All that it has begun is then complete, but the ranks have not compared it.
            late = mock.patch.object(Lane, "confirm", confirm_late)
            with late if step == 3 and rank == 1 else contextlib.nullcontext():
                optimizer.step()
        tell("about to shut down")
        if rank == 1:
            direct(optimizer).finish_comparison()
        hvd.shutdown()
    return "trained"


def test_the_first_to_shut_down_is_not_taken_for_lost() -> None:
    with start_ranks(ends_at_once, 2, env=own_device) as ranks:
        assert ranks.heard(0) == "about to shut down"
        ranks.wait_until_blocked(0)  # it waits for the other
        ranks.say()
        assert ranks.results() == ["trained", "trained"]


def saves_after_an_abort(in_flight: bool) -> str:
    """A state is worth keeping after an abort, unless it came in the middle of a step."""
    training = Training()
    model = training.model()
    with lanes():
        optimizer = distributed(model)
        state = hvd.elastic.TorchState(model, optimizer, step=0)
        for step in range(3):
            optimizer.zero_grad()
            training.loss(model, step, 0, hvd.rank()).backward()
            optimizer.step()
        direct(optimizer).finish_comparison()
        state.step = 3
        busy = mock.patch.object(device_stand_in.Work, "is_completed", return_value=not in_flight)
        with busy:
            direct(optimizer).lane.abort(HorovodInternalError("enough"))
            try:
                state.save()
            except HorovodInternalError as error:
                return f"{error}, step {state._saved_state['step']}"
    return f"saved, step {state._saved_state['step']}"


@pytest.mark.parametrize(
    ("in_flight", "outcome"), [(False, "saved, step 3"), (True, "enough, step 0")]
)
def test_what_was_aborted_in_the_middle_is_not_committed(in_flight: bool, outcome: str) -> None:
    pool = RankPool(2, env=own_device)
    assert pool.run(saves_after_an_abort, in_flight) == [outcome, outcome]
    pool.close(orderly=False)
