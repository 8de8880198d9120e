"""One rank of benchmarks/local_steps.py: trains the way of one contender when it is told to.

Started by `benchmarks.local_steps` with a plan in JSON as the only argument. Every order is a dict
whose "do" names what is wanted.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import horovod.torch as hvd
from benchmarks.network_hosts import UNLIMITED
from benchmarks.processes import Member, bind
from benchmarks.training_models import WORKLOADS, Batch, Transformer
from horovod.runner.options.values import link as as_link
from horovod.runner.plan import Link, PlannedJob, Way
from horovod.torch.optimizers.fragments import Fragment
from tests.hosts import INTERFACE

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WARM_UP = 3
FRAGMENTS = 2  # of streaming, unless the plan has another number
TEXT_LENGTH, TEXTS = 64, 8  # bytes of one text of the small GPT, and texts of one batch
DISTINCT_BATCHES = 8
# Of the steps of a quality: by these its learning rate rises, and these are ordinary ones at first.
RISE, TOGETHER = 0.05, 0.25


def options(
    contender: str, steps: int, delay: int | None = None, fragments: int = FRAGMENTS
) -> dict[str, Any]:
    """Return the arguments of DistributedOptimizer that a contender stands for.

    Args:
        contender: Its name.
        steps: Local steps.
        delay: Steps of delay of streaming; by default a tenth of the local steps.
        fragments: Fragments of streaming.
    """
    # These trainings synchronise 15 times. The usual lr=0.7 and momentum=0.9, with which they were
    # compared first, did worse: docs/slow_links.md has all that was tried.
    local: dict[str, Any] = {"local_steps": steps, "outer": hvd.OuterSGD(lr=1.0, momentum=0.5)}
    delay = max(1, steps // 10) if delay is None else delay
    streaming = {"fragments": fragments, "delay": delay}
    return {
        "every": {},
        "every bf16": {"compression": hvd.Compression.bf16},
        "every fp8": {"compression": hvd.Compression.fp8},
        "average": {"local_steps": steps},
        "local": local,
        "local fp8": {**local, "compression": hvd.Compression.fp8},
        "streaming": {**local, **streaming},
        "streaming fp8": {**local, **streaming, "compression": hvd.Compression.fp8},
    }[contender]


def sent() -> int:
    """Bytes that this host has sent so far; 0 where ranks only pretend to be on hosts."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    return 0


waits: list[float] = []  # seconds that steps have waited for what was sent, since the last turn


class TimedFragment(Fragment):
    """Notes how long a step waits for a fragment of the model that ranks exchange."""

    def wait(self) -> None:
        began = time.monotonic()
        super().wait()
        waits.append(time.monotonic() - began)


class Speed:
    """Training of one model, for turns."""

    def __init__(
        self, model: str, contender: str, local_steps: int, fragments: int, link: str
    ) -> None:
        self.delay = 0
        self.fragments = fragments
        torch.manual_seed(1)
        workload = WORKLOADS[model]
        self.model = self.trained = workload.model()
        generator = torch.Generator().manual_seed(1000 + RANK)
        self.data = [workload.batch(generator) for _ in range(DISTINCT_BATCHES)]
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        if contender == "ddp":
            self.trained = DistributedDataParallel(
                self.model, gradient_as_bucket_view=True, static_graph=True
            )
        elif contender != "plain":
            if contender.startswith("streaming"):
                self.delay = self._planned_delay("fp8" in contender, local_steps, link)
            hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
            named = self.model.named_parameters()
            chosen = options(contender, local_steps, self.delay, fragments)
            self.optimizer = hvd.DistributedOptimizer(self.optimizer, named, **chosen)
            for fragment in getattr(self.optimizer, "_fragments", []):
                fragment.__class__ = TimedFragment

    def _planned_delay(self, is_coded: bool, local_steps: int, link: str) -> int:
        """The steps of delay that ``horovodrun --plan`` recommends for this model and link.

        Its step time is measured here, by training alone for some steps.
        """
        if link == UNLIMITED:
            return 1
        times = []
        for number in range(WARM_UP + 5):
            began = time.monotonic()
            train(self.model, self.optimizer, self.data[number % len(self.data)])
            times.append(time.monotonic() - began)
        slowest = hvd.allreduce(torch.tensor(median(times[WARM_UP:])), name="step", op=hvd.Max)
        parameters = sum(param.numel() for param in self.model.parameters())
        job = PlannedJob(parameters, float(slowest), SIZE, Link(*as_link(link)))
        return Way("streaming", 8 if is_coded else 32, local_steps, self.fragments).delay(job)

    def warm_up(self, local_steps: int) -> None:
        """Train until fragments are sent early in every turn, so that they travel within it."""
        self.turn(0.0, max(WARM_UP, local_steps // self.fragments - 1))

    def turn(self, start: float, steps: int) -> dict[str, Any]:
        """Milliseconds and bytes of a step, and each wait for a fragment, in usual steps.

        "cpu" are milliseconds of the processor, which say more than "ms" where others use it too.
        """
        while time.monotonic() < start:
            pass
        before, cpu_before, times = sent(), time.process_time(), []
        waits.clear()
        for number in range(steps):
            began = time.monotonic()
            train(self.trained, self.optimizer, self.data[number % len(self.data)])
            times.append(time.monotonic() - began)
        took = 1000 * (time.monotonic() - start) / steps
        usual = median(times)
        cpu = 1000 * (time.process_time() - cpu_before) / steps
        return {
            "ms": took,
            "cpu": cpu,
            "bytes": (sent() - before) / steps,
            "waits": [seconds / usual for seconds in waits],
            "delay": self.delay,
        }


def train(model: nn.Module, optimizer: Any, batch: Batch) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return float(loss.detach())


# -- how well it learns --------------------------------------------------------------------------

Data = Callable[[torch.Generator], Batch]


def digits() -> tuple[Callable[[], nn.Module], Data, list[Batch]]:
    """Hand-written digits, 8 x 8: a model, this rank's batches, and what it is tested with.

    Ranks draw from all digits, as with a sampler that shuffles them anew in every epoch.
    """
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(found.target)[order]

    def batch(generator: torch.Generator) -> Batch:
        chosen = torch.randint(1500, (32,), generator=generator)
        return images[chosen], labels[chosen]

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    return model, batch, [(images[1500:], labels[1500:])]


def text() -> tuple[Callable[[], nn.Module], Data, list[Batch]]:
    """Python's own library, byte by byte: a small GPT, this rank's batches, and those of a test."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    content = b"".join(file.read_bytes() for file in files)
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    held_out = len(tokens) * 9 // 10

    def cut(starts: torch.Tensor) -> Batch:
        rows = torch.stack([tokens[start : start + TEXT_LENGTH + 1] for start in starts.tolist()])
        return rows[:, :-1].contiguous(), rows[:, 1:].flatten()

    def batch(generator: torch.Generator) -> Batch:
        first, last = held_out * RANK // SIZE, held_out * (RANK + 1) // SIZE - TEXT_LENGTH - 1
        return cut(torch.randint(first, last, (TEXTS,), generator=generator))

    generator = torch.Generator().manual_seed(0)
    last = len(tokens) - TEXT_LENGTH - 1
    tests = [cut(torch.randint(held_out, last, (32,), generator=generator)) for _ in range(4)]
    return lambda: Transformer(256, TEXT_LENGTH, 128, 4, 4), batch, tests


def pictures() -> tuple[Callable[[], nn.Module], Data, list[Batch]]:
    """Images as large as CIFAR's, new ones in every batch: ten patterns, shifted, under noise."""
    fixed = torch.Generator().manual_seed(0)
    patterns = F.interpolate(torch.randn(10, 3, 8, 8, generator=fixed), 32, mode="bilinear")

    def batch(generator: torch.Generator, count: int = 32) -> Batch:
        labels = torch.randint(10, (count,), generator=generator)
        shifts = torch.randint(-6, 7, (count, 2), generator=generator).tolist()
        shifted = [
            patterns[label].roll(shift, (1, 2))
            for label, shift in zip(labels.tolist(), shifts, strict=True)
        ]
        dimmed = torch.stack(shifted) * torch.rand(count, 1, 1, 1, generator=generator)
        return dimmed + torch.randn(count, 3, 32, 32, generator=generator), labels

    def model() -> nn.Module:
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
            layers.append(nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False))
            layers += [nn.BatchNorm2d(outputs), nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))

    return model, batch, [batch(fixed, 1000)]


TASKS = {"digits": digits, "pictures": pictures, "text": text}


def quality(
    task: str, contender: str, local_steps: int, steps: int, seed: int
) -> list[tuple[float, float]]:
    """Loss and accuracy on other data than was trained with, ten times and at the end."""
    make, batch, tests = TASKS[task]()
    torch.manual_seed(seed)
    model = make()
    generator = torch.Generator().manual_seed(1000 * seed + RANK)
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    chosen = options(contender, local_steps)
    if "local_steps" in chosen:
        chosen = {**chosen, "warmup_steps": max(1, int(TOGETHER * steps)), "average_buffers": model}
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), **chosen)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=RISE)
    curve = []
    for number in range(1, steps + 1):
        train(model, optimizer, batch(generator))
        schedule.step()
        if number == steps and "local_steps" in chosen:
            optimizer.synchronize_parameters()
        if number == steps or number % max(1, steps // 10) == 0:
            curve.append(test(model, tests))
    return curve


@torch.no_grad()
def test(model: nn.Module, tests: list[Batch]) -> tuple[float, float]:
    """Loss and accuracy, averaged over ranks, which differ between synchronisations."""
    model.eval()
    mine = torch.zeros(2)
    for inputs, targets in tests:
        found = model(inputs)
        is_right = (found.argmax(-1) == targets).float()
        mine += torch.stack([F.cross_entropy(found, targets), is_right.mean()]) / len(tests)
    model.train()
    loss, accuracy = hvd.allreduce(mine, name="test").tolist()
    return loss, accuracy


# -- allreduce -----------------------------------------------------------------------------------


def allreduce(contender: str, nbytes: int, start: float) -> dict[str, float]:
    """Milliseconds and bytes of one allreduce of float32 numbers."""
    tensor = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(RANK))
    wires = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
    hvd.allreduce(tensor[:64], name="ready")
    while time.monotonic() < start:
        pass
    before, began = sent(), time.monotonic()
    optimizer_way(tensor, wires.get(contender))
    return {"ms": 1000 * (time.monotonic() - began), "bytes": sent() - before}


def optimizer_way(tensor: torch.Tensor, wire: torch.dtype | None) -> None:
    """Reduce in place, as DistributedOptimizer does: the transport narrows what leaves the host."""
    from horovod.engine.collective import Collective, Kind, Reduction
    from horovod.engine.runtime import runtime

    reduction = Reduction(hvd.Average, wire=wire)
    collective = Collective(Kind.ALLREDUCE, f"of {tensor.nbytes}", reduction=reduction)
    runtime.submit(collective, [tensor], [tensor], background=False).wait()


def main(plan: dict[str, Any]) -> None:
    member = Member()
    if plan["bind"]:
        bind(RANK)
    if plan.get("contender") == "ddp":
        dist.init_process_group("gloo", rank=RANK, world_size=SIZE)
    elif plan.get("contender") != "plain":
        hvd.init()
    speed = None
    if "model" in plan:
        told = ("model", "contender", "local_steps", "fragments", "link")
        speed = Speed(**{name: plan[name] for name in told})
        speed.warm_up(plan["local_steps"])

    def carry_out(order: dict[str, Any]) -> Any:
        what = order.pop("do")
        if what == "turn":
            assert speed is not None
            return speed.turn(**order)
        return quality(**order) if what == "quality" else allreduce(**order)

    member.obey(carry_out)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
