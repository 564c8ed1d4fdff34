"""U-Net (Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation", arXiv 1505.04597).

    image -> level 0 --------------------------------> level 0 -> labels
               '-> level 1 ----------------> level 1 -'
                     '-> ... bottom ... ->'

The skips are long: what level 0 computes first is read last, and crosses every position in between. Unlike the
paper's, convolutions are padded (the labels have the image's extent) and followed by batch normalization.
"""

import torch
from torch import Tensor, nn


class DoubleConvolution(nn.Module):
    """Two 3x3 convolutions, each with batch normalization and ReLU in place (section 2)."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class UNet(nn.Module):
    """Images (batch, 3, height, width) -> logits (batch, num_classes, height, width).

    Args:
        depth: levels above the bottom; both extents are multiples of 2 ** depth.
        channels: of the top level; each level below has twice as many.
        num_classes: labels of a pixel.
    """

    def __init__(self, depth: int = 4, channels: int = 64, num_classes: int = 2) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            DoubleConvolution(above, below) for above, below in zip([3, *widths], widths[:-1], strict=False)
        )
        self.pool = nn.MaxPool2d(2)
        self.bottom = DoubleConvolution(widths[-2], widths[-1])
        self.rise = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in widths[-2::-1])
        self.up = nn.ModuleList(DoubleConvolution(2 * width, width) for width in widths[-2::-1])
        self.head = nn.Conv2d(channels, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for rise, level, skip in zip(self.rise, self.up, reversed(skips), strict=True):
            x = level(torch.cat((skip, rise(x)), dim=1))
        return self.head(x)
