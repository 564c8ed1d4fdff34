"""Forward passes that keep nothing for a backward pass, which recomputed segments begin with.

`torch.no_grad` would be a little cheaper but lets operations choose other kernels (LSTMs do, on CPU), whose results
differ in the last bit from those of the recomputed pass.

A module that is called as it is may go backward inside its forward pass, as force fields do that differentiate an
energy. What it keeps is there as long as the call lasts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

_NOTHING_IS_KEPT: ContextVar[bool] = ContextVar("nothing is kept", default=False)


@contextlib.contextmanager
def keeping_nothing() -> Iterator[None]:
    """Forward passes inside take the code paths of training but keep no activations; backward is impossible."""
    before = _NOTHING_IS_KEPT.set(True)
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda _: None, _refuse):
            yield
    finally:
        _NOTHING_IS_KEPT.reset(before)


@contextlib.contextmanager
def kept_inside() -> Iterator[None]:
    """Where nothing is kept, all is until this ends: what is inside may go backward through itself."""
    if not _NOTHING_IS_KEPT.get():
        yield
        return
    kept: list[list[Tensor]] = []

    def keep(tensor: Tensor) -> list[Tensor]:
        kept.append([tensor.detach()])
        return kept[-1]

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, _first):
            yield
    finally:
        for each in kept:
            each.clear()


def _first(kept: list[Tensor]) -> Tensor:
    return kept[0] if kept else _refuse(None)


def _refuse(_: None) -> Tensor:
    raise RuntimeError("backward through a forward pass that kept nothing")
