"""What overlap_forward refuses, and how training with it ends, well or badly."""

from __future__ import annotations

import gc
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.optimizers.pending import is_pending
from tests.ranks import RankPool, listen, run_ranks, start_ranks, tell
from tests.torch.delaying import NETWORK, Run, assert_equal, assert_same, small_buckets
from tests.torch.training import batch_of, loss_of, make_model, my_rows, train, weights_of


@pytest.fixture(scope="module")
def network2() -> Iterator[RankPool]:
    pool = RankPool(2, NETWORK)
    yield pool
    pool.close()


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
    """A method of a scripted copy uses parameters unseen: an error, not a wrong result."""
    with small_buckets(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Run(True)
        scripted = torch.jit.script(run.model)
        for _ in range(3):
            run.step()
        assert run.delayed[-1] > 0
        with pytest.raises(RuntimeError, match="with the value from before the last step"):
            loss_of(scripted.forward, batch_of(0, 1)).backward()
        ordinary = Run(False)
        for _ in range(3):
            ordinary.step()
        assert_equal(weights_of(run.model), weights_of(ordinary.model))


def test_unseen_use_is_an_error(network2: RankPool):
    network2.run(_used_unseen)


# -- what torch is meanwhile ------------------------------------------------------------------


def _replaced(rank: int, size: int) -> None:
    """Torch is as it was without such an optimizer, and again when there is none any more."""
    original = nn.Module.named_parameters
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    hvd.init()
    with small_buckets():
        Run(False).step()
        assert nn.Module.named_parameters is original
        run = Run(True)
        assert nn.Module.named_parameters is not original
        for _ in range(3):
            run.step()
        assert run.delayed[-1] > 0
        assert len(hooks) == 1
        weights_of(run.model)
        assert not hooks, "nothing is pending"
        model = run.model
        del run
        gc.collect()
        expected = [name for name, _ in model.named_parameters()]
        assert nn.Module.named_parameters is original

        run = Run(True)
        ours = nn.Module.named_parameters
        theirs = nn.Module.named_parameters = lambda *args, **named: ours(*args, **named)
        del run
        gc.collect()
        assert [name for name, _ in model.named_parameters()] == expected
        assert nn.Module.named_parameters is theirs, "another library's stays"
        run = Run(True)
        for _ in range(3):
            run.step()
        assert run.delayed[-1] > 0
        assert [name for name, _ in run.model.named_parameters()] == expected
        run.note()
        assert run.delayed[-1] == 0


def test_torch_is_as_it_was_without_such_an_optimizer():
    run_ranks(_replaced, 2, env=NETWORK)


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
        runs[0].note()
        assert runs[0].delayed[-1] == 0
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
        ranks.wait(ranks=[1])
        ranks.say()
        (outcome,) = ranks.wait(ranks=[0])
        assert outcome.error is None, outcome.describe()
        assert_same([outcome.result])


def _killed(rank: int, size: int, early: float) -> str:
    """Rank 1 dies in the middle of a step whose updates rank 0 has yet to make."""
    hvd.init()
    with small_buckets(early=early):
        run = Run(True, model="wide")
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


@pytest.mark.parametrize("early", [0.0, 0.5])
def test_a_lost_rank_surfaces_in_the_next_forward(early: float):
    with start_ranks(_killed, 2, early, env=NETWORK) as ranks:
        ranks.heard(1)
        ranks.heard(0)  # its step has returned
        ranks.signal(1, signal.SIGKILL)
        (outcome,) = ranks.wait(ranks=[0])
        assert outcome.error is None, outcome.describe()
        assert "rank 1" in outcome.result
