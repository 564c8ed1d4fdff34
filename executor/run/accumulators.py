"""A parameter's accumulator is our own: no gradient shares memory with another one, or with what is sent or waits.

Autograd lets a leaf keep the gradient that reaches it as its `.grad`, without a copy, if nobody holds that *tensor*.
Its memory may be another's all the same. Backward passes of views give views, and that of an addition hands one
gradient to both sides; so with `h.view(T, D) + position` one piece of memory may be

    position.grad         which the next micro-batch adds to in place
    gradient of h         which waits for the stage before, or is just being sent
    other.grad            of another parameter in the same sum

and that addition changes all of them. It is torch's own fault: two views of parameters in one sum are trained wrong by
plain accumulation too. Here the first gradient of a parameter is copied if anything else holds its memory, right after
the backward pass that brought it; all that could hold it is alive then. Additions come later, into memory of its own.

The gradients of weights that lie one after the other, as those of an LSTM for cuDNN or of `torch.cat`, are parts of one
block. Of these the last to be looked at is alone with the block by then, and is copied too, or it would keep all of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from profiler.torch_private import use_count, values_of


class Accumulators:
    """Parameters that have no gradient yet.

    Those that have one are left alone, whatever shares its memory: it was made here, or its user laid it where it is,
    such as into one flat buffer.

    Args:
        parameters: that backward passes to come may reach; each takes its `.grad` over from the first that does.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._bare = [parameter for parameter in parameters if parameter.requires_grad and parameter.grad is None]

    def own(self) -> None:
        """After a backward pass: let the gradients that it brought lie in memory that nothing else holds."""
        if not self._bare:
            return
        bare, alone = [], []
        copies = False
        for parameter in self._bare:
            gradient = parameter.grad
            if gradient is None:
                bare.append(parameter)
            elif type(gradient) is not Tensor or gradient.layout is not torch.strided:
                if _may_be_shared(gradient):
                    parameter.grad = gradient.clone()
            elif use_count(gradient.untyped_storage()._cdata) > _ALONE:  # in place: a call more for each takes 0.5 %
                parameter.grad = gradient.clone()
                copies = True
            else:
                alone.append(parameter)
        if copies:
            _shrink(alone)
        self._bare = bare


def _shrink(parameters: Iterable[Tensor]) -> None:
    """Let gradients that are parts of a block that nothing else holds any more let go of it."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.untyped_storage().nbytes() > gradient.nbytes:
            parameter.grad = gradient.clone()


def _may_be_shared(gradient: Tensor) -> bool:
    """Whether something other than an unusual gradient holds its memory; True where that cannot be known."""
    if type(gradient) is Tensor and gradient.layout is torch.sparse_coo:
        values = values_of(gradient)
        return use_count(values.untyped_storage()._cdata) > _ALONE + 1  # the gradient's own, and this handle on it
    return True


_lone_tensor = torch.empty(1)
_ALONE = use_count(_lone_tensor.untyped_storage()._cdata)
