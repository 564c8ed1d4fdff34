"""Modules by their paths: which layers hold one, and whether one begins a layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol, TypeAlias

from profiler.errors import ArgumentError


class NamedLayer(Protocol):
    """What rules ask of a layer: those of a traced model and those of a profile have it."""

    @property
    def index(self) -> int:
        """Its position."""

    @property
    def name(self) -> str:
        """What it is called in messages."""

    @property
    def module_paths(self) -> tuple[str, ...]:
        """Of the modules that its operations come from, in order of first use."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of those that it reads, in order of first use."""


Layers: TypeAlias = Sequence[NamedLayer]


def within(known: str, path: str) -> bool:
    """Whether one path is the other, or of something in it."""
    return known == path or known.startswith(f"{path}.")


def held_by(layers: Layers, path: str) -> list[int]:
    """Positions of the layers with operations of a module, or of modules in it."""
    return [layer.index for layer in layers if any(within(known, path) for known in layer.module_paths)]


def span_of(layers: Layers, setting: str, path: str) -> tuple[int, int]:
    """First and stop layer of a module's operations.

    Args:
        layers: of the model.
        setting: that names the module, for the message.
        path: of the module.

    Raises:
        ArgumentError: no layer has any.
    """
    inside = held_by(layers, path)
    if not inside:
        known = sorted({name for layer in layers for name in layer.module_paths})
        raise ArgumentError(
            f"{setting} names {path!r}, and no layer holds a module of that path; there are "
            f"{', '.join(known[:8])}{', ...' if len(known) > 8 else ''}"
        )
    return inside[0], inside[-1] + 1


def inside_text(layer: NamedLayer, path: str, *, begun: bool = False) -> str:
    """How a module begins inside a layer, for people; "" where a cut before the layer is one before the module.

    Before it there may be modules without parameters that are no part of what it is in: activations, pooling, dropout.

    Args:
        layer: the first that holds it.
        path: of the module.
        begun: whether the layers were traced to begin with it, so that what paths leave open is in its favour.
    """
    before = [*takewhile(lambda known: not within(known, path), layer.module_paths)]
    follows = any(within(path, known) or any(within(name, known) for name in layer.parameters) for known in before)
    if not follows and (begun or not _reads_other_parameters(layer, path, before)):
        return ""
    after = before[0] if before else "what the model itself does"
    return f"begins inside layer {layer.index} ({layer.name}) after {f'{after!r}' if before else after}"


def _reads_other_parameters(layer: NamedLayer, path: str, before: Sequence[str]) -> bool:
    """Whether the layer reads parameters by names of none of its modules first: the model's own, or by other names."""
    later = layer.module_paths[len(before) :]

    def own(name: str) -> bool:
        return any(within(name, known) for known in later)

    if any(within(name, path) for name in layer.parameters):
        later = (path,)
    others = [*takewhile(lambda name: not own(name), layer.parameters)]
    if before:
        return bool(others)
    return len(others) < len(layer.parameters) and any("." not in name for name in others)
