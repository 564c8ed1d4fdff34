"""Hooks that somebody has put on parameters draw random numbers that are keyed, too: by the layer and the parameter.

    for parameter in pipe.parameters():
        parameter.register_hook(lambda gradient: gradient + 0.01 * torch.randn_like(gradient))

A hook of ours comes first and seeds the generators. In a stage all that a hook draws comes after it, and before the
next parameter's gradient.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

from torch import Tensor

from executor.run.randomness import OF_PARAMETERS, Keyed
from profiler.torch_private import gradient_hooks, hook_first


class ParameterHooks:
    """Those of the parameters of one stage.

    Attributes:
        keyed: seeds the generators in the backward pass that runs now.
    """

    def __init__(self) -> None:
        self.keyed: Keyed | None = None
        self._known: set[int] = set()

    def seed(self, parameters: Mapping[tuple[int, str], Tensor]) -> None:
        """Let hooks of these parameters, by (layer, name), draw what follows from the seed."""
        for (layer, name), parameter in parameters.items():
            if gradient_hooks(parameter) and id(parameter) not in self._known:
                self._known.add(id(parameter))
                hook_first(parameter, self._hook(zlib.crc32(f"{layer} {name}".encode())))

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            if self.keyed is not None:
                self.keyed.in_backward(OF_PARAMETERS, number, ())

        return hook
