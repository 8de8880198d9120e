"""ResNets for images of any size: what the examples use where you would use torchvision's models.

from resnet import resnet
model = resnet(50, num_classes=1000)
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

# Blocks in each of the four stages, and whether a block is a bottleneck.
DEPTHS = {
    10: ((1, 1, 1, 1), False),
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}


def resnet(depth: int, num_classes: int = 1000, width: int = 64) -> ResNet:
    """A ResNet of one of the DEPTHS; `width` is the number of channels of the first stage."""
    blocks, bottleneck = DEPTHS[depth]
    return ResNet(blocks, bottleneck, num_classes, width)


class ResNet(nn.Module):
    def __init__(
        self, blocks: tuple[int, ...], bottleneck: bool, num_classes: int, width: int
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *normalised_convolution(3, width, 7, 2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            inner = width * 2**stage
            outer = 4 * inner if bottleneck else inner
            for place in range(count):
                stride = 2 if stage > 0 and place == 0 else 1
                stages.append(Block(channels, inner, outer, stride))
                channels = outer
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Block):
                nn.init.zeros_(module.branch[-1].weight)  # a block starts as the identity

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.stages(self.stem(images)).mean((2, 3)))


class Block(nn.Module):
    """Two 3x3 convolutions; or, where `outer` is not `inner`, 1x1, 3x3 and 1x1; and a shortcut."""

    def __init__(self, channels: int, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        if inner == outer:
            shapes = [(channels, inner, 3, stride), (inner, outer, 3, 1)]
        else:
            shapes = [(channels, inner, 1, 1), (inner, inner, 3, stride), (inner, outer, 1, 1)]
        layers: list[nn.Module] = []
        for shape in shapes:
            layers += [*normalised_convolution(*shape), nn.ReLU(inplace=True)]
        self.branch = nn.Sequential(*layers[:-1])  # the last activation follows the sum
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != outer:
            self.shortcut = nn.Sequential(*normalised_convolution(channels, outer, 1, stride))

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.branch(images) + self.shortcut(images), inplace=True)


def normalised_convolution(channels: int, outputs: int, size: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, outputs, size, stride, padding=size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]
