"""Everything that a model holds at one moment, as text by place: what may not change is compared with it."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def snapshot(model: nn.Module) -> dict[str, str]:
    """By place: which object it is, what it is made of, and the bits of each tensor; and the random generators.

    A module under several names is looked at under each of them.
    """
    found = {
        "torch's generator": str(hash(bytes(torch.get_rng_state().tolist()))),
        "Python's generator": str(hash(random.getstate())),
        "numpy's generator": str(np.random.get_state(legacy=False)),
    }
    for path, module in model.named_modules(remove_duplicate=False):
        found[f"{path} itself"] = f"{id(module)} {type(module).__name__}"
        for name, value in vars(module).items():
            found.update(_described(f"{path}: {name}", value, set()))
        found[f"{path}: order of attributes"] = str(list(vars(module)))
    return found


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Places that were added, removed or changed."""
    return [place for place in {**before, **after} if before.get(place) != after.get(place)]


def _described(place: str, value: Any, above: set[int]) -> Iterator[tuple[str, str]]:
    if isinstance(value, _PLAIN):
        yield place, repr(value)
        return
    yield place, f"{id(value)} {type(value).__name__}"
    if id(value) in above or isinstance(value, nn.Module):
        return
    above = above | {id(value)}
    if isinstance(value, Tensor):
        yield (
            f"{place} as it is",
            f"{value.requires_grad} {value._version} {value.dtype} {value.shape} {value.stride()}",
        )
        if not value.is_meta:
            yield f"{place} in memory", str(value.data_ptr())
            yield f"{place} in bits", str(hash(bytes(value.detach().contiguous().flatten().view(torch.uint8).tolist())))
        yield from _described(f"{place}.grad", value.grad if value.is_leaf else None, above)
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            yield from _described(f"{place}.{name}", getattr(value, name, None), above)
        yield from _described(f"{place} attributes", getattr(value, "__dict__", None), above)
    elif isinstance(value, dict):
        yield f"{place} keys", str([repr(key) if isinstance(key, _PLAIN) else id(key) for key in value])
        for number, item in enumerate(value.values()):
            yield from _described(f"{place}[{list(value)[number]!r}]", item, above)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _described(f"{place}[{number}]", item, above)
    elif isinstance(value, set):
        yield f"{place} items", str(sorted(map(id, value)))
    elif isinstance(value, torch.Generator):
        yield f"{place} state", str(hash(bytes(value.get_state().tolist())))
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        yield from _described(f"{place} attributes", vars(value), above)
