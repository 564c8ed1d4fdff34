"""A model on the meta device: its tensors come to life only in the processes that hold them.

Each module draws its values with random numbers keyed by (seed, the module's path), so they are the same for every K
and every process. As its initializer counts, in this order: what the caller passes; `_init_weights` of the nearest
module around it that has one (Hugging Face models); its own `reset_parameters` or `_reset_parameters`, as torch's own
modules have. After it come those of the modules around it, from the inside out, as where a model is built: GPT-2's
attention scales down the weights of its output projection. A checkpoint that is loaded afterwards replaces the values.

A module that is parametrized (`torch.nn.utils.parametrizations.weight_norm`) is initialized as it was before: its
initializer fills the weight, and what the parametrization computes that from follows, as when it was registered.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from executor.run.randomness import key, seed_all
from profiler.errors import ArgumentError
from profiler.observe.random_states import generators_of, preserved
from profiler.text import raised_text
from profiler.torch_private import not_persistent_buffers

Initializer = Callable[[nn.Module], None]


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
            A parametrized module comes as it was before.
            What it leaves of the persistent ones is NaN, or 0, for a checkpoint to fill; all else left is an error.
        seed: of the random numbers.

    Raises:
        ArgumentError: a tensor has no initializer, or belongs to no module.
    """
    found: dict[tuple[str, torch.device], Tensor] = {}
    living = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if not tensor.is_meta]
    for path, names in _by_module(model, wanted).items():
        module = model.get_submodule(path)
        for device in sorted({device for name in names.values() for device in wanted[name]}, key=str):
            twin = _twin(module, device)
            empty = {own: getattr(twin, own) for own in names if hasattr(twin, own)}
            versions = {own: tensor._version for own, tensor in empty.items()}
            with preserved([device]), torch.no_grad():
                seed_all(generators_of(device), key(seed, 0, 0, _number(path)))
                if initialize is not None:
                    initialize(twin)
                else:
                    _initialize(model, path, twin, living)
                originals = dict(_originals(module, path, twin))
            for own, name in names.items():
                if device in wanted[name]:
                    value = originals[own] if own in originals else getattr(twin, own)
                    untouched = own in empty and value is empty[own] and value._version == versions[own]
                    to_load = initialize is not None and own not in not_persistent_buffers(module)
                    if _is_empty(value, untouched) and not to_load:
                        raise _unfilled(own, path)
                    found[name, device] = value.detach()
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
        path, own = _place(model, first[identity[name]])
        grouped.setdefault(path, {})[own] = name
    return grouped


_PARAMETRIZATIONS = "parametrizations"  # the child of a parametrized module that holds what it computes tensors from


def _place(model: nn.Module, name: str) -> tuple[str, str]:
    """The path of the module that fills a tensor, and the name there: a parametrized one fills the originals, too."""
    path, _, own = name.rpartition(".")
    table, _, tensor = path.rpartition(".")
    outer, _, child = table.rpartition(".")
    if child == _PARAMETRIZATIONS and parametrize.is_parametrized(model.get_submodule(outer), tensor):
        return outer, f"{child}.{tensor}.{own}"
    return path, own


def _twin(module: nn.Module, device: torch.device) -> nn.Module:
    """The module with tensors of its own on the device, NaN where they can be; children stay as they are."""
    twin = _copied(module)
    twin._parameters = {
        name: None if held is None else nn.Parameter(_empty(held, device), requires_grad=held.requires_grad)
        for name, held in twin._parameters.items()
    }
    twin._buffers = {name: None if held is None else _empty(held, device) for name, held in twin._buffers.items()}
    return twin


def _copied(module: nn.Module) -> nn.Module:
    """A shallow copy; of a parametrized module, which torch lets nobody copy, one as it was before."""
    if not parametrize.is_parametrized(module):
        return copy.copy(module)
    plain: nn.Module = object.__new__(parametrize.type_before_parametrizations(module))
    vars(plain).update(vars(module))
    plain._parameters, plain._buffers = dict(module._parameters), dict(module._buffers)
    plain._modules = {name: part for name, part in module._modules.items() if name != _PARAMETRIZATIONS}
    for name, held in _parametrizations(module):
        value = getattr(module, name).detach()
        if held._parameters:
            plain._parameters[name] = nn.Parameter(value, requires_grad=False)
        else:
            plain._buffers[name] = value
    return plain


def _parametrizations(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The names of a module's parametrized tensors, and what computes each."""
    return getattr(module, _PARAMETRIZATIONS).named_children() if parametrize.is_parametrized(module) else iter(())


def _originals(module: nn.Module, path: str, twin: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What parametrized tensors are computed from, now that a module's twin has values for them.

    Raises:
        ArgumentError: it does not follow from these.
    """
    for name, held in _parametrizations(module):
        value: Any = getattr(twin, name).detach()
        tensors = {
            own: tensor for own, tensor in (*held._parameters.items(), *held._buffers.items()) if tensor is not None
        }
        if _is_empty(value, untouched=False):  # left for a checkpoint
            found = {own: _empty(tensor, value.device) for own, tensor in tensors.items()}
        else:
            try:
                found = _inverted(held, value)
            except Exception as problem:
                parts = ", ".join(type(part).__name__ for part in held.children())
                raise ArgumentError(
                    f"module {path!r} is on the meta device, and from values of its {name!r} nobody finds what its "
                    f"parametrization ({parts}) computes that from: {raised_text(problem)}; give the "
                    "model values before it is parametrized: build it on the CPU"
                ) from problem
        for own, tensor in found.items():
            yield f"{_PARAMETRIZATIONS}.{name}.{own}", tensor


def _inverted(held: nn.Module, value: Any) -> dict[str, Tensor]:
    """As `register_parametrization` does it: a part without `right_inverse` counts as one that changes nothing."""
    for part in reversed([*held.children()]):
        inverse = getattr(part, "right_inverse", None)
        if inverse is not None:
            with contextlib.suppress(NotImplementedError):
                value = inverse(value)
    if isinstance(value, Tensor):
        return {"original": value.clone()}
    return {f"original{number}": tensor.clone() for number, tensor in enumerate(value)}


def _empty(like: Tensor, device: torch.device) -> Tensor:
    if not like.is_meta:
        return like.detach().to(device, copy=True)
    empty = torch.empty_like(like, device=device, requires_grad=False)
    return empty.fill_(float("nan")) if empty.is_floating_point() or empty.is_complex() else empty.zero_()


def _initialize(model: nn.Module, path: str, twin: nn.Module, living: Collection[str]) -> None:
    """Fill a module's twin as the model itself does.

    Of a module around it nothing but the twin has values; where something has (`living`), it is left alone.
    """
    parts = path.split(".") if path else []
    paths = [".".join(parts[:length]) for length in reversed(range(len(parts) + 1))]
    own = _initializer_of(model, paths, twin)
    if own is None:
        raise ArgumentError(
            f"module {path!r} ({type(twin).__name__}) is on the meta device and has no reset_parameters; add one, or "
            "pass initialize=... to Pipeline"
        )
    own()
    for position, outer in enumerate(paths[1:], start=1):
        if any(name.startswith(f"{outer}." if outer else "") for name in living):
            return
        around = _copied(model.get_submodule(outer))
        around._modules = {**around._modules, parts[-position]: twin}
        twin = around
        then = _initializer_of(model, paths[position:], twin)
        if then is not None:
            then()


def _initializer_of(model: nn.Module, paths: Sequence[str], twin: nn.Module) -> Callable[[], Any] | None:
    """What initializes a module, given its path and those of the modules around it."""
    for path in paths:
        init_weights = getattr(model.get_submodule(path), "_init_weights", None)
        if callable(init_weights):
            return partial(init_weights, twin)
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(twin, name, None)):
            return getattr(twin, name)  # type: ignore[no-any-return]
    return None


def _is_empty(tensor: Tensor, untouched: bool) -> bool:
    """Whether a tensor holds what `_empty` gave it; what is written to its `.data` shows in its values only."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return untouched and not bool(tensor.any())


def _unfilled(name: str, path: str) -> ArgumentError:
    return ArgumentError(
        f"{name!r} of module {path!r} is on the meta device, and the module's initializer does not fill it; let "
        "reset_parameters do so, or pass initialize=... to Pipeline"
    )


def _number(path: str) -> int:
    """A number for a module's path."""
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "little") >> 1
