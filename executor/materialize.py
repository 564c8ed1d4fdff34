"""A model on the meta device: its tensors come to life only in the processes that hold them.

Each module draws its values with random numbers keyed by (seed, the module's path), so they are the same for every K
and every process. As its initializer counts, in this order: what the caller passes; `_init_weights` of the nearest
module around it that has one (Hugging Face models); its own `reset_parameters` or `_reset_parameters`, as torch's own
modules have. A checkpoint that is loaded afterwards replaces the values.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from executor.randomness import generator_of, key, preserved
from profiler.errors import ArgumentError

Initializer = Callable[[nn.Module], None]


def is_on_meta(model: nn.Module) -> bool:
    """Whether a tensor of the model has no values."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def materialized(
    model: nn.Module,
    wanted: Mapping[str, Collection[torch.device]],
    *,
    initialize: Initializer | None,
    seed: int,
) -> dict[tuple[str, torch.device], Tensor]:
    """Tensors with values for the given names of a model on meta.

    Args:
        model: some of its tensors have no values.
        wanted: names of parameters and buffers, and the devices on which each is wanted.
        initialize: fills the parameters and buffers of the one module that it is called with, not of its children.
            What it leaves is NaN; without it, that is an error.
        seed: of the random numbers.

    Raises:
        ArgumentError: a tensor has no initializer, or belongs to no module.
    """
    found: dict[tuple[str, torch.device], Tensor] = {}
    for path, names in _by_module(model, wanted).items():
        module = model.get_submodule(path)
        for device in sorted({device for name in names.values() for device in wanted[name]}, key=str):
            twin = _twin(module, device)
            with preserved([generator_of(device)]), torch.no_grad():
                generator_of(device).manual_seed(key(seed, 0, 0, _number(path)))
                run = initialize if initialize is not None else _initializer_of(model, path)
                run(twin)
            for own, name in names.items():
                if device in wanted[name]:
                    found[name, device] = _value(twin, own, path, allow_nan=initialize is not None)
    return found


def _by_module(model: nn.Module, wanted: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """By the path of a module the wanted tensors that it holds: name there -> wanted name.

    Of a tied tensor the first module counts, whichever name is wanted.
    """
    identity: dict[str, int] = {}
    first: dict[int, str] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        identity[name] = id(tensor)
        first.setdefault(id(tensor), name)
    grouped: dict[str, dict[str, str]] = {}
    for name in wanted:
        if name not in identity:
            raise ArgumentError(
                f"the model is on the meta device and computes with the constant {name}, which has no values there; "
                "register it as a buffer of a module that fills it in reset_parameters"
            )
        path, _, own = first[identity[name]].rpartition(".")
        grouped.setdefault(path, {})[own] = name
    return grouped


def _twin(module: nn.Module, device: torch.device) -> nn.Module:
    """The module with tensors of its own on the device, NaN where they can be; children stay as they are."""
    twin = copy.copy(module)
    twin._parameters = {
        name: None if held is None else nn.Parameter(_empty(held, device), requires_grad=held.requires_grad)
        for name, held in module._parameters.items()
    }
    twin._buffers = {name: None if held is None else _empty(held, device) for name, held in module._buffers.items()}
    return twin


def _empty(like: Tensor, device: torch.device) -> Tensor:
    if not like.is_meta:
        return like.detach().to(device, copy=True)
    empty = torch.empty_like(like, device=device, requires_grad=False)
    return empty.fill_(float("nan")) if empty.is_floating_point() else empty.zero_()


def _initializer_of(model: nn.Module, path: str) -> Initializer:
    parts = path.split(".") if path else []
    around = [model.get_submodule(".".join(parts[:length])) for length in reversed(range(len(parts) + 1))]
    for outer in around:
        own = getattr(outer, "_init_weights", None)
        if callable(own):
            return own  # type: ignore[no-any-return]
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(around[0], name, None)):
            return lambda twin: getattr(twin, name)()
    raise ArgumentError(
        f"module {path!r} ({type(around[0]).__name__}) is on the meta device and has no reset_parameters; add one, or "
        "pass initialize=... to Pipeline"
    )


def _value(twin: nn.Module, name: str, path: str, *, allow_nan: bool) -> Tensor:
    held = getattr(twin, name)
    assert isinstance(held, Tensor), "the module holds it"
    if not allow_nan and held.is_floating_point() and bool(held.isnan().any()):
        raise ArgumentError(
            f"{name!r} of module {path!r} is on the meta device, and the module's initializer does not fill it; let "
            "reset_parameters do so, or pass initialize=... to Pipeline"
        )
    return held.detach()


def _number(path: str) -> int:
    """A number for a module's path."""
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "little") >> 1
