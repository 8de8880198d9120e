"""overlap_forward beside all that people do with optimizers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from horovod.torch.optimizers.pending import is_pending
from tests.ranks import RankPool, run_ranks
from tests.torch.delaying import (
    ALL_OPTIMIZERS,
    NETWORK,
    Run,
    assert_equal,
    assert_same,
    compare,
    small_buckets,
)
from tests.torch.training import batch_of, loss_of, make_model, my_rows, weights_of


@pytest.fixture(scope="module")
def network2() -> Iterator[RankPool]:
    pool = RankPool(2, NETWORK)
    yield pool
    pool.close()


def _backward(run: Run) -> None:
    run.optimizer.zero_grad()
    run.forward().backward()


def _clipped(run: Run) -> None:
    for number in range(6):
        if number % 2:
            run.step()
            continue
        _backward(run)
        run.optimizer.synchronize()
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        with run.optimizer.skip_synchronize():
            run.optimizer.step()


def _scaled(run: Run) -> list[float]:
    """A scaler that meets an infinity now and then; in between, steps without it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    scales = []
    for number in range(8):
        if number % 3 == 2:
            run.step()
            continue
        run.optimizer.zero_grad()
        loss = run.forward()
        scaler.scale(loss * (float("inf") if number == 4 and hvd.rank() == 1 else 1.0)).backward()
        scaler.step(run.optimizer)
        run.note()
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def _accumulated(run: Run) -> None:
    for _ in range(5):
        run.optimizer.zero_grad()
        with run.optimizer.no_sync():
            run.forward().backward()
        run.forward().backward()
        run.optimizer.step()
        run.note()


def _hooked(run: Run) -> list[Any]:
    """Hooks after the step see its parameters; one that comes before sees the gradients."""
    seen: list[Any] = []
    look = run.optimizer.register_step_post_hook(lambda *_: seen.append(weights_of(run.model)))
    for _ in range(3):
        run.step()
    look.remove()
    assert len(seen) == 3
    post = run.optimizer.register_step_post_hook(lambda *_: seen.append("post"))

    def halved(*_: Any) -> None:
        for param in run.model.parameters():
            param.grad.mul_(0.5)

    halve = run.optimizer.register_step_pre_hook(halved)
    run.step()
    halve.remove()
    post.remove()
    run.step()
    assert seen.count("post") == 1
    return seen


def _counted(run: Run) -> int:
    """Hooks run once in a step, however many buckets there are."""
    calls: list[int] = []
    run.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for _ in range(5):
        run.step()
    return len(calls)


def _resumed(run: Run) -> Any:
    """Save after a step, go on with a new model and optimizer that have loaded it."""
    for _ in range(3):
        run.step()
    saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    other = Run(run.delay, optimizer="Adam")
    other.model.load_state_dict(saved[0])
    other.optimizer.load_state_dict(saved[1])
    for _ in range(4):
        other.step()
    return weights_of(other.model), other.optimizer.state_dict()


def _loaded_at_once(run: Run) -> None:
    """Go back to an earlier model and state while updates are outstanding."""
    for _ in range(3):
        run.step()
    saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    for _ in range(2):
        run.step()
    run.model.load_state_dict(saved[0])
    run.step()
    run.optimizer.load_state_dict(saved[1])
    run.step()


def _more_parameters(run: Run) -> Any:
    """A group that the model does not have; one of its parameters is no nn.Parameter."""
    for _ in range(3):
        run.step()
    more = [nn.Parameter(torch.ones(3)), torch.ones(2, requires_grad=True)]
    run.optimizer.add_param_group({"params": more, "lr": 0.5})
    for _ in range(4):
        run.optimizer.zero_grad()
        (run.forward() * more[0].sum() * more[1].prod()).backward()
        run.optimizer.step()
        run.note()
        assert [type(param) for param in more] == [nn.Parameter, torch.Tensor]
    return [param.detach().clone() for param in more]


def _fresh_state_in_inference(run: Run) -> Any:
    """State that is first made while somebody evaluates can be used in training."""
    for _ in range(3):
        run.step()
    run.optimizer.state.clear()
    run.step()
    with torch.inference_mode():
        run.model(batch_of(0, 1))
    run.step()
    return run.optimizer.state_dict()["state"]


def _restored(run: Run) -> Any:
    """Back to the last commit while updates are outstanding, as after the loss of a rank."""
    for _ in range(3):
        run.step()
    state = hvd.elastic.TorchState(run.model, run.optimizer)
    saved = weights_of(run.model), copy.deepcopy(run.optimizer.state_dict())
    run.step()
    state.restore()
    assert not any(map(is_pending, run.optimizer.param_groups[0]["params"]))
    restored = weights_of(run.model), run.optimizer.state_dict()
    assert_equal(restored, saved)
    for _ in range(3):
        run.step()
    state.save()  # of the last step, whose updates are outstanding
    return state._handlers["model"].saved.content


def _thawed(run: Run) -> None:
    """A layer is frozen for some steps while updates are outstanding."""
    for number in range(8):
        run.model[0].requires_grad_(number not in (3, 4))
        run.step()


def _under_autocast(run: Run) -> None:
    """Updates that are made in a forward pass compute in the types of an ordinary step."""
    for _ in range(5):
        run.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = run.forward()
        loss.backward()
        run.optimizer.step()
        run.note()


def _set_to_none_by_hand(run: Run) -> None:
    for _ in range(5):
        run.forward().backward()
        run.optimizer.step()
        run.note()
        for param in run.model.parameters():
            param.grad = None


# Adafactor multiplies matrices, which autocast would do in another type.
AUTOCAST = "Adafactor" if "Adafactor" in ALL_OPTIMIZERS else "Adam"
USES = {
    "clipping": (_clipped, {}),
    "scaler": (_scaled, {}),
    "no_sync": (_accumulated, {}),
    "hooks": (_hooked, {}),
    "hook calls": (_counted, {}),
    "checkpoint": (_resumed, {"optimizer": "Adam"}),
    "loading": (_loaded_at_once, {"optimizer": "Adam"}),
    "more parameters": (_more_parameters, {}),
    "inference": (_fresh_state_in_inference, {"optimizer": "Adam"}),
    "autocast": (_under_autocast, {"optimizer": AUTOCAST}),
    "elastic": (_restored, {"optimizer": "Adam"}),
    "thawing": (_thawed, {}),
    "gradients by hand": (_set_to_none_by_hand, {}),
    "groups": (lambda run: [run.step() for _ in range(5)], {"groups": 2}),
    "predivided": (lambda run: [run.step() for _ in range(5)], {"gradient_predivide_factor": 2.0}),
}


def _used(name: str) -> Any:
    change, options = USES[name]
    return compare(change, **options)


@pytest.mark.parametrize("name", USES)
def test_use(network2: RankPool, name: str):
    assert_same(network2.run(_used, name))


def _two_optimizers() -> Any:
    results = []
    for delay in (True, False):
        with small_buckets():
            model = make_model("mlp")
            halves = [list(model[0].parameters()), list(model[2].parameters())]
            options = {"overlap_forward": model} if delay else {}
            optimizers = [
                hvd.DistributedOptimizer(torch.optim.SGD(half, lr=0.1), **options)
                for half in halves
            ]
            delayed = 0
            for number in range(6):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss_of(model, my_rows(batch_of(number, hvd.size()))).backward()
                for optimizer in optimizers:
                    optimizer.step()
                delayed = max(delayed, sum(is_pending(p) for half in halves for p in half))
            assert delayed == (4 if delay else 0)
            results.append((weights_of(model), None))
    return results


def test_two_optimizers_of_one_model(network2: RankPool):
    assert_same(network2.run(_two_optimizers))


def _muon() -> Any:
    """An optimizer that makes whole matrices orthogonal."""
    results = []
    for delay in (True, False):
        with small_buckets():
            torch.manual_seed(0)
            layers = [nn.Linear(6, 6, bias=False) for _ in range(3)]
            model = nn.Sequential(*layers)
            options = {"overlap_forward": model} if delay else {}
            plain = torch.optim.Muon(model.parameters(), lr=0.05)
            optimizer = hvd.DistributedOptimizer(plain, **options)
            delayed = 0
            for number in range(5):
                optimizer.zero_grad()
                loss_of(model, my_rows(batch_of(number, hvd.size()))).backward()
                optimizer.step()
                delayed = max(delayed, sum(is_pending(layer.weight) for layer in layers))
            assert (delayed > 0) == delay
            results.append((weights_of(model), optimizer.state_dict()["state"]))
    return results


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="since torch 2.9")
def test_whole_matrices(network2: RankPool):
    assert_same(network2.run(_muon))


def _compiled() -> Any:
    results = []
    for delay in (True, False):
        with small_buckets():
            run = Run(delay)
            compiled = torch.compile(run.model, backend="eager")
            seen = []
            for number in range(8):
                run.optimizer.zero_grad()
                loss_of(compiled, my_rows(batch_of(number, hvd.size()))).backward()
                run.optimizer.step()
                if number % 2:  # with the code that was compiled before anything was delayed
                    with torch.no_grad():
                        seen.append(compiled(batch_of(99, 1)))
            results.append((weights_of(run.model), seen))
    return results


def test_a_compiled_view_of_the_model(network2: RankPool):
    assert_same(network2.run(_compiled))


# -- where nothing is delayed ---------------------------------------------------------------


def _ordinary() -> Any:
    results = []
    for delay in (True, False):
        run = Run(delay, optimizer="Adam")
        for _ in range(6):
            run.step()
        assert max(run.delayed) == 0
        results.append((weights_of(run.model), run.optimizer.state_dict()["state"]))
    return results


def test_shared_memory(pool2: RankPool):
    assert_same(pool2.run(_ordinary))


def _alone(rank: int, size: int) -> Any:
    hvd.init()
    return _ordinary()


def test_one_process():
    assert_same(run_ranks(_alone, 1))


def _check_nan(rank: int, size: int) -> str:
    hvd.init()
    with small_buckets():
        run = Run(True)
        for _ in range(4):
            run.step()
        before = weights_of(run.model)
        run.optimizer.zero_grad()
        (run.forward() * (float("nan") if rank == 1 else 1.0)).backward()
        with pytest.raises(FloatingPointError) as caught:
            run.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(run.model), strict=True))
    return str(caught.value)


def test_check_nan():
    for message in run_ranks(_check_nan, 2, env={**NETWORK, "HOROVOD_CHECK_NAN": "1"}):
        assert "rank 1: 0.weight" in message
