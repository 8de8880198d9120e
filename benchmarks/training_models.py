"""The models of benchmarks/training.py, with made data. Shapes are fixed: results compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, and how one rank's batch for it is made."""

    title: str
    model: Callable[[], nn.Module]
    make: Callable[[int, torch.Generator], Batch]  # that many samples
    samples: int  # of a rank in a step
    turn: int  # steps of one contender before the next is due, about a tenth of a second

    def batch(self, generator: torch.Generator) -> Batch:
        """Make one rank's inputs and targets of one step."""
        return self.make(self.samples, generator)


def shared_out(workload: Workload, size: int) -> Workload:
    """The same with a rank's part when two ranks' batches are shared out among `size`."""

    return dataclasses.replace(workload, samples=max(1, 2 * workload.samples // size))


class ConvNet(nn.Module):
    """The small network of the MNIST example that Horovod's documentation uses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(images), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class Residual(nn.Module):
    """Convolutions around which the input passes; with `bottleneck` three of them, else two."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            layers = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        else:
            layers = [(inputs, width, 3, stride), (width, outputs, 3, 1)]
        stages: list[nn.Module] = []
        for before, after, kernel, step in layers:
            convolution = nn.Conv2d(before, after, kernel, step, kernel // 2, bias=False)
            stages += [convolution, nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
        self.main = nn.Sequential(*stages[:-1])
        self.side: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.side = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.main(x) + self.side(x))


def resnet(blocks: tuple[int, ...], bottleneck: bool, classes: int, small: bool) -> nn.Module:
    """ResNet; `small` is the form for 32 x 32 images, without early down-sampling."""
    stem: list[nn.Module] = [
        nn.Conv2d(3, 64, 3 if small else 7, 1 if small else 2, 1 if small else 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
    ]
    if not small:
        stem.append(nn.MaxPool2d(3, 2, 1))
    inputs = 64
    for stage, count in enumerate(blocks):
        width = 64 << stage
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            stem.append(Residual(inputs, width, stride, bottleneck))
            inputs = 4 * width if bottleneck else width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*stem, *head)


class Transformer(nn.Module):
    """A decoder over tokens, with learned positions."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.tokens(tokens) + self.positions[:length]
        return self.head(self.layers(x, mask=mask.to(x.dtype), is_causal=True)).flatten(0, 1)


def images(channels: int, side: int, classes: int) -> Callable[..., Batch]:
    def make(count: int, generator: torch.Generator) -> Batch:
        pictures = torch.randn(count, channels, side, side, generator=generator)
        return pictures, torch.randint(classes, (count,), generator=generator)

    return make


def vectors(length: int, classes: int) -> Callable[..., Batch]:
    def make(count: int, generator: torch.Generator) -> Batch:
        inputs = torch.randn(count, length, generator=generator)
        return inputs, torch.randint(classes, (count,), generator=generator)

    return make


def texts(vocabulary: int, length: int) -> Callable[..., Batch]:
    def make(count: int, generator: torch.Generator) -> Batch:
        tokens = torch.randint(vocabulary, (count, length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()

    return make


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


# Batches are such that a step without communication takes as long as in the measurements behind the
# project's promises: about 7.5, 7, 18 and 180 ms on one core.
WORKLOADS = {
    "mlp": Workload("MLP 784-1024-1024-10", mlp, vectors(784, 10), 40, 10),
    "cnn": Workload("MNIST CNN", ConvNet, images(1, 28, 10), 40, 10),
    "transformer": Workload(
        "4-layer transformer", lambda: Transformer(1000, 64, 128, 4, 4), texts(1000, 32), 4, 5
    ),
    "resnet18": Workload(
        "ResNet-18 (CIFAR)",
        lambda: resnet((2, 2, 2, 2), False, 10, small=True),
        images(3, 32, 10),
        3,
        1,
    ),
    # For an accelerator. Batches are those of the measurements behind the promises there: without
    # communication two ranks that share an H200 take 25 to 32 ms for a step of ResNet-50.
    "resnet50": Workload(
        "ResNet-50",
        lambda: resnet((3, 4, 6, 3), True, 1000, small=False),
        images(3, 224, 1000),
        32,
        5,
    ),
    "gpt": Workload(
        "GPT (6 layers, 768)",
        lambda: Transformer(50257, 512, 768, 12, 6),
        texts(50257, 512),
        8,
        5,
    ),
    "gpt2": Workload(
        "GPT-2 small", lambda: Transformer(50257, 512, 768, 12, 12), texts(50257, 512), 8, 5
    ),
}
