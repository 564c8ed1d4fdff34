"""Memory layouts of gradients: each is brought into its value's own, as autograd does where it comes to a leaf."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(slots=True)
class Watched:
    """The outputs of a layer whose gradients may come in another memory layout than their own.

    Attributes:
        positions: of these among the outputs.
        changed: called when there are others.
        astray: those of them whose gradients did.
    """

    positions: set[int]
    changed: Callable[[], None]
    astray: set[int] = field(default_factory=set)

    def watch(self, outputs: Sequence[Any]) -> None:
        """Bring the outputs' gradients into their own memory layouts, and note which of them had to be brought."""
        for position in tuple(self.positions):
            output = outputs[position]
            if isinstance(output, nn.Parameter):
                continue  # which would keep the hook from step to step, and autograd does this there
            if isinstance(output, Tensor) and output.requires_grad:
                hook_gradient(output, self._hook(position, layout_hook(output)))
            elif torch.is_grad_enabled():
                self._known(position)

    def _known(self, position: int) -> None:
        if position in self.positions:
            self.positions.discard(position)
            self.changed()

    def _hook(self, position: int, bring: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
        def hook(gradient: Tensor) -> Tensor | None:
            brought = bring(gradient)
            if brought is None and position not in self.astray:
                self._known(position)
            elif brought is not None and position not in self.astray:
                self.astray.add(position)
                self.positions.add(position)
                self.changed()
            return brought

        return hook


def hook_gradient(value: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
    """Have a hook called with the value's gradient, as `Tensor.register_hook` does, which no code here may call itself.

    That ends the process with a segmentation fault if the value is a view whose base was written since: it makes the
    hooks' dictionary first and looks at `grad_fn` then, which makes the view's history anew and throws the dictionary
    away (torch 2.9 to 2.14; github.com/pytorch/pytorch/issues/196459). And it calls hooks with None, for outputs of an
    operation without a part in the loss.
    """
    _ = value.grad_fn

    def only_if_there_is_one(gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else hook(gradient)

    value.register_hook(only_if_there_is_one)


def layout_hook(value: Tensor) -> Callable[[Tensor], Tensor | None]:
    """A hook that brings the value's gradient into the value's memory layout; into a dense one where elements overlap.

    `reshape` may view a tensor of one sample that it copies of several, one that was expanded or unfolded, too.
    """
    shape, strides = value.shape, value.stride()
    if _overlaps(shape, strides):
        strides = torch.empty_like(value, device="meta").stride()

    def bring(gradient: Tensor) -> Tensor | None:
        if gradient.stride() == strides:
            return None
        return torch.empty_strided(shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)

    return bring


def each_once(tensor: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor and a value of its shape without the dimensions along which it holds one element many times (`expand`).

    Masks often do.
    """
    has_strides = tensor.layout == torch.strided and not tensor.is_nested
    for dim, stride in enumerate(tensor.stride() if has_strides else ()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor, value = tensor.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    return tensor, value


def write_in_place(tensor: Tensor, value: Tensor) -> None:
    """Write a value, also where a tensor holds one element many times."""
    tensor, value = each_once(tensor, value)
    tensor.copy_(value)


def _overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may share their memory."""
    reach = 0  # of all dimensions of smaller strides
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
