"""How long a training step takes, given what its collectives cost; for benchmarks/scaling_model.py.

Pure functions over `benchmarks.scaling_costs`. A model is a row of layers from input to output,
each with its tensors' bytes and its part of the arithmetic. Gradients arrive from the output to the
input while backward runs, fill buckets, and a bucket is reduced as soon as it is complete and the
ones before it are done. Three ways to go on:

- flat: between all ranks, and the next forward begins when the last bucket is there;
- hierarchical: the same with shared memory inside hosts;
- next-forward: hierarchical, and a layer's next forward only needs the buckets of that layer, so
  that what is left over goes on beside forward, the most urgent first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.scaling_costs import (
    Cost,
    Layout,
    Link,
    Machine,
    agreement,
    flat,
    hierarchical,
)

MIB = 1 << 20
FORWARD = 1 / 3  # of a step's arithmetic: backward does twice as much
WAYS = ("flat", "hierarchical", "next-forward")
_STEPS = 24  # simulated, of which the last ones count
_SETTLING = 12


@dataclass(frozen=True)
class Layer:
    """Consecutive tensors of one size, in millions of parameters, and their multiplications."""

    title: str
    parameters: float
    arithmetic: float
    tensors: int = 1


@dataclass(frozen=True)
class Piece:
    """One tensor: its bytes, and the seconds of forward and of backward that belong to it."""

    nbytes: float
    forward: float
    backward: float


@dataclass(frozen=True)
class Bucket:
    """Bytes that are reduced together."""

    nbytes: float
    ready: float  # seconds after the begin of backward
    piece: int  # the first of its tensors, counted from the input: who needs it first


@dataclass(frozen=True)
class Network:
    """A model, as far as scaling is concerned, and the speed that is assumed of one rank."""

    title: str
    layers: tuple[Layer, ...]
    samples: int  # of one rank's batch
    rate: float  # samples per second of a rank by itself: an assumption
    published: float | None = None  # efficiency of Horovod with 512 GPUs in its own study

    @property
    def compute(self) -> float:
        return self.samples / self.rate

    def pieces(self) -> list[Piece]:
        arithmetic = sum(layer.arithmetic for layer in self.layers)
        return [
            Piece(
                layer.parameters * 4e6 / layer.tensors,
                FORWARD * self.compute * layer.arithmetic / arithmetic / layer.tensors,
                (1 - FORWARD) * self.compute * layer.arithmetic / arithmetic / layer.tensors,
            )
            for layer in self.layers
            for _ in range(layer.tensors)
        ]


# Shapes are those of the papers that introduced the networks; a stage's tensors are taken as equal.
# Rates: about what one Pascal-class GPU (P100) does in fp32. They are assumptions.
NETWORKS = {
    "resnet101": Network(
        "ResNet-101",
        (
            Layer("stem", 0.01, 0.12),
            Layer("stage 2", 0.22, 0.68, 10),
            Layer("stage 3", 1.22, 0.95, 13),
            Layer("stage 4", 26.1, 5.05, 70),
            Layer("stage 5", 14.96, 0.81, 10),
            Layer("classifier", 2.05, 0.002),
        ),
        64,
        130.0,
        0.90,
    ),
    "inception3": Network(
        "Inception V3",
        (
            Layer("stem", 0.2, 1.3, 5),
            Layer("35 x 35", 1.0, 1.2, 21),
            Layer("to 17 x 17", 1.15, 0.33, 4),
            Layer("17 x 17", 6.6, 2.0, 40),
            Layer("to 8 x 8", 1.7, 0.3, 6),
            Layer("8 x 8", 11.1, 0.7, 18),
            Layer("classifier", 2.05, 0.002),
        ),
        64,
        140.0,
        0.90,
    ),
    "vgg16": Network(
        "VGG-16",
        (
            Layer("block 1", 0.04, 1.94, 2),
            Layer("block 2", 0.22, 2.77, 2),
            Layer("block 3", 1.48, 4.62, 3),
            Layer("block 4", 5.9, 4.62, 3),
            Layer("block 5", 7.08, 1.39, 3),
            Layer("fc6", 102.76, 0.103),
            Layer("fc7", 16.78, 0.017),
            Layer("fc8", 4.1, 0.004),
        ),
        64,
        150.0,
        0.68,
    ),
}


def evenly(sizes: Sequence[float], compute: float) -> list[Piece]:
    """Tensors of these bytes, from input to output, with arithmetic in proportion to them."""
    total = sum(sizes)
    return [
        Piece(size, FORWARD * compute * size / total, (1 - FORWARD) * compute * size / total)
        for size in sizes
    ]


def cut(pieces: Sequence[Piece], most: float) -> list[Bucket]:
    """Buckets of up to `most` bytes, in the order in which they become complete.

    As in `horovod.torch.gradients.bucketing`, a tensor is never divided.
    """
    buckets: list[Bucket] = []
    clock = 0.0
    full = True
    for index in reversed(range(len(pieces))):
        piece = pieces[index]
        clock += piece.backward
        full = full or buckets[-1].nbytes + piece.nbytes > most
        before = 0.0 if full else buckets.pop().nbytes
        buckets.append(Bucket(before + piece.nbytes, clock, index))
        full = False
    return buckets


@dataclass(frozen=True)
class Setting:
    """Everything about a job but the model."""

    layout: Layout
    link: Link
    machine: Machine
    bucket_bytes: float = 8 * MIB
    crowding: float = 1.0  # ranks for each core
    on_cores: bool = False  # whether training itself uses the cores that communicate

    def reduction(self, way: str) -> Callable[[Bucket], Cost]:
        """What a bucket costs: Python, packing, its agreement, and its bytes."""
        by_host = way != "flat"
        reduce = hierarchical if by_host else flat

        def cost(bucket: Bucket) -> Cost:
            if self.layout.size == 1:
                return Cost()
            asked = agreement(self.layout, self.link, self.machine, by_host)
            moved = reduce(bucket.nbytes, self.layout, self.link, self.machine)
            packed = bucket.nbytes * self.machine.copy_byte
            return Cost(serial=self.machine.call, moving=packed) + asked + moved

        return cost


def after_backward(pieces: Sequence[Piece], buckets: Sequence[Bucket], taken: list[float]) -> float:
    """A step in which the last bucket is awaited. `taken` are the buckets' seconds."""
    forward = sum(piece.forward for piece in pieces)
    free = 0.0
    for bucket, seconds in zip(buckets, taken, strict=True):
        free = max(free, forward + bucket.ready) + seconds
    return max(free, forward + sum(piece.backward for piece in pieces))


def beside_forward(pieces: Sequence[Piece], buckets: Sequence[Bucket], taken: list[float]) -> float:
    """A step in which each layer's forward awaits its own bucket only: the mean of many steps."""
    clock = free = settled = 0.0
    waiting: dict[int, float] = {}  # buckets that are not begun, and since when they are complete
    done: dict[int, float] = {}
    bucket_of: dict[int, int] = {}
    last = len(pieces)
    for number, bucket in enumerate(buckets):
        bucket_of.update(dict.fromkeys(range(bucket.piece, last), number))
        last = bucket.piece

    def reduce_until(moment: float, wanted: int | None = None) -> None:
        """Begin what can begin before `moment`, or until `wanted` is done; most urgent first."""
        nonlocal free
        while waiting and (wanted in waiting if wanted is not None else True):
            begin = max(free, min(waiting.values()))
            if wanted is None and begin >= moment:
                return
            ready = [number for number, since in waiting.items() if since <= begin]
            chosen = min(ready, key=lambda number: buckets[number].piece)
            del waiting[chosen]
            done[chosen] = free = begin + taken[chosen]

    for step in range(_STEPS):
        for index, piece in enumerate(pieces):
            number = bucket_of[index]
            if step > 0:
                reduce_until(clock)
                reduce_until(clock, number)
                clock = max(clock, done[number])
            clock += piece.forward
        for number, bucket in enumerate(buckets):
            waiting[number] = clock + bucket.ready
        begin = clock
        for bucket in buckets:
            reduce_until(begin + bucket.ready)
        clock = begin + sum(piece.backward for piece in pieces)
        if step == _SETTLING - 1:
            settled = clock
    return (clock - settled) / (_STEPS - _SETTLING)


def step(pieces: Sequence[Piece], setting: Setting, way: str) -> float:
    """Seconds of a training step. `way` is one of WAYS."""
    buckets = cut(pieces, setting.bucket_bytes)
    costs = [setting.reduction(way)(bucket) for bucket in buckets]
    taken = [cost.seconds(setting.crowding) for cost in costs]
    compute = sum(piece.forward + piece.backward for piece in pieces)
    run = beside_forward if way == "next-forward" else after_backward
    least = max(compute, math.fsum(taken))
    if setting.on_cores:
        least = max(least, compute + setting.crowding * sum(cost.work for cost in costs))
    return max(least, run(pieces, buckets, taken))


def efficiency(network: Network, setting: Setting, way: str) -> float:
    """The part of a step that a rank by itself would need."""
    return network.compute / step(network.pieces(), setting, way)
