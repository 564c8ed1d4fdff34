"""What a pipeline does with the user's optimizer, which it never sees but when that steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from profiler.errors import ArgumentError
from profiler.text import counted

Owner = TypeVar("Owner")


def before_each_step(owner: Owner, call: Callable[[Owner, torch.optim.Optimizer], None]) -> None:
    """Call `call(owner, optimizer)` before each step of any of torch's optimizers, as long as the owner lives."""
    _hooked(register_optimizer_step_pre_hook, owner, call)


def after_each_step(owner: Owner, call: Callable[[Owner, torch.optim.Optimizer], None]) -> None:
    """The same after it."""
    _hooked(register_optimizer_step_post_hook, owner, call)


def _hooked(register: Callable[..., Any], owner: Owner, call: Callable[[Owner, torch.optim.Optimizer], None]) -> None:
    known = weakref.ref(owner)

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        living = known()
        if living is not None:
            call(living, optimizer)

    ending = weakref.finalize(owner, register(hook).remove)
    ending.atexit = False


def refuse_line_search(optimizer: torch.optim.Optimizer, own: Collection[int]) -> None:
    """Refuse a step that decides by sums over all parameters, where this process steps only some of them.

    Args:
        optimizer: about to step.
        own: identities of the pipeline's parameters.

    Raises:
        ArgumentError: it is `torch.optim.LBFGS`, and holds some of them.
    """
    if isinstance(optimizer, torch.optim.LBFGS) and any(
        id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]
    ):
        raise ArgumentError(
            "LBFGS decides by sums over all parameters how far to go, and each process steps only some of them; "
            "train in one process, or with an optimizer that steps each parameter by itself"
        )


def refuse_replaced(optimizer: torch.optim.Optimizer, replaced: Mapping[str, nn.Parameter]) -> None:
    """Refuse a step that would change nothing, of parameters in whose place others are trained.

    Args:
        optimizer: about to step.
        replaced: these parameters by name.

    Raises:
        ArgumentError: it holds some of them, none of which has a gradient.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    useless = [name for name, parameter in replaced.items() if id(parameter) in held]
    if useless and all(replaced[name].grad is None for name in useless):
        raise ArgumentError(
            f"the optimizer holds {counted(len(useless), 'parameter')} of the model, such as {useless[0]}, in "
            "whose place the "
            "pipeline trains others, of another type or on another device; build it from pipe.parameters()"
        )
