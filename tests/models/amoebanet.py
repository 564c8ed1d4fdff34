"""AmoebaNet-D (Real et al., "Regularized Evolution for Image Classifier Architecture Search", arXiv 1802.01548).

GPipe's image model (Huang et al., arXiv 1811.06965, table 1), of any depth and width: `AmoebaNet(18, 256)` has 122.5 M
parameters with 1000 classes, `AmoebaNet(36, 544)` has 1,055.8 M.

    image -> 3x3 convolution -> 2 reduction cells -> L/3 normal cells -> reduction cell -> L/3 -> reduction cell -> L/3
          -> mean over positions -> linear

Each cell reads the outputs of the two cells before it, so at least two values cross every position between cells.

Published implementations differ from the paper and from each other. This one

- joins states 0, 3, 4 and 6 of a normal cell, where the paper's figure 4 joins only states that no other reads: that is
  how the parameter counts above come out;
- pools the maximum where the paper says so (torchgpipe's port pools the mean);
- reads the reduction cell's states in the order of torchgpipe's port, which differs from TensorFlow's in one of them;
- has no auxiliary classifier, no dropped paths and no dropout;
- averages over all positions before the classifier, so images of any multiple of 32 pixels fit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


def relu_conv_norm(channels: Sequence[int], *kernels: tuple[int, int], stride: int = 1) -> nn.Sequential:
    """One ReLU, convolution and normalization for each kernel.

    Args:
        channels: before the first and behind each convolution.
        kernels: (height, width) of each.
        stride: of the whole; along each axis the convolution with the largest extent takes it.
    """
    tallest = max(range(len(kernels)), key=lambda i: kernels[i][0])
    widest = max(range(len(kernels)), key=lambda i: kernels[i][1])
    parts: list[nn.Module] = []
    for index, kernel in enumerate(kernels):
        steps = (stride if index == tallest else 1, stride if index == widest else 1)
        padding = (kernel[0] // 2, kernel[1] // 2)
        parts += [
            nn.ReLU(),
            nn.Conv2d(channels[index], channels[index + 1], kernel, steps, padding, bias=False),
            nn.BatchNorm2d(channels[index + 1]),
        ]
    return nn.Sequential(*parts)


class FactorizedReduction(nn.Module):
    """Halves both extents: two 1x1 convolutions of stride 2, the second shifted by one position, joined."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(channels_in, channels_out // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(channels_in, channels_out // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(channels_out)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(x)
        shifted = functional.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        return self.norm(torch.cat((self.even(x), self.odd(shifted)), dim=1))


def identity(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else FactorizedReduction(channels, channels)


def mean_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def max_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, padding=1)


def max_pool_2x2(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride)


def conv_1x1(channels: int, stride: int) -> nn.Module:
    return relu_conv_norm((channels, channels), (1, 1), stride=stride)


def conv_3x3(channels: int, stride: int) -> nn.Module:
    inner = channels // 4
    return relu_conv_norm((channels, inner, inner, channels), (1, 1), (3, 3), (1, 1), stride=stride)


def conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    inner = channels // 4
    return relu_conv_norm((channels, inner, inner, inner, channels), (1, 1), (1, 7), (7, 1), (1, 1), stride=stride)


Operation = Callable[[int, int], nn.Module]  # from channels and stride
Operand = tuple[int, Operation]  # a state and what is done to it


@dataclass(frozen=True)
class CellDesign:
    """What a cell computes (section 3.1): from states 0 and 1, its inputs, each pair makes the next state, their sum.

    Attributes:
        pairs: the two operands of states 2 to 6.
        joined: states whose channels the cell returns.
    """

    pairs: tuple[tuple[Operand, Operand], ...]
    joined: tuple[int, ...]


NORMAL = CellDesign(
    pairs=(
        ((1, conv_1x1), (1, max_pool_3x3)),
        ((1, identity), (0, conv_1x7_7x1)),
        ((0, conv_1x1), (0, conv_1x7_7x1)),
        ((2, max_pool_3x3), (2, identity)),
        ((1, mean_pool_3x3), (5, conv_1x1)),
    ),
    joined=(0, 3, 4, 6),
)
REDUCTION = CellDesign(
    pairs=(
        ((0, max_pool_2x2), (0, max_pool_3x3)),
        ((2, identity), (1, conv_3x3)),
        ((2, conv_1x7_7x1), (2, max_pool_3x3)),
        ((3, identity), (1, max_pool_2x2)),
        ((2, mean_pool_3x3), (3, conv_1x1)),
    ),
    joined=(4, 5, 6),
)


class Cell(nn.Module):
    """One cell: brings its two inputs to the same shape, then follows its design."""

    def __init__(
        self, design: CellDesign, channels: int, last_channels: int, earlier_channels: int, last_is_reduction: bool
    ) -> None:
        super().__init__()
        self.design = design
        self.last = relu_conv_norm((last_channels, channels), (1, 1))
        self.earlier: nn.Module = nn.Identity()
        if last_is_reduction:
            self.earlier = FactorizedReduction(earlier_channels, channels)
        elif earlier_channels != channels:
            self.earlier = relu_conv_norm((earlier_channels, channels), (1, 1))
        self.operations = nn.ModuleList(
            operation(channels, 2 if design is REDUCTION and state < 2 else 1)
            for pair in design.pairs
            for state, operation in pair
        )

    def forward(self, last: Tensor, earlier: Tensor) -> Tensor:
        states = [self.last(last), self.earlier(earlier)]
        operations = iter(self.operations)
        for (first, _), (second, _) in self.design.pairs:
            states.append(next(operations)(states[first]) + next(operations)(states[second]))
        return torch.cat([states[index] for index in self.design.joined], dim=1)


class AmoebaNet(nn.Module):
    """AmoebaNet-D (L, D): images (batch, 3, height, width) -> logits (batch, num_classes).

    Args:
        L: normal cells, a multiple of 3.
        D: filters of the first group of normal cells, a multiple of 8.
        num_classes: logits.
    """

    def __init__(self, L: int, D: int, num_classes: int = 1000) -> None:  # noqa: N803 - the paper's names
        super().__init__()
        channels = last = earlier = D // 4
        self.stem = nn.Sequential(
            nn.ReLU(), nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels)
        )
        group = [NORMAL] * (L // 3)
        self.cells = nn.ModuleList()
        last_is_reduction = False
        for design in (REDUCTION, REDUCTION, *group, REDUCTION, *group, REDUCTION, *group):
            channels *= 2 if design is REDUCTION else 1
            self.cells.append(Cell(design, channels, last, earlier, last_is_reduction))
            last, earlier = channels * len(design.joined), last
            last_is_reduction = design is REDUCTION
        self.classify = nn.Linear(last, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        last = earlier = self.stem(images)
        for cell in self.cells:
            last, earlier = cell(last, earlier), last
        return self.classify(last.mean((2, 3)))
