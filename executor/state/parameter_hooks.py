"""Hooks that somebody has put on parameters whose gradients another tensor collects: they would not be called."""

from __future__ import annotations

from executor.state.placement import Placement
from profiler.errors import ArgumentError
from profiler.torch_private import gradient_hooks


def refuse_lost_hooks(placement: Placement) -> None:
    """Refuse hooks that no micro-batch would call, or with a part of the gradient.

    Raises:
        ArgumentError: naming the parameter.
    """
    hooked = {name: held for (name, _), held in placement.parameters.items() if gradient_hooks(held)}
    if not hooked:
        return
    collecting = {id(tensor) for own in placement.read_by.values() for tensor in own.values()}
    for name, parameter in hooked.items():
        if id(parameter) not in collecting:
            raise ArgumentError(
                f"parameter {name!r} has a hook on its gradient, to which several layers add, or which layers make in "
                "another type; change the gradient between step() and optimizer.step()"
            )
