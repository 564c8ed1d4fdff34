"""The model that computes as a recipe says: a twin of the user's, with cast parameters.

The twin has the user's modules under the same names, and shares with the user's model what keeps its type. In place
of the rest it has tensors of its own. What enters it is cast, and what it returns is in float32, as Megatron-LM's
`Float16Module` does it; both are operations of the traced graph, so they are measured and trained like others.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from profiler.errors import ArgumentError
from profiler.precision import Recipe, recipe_of
from profiler.torch_private import NormBase, forward_pre_hooks, not_persistent_buffers

MAIN = torch.float32
"""Of what a model under a recipe returns."""


class _Entering:
    """The hook that casts floating-point inputs; by it a twin is known."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def cast(value: Tensor) -> Tensor:
            return value.to(self.dtype) if value.is_floating_point() else value

        entered: tuple[Any, Any] = pytree.tree_map_only(Tensor, cast, (args, kwargs))
        return entered


def _leaving(model: nn.Module, args: Any, output: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda value: value.to(MAIN) if value.is_floating_point() else value, output)


def computing_model(model: nn.Module, precision: str | None) -> nn.Module:
    """The model whose layers are traced, measured and run; the model itself without a recipe, or if it is a twin.

    Args:
        model: the user's.
        precision: name of a recipe.

    Raises:
        ArgumentError: the model cannot be copied.
    """
    recipe = recipe_of(precision)
    if recipe is None or any(isinstance(hook, _Entering) for hook in forward_pre_hooks(model)):
        return model
    memo: dict[int, Any] = dict(_held(model, recipe))
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as problem:  # whatever a module's attributes raise
        raise ArgumentError(
            f"precision={recipe.name!r} needs a copy of the model, and copy.deepcopy raises {type(problem).__name__}: "
            f"{problem}; give its modules a __deepcopy__, or cast the model yourself and leave precision out"
        ) from problem
    dtype = _dtype(recipe.computes)
    twin.register_forward_pre_hook(_Entering(dtype), with_kwargs=True)
    twin.register_forward_hook(_leaving)
    return twin


def main_dtype(precision: str | None, computing: Tensor) -> torch.dtype:
    """The type of what the optimizer steps for a parameter, and of the gradient that it reads.

    Args:
        precision: name of a recipe.
        computing: the parameter that layers compute with.
    """
    recipe = recipe_of(precision)
    if recipe is None or not recipe.has_masters or not computing.requires_grad:
        return computing.dtype
    return _dtype(recipe.main) if computing.dtype == _dtype(recipe.computes) else computing.dtype


def adding_dtype(precision: str | None, computing: Tensor) -> torch.dtype:
    """The type in which a parameter's gradient is added up.

    Args:
        precision: name of a recipe.
        computing: the parameter that layers compute with.
    """
    recipe = recipe_of(precision)
    main = main_dtype(precision, computing)
    return main if recipe is None or main == computing.dtype else _dtype(recipe.adds)


def added_type(precision: str | None) -> torch.dtype | None:
    """The type in which gradients are added up, where that is not the optimizer's."""
    recipe = recipe_of(precision)
    return _dtype(recipe.adds) if recipe is not None and recipe.casts_at_end else None


def main_like(precision: str | None, computing: Tensor) -> Tensor:
    """The shape and type of what the optimizer steps for a parameter, without data; itself where it has no master."""
    dtype = main_dtype(precision, computing)
    if dtype == computing.dtype:
        return computing
    return torch.empty_like(computing, dtype=dtype, device="meta").requires_grad_(computing.requires_grad)


def rounded_type(precision: str | None) -> torch.dtype | None:
    """The type to which master weights are rounded; None for a recipe without them."""
    recipe = recipe_of(precision)
    return _dtype(recipe.computes) if recipe is not None and recipe.has_masters else None


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _held(model: nn.Module, recipe: Recipe) -> Iterator[tuple[int, Any]]:
    """What the twin holds in place of each tensor of the model, by identity: tied ones stay tied."""
    dtype = _dtype(recipe.computes)
    kept = {
        id(tensor)
        for module in model.modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and (isinstance(module, NormBase) or name in not_persistent_buffers(module))
    }
    tensors: Mapping[int, Tensor] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for number, tensor in tensors.items():
        if number in kept or not tensor.is_floating_point() or tensor.dtype == dtype:
            yield number, tensor
        elif isinstance(tensor, nn.Parameter):
            yield number, nn.Parameter(tensor.detach().to(dtype), requires_grad=tensor.requires_grad)
        else:
            yield number, tensor.detach().to(dtype)
