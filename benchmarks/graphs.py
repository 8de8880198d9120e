#!/usr/bin/env python
"""How fast a step in a CUDA graph is with one rank: hvd.graphed against torch's own graph.

Both take turns in this process, on the same model, and so do the steps without a graph. Needs a
CUDA device; see --help.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # measure this checkout, whatever else is installed

import torch  # noqa: E402
from torch import nn  # noqa: E402

import horovod.torch as hvd  # noqa: E402
from benchmarks.turns import Samples, interval, race, ratios  # noqa: E402

WIDTH, LAYERS, BATCH = 256, 24, 32  # many small kernels: what graphs are for
MOST = 1.02  # times as long as torch's graph that ours may take

Step = Callable[[torch.Tensor], torch.Tensor]


def make(with_us: bool) -> Step:
    """A training step of a model that Python keeps waiting."""
    torch.manual_seed(0)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers).cuda()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    if with_us:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    def step(inputs: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def captured_by_torch(step: Step, inputs: torch.Tensor) -> Step:
    """The step as torch's documentation says to capture it."""
    static = inputs.clone()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(static)

    def replay(inputs: torch.Tensor) -> torch.Tensor:
        assert step  # whose parameters the graph reads and writes: they must stay
        static.copy_(inputs, non_blocking=True)
        graph.replay()
        return loss

    return replay


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of the race, at most (20)")
    parser.add_argument("--turn", type=int, default=100, help="steps of a turn (100)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the promise is missed")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device")
    hvd.init()
    if hvd.size() != 1:
        parser.error("this compares one rank with torch alone: start it without a launcher")
    inputs = torch.randn(BATCH, WIDTH, device="cuda")
    steps: dict[str, Step] = {
        "torch": make(with_us=False),
        "Horovod": make(with_us=True),
        "torch, graph": captured_by_torch(make(with_us=False), inputs),
        "Horovod, graph": hvd.graphed(make(with_us=True)),
    }
    for step in steps.values():
        for _ in range(10):
            step(inputs)
    torch.cuda.synchronize()

    def turn(step: Step) -> float:
        began = perf_counter()
        for _ in range(options.turn):
            step(inputs)
        torch.cuda.synchronize()
        return (perf_counter() - began) / options.turn * 1e3

    pairs = [("Horovod, graph", "torch, graph"), ("Horovod", "torch")]
    turns = {name: (lambda step=step: turn(step)) for name, step in steps.items()}
    samples: Samples = race(turns, pairs, options.seconds, precise=0.003)
    print(f"1 rank, {torch.cuda.get_device_name()}: milliseconds a step (median)")
    for name, values in samples.items():
        print(f"  {name:16s} {median(values):7.3f}")
    found = {}
    for ours, theirs in pairs:
        quotients = ratios(samples, ours, theirs)
        low, high = interval(quotients)
        found[ours] = median(quotients)
        print(f"  {ours} / {theirs}: {found[ours]:.3f} ({low:.3f} to {high:.3f})")
    met = found["Horovod, graph"] <= MOST
    print(f"{'met' if met else 'MISSED'}: a replay takes at most {MOST} times as long as torch's")
    hvd.shutdown()
    return 0 if met or not options.check else 1


if __name__ == "__main__":
    sys.exit(main())
