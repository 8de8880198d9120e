"""overlap_forward beside all that people do with optimizers; what it refuses; and failures."""

from __future__ import annotations

import copy
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.pending import is_pending
from tests.ranks import RankPool, listen, run_ranks, start_ranks, tell
from tests.torch.delaying import NETWORK, Run, assert_same, compare, small_buckets
from tests.torch.training import batch_of, loss_of, make_model, my_rows, train, weights_of


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
        assert not any(is_pending(param) for param in more)
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


def _thawed(run: Run) -> None:
    """A layer is frozen for some steps while updates are outstanding."""
    for number in range(8):
        run.model[0].requires_grad_(number not in (3, 4))
        run.step()


def _set_to_none_by_hand(run: Run) -> None:
    for _ in range(5):
        run.forward().backward()
        run.optimizer.step()
        run.note()
        for param in run.model.parameters():
            param.grad = None


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


# -- what is refused ------------------------------------------------------------------------


def _refused(kind: str) -> str:
    model = make_model("mlp")
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"overlap_forward": model}
    if kind == "no model":
        options["overlap_forward"] = list(model.parameters())
    elif kind == "another model":
        options["overlap_forward"] = make_model("mlp")
    elif kind == "Adasum":
        options["op"] = hvd.Adasum
    elif kind == "shard_state":
        options["shard_state"] = True
    elif kind == "communication_hook":
        options["communication_hook"] = hvd.hooks.FP16()
    elif kind == "LBFGS":
        optimizer = torch.optim.LBFGS(model.parameters())
    elif kind == "Adafactor":
        optimizer = torch.optim.Adafactor(model.parameters())
    elif kind == "differentiable":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True)
    elif kind == "compiled":
        options["overlap_forward"] = torch.compile(model)
    elif kind == "compiled in place":
        model[0].compile()
    elif kind == "scripted":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options["overlap_forward"] = torch.jit.script(model)
    elif kind == "DataParallel":
        options["overlap_forward"] = nn.DataParallel(model)
    with pytest.raises(ValueError, match="overlap_forward") as caught:
        hvd.DistributedOptimizer(optimizer, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("no model", "must be the model, a torch.nn.Module, not list"),
        ("another model", "no parameter of this model"),
        ("Adasum", "op=Average"),
        ("shard_state", "shard_state"),
        ("communication_hook", "communication_hook"),
        ("LBFGS", "LBFGS.elementwise = True"),
        ("Adafactor", "Adafactor.elementwise = True"),
        ("differentiable", "differentiable=True"),
        ("compiled", "the model is compiled"),
        ("compiled in place", "module '0' is compiled"),
        ("scripted", "TorchScript"),
        ("DataParallel", "DataParallel"),
    ],
)
def test_refused(network2: RankPool, kind: str, told: str):
    for message in network2.run(_refused, kind):
        assert told in message


def _closure() -> None:
    run = Run(True)
    run.step()
    with pytest.raises(ValueError, match=r"step\(closure\) does not go with overlap_forward"):
        run.optimizer.step(run.forward)


def test_closures_are_refused(network2: RankPool):
    network2.run(_closure)


def _given_on_one_rank() -> None:
    model = make_model("mlp")
    options = {"overlap_forward": model} if hvd.rank() == 0 else {}
    with pytest.raises(ValueError, match="overlap_forward of DistributedOptimizer differs"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_all_ranks_must_ask_for_it(network2: RankPool):
    network2.run(_given_on_one_rank)


def _used_unseen() -> None:
    """A scripted copy uses the parameters where nobody can see it: an error, not a wrong result."""
    with small_buckets(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Run(True)
        scripted = torch.jit.script(run.model)
        for _ in range(3):
            run.step()
        assert run.delayed[-1] > 0
        with pytest.raises(RuntimeError, match="with the value from before the last step"):
            loss_of(scripted, batch_of(0, 1)).backward()


def test_unseen_use_is_an_error(network2: RankPool):
    network2.run(_used_unseen)


# -- ending ---------------------------------------------------------------------------------


def _shut_down(rank: int, size: int) -> Any:
    hvd.init()
    with small_buckets():
        results = []
        runs = [Run(True), Run(False)]
        for run in runs:
            for _ in range(4):
                run.step()
        assert runs[0].delayed[-1] > 0
        hvd.shutdown()
        results = [(weights_of(run.model), None) for run in runs]
    return results


def test_shutdown_finishes():
    assert_same(run_ranks(_shut_down, 2, env=NETWORK))


def _leaves_early(rank: int, size: int) -> Any:
    """Rank 1 ends after its last step; rank 0 looks at the result afterwards."""
    hvd.init()
    with small_buckets():
        runs = [Run(False), Run(True)]
        for run in runs:
            for _ in range(4):
                run.step()
    assert runs[1].delayed[-1] > 0
    if rank == 1:
        return None
    listen()
    return [(weights_of(run.model), None) for run in runs]


def test_a_rank_that_ends_lets_the_others_finish():
    with start_ranks(_leaves_early, 2, env=NETWORK) as ranks:
        ranks.wait(30, [1])
        ranks.say()
        (outcome,) = ranks.wait(30, [0])
        assert outcome.error is None, outcome.describe()
        assert_same([outcome.result])


def _killed(rank: int, size: int) -> str:
    """Rank 1 dies in the middle of a step whose updates rank 0 has yet to make."""
    hvd.init()
    with small_buckets():
        run = Run(True)
        for _ in range(4):
            run.step()
        run.optimizer.zero_grad()
        run.forward().backward() if rank == 0 else tell("here")
        if rank == 1:
            signal.pause()
        run.optimizer.step()
        tell("stepped")
        assert any(map(is_pending, run.optimizer.param_groups[0]["params"]))
        with pytest.raises(HorovodInternalError) as caught:
            run.forward()
        assert not any(map(is_pending, run.optimizer.param_groups[0]["params"]))
        with pytest.raises(HorovodInternalError):
            train(run.model, run.optimizer, 1, my_rows)
    return str(caught.value)


def test_a_lost_rank_surfaces_in_the_next_forward():
    with start_ranks(_killed, 2, env=NETWORK) as ranks:
        ranks.heard(1)
        ranks.heard(0)  # its step has returned
        ranks.signal(1, signal.SIGKILL)
        (outcome,) = ranks.wait(30, [0])
        assert outcome.error is None, outcome.describe()
        assert "rank 1" in outcome.result
