"""How code reads a tensor's value, and where it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

import torch
from torch import Tensor

from profiler.observe.source_place import Place

CONDITIONS = frozenset({Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero})
"""Ask a tensor of one element whether it is true."""
COMPARISONS: Mapping[Any, Callable[..., Tensor]] = {
    torch.equal: torch.eq,
    Tensor.equal: torch.eq,
    torch.allclose: torch.isclose,
    Tensor.allclose: torch.isclose,
}
"""Ask whether all elements of two tensors are alike -> what asks that of each."""
NUMBERS = frozenset({Tensor.item, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.tolist})
"""Make numbers of elements."""
READS = CONDITIONS | COMPARISONS.keys() | NUMBERS | {Tensor.__contains__}


class Spot(NamedTuple):
    """The innermost module whose code is under way and its line, the same on every machine."""

    module: str
    line: str


def spot_of(place: Place) -> Spot:
    """The same place without the folder of its file."""
    before, quote, code = place.line.partition('"')
    file, colon, number = before.rpartition(":")
    return Spot(place.modules[-1] if place.modules else "", f"{PurePath(file).name}{colon}{number}{quote}{code}")
