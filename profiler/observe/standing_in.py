"""Other tensors in the place of a module's parameters and buffers, for the time of a call.

`torch.func.functional_call` puts them back by name, and so leaves stand-ins behind in a module that its model holds
under two names. Here each place is put back by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

from torch import Tensor, nn


@contextlib.contextmanager
def standing_in(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Within, the given tensors stand wherever the module holds those of the same names, under other names too.

    Args:
        module: that is to be called.
        tensors: by dotted name. Where the module holds another tensor at the end of the block, for it has replaced it,
            that one is put in here.
    """
    holders = {
        (f"{path}.{own}" if path else own): (held, own)
        for path, part in module.named_modules()
        for held in _held_by(part)
        for own in held
    }
    stand_ins = {id(holders[name][0][holders[name][1]]): tensor for name, tensor in tensors.items()}
    before = [(held, dict(held)) for part in module.modules() for held in _held_by(part)]
    try:
        for held, originals in before:
            held.update({own: stand_ins[id(tensor)] for own, tensor in originals.items() if id(tensor) in stand_ins})
        yield
    finally:
        for name in tensors:
            held, own = holders[name]
            if (now := held.get(own)) is not None:
                tensors[name] = now
        for held, originals in before:
            held.clear()
            held.update(originals)


def _held_by(module: nn.Module) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Its own parameters and its own buffers."""
    return cast("dict[str, Tensor | None]", module._parameters), module._buffers
