"""Made-up tensors for a module that is called as it is, and the circumstances of the call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from profiler.machine.backend import backend_of
from profiler.opaque.call import filled
from profiler.opaque.held import Held


@dataclass(frozen=True, slots=True)
class TakenTensor:
    """A tensor that the module takes, while it is traced: extents may be symbolic."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    requires_grad: bool
    device: torch.device


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What thread-local state a call takes place in.

    Attributes:
        with_gradient: whether gradients are recorded.
        autocast: dtype of the autocast region on the device; None outside one.
        device_type: of the module.
    """

    with_gradient: bool
    autocast: torch.dtype | None
    device_type: str

    @classmethod
    def now(cls, device: torch.device) -> Circumstances:
        """Those of this thread."""
        kind = backend_of(device).type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return cls(torch.is_grad_enabled(), autocast, kind)

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Within, they are this thread's."""
        autocast = torch.autocast(
            self.device_type, self.autocast, enabled=self.autocast is not None, cache_enabled=False
        )
        with torch.set_grad_enabled(self.with_gradient), autocast:
            yield


@dataclass(frozen=True, slots=True)
class RehearsedCall:
    """What is rehearsed.

    Attributes:
        held: the module.
        leaves: of its arguments, see `Signature`.
        tree: structure of its arguments.
        tensors: that it takes.
        numbers: that it takes; ints, perhaps symbolic.
        others: parameters and buffers of the model that are not the module's; a layer has them only as arguments.
    """

    held: Held
    leaves: Sequence[Any]
    tree: pytree.TreeSpec
    tensors: Sequence[TakenTensor]
    numbers: Sequence[Any]
    others: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Numbers:
    """What is made up.

    Attributes:
        floats: makes tensors of them.
        integer: what a tensor of whole numbers is filled with, for a micro-batch's size and all tensors of the call.
    """

    floats: Callable[..., Tensor]
    integer: Callable[[TakenTensor, int, Sequence[TakenTensor]], int]

    @classmethod
    def tried(cls, tensors: Sequence[TakenTensor]) -> Iterator[Numbers]:
        """For a call that takes these tensors, the likeliest first.

        Of a normal distribution, or, for what takes probabilities or boxes, between 0 and 1; whole numbers of 0, which
        most tables have, lengths of what is padded, which are not 0, or 1.
        """
        whole = any(not _is_of_floats(tensor) and tensor.dtype != torch.bool for tensor in tensors)
        for integer in (_zero, _longest, _one) if whole else (_zero,):
            for floats in (torch.randn, torch.rand):
                yield cls(floats, integer)


def _zero(tensor: TakenTensor, size: int, others: Sequence[TakenTensor]) -> int:
    return 0


def _one(tensor: TakenTensor, size: int, others: Sequence[TakenTensor]) -> int:
    return 1


def _longest(tensor: TakenTensor, size: int, others: Sequence[TakenTensor]) -> int:
    """If there is one for each sample, the sequences' length; (N, T, ...) and (T, N, ...) both are usual."""
    sequences = next((other for other in others if len(other.shape) > 1), None)
    if len(tensor.shape) != 1 or sequences is None:
        return 0
    (samples,) = tensor.shape
    lengths = [e for e in sequences.shape[:2] if not _is_of_batch(e, samples)]
    return extent_at((*lengths, samples)[0], size)


def _is_of_batch(extent: Any, samples: Any) -> bool:
    """Symbols are of the batch alone, each tensor's its own, and comparing them would settle what they are."""
    return isinstance(extent, torch.SymInt) or (not isinstance(samples, torch.SymInt) and extent == samples)


def _is_of_floats(tensor: TakenTensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _made_up(
    tensor: TakenTensor,
    size: int,
    around: Circumstances,
    generator: torch.Generator,
    numbers: Numbers,
    others: Sequence[TakenTensor],
) -> Tensor:
    shape = [extent_at(extent, size) for extent in tensor.shape]
    if _is_of_floats(tensor):
        made = numbers.floats(shape, dtype=tensor.dtype, generator=generator).to(around.device_type)
        return made.requires_grad_(tensor.requires_grad)
    value = True if tensor.dtype == torch.bool else numbers.integer(tensor, size, others)
    return torch.full(shape, value, dtype=tensor.dtype, device=around.device_type)


def extent_at(extent: Any, size: int) -> int:
    """An extent for a micro-batch of `size` samples."""
    if not isinstance(extent, torch.SymInt):
        return int(extent)
    expression = extent.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, size)))


@dataclass(frozen=True)
class Entering:
    """Made-up tensors, and the arguments of a call that has them.

    Attributes:
        tensors: that the call takes.
        leaves: of those, before they were copied: gradients come here.
        call: args and kwargs.
    """

    tensors: Sequence[Tensor]
    leaves: Sequence[Tensor]
    call: tuple[Sequence[Any], Mapping[str, Any]]

    @classmethod
    def of(cls, call: RehearsedCall, size: int, around: Circumstances, numbers: Numbers, seed: int = 0) -> Entering:
        """At a micro-batch size."""
        generator = torch.Generator().manual_seed(seed)
        leaves = [_made_up(each, size, around, generator, numbers, call.tensors) for each in call.tensors]
        tensors = [leaf.clone() if leaf.requires_grad else leaf for leaf in leaves]
        values = [*tensors, *(extent_at(number, size) for number in call.numbers)]
        device = torch.device(around.device_type)
        args, kwargs = pytree.tree_unflatten(filled(call.leaves, values, device), call.tree)
        return cls(tensors, leaves, (args, kwargs))


def own_parameters(held: Held, factor: float = 1.0) -> dict[str, Tensor]:
    """A leaf for each parameter; those that are trained may be others, by a factor."""
    return {
        name: (tensor.detach() * factor if factor != 1 and tensor.requires_grad else tensor.detach()).requires_grad_(
            tensor.requires_grad
        )
        for name, tensor in held.parameters.items()
    }


def backward_from(outputs: Sequence[Tensor]) -> None:
    """The backward pass of the outputs' sum."""
    roots = [output for output in outputs if output.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
