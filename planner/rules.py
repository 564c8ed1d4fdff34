"""Rules of the caller about cuts and devices, as masks over layer positions; and which rules contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import Indices
from planner.settings import Settings
from profiler.errors import ArgumentError, InfeasibleError
from profiler.module_paths import Layers, inside_text, span_of
from profiler.text import counted

FREE = -1
"""Device of a layer that no rule pins."""


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """Where cuts may and must be, and what must run where.

    Attributes:
        allowed: whether a cut is allowed at a position, shape (L + 1,); both ends are.
        demanded: whether there must be one, shape (L + 1,).
        pinned: position of the device that must run a layer, or FREE, shape (L,).
    """

    allowed: NDArray[np.bool_]
    demanded: NDArray[np.bool_]
    pinned: Indices


@dataclass(frozen=True, slots=True)
class _Rule:
    """One rule as the caller gave it, and how it narrows the masks and the numbers of stages."""

    text: str
    apply: Callable[[Rules], None] | None = None
    stages: tuple[int, int] | None = None


def rules_of(layers: Layers, settings: Settings, begun: Collection[str] = ()) -> Rules:
    """The masks of the settings' rules; known as soon as a model is traced.

    Args:
        layers: of the model, which the module paths mean.
        settings: with the rules.
        begun: paths of modules that the layers were traced with, each to begin one.

    Raises:
        ArgumentError: there are more stages than layers, a path is no module of the model, or no cut can be made before
            it.
        InfeasibleError: rules contradict each other; the message names a smallest set that does.
    """
    count, chunks = len(layers), settings.chunks
    if settings.stages is not None and settings.stages > count:
        raise ArgumentError(
            f"stages is {settings.stages}, but the model has {counted(count, 'layer')}; a stage holds at least 1"
        )
    if chunks > 1 and count < 2 * chunks:
        raise InfeasibleError(
            f"chunks is {chunks}, so 2 ranks have {2 * chunks} stages, but the model has "
            f"{counted(count, 'layer')}; a stage holds at least 1"
        )
    rules = _listed(layers, settings, begun)
    whole = _applied(count, rules)
    if _clash(count, rules):
        needed = list(rules)
        for rule in rules:
            fewer = [other for other in needed if other is not rule]
            if _clash(count, fewer):
                needed = fewer
        texts = [rule.text for rule in needed]
        raise InfeasibleError(
            f"no cuts satisfy {' and '.join(texts)} at once; drop or loosen one of them"
            if len(texts) > 1
            else f"no cuts satisfy {texts[0]}; drop or loosen it"
        )
    return whole


def with_chunks_for_cuts(layers: Layers, settings: Settings, begun: Collection[str] = ()) -> Settings:
    """The settings with as many chunks a rank as the cuts take that are asked for, if chunks may be chosen so.

    Args:
        layers: of the model.
        settings: with the rules.
        begun: paths of modules that the layers were traced with, each to begin one.

    Raises:
        ArgumentError: no cut can be made before a module, or so many chunks do not go together with other settings.
        InfeasibleError: the batch is too small for them.
    """
    return settings.for_cuts(len({start_of(layers, path, begun) for path in settings.cut_at} - {0}))


def most_stages(settings: Settings, layers: int) -> int:
    """Largest K that settings, devices, batch and so many layers allow."""
    per_rank = settings.batch_size // settings.micro_batches_per_stage
    return min(settings.max_stages, layers, per_rank * settings.chunks)


def _listed(layers: Layers, settings: Settings, begun: Collection[str]) -> list[_Rule]:
    rules = []
    for path in settings.keep_together:
        first, stop = span_of(layers, "keep_together", path)
        rules.append(_Rule(f"keep_together {path!r}", lambda it, a=first, b=stop: it.allowed[a + 1 : b].fill(False)))  # type: ignore[misc]
    for path in settings.cut_at:
        start = start_of(layers, path, begun)
        rules.append(_Rule(f"cut_at {path!r}", lambda it, a=start: it.demanded[a : a + 1].fill(True)))  # type: ignore[misc]
    seen: dict[int, tuple[str, int]] = {}
    for path, device in settings.pinned:
        first, stop = span_of(layers, "pinned", path)
        for layer in range(first, stop):
            other, where = seen.setdefault(layer, (path, device))
            if where != device:
                raise InfeasibleError(
                    f"pinned {path!r} to device {device} and pinned {other!r} to device {where} clash: both hold layer "
                    f"{layer} ({layers[layer].name})"
                )
        rules.append(
            _Rule(f"pinned {path!r} to device {device}", lambda it, a=first, b=stop, d=device: it.pinned[a:b].fill(d))  # type: ignore[misc]
        )
    if settings.stages is not None:
        rules.append(_Rule(f"stages = {settings.stages}", stages=(settings.stages, settings.stages)))
    most = most_stages(settings, len(layers))
    rules.append(_Rule(f"at most {most} stages", stages=(1, most)))
    return rules


def _applied(count: int, rules: Sequence[_Rule]) -> Rules:
    masks = Rules(
        np.ones(count + 1, dtype=np.bool_), np.zeros(count + 1, dtype=np.bool_), np.full(count, FREE, dtype=np.intp)
    )
    for rule in rules:
        if rule.apply is not None:
            rule.apply(masks)
    masks.demanded[[0, -1]] = False
    return masks


def _clash(count: int, rules: Sequence[_Rule]) -> bool:
    """Whether no cuts at all of so many layers satisfy these rules, memory and time disregarded."""
    masks = _applied(count, rules)
    least, most = 1, count
    for rule in rules:
        if rule.stages is not None:
            least, most = max(least, rule.stages[0]), min(most, rule.stages[1])
    if (masks.demanded & ~masks.allowed).any():
        return True
    optional = masks.allowed.copy()
    optional[[0, -1]] = False
    needed = 1 + int(masks.demanded.sum())
    where = np.flatnonzero(masks.pinned != FREE)
    finished: set[int] = set()
    for before, after in pairwise(where):
        one, other = int(masks.pinned[before]), int(masks.pinned[after])
        between = slice(before + 1, after + 1)
        if one == other:
            optional[between] = False
            if masks.demanded[between].any():
                return True
            continue
        finished.add(one)
        if other in finished or not masks.allowed[between].any():
            return True
        needed += not masks.demanded[between].any()
    return max(needed, least) > min(most, 1 + int(optional.sum()))


def start_of(layers: Layers, path: str, begun: Collection[str] = ()) -> int:
    """The position before a module, where its first operation begins a layer.

    Args:
        layers: of the model.
        path: of the module.
        begun: paths that the layers were traced with, each to begin one.

    Raises:
        ArgumentError: it begins inside a layer, or is in none.
    """
    first, _ = span_of(layers, "cut_at", path)
    if inside := inside_text(layers[first], path, begun=path in begun):
        raise ArgumentError(
            f"cut_at names {path!r}, which {inside}; trace the model with cut_at={[path]!r} for a layer to begin "
            "there, which it does if a cut is safe, or choose one of the modules that begin a layer"
        )
    return first
