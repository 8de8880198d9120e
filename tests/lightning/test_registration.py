"""The name "horovod" is known to Lightning in whatever order things are imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from horovod.lightning.flavours import OLDEST
from tests.ranks import clean_environment

ROOT = Path(__file__).resolve().parents[2]

BUILD = """
trainer = pl.Trainer(strategy="horovod", logger=False, enable_checkpointing=False)
print(type(trainer.strategy).__name__, type(trainer.accelerator).__name__)
old = pl.Trainer(accelerator="horovod", logger=False, enable_checkpointing=False)
print(type(old.strategy).__name__, type(old.accelerator).__name__)
assert isinstance(trainer.strategy, pl.strategies.Strategy)
"""


# A process that has torch, but neither Lightning nor Horovod, and forks one for each program.
FORKING = """
import json, os, sys
import torch._dynamo  # what Lightning imports, which takes longer than all the rest

for line in sys.stdin:
    program, *streams = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, path in enumerate(streams, 1):
            with open(path, "wb") as file:
                os.dup2(file.fileno(), number)
        exec(program)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Programs:
    """Runs programs that import things in an order of their own."""

    def __init__(self, folder: Path) -> None:
        self._streams = folder / "stdout", folder / "stderr"
        self.process = subprocess.Popen(
            [sys.executable, "-c", FORKING],
            cwd=ROOT,
            env=clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, program: str, *, expect: int = 0) -> str:
        """Return what the program prints, or where it should fail, what it says of the failure."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = [program, *map(str, self._streams)]
        print(json.dumps(request), file=self.process.stdin, flush=True)
        exit_code = int(self.process.stdout.readline())
        stdout, stderr = (path.read_text() for path in self._streams)
        assert exit_code == expect, stdout + stderr
        return stdout if expect == 0 else stderr


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    started = Programs(tmp_path_factory.mktemp("programs"))
    yield started
    started.process.communicate()


@pytest.mark.parametrize(
    "imports",
    [
        ["import horovod.torch", "import lightning.pytorch as pl"],
        ["import lightning.pytorch as pl", "import horovod.lightning"],
        ["import horovod.lightning", "import pytorch_lightning as pl"],
        ["import pytorch_lightning as pl", "import horovod.torch"],
    ],
)
def test_any_order_of_imports(programs: Programs, imports: list[str]):
    said = programs.run("\n".join(imports) + BUILD).splitlines()
    assert said == ["HorovodStrategy CPUAccelerator"] * 2


def test_lightning_is_not_imported_unless_it_is_used(programs: Programs):
    programs.run(
        "import sys, horovod.torch, horovod.lightning\n"
        "found = [m for m in sys.modules if m.startswith(('lightning', 'pytorch_lightning'))]\n"
        "assert not found, found\n"
        "assert horovod.lightning.HorovodStrategy\n"
        "assert 'lightning.pytorch' in sys.modules\n"
        "assert 'pytorch_lightning' not in sys.modules\n"
    )


def test_without_lightning(programs: Programs):
    said = programs.run(
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


def test_one_strategy_object_goes_into_trainers_of_both_packages_and_into_fabric(
    programs: Programs,
):
    said = programs.run(
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


OLD = """
import importlib.metadata as metadata
real = metadata.version
metadata.version = lambda name: "1.9.5" if name == "{distribution}" else real(name)
import horovod.torch
import {module} as pl

def use():
    from horovod.lightning import HorovodStrategy

for attempt in (
    lambda: pl.Trainer(strategy="horovod"), lambda: pl.Trainer(accelerator="horovod"), use
):
    try:
        attempt()
    except ImportError as error:
        print(error)
"""


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_lightning_that_is_too_old_is_told_what_is_needed(programs: Programs, package: str):
    distribution = package.partition(".")[0].replace("_", "-")
    said = programs.run(OLD.format(distribution=distribution, module=package))
    wanted = (
        f"Horovod needs {distribution} {OLDEST} or newer, and this is 1.9.5: "
        f"pip install --upgrade '{distribution}>={OLDEST}'\n"
    )
    assert said == wanted * 3


def test_the_names_are_in_lightnings_registries_and_others_are_left_alone(programs: Programs):
    programs.run(
        "import horovod.torch as hvd\n"
        "from lightning.pytorch.strategies import StrategyRegistry\n"
        "from lightning.pytorch.accelerators import AcceleratorRegistry\n"
        "import lightning.pytorch as pl\n"
        "assert 'horovod' in StrategyRegistry.available_strategies()\n"
        "assert 'horovod' in AcceleratorRegistry.available_accelerators()\n"
        "assert AcceleratorRegistry.get('horovod').name() == 'horovod'\n"
        "assert AcceleratorRegistry['horovod']['accelerator'].is_available()\n"
        "assert type(StrategyRegistry.get('horovod')).__name__ == 'HorovodStrategy'\n"
        "trainer = pl.Trainer(logger=False, enable_checkpointing=False)\n"
        "assert type(trainer.strategy).__name__ == 'SingleDeviceStrategy'\n"
        "assert not hvd.is_initialized()\n"
    )


def test_the_accelerator_by_itself_chooses_the_strategy_and_places_mixed_precision(
    programs: Programs,
):
    programs.run(
        "import horovod.torch\n"
        "import lightning.pytorch as pl\n"
        "from horovod.lightning import HorovodAccelerator\n"
        "accelerator = HorovodAccelerator()\n"
        "quiet = dict(logger=False, enable_checkpointing=False)\n"
        "trainer = pl.Trainer(accelerator=accelerator, precision='bf16-mixed', **quiet)\n"
        "assert trainer.accelerator is accelerator\n"
        "assert type(trainer.strategy).__name__ == 'HorovodStrategy'\n"
        "assert trainer.strategy.root_device.type == trainer.precision_plugin.device == 'cpu'\n"
        "assert accelerator.parse_devices('2') == accelerator.parse_devices(2) == [0, 1]\n"
        "assert accelerator.parse_devices('0,3') == accelerator.parse_devices([0, 3]) == [0, 3]\n"
        "assert accelerator.auto_device_count() == 1\n"
        "assert 'cpu_percent' in accelerator.get_device_stats('cpu')\n"
    )
