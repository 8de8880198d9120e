"""What people get wrong, and what they are told."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, FSDPPrecision

import horovod.torch as hvd
from horovod.lightning import HorovodEnvironment, HorovodStrategy
from tests.lightning.training import Net, loader, trainer, weights
from tests.ranks import RankPool, run_ranks


def test_devices_without_a_launcher():
    for use in (
        lambda: pl.Trainer(strategy="horovod", accelerator="cpu", devices=3),
        lambda: pl.Trainer(accelerator="horovod", devices=3),
        lambda: Fabric(strategy="horovod", accelerator="cpu", devices=3),
    ):
        with pytest.raises(ValueError, match="not started by a launcher") as caught:
            use()
        assert "horovodrun -np 3 python" in str(caught.value)
    with pytest.raises(ValueError, match=r"horovodrun -np 2 -H host1:1,\.\.\. python"):
        trainer(num_nodes=2)


def test_devices_and_nodes_that_contradict_the_job(ranks: RankPool):
    def use() -> None:
        with pytest.raises(ValueError, match="write devices=2; how many") as caught:
            trainer(devices=3)
        assert "the job has 2 process(es) on the node of rank" in str(caught.value)
        with pytest.raises(ValueError, match="leave num_nodes out, or write num_nodes=1"):
            trainer(num_nodes=4)
        with pytest.raises(ValueError, match="write devices=2"):
            Fabric(strategy="horovod", accelerator="cpu", devices=5)

    ranks.run(use)


def test_modules_that_differ_between_ranks(ranks: RankPool):
    def train() -> Any:
        said = []
        for build in (
            lambda: torch.nn.Linear(8, 1 + hvd.rank()),
            lambda: torch.nn.Linear(8, 1, bias=hvd.rank() == 0),
            lambda: torch.nn.Linear(8, 1, dtype=(torch.float32, torch.float64)[hvd.rank()]),
        ):
            for use in ("fit", "validate"):
                module = Net()
                module.net = build()
                made = trainer()
                with pytest.raises(ValueError, match="the modules of ranks 0 and 1 differ") as e:
                    getattr(made, use)(module, loader())
                said.append(str(e.value))
        return said

    first, second = ranks.run(train)
    assert first == second
    assert "'net.weight' is float32[1, 8]" in first[0]
    assert "float32[2, 8]" in first[0]
    assert "only the first has ['net.bias']" in first[2]
    assert "float64" in first[4]


def test_optimizers_that_differ_between_ranks(ranks: RankPool):
    def train() -> None:
        def some(params: Any) -> Any:
            return torch.optim.SGD(list(params)[hvd.rank() :], lr=0.1)

        with pytest.raises(ValueError, match="the models differ between ranks 0 and 1"):
            trainer().fit(Net(some), loader())

    ranks.run(train)


def test_a_parameter_on_another_device(ranks: RankPool):
    class Elsewhere(Net):
        def configure_optimizers(self) -> Any:
            self.lost = torch.nn.Parameter(torch.ones(3, device="meta"))
            return super().configure_optimizers()

    class Meta(Net):
        def __init__(self) -> None:
            super().__init__()
            self.empty = torch.nn.Linear(2, 2, device="meta")

    class Lazy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.lazy = torch.nn.LazyLinear(2)

    def train() -> Any:
        said = []
        for kind in (Elsewhere, Meta, Lazy):
            with pytest.raises(ValueError, match="parameter '") as caught:
                trainer().fit(kind(), loader())
            said.append(str(caught.value))
        return said

    for rank, (elsewhere, meta, lazy) in enumerate(ranks.run(train)):
        assert "'lost' of the module is on meta" in elsewhere
        assert f"rank {rank} computes on cpu" in elsewhere
        assert "'empty.weight' is on the device 'meta'" in meta
        assert "'lazy.weight' has no shape yet" in lazy


@pytest.mark.parametrize("plugin", [FSDPPrecision("32-true"), DeepSpeedPrecision("32-true")])
def test_precision_of_strategies_that_spread_a_model(plugin: Any):
    with pytest.raises(ValueError, match=type(plugin).__name__):
        trainer(plugins=[plugin])


def test_a_module_that_something_else_reduces():
    module = Net()
    module.net = type("FullyShardedDataParallel", (torch.nn.Sequential,), {})(module.net)
    with pytest.raises(ValueError, match="'net' is a FullyShardedDataParallel"):
        trainer().fit(module, loader())


def test_an_accelerator_and_a_strategy_that_contradict_each_other():
    with pytest.raises(ValueError, match="strategy='ddp' was given: leave one of the two out"):
        pl.Trainer(accelerator="horovod", strategy="ddp")


def test_options_that_do_not_exist_or_do_not_fit():
    with pytest.raises(TypeError):
        trainer(HorovodStrategy(compresion=None)).fit(Net(), loader())
    strategy = HorovodStrategy(backward_passes_per_step=2)
    with pytest.raises(ValueError, match="give one of them"):
        trainer(strategy, accumulate_grad_batches=3).fit(Net(), loader())
    with pytest.raises(ValueError, match="is not registered"):
        trainer(HorovodStrategy(process_set=hvd.ProcessSet([0])))
    with pytest.raises(ValueError, match="join=True works with all ranks"):
        HorovodStrategy(process_set=hvd.ProcessSet([0]), join=True)


def test_an_error_in_training_leaves_the_ranks_able_to_train(ranks: RankPool):
    class Failing(Net):
        def training_step(self, batch: Any, index: int) -> Any:
            if index == 3:
                raise KeyError("mine")
            return super().training_step(batch, index)

    def train() -> Any:
        with pytest.raises(KeyError, match="mine"):
            trainer().fit(Failing(), loader())
        module = Net()
        trainer().fit(module, loader())
        return weights(module)

    first, second = ranks.run(train)
    assert all(map(torch.equal, first, second))


class Undefined(Net):
    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        return loss * float("nan") if index == 2 and self.global_rank == 1 else loss


def _train_undefined(rank: int, size: int) -> str:
    with pytest.raises(FloatingPointError) as caught:
        trainer().fit(Undefined(), loader())
    return str(caught.value)


def test_gradients_that_are_not_finite_are_named_if_that_is_asked_for():
    for said in run_ranks(_train_undefined, 2, env={"HOROVOD_CHECK_NAN": "1"}, timeout=200):
        assert "rank 1" in said
        assert "net.0.weight" in said


def test_the_environment_serves_other_strategies(ranks: RankPool):
    def train() -> Any:
        module = Net(seed=1 + hvd.rank())
        environment = HorovodEnvironment()
        made = trainer("ddp", devices=2, plugins=[environment])
        made.fit(module, loader())
        torch.distributed.destroy_process_group()
        ours = Net()
        trainer().fit(ours, loader())
        return weights(module), weights(ours), environment.main_address, environment.main_port

    (first, ours, *where), (second, _, *other) = ranks.run(train)
    assert where == other
    assert where[0] == "127.0.0.1"
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, ours)), "bitwise what DDP computes"
