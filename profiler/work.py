"""What a model computes for one sample, whatever computes it. Torch-free."""

from __future__ import annotations

from profiler.field_types import Rate
from profiler.value import Value

PASSES = 3
"""A backward pass does twice the FLOPs of a forward pass, which makes three in all; recompute is no useful work."""


class Work(Value):
    """What a model computes for one sample.

    Attributes:
        forward_flops: of a forward pass, multiply-adds counted as two, as `torch.utils.flop_counter` does.
        dtype: in which most parameters are computed, autocast's if there is one: torch name without the prefix.
    """

    forward_flops: Rate
    dtype: str

    @property
    def training_flops(self) -> float:
        """Of a forward and a backward pass."""
        return PASSES * self.forward_flops
