"""FLOPs of operations, against torch's formulas and by hand."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from profiler.observe.flops import FLOP_FORMULAS

aten = torch.ops.aten


class _Counted(TorchDispatchMode):
    """FLOPs by operation, by this project's formulas and by torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.ours: dict[Any, int] = {}
        self.torchs: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        operation = func._overloadpacket
        if operation in FLOP_FORMULAS:
            self.ours[operation] = FLOP_FORMULAS[operation](*args, **(kwargs or {}), out_val=out)
            self.torchs[operation] = flop_registry[operation](*args, **(kwargs or {}), out_val=out)
        return out


def _count(layer: nn.Module, x: torch.Tensor) -> _Counted:
    with _Counted() as counted:
        layer(x).sum().backward()
    return counted


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize(("channels", "groups"), [(64, 1), (64, 8), (64, 64)])
@pytest.mark.parametrize("learns_input", [False, True])
def test_a_convolution_goes_back_with_as_many_flops_a_gradient(
    kind: type[nn.Module], channels: int, groups: int, learns_input: bool
) -> None:
    layer = kind(channels, channels, 3, padding=1, groups=groups)
    counted = _count(layer, torch.randn(2, channels, 16, 16, requires_grad=learns_input))
    forward = 2 * (2 * 16 * 16) * channels * (channels // groups) * 9  # a multiply-add is two
    assert counted.ours[aten.convolution] == forward
    assert counted.ours[aten.convolution_backward] == forward * (1 + learns_input)
    if groups == 1:
        assert counted.ours == counted.torchs


def test_a_strided_convolution_without_groups_is_torchs() -> None:
    for layer in (nn.Conv1d(6, 10, 3, stride=2), nn.ConvTranspose1d(6, 10, 3, stride=2)):
        counted = _count(layer, torch.randn(3, 6, 17, requires_grad=True))
        forward = counted.ours[aten.convolution]
        assert forward == counted.torchs[aten.convolution]
        assert counted.ours[aten.convolution_backward] == 2 * forward
