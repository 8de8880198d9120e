"""Which device ``accelerator="horovod"`` takes where torch has an accelerator that is not CUDA.

The machines of these tests have none: torch is made to say that there are two XPUs. A Trainer is
built and chooses; it does not train.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric

import horovod.torch as hvd
from tests.lightning.training import QUIET
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(torch, "accelerator"), reason="torch.accelerator came with torch 2.6"
)


def _choose(rank: int, size: int, kind: str | None, count: int) -> dict[str, Any]:
    device = None if kind is None else torch.device(kind)
    with (
        mock.patch("torch.accelerator.is_available", return_value=device is not None),
        mock.patch("torch.accelerator.current_accelerator", return_value=device),
        mock.patch("torch.accelerator.device_count", return_value=count),
        mock.patch("torch.accelerator.set_device_index"),
    ):
        hvd.init()
        trainer = pl.Trainer(**{**QUIET, "accelerator": "horovod"})
        fabric = Fabric(accelerator="horovod")
        return {
            "trainer": str(trainer.strategy.root_device),
            "fabric": str(fabric.strategy.root_device),
            "strategy": type(trainer.strategy).__name__,
            "world": trainer.world_size,
            "local": hvd.local_rank(),
        }


@pytest.mark.parametrize(
    ("kind", "count", "expected"),
    [("xpu", 2, ["xpu:0", "xpu:1"]), ("xpu", 4, ["xpu:0", "xpu:1"]), (None, 0, ["cpu", "cpu"])],
)
def test_every_rank_takes_its_own(kind: str | None, count: int, expected: list[str]):
    found = run_ranks(_choose, 2, kind, count, timeout=280)
    assert [each["trainer"] for each in found] == expected
    assert [each["fabric"] for each in found] == expected
    assert {each["strategy"] for each in found} == {"HorovodStrategy"}
    assert {each["world"] for each in found} == {2}
