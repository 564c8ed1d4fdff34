"""Rules of the caller about cuts and devices, as masks over layer positions; and which rules contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cost.layer_costs import Indices
from planner.settings import Settings
from profiler.errors import ArgumentError, InfeasibleError
from profiler.record import Profile

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


def rules_of(profile: Profile, settings: Settings, most_stages: int) -> Rules:
    """The masks of the settings' rules.

    Args:
        profile: whose layers the module paths mean.
        settings: with the rules.
        most_stages: largest K that devices, batch and layers allow.

    Raises:
        ArgumentError: a path is no module of the profile, or no cut can be made before it.
        InfeasibleError: rules contradict each other; the message names a smallest set that does.
    """
    rules = _listed(profile, settings, most_stages)
    whole = _applied(profile, rules)
    if _clash(profile, rules):
        needed = list(rules)
        for rule in rules:
            fewer = [other for other in needed if other is not rule]
            if _clash(profile, fewer):
                needed = fewer
        texts = [rule.text for rule in needed]
        raise InfeasibleError(
            f"no cuts satisfy {' and '.join(texts)} at once; drop or loosen one of them"
            if len(texts) > 1
            else f"no cuts satisfy {texts[0]}; drop or loosen it"
        )
    return whole


def _listed(profile: Profile, settings: Settings, most_stages: int) -> list[_Rule]:
    rules = []
    for path in settings.keep_together:
        first, stop = _span(profile, "keep_together", path)
        rules.append(_Rule(f"keep_together {path!r}", lambda it, a=first, b=stop: it.allowed[a + 1 : b].fill(False)))  # type: ignore[misc]
    for path in settings.cut_at:
        start = _start(profile, path)
        rules.append(_Rule(f"cut_at {path!r}", lambda it, a=start: it.demanded[a : a + 1].fill(True)))  # type: ignore[misc]
    seen: dict[int, tuple[str, int]] = {}
    for path, device in settings.pinned:
        first, stop = _span(profile, "pinned", path)
        for layer in range(first, stop):
            other, where = seen.setdefault(layer, (path, device))
            if where != device:
                raise InfeasibleError(
                    f"pinned {path!r} to device {device} and pinned {other!r} to device {where} clash: both hold layer "
                    f"{layer} ({profile.layers[layer].name})"
                )
        rules.append(
            _Rule(f"pinned {path!r} to device {device}", lambda it, a=first, b=stop, d=device: it.pinned[a:b].fill(d))  # type: ignore[misc]
        )
    if settings.stages is not None:
        rules.append(_Rule(f"stages = {settings.stages}", stages=(settings.stages, settings.stages)))
    rules.append(_Rule(f"at most {most_stages} stages", stages=(1, most_stages)))
    return rules


def _applied(profile: Profile, rules: Sequence[_Rule]) -> Rules:
    count = len(profile.layers)
    masks = Rules(
        np.ones(count + 1, dtype=np.bool_), np.zeros(count + 1, dtype=np.bool_), np.full(count, FREE, dtype=np.intp)
    )
    for rule in rules:
        if rule.apply is not None:
            rule.apply(masks)
    masks.demanded[[0, -1]] = False
    return masks


def _clash(profile: Profile, rules: Sequence[_Rule]) -> bool:
    """Whether no cuts at all satisfy these rules, memory and time disregarded."""
    masks = _applied(profile, rules)
    least, most = 1, len(profile.layers)
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


def _span(profile: Profile, setting: str, path: str) -> tuple[int, int]:
    """First and stop layer of a module's operations."""
    inside = [layer.index for layer in profile.layers if any(_within(known, path) for known in layer.module_paths)]
    if not inside:
        known = sorted({name for layer in profile.layers for name in layer.module_paths})
        raise ArgumentError(
            f"{setting} names {path!r}, and no layer of the profile holds a module of that path; there are "
            f"{', '.join(known[:8])}{', ...' if len(known) > 8 else ''}"
        )
    return inside[0], inside[-1] + 1


def _start(profile: Profile, path: str) -> int:
    """The position before a module, where its first operation begins a layer."""
    first, _ = _span(profile, "cut_at", path)
    begins = profile.layers[first].module_paths[0]
    if first and not _within(begins, path):
        raise ArgumentError(
            f"cut_at names {path!r}, which begins inside layer {first} ({profile.layers[first].name}) after "
            f"{begins!r}; no cut was found worth offering there, choose one of the modules that begin a layer"
        )
    return first


def _within(known: str, path: str) -> bool:
    return known == path or known.startswith(f"{path}.")
