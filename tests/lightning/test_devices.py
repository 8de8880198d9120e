"""A Trainer on a GPU: ``accelerator="horovod"`` takes this rank's, and ranks agree there."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import horovod.torch as hvd
from tests.lightning.training import QUIET, Net, alone, assert_same, loader, weights
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU for torch")


def _train(**how: Any) -> Any:
    hvd.init()
    module = Net(seed=1 + hvd.rank())
    made = pl.Trainer(**{**QUIET, "max_epochs": 2, **how})
    devices = set()
    module.on_train_batch_end = lambda *_: devices.add(module.net[0].weight.device)
    made.fit(module, loader())
    return [w.cpu() for w in weights(module)], made.strategy.root_device, devices


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "how",
    [
        {"accelerator": "horovod"},
        {"accelerator": "gpu", "strategy": "horovod"},
        {"strategy": "horovod"},
    ],
    ids=str,
)
def test_every_spelling_trains_on_the_gpu(ranks: int, how: dict[str, Any]):
    results = run_ranks(lambda rank, size: _train(**how), ranks, timeout=300)
    gpus = torch.cuda.device_count()
    for rank, (_, root, devices) in enumerate(results):
        assert root == torch.device("cuda", rank % gpus)
        assert devices == {root}
    expected = alone(Net()) if ranks == 2 else None
    learned = [result[0] for result in results]
    assert_same(learned)
    for one, other in zip(learned[0], expected or (), strict=expected is not None):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_mixed_precision_on_two_ranks(precision: Any):
    def train(rank: int, size: int) -> Any:
        return _train(accelerator="horovod", precision=precision)[0]

    assert_same(run_ranks(train, 2, timeout=300))
