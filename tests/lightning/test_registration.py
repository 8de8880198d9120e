"""The name "horovod" is known to Lightning in whatever order things are imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import clean_environment

ROOT = Path(__file__).resolve().parents[2]

BUILD = """
trainer = pl.Trainer(strategy="horovod", logger=False, enable_checkpointing=False)
print(type(trainer.strategy).__name__, type(trainer.accelerator).__name__)
old = pl.Trainer(accelerator="horovod", logger=False, enable_checkpointing=False)
print(type(old.strategy).__name__, type(old.accelerator).__name__)
assert isinstance(trainer.strategy, pl.strategies.Strategy)
"""


def run(program: str, *, expect: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout if expect == 0 else done.stderr


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("ours", ["horovod.torch", "horovod.lightning"])
@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_any_order_of_imports(package: str, ours: str, first: str):
    imports = [f"import {ours}", f"import {package} as pl"]
    if first == "theirs":
        imports.reverse()
    said = run("\n".join(imports) + BUILD).splitlines()
    assert said == ["HorovodStrategy CPUAccelerator"] * 2


def test_lightning_is_not_imported_unless_it_is_used():
    run(
        "import sys, horovod.torch, horovod.lightning\n"
        "found = [m for m in sys.modules if m.startswith(('lightning', 'pytorch_lightning'))]\n"
        "assert not found, found\n"
        "assert horovod.lightning.HorovodStrategy\n"
        "assert 'lightning.pytorch' in sys.modules\n"
        "assert 'pytorch_lightning' not in sys.modules\n"
    )


def test_without_lightning():
    said = run(
        "import sys\n"
        "for name in ('lightning', 'pytorch_lightning', 'lightning_fabric'):\n"
        "    sys.modules[name] = None\n"
        "import horovod.torch, horovod.lightning\n"
        "horovod.torch.init()\n"
        "horovod.lightning.HorovodStrategy\n",
        expect=1,
    )
    assert "ImportError: horovod.lightning needs Lightning, which is not installed" in said
    assert "pip install 'horovod[lightning]'" in said


def test_one_strategy_object_goes_into_trainers_of_both_packages_and_into_fabric():
    said = run(
        "import horovod.torch as hvd\n"
        "from horovod.lightning import HorovodStrategy, HorovodFabricStrategy\n"
        "import lightning.pytorch, pytorch_lightning, lightning.fabric, lightning_fabric\n"
        "strategy = HorovodStrategy(groups=2, compression=hvd.Compression.fp16)\n"
        "options = dict(logger=False, enable_checkpointing=False, strategy=strategy)\n"
        "for package in (lightning.pytorch, pytorch_lightning):\n"
        "    used = package.Trainer(**options).strategy\n"
        "    print(used is strategy, used._options.groups, used._options.compression.__name__)\n"
        "for package in (lightning.fabric, lightning_fabric):\n"
        "    used = package.Fabric(strategy=strategy).strategy\n"
        "    print(used is strategy, used._options.groups, used._options.compression.__name__)\n"
        "    assert isinstance(package.Fabric(accelerator='horovod').strategy, type(used))\n"
        "    assert isinstance(package.Fabric(strategy='horovod').strategy, type(used))\n"
    )
    first, *others = said.splitlines()
    assert first == "True 2 FP16Compressor"
    assert others == ["False 2 FP16Compressor"] * 3


def test_the_names_are_in_lightnings_registries():
    run(
        "import horovod.torch\n"
        "from lightning.pytorch.strategies import StrategyRegistry\n"
        "from lightning.pytorch.accelerators import AcceleratorRegistry\n"
        "import lightning.pytorch\n"
        "assert 'horovod' in StrategyRegistry.available_strategies()\n"
        "assert 'horovod' in AcceleratorRegistry.available_accelerators()\n"
        "assert AcceleratorRegistry.get('horovod').name() == 'horovod'\n"
        "assert AcceleratorRegistry['horovod']['accelerator'].is_available()\n"
        "strategy = StrategyRegistry.get('horovod')\n"
        "assert type(strategy).__name__ == 'HorovodStrategy'\n"
    )


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_a_lightning_that_is_too_old_is_told_what_is_needed(package: str):
    distribution = package.replace("_", "-")
    module = "lightning.pytorch" if package == "lightning" else package
    old = (
        "import importlib.metadata as metadata\n"
        "real = metadata.version\n"
        f"metadata.version = lambda n: '1.9.5' if n == {distribution!r} else real(n)\n"
        "import horovod.torch\n"
        f"import {module} as pl\n"
    )
    for use in (
        "pl.Trainer(strategy='horovod')",
        "pl.Trainer(accelerator='horovod')",
        "from horovod.lightning import HorovodStrategy",
    ):
        said = run(old + use, expect=1)
        assert f"Horovod needs {distribution} 2." in said
        assert "and this is 1.9.5" in said
        assert f"pip install --upgrade '{distribution}>=2." in said


def test_a_trainer_that_does_not_ask_for_horovod_is_left_alone():
    run(
        "import horovod.torch as hvd, lightning.pytorch as pl\n"
        "trainer = pl.Trainer(logger=False, enable_checkpointing=False)\n"
        "assert type(trainer.strategy).__name__ == 'SingleDeviceStrategy'\n"
        "assert not hvd.is_initialized()\n"
    )
