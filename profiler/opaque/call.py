"""A module or function that cannot be traced, called as it is: one operation of the graph, whatever happens inside.

Its parameters and buffers are arguments of the operation, under their original names, so that a stage can place them,
and a buffer that it writes is written on a copy that the layer returns. What a graph cannot hold is looked for at
each call: a module that does in training what it did not while it was traced is an error, never a wrong gradient.

On fake tensors, from which nothing can be computed, a call is imitated: with the shapes, the FLOPs and the memory that
a rehearsal on real tensors had, see `profiler.opaque.rehearsal`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from profiler.errors import ExecutionError
from profiler.machine.backend import device_of_first
from profiler.observe.draws import keyed_backward
from profiler.observe.python_state import Attribute
from profiler.observe.random_states import next_seed
from profiler.observe.storage_watch import is_strided
from profiler.opaque.held import Changed, Held, Refused
from profiler.opaque.keeping_nothing import kept_inside
from profiler.opaque.run_again import RunAgain
from profiler.opaque.statistics import BUFFERS, MovedBy, buffer_of
from profiler.text import counted
from profiler.torch_private import can_carry, storage_of


@dataclass(frozen=True, slots=True)
class Affine:
    """A whole number that grows with the micro-batch: `constant + per_sample * n`."""

    constant: int
    per_sample: int

    @classmethod
    def through(cls, sizes: Sequence[int], values: Sequence[int]) -> Affine:
        """The line through the first two points, or level through one.

        >>> Affine.through((2, 3), (24, 36))
        Affine(constant=0, per_sample=12)
        """
        if len(sizes) == 1:
            return cls(values[0], 0)
        per_sample, rest = divmod(values[1] - values[0], sizes[1] - sizes[0])
        return cls(values[0] - per_sample * sizes[0], per_sample + bool(rest))

    def at(self, size: Any) -> Any:
        """The number for `size` samples, which may be symbolic."""
        return self.constant + self.per_sample * size if self.per_sample else self.constant

    def size_for(self, value: Any) -> Any:
        """The micro-batch size at which the number is `value`."""
        rest = value - self.constant if self.constant else value
        return rest // self.per_sample if self.per_sample != 1 else rest


@dataclass(frozen=True, slots=True)
class TensorKind:
    """A tensor that the module takes or returns."""

    shape: tuple[Affine, ...]
    dtype: torch.dtype

    def shape_at(self, size: Any) -> tuple[Any, ...]:
        """Extents for a micro-batch of `size` samples."""
        return tuple(extent.at(size) for extent in self.shape)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call costs in addition to what goes in and out.

    Attributes:
        flops: of the forward pass.
        kept_bytes: created inside and kept by autograd.
        forward_bytes: largest sum of bytes created inside during the forward pass, kept ones and outputs included.
        backward_bytes: largest growth of memory during the backward pass.
        kept_inputs: positions of the tensor inputs that autograd keeps.
        kept_outputs: positions of the tensor outputs that autograd keeps.
    """

    flops: Affine
    kept_bytes: Affine
    forward_bytes: Affine
    backward_bytes: Affine
    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor or a number stands among the leaves of a call's arguments or of its result."""

    position: int


@dataclass(frozen=True, slots=True)
class OwnDevice:
    """Where a device stands among the leaves of a call's arguments: that of the tensors that the call takes."""


def filled(leaves: Sequence[Any], values: Sequence[Any], device: torch.device) -> list[Any]:
    """The leaves of a call's arguments, with values in the places that are kept for them."""
    return [
        values[leaf.position] if isinstance(leaf, Slot) else device if isinstance(leaf, OwnDevice) else leaf
        for leaf in leaves
    ]


def with_slots(leaves: Sequence[Any]) -> list[Any]:
    """The leaves of a result, with a `Slot` in the place of each tensor."""
    slots: list[Any] = []
    for leaf in leaves:
        slots.append(Slot(sum(isinstance(slot, Slot) for slot in slots)) if isinstance(leaf, Tensor) else leaf)
    return slots


def on_own_memory(outputs: Iterable[Tensor], taken: Iterable[Any]) -> tuple[Tensor, ...]:
    """The tensors of a result; those that share memory with something taken or with each other are copied."""
    storages = {storage_of(value) for value in taken if is_strided(value)}
    returned = []
    for output in outputs:
        returned.append(output.clone() if storage_of(output) in storages else output)
        storages.add(storage_of(returned[-1]))
    return tuple(returned)


def same_structure(one: pytree.TreeSpec, other: pytree.TreeSpec) -> bool:
    """Whether two results are built alike; of named tuples torch's interpreter makes a class of its own."""
    kinds = [(tree.type, tree.context) for tree in (one, other)]
    if kinds[0] != kinds[1]:
        named = [getattr(context, "_fields", None) for _, context in kinds]
        if named[0] is None or named[0] != named[1]:
            return False
    inside = (one.children(), other.children())
    return len(inside[0]) == len(inside[1]) and all(map(same_structure, *inside))


@dataclass(frozen=True, slots=True)
class Signature:
    """How a module is called, and what it returns.

    Attributes:
        leaves: of `(args, kwargs)`: a `Slot` for each tensor and, after them, each number; an `OwnDevice` for each
            device; anything else as it is.
        tree: structure of `(args, kwargs)`.
        inputs: the tensors.
        numbers: the numbers.
        result_leaves: a `Slot` for each tensor; anything else as it is.
        result_tree: structure of the result.
        outputs: the tensors.
        normalizations: paths of batch normalizations that move statistics, in the order of their calls.
        written: names of the buffers that it writes.
        replaced: of those in whose place it puts another tensor; its backward pass may read the one before.
        draws: whether it draws random numbers of other generators than torch's own.
        runs_again: whether its backward pass may run modules again.
        begins_alike: whether each call begins with the attributes that the module had when it was planned.
    """

    leaves: tuple[Any, ...]
    tree: pytree.TreeSpec
    inputs: tuple[TensorKind, ...]
    numbers: tuple[Affine, ...]
    result_leaves: tuple[Any, ...]
    result_tree: pytree.TreeSpec
    outputs: tuple[TensorKind, ...]
    normalizations: tuple[str, ...]
    written: frozenset[str]
    replaced: frozenset[str]
    draws: bool
    runs_again: bool
    begins_alike: bool


class OpaqueCall:
    """One call of a module: a function from its parameters, buffers, tensors and numbers to a tuple of tensors.

    Args:
        held: the module.
        number: of the call, from 0: a module may be called more than once.
        signature: of the call.
        cost: of the call.
    """

    def __init__(self, held: Held, number: int, signature: Signature, cost: Cost) -> None:
        self.__name__ = f"called_as_is[{held.path}]" + (f"[{number}]" if number else "")
        self.__qualname__ = self.__name__
        self.path = held.path
        self.own_arguments = len(held.names)
        self.cost = cost
        self.signature = signature
        self._held = held
        self._made: dict[str, Any] = {}

    def __repr__(self) -> str:
        """The same in every process."""
        return self.__name__

    def __call__(self, *values: Any) -> tuple[Tensor, ...]:
        """Run the module, or imitate it on tensors without data."""
        inputs = values[self.own_arguments :]
        size = self.size_of(inputs)
        if _without_data(values):
            outputs: tuple[Tensor, ...] = _Imitation.apply(self, size, *values)  # type: ignore[no-untyped-call]
            return outputs
        with kept_inside():
            called = self._carried_out(values, size)
        return keyed_backward(called, self._held.generators)

    def _carried_out(self, values: Sequence[Any], size: int) -> tuple[Tensor, ...]:
        """What it returns, attached to the graph."""
        if (self.signature.runs_again or self.signature.begins_alike) and torch.is_grad_enabled():
            called: tuple[Tensor, ...] = RunAgain.apply(  # type: ignore[no-untyped-call]
                lambda leaves: self._called(leaves, size), self._held, *values
            )
            return called
        return self._called(values, size)[0]

    def _called(self, values: Sequence[Any], size: int) -> tuple[tuple[Tensor, ...], Mapping[str, Attribute]]:
        """What it returns, and the attributes that it has changed, as it has left them."""
        own = dict(zip(self._held.names, values[: self.own_arguments], strict=True))
        return self._run(own, values[self.own_arguments :], size)

    def size_of(self, inputs: Sequence[Any]) -> Any:
        """The micro-batch size, told by the shapes of the inputs, or a number; 1 where none depends on it."""
        for kind, value in zip(self.signature.inputs, inputs, strict=False):
            for dim, extent in enumerate(kind.shape):
                if extent.per_sample:
                    return extent.size_for(value.shape[dim])
        for number, value in zip(self.signature.numbers, inputs[len(self.signature.inputs) :], strict=False):
            if number.per_sample:
                return number.size_for(value)
        return 1

    def written_positions(self) -> tuple[int, ...]:
        """Positions of the arguments that it writes."""
        return tuple(i for i, name in enumerate(self._held.names) if name in self.signature.written)

    def statistics(self) -> list[MovedBy]:
        """What moves the running statistics of its batch normalizations, in the order in which it does."""
        positions = {name: position for position, name in enumerate(self._held.names)}
        found = []
        for number, path in enumerate(self.signature.normalizations):
            buffers = [positions[buffer_of(path, name)] for name in BUFFERS]
            first = len(self.signature.outputs) + number * len(BUFFERS)
            found.append(MovedBy((buffers[0], buffers[1], buffers[2]), self._held.momentum(path), first))
        return found

    def statistics_like(self, device: torch.device) -> tuple[Tensor, ...]:
        """Tensors as those that follow its outputs: mean, variance and count of each batch normalization."""
        found: list[Tensor] = []
        for path in self.signature.normalizations:
            found += (
                torch.empty_like(self._held.buffers[buffer_of(path, name)], device=device) for name in BUFFERS[:2]
            )
            found.append(torch.empty((), dtype=torch.float64, device=device))
        return tuple(found)

    def _run(
        self, tensors: Mapping[str, Tensor], inputs: Sequence[Any], size: int
    ) -> tuple[tuple[Tensor, ...], Mapping[str, Attribute]]:
        device = device_of_first(value for value in (*inputs, *tensors.values()) if isinstance(value, Tensor))
        leaves = filled(self.signature.leaves, inputs, device)
        args, kwargs = pytree.tree_unflatten(leaves, self.signature.tree)
        own = {**tensors, **{name: tensors[name].clone() for name in self.signature.replaced}}
        try:
            draws = self.signature.draws
            seed = next_seed() if draws else None
            changed = Changed.PUT_BACK if self.signature.begins_alike else Changed.REFUSED
            done = self._held.call(own, args, kwargs, self._made, may_draw=draws, seed=seed, changed=changed)
        except Refused as problem:
            self._refuse(str(problem))
        with torch.no_grad():
            for name, value in done.replaced.items():
                tensors[name].copy_(value)
        result, written = done.result, done.written
        if written - self.signature.written:
            self._refuse(f"it writes its buffer {min(written - self.signature.written)!r}, and did not when traced")
        called = tuple(measured.path for measured in done.measured)
        if called != self.signature.normalizations:
            self._refuse(
                f"it calls its batch normalizations {list(called)}, and called {list(self.signature.normalizations)} "
                "when traced; let it always call the same"
            )
        found, tree = pytree.tree_flatten(result)
        constants = [leaf for leaf in found if not isinstance(leaf, Tensor)]
        if not same_structure(tree, self.signature.result_tree) or constants != [
            leaf for leaf in self.signature.result_leaves if not isinstance(leaf, Slot)
        ]:
            self._refuse(f"it returns {tree} with {constants}, when traced it was {self.signature.result_tree}")
        outputs = [leaf for leaf in found if isinstance(leaf, Tensor)]
        carries = torch.is_grad_enabled() and any(
            value.requires_grad for value in (*tensors.values(), *inputs) if isinstance(value, Tensor)
        )
        checked = [
            self._checked(output, kind, size, carries=carries)
            for output, kind in zip(outputs, self.signature.outputs, strict=True)
        ]
        moments = (moment for found in done.measured for moment in (found.mean, found.variance, found.count))
        return (*on_own_memory(checked, (*tensors.values(), *inputs)), *moments), done.left

    def _checked(self, output: Tensor, kind: TensorKind, size: int, *, carries: bool) -> Tensor:
        """The output as it was when traced: its shape, its dtype, dense in memory, and with a gradient."""
        expected = kind.shape_at(size)
        if tuple(output.shape) != expected or output.dtype != kind.dtype:
            kinds = " and ".join(
                ["shape"] * (tuple(output.shape) != expected) + ["dtype"] * (output.dtype != kind.dtype)
            )
            self._refuse(
                f"it returns {list(output.shape)} of {output.dtype} for {counted(size, 'sample')}, when traced it was "
                f"{list(expected)} of {kind.dtype}; give it results of one {kinds}"
            )
        output = output.contiguous()
        if carries and not output.requires_grad and can_carry(output):
            output = output.detach().requires_grad_()  # a path without gradient: what comes back for it ends here
        return output

    def _refuse(self, reason: str) -> NoReturn:
        raise ExecutionError(f"{self._held} is called as it is, for it could not be traced, and {reason}")


def _without_data(values: Sequence[Any]) -> bool:
    """Whether a call is on fake tensors, or on the meta device; one that takes no tensors may be among such."""
    tensors = [value for value in values if isinstance(value, Tensor)] or [torch.empty(0)]
    return any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors)


class _Imitation(torch.autograd.Function):
    """A call on tensors without data: shapes and memory are those of the rehearsal."""

    @staticmethod
    def forward(ctx: Any, call: OpaqueCall, size: int, *values: Any) -> tuple[Tensor, ...]:
        device = device_of_first(value for value in values if isinstance(value, Tensor))
        cost = call.cost
        outputs = tuple(
            torch.empty(kind.shape_at(size), dtype=kind.dtype, device=device) for kind in call.signature.outputs
        )
        moments = call.statistics_like(device)
        kept = torch.empty(max(0, cost.kept_bytes.at(size)), dtype=torch.uint8, device=device)
        held = kept.nbytes + sum(output.nbytes for output in outputs)
        torch.empty(max(0, cost.forward_bytes.at(size) - held), dtype=torch.uint8, device=device)
        inputs = [value for value in values if isinstance(value, Tensor)][call.own_arguments :]
        saved = [inputs[position] for position in cost.kept_inputs]
        ctx.save_for_backward(*saved, *(outputs[position] for position in cost.kept_outputs), kept)
        ctx.mark_non_differentiable(*(output for output in outputs if not can_carry(output)), *moments)
        ctx.call, ctx.size, ctx.device = call, size, device
        ctx.kinds = [(v.shape, v.dtype) if isinstance(v, Tensor) and can_carry(v) else None for v in values]
        return (*outputs, *moments)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        gradients = [
            torch.zeros(kind[0], dtype=kind[1], device=ctx.device) if kind is not None and needed else None
            for kind, needed in zip(ctx.kinds, ctx.needs_input_grad[2:], strict=True)
        ]
        own = sum(gradient.nbytes for gradient in gradients if gradient is not None)
        torch.empty(max(0, ctx.call.cost.backward_bytes.at(ctx.size) - own), dtype=torch.uint8, device=ctx.device)
        return (None, None, *gradients)
