"""Main gradients: a backward pass leaves gradients in the type that computes, and they are added up in another one.

    leaf (bfloat16) -- backward pass --> leaf.grad (bfloat16) -- added, then gone --> main.grad (float32)

That happens in the backward pass itself, to each gradient as soon as it is complete: they never exist all at once. The
executor and the profiler use the same, so what is measured is what trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from profiler.machine.backend import HOST
from profiler.precision import CAST_ELEMENTS
from profiler.torch_private import copy_all


def adding_to(main: Tensor, computing: Tensor) -> Tensor:
    """A leaf that shares the memory of `computing`, and whose gradients are added to `main.grad`.

    Args:
        main: a leaf of the same shape.
        computing: what layers compute with.
    """
    leaf = computing.detach().requires_grad_(main.requires_grad)
    if leaf.requires_grad:
        leaf.register_post_accumulate_grad_hook(partial(_add, main))
    return leaf


def with_gradient(computing: Tensor, gradient: Tensor) -> Tensor:
    """A leaf as layers read it from the second micro-batch of a step on: its gradient is added to that one.

    Args:
        computing: a leaf without a gradient.
        gradient: of its shape; of another type, it is a main gradient.
    """
    if gradient.dtype == computing.dtype:
        computing.grad = gradient
        return computing
    main = torch.empty((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape).requires_grad_()
    main.grad = gradient
    return adding_to(main, computing)


@torch.no_grad()
def _add(main: Tensor, leaf: Tensor) -> None:
    gradient = leaf.grad
    leaf.grad = None
    if gradient is None:
        return
    total = main.grad
    if total is None:
        main.grad = gradient.to(main.dtype)
    elif total.device.type == HOST.type and _flat(total) and _flat(gradient) and total.numel() > CAST_ELEMENTS:
        parts = zip(total.view(-1).split(CAST_ELEMENTS), gradient.view(-1).split(CAST_ELEMENTS), strict=True)
        for part, added in parts:
            part.add_(added)
    else:
        main.grad = total.add_(gradient) if total.layout is torch.strided else total + gradient.to(main.dtype)


def _flat(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_contiguous()


@torch.no_grad()
def round_to(computing: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Write master weights to what layers compute with."""
    if computing:
        copy_all(list(computing), list(masters))
