"""DenseNet-BC (Huang et al., "Densely Connected Convolutional Networks", arXiv 1608.06993).

Each layer reads the outputs of all layers of its block before it. Joined anew for each reader, as here and in the
paper, a block of n layers has n values alive at its end. The stem is that of the paper's networks for small images.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class DenseLayer(nn.Module):
    """BN-ReLU-Conv(1x1)-BN-ReLU-Conv(3x3) (section 3, "bottleneck layers")."""

    def __init__(self, channels: int, growth: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
            nn.Dropout(dropout),
        )

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.layers(torch.cat(features, dim=1))


class Transition(nn.Sequential):
    """Halves channels and extents between two blocks."""

    def __init__(self, channels: int) -> None:
        super().__init__(
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels // 2, 1, bias=False),
            nn.AvgPool2d(2),
        )


class DenseNet(nn.Module):
    """Images (batch, 3, height, width) -> logits (batch, num_classes).

    Args:
        growth: channels that each layer adds (the paper's k).
        blocks: layers of each block.
        num_classes: logits.
        dropout: behind each layer.
    """

    def __init__(
        self,
        growth: int = 32,
        blocks: Sequence[int] = (6, 12, 24, 16),
        num_classes: int = 1000,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        channels = 2 * growth
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList()
        self.transitions = nn.ModuleList()
        for index, layers in enumerate(blocks):
            if index > 0:
                self.transitions.append(Transition(channels))
                channels //= 2
            self.blocks.append(
                nn.ModuleList(DenseLayer(channels + layer * growth, growth, dropout) for layer in range(layers))
            )
            channels += layers * growth
        self.norm = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            if index > 0:
                x = self.transitions[index - 1](x)
            features = [x]
            assert isinstance(block, nn.ModuleList)
            for layer in block:
                features.append(layer(features))
            x = torch.cat(features, dim=1)
        return self.head(torch.relu(self.norm(x)).mean((2, 3)))
