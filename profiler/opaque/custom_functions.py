"""Functions with a backward pass of their own (`torch.autograd.Function`), kept exactly: a call is one operation.

Export follows the forward pass of such a function and forgets its backward pass. In the graph a `FunctionCall` takes
the call's place. It calls the function itself, on real tensors as on fake ones, so its FLOPs and bytes are known too.

A function that writes an argument without saying so (`x -= x.max()`) works on a copy, which the call returns after what
the function returns; an operation of its own writes that into the argument, so that later readers find it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.errors import ExecutionError
from profiler.observe.drawn_from import of_function
from profiler.observe.draws import keyed_backward
from profiler.observe.operation_writes import written_by
from profiler.observe.storage_watch import is_strided
from profiler.opaque.call import Slot, on_own_memory, with_slots
from profiler.opaque.held import Refused
from profiler.torch_private import applied, storage_of

_COMPUTED = (Tensor, torch.SymInt, torch.device)  # kinds of arguments that the graph hands over, in this order
_CONSTANTS = (bool, int, float, complex, str, bytes, slice, torch.dtype, torch.layout, torch.memory_format)
_RETURNED = (Tensor, bool, int, float, str)
_LIFTS = (torch.ops.aten.lift, torch.ops.aten.lift_fresh, torch.ops.aten.lift_fresh_copy)  # of `torch.tensor(1.0)`


class FunctionCall:
    """A call of a function: from tensors, numbers and devices to the tensors that it returns.

    Args:
        function: a subclass of `torch.autograd.Function`.
        leaves: of `(args, kwargs)` in the call that was noticed first.
        tree: structure of `(args, kwargs)`.

    Attributes:
        devices: that it takes.
        result_leaves: of its result: a `Slot` for each tensor, else the value; None before it was rehearsed.
        result_tree: structure of its result.
        carries: of each tensor that it returns, whether a gradient comes back through it, if an argument needs one.
        written: positions of the tensors that it writes, among those that it takes.

    Raises:
        Refused: it takes what a graph cannot hold.
    """

    def __init__(self, function: Any, leaves: Sequence[Any], tree: pytree.TreeSpec) -> None:
        self.function = function
        self.tree = tree
        self._draws = of_function(function)
        if self._draws.of_the_system:
            raise Refused(
                f"its code names {self._draws.of_the_system!r}, by which it may draw random numbers of the system, "
                "which nobody can draw again; let it draw from torch's generator (torch.rand)"
            )
        self._places = [[i for i, leaf in enumerate(leaves) if isinstance(leaf, kind)] for kind in _COMPUTED]
        self._leaves = list(leaves)
        for position, place in enumerate(place for places in self._places for place in places):
            self._leaves[place] = Slot(position)
        self.devices = tuple(leaves[place] for place in self._places[2])
        constants = [leaf for leaf in self._leaves if not isinstance(leaf, Slot)]
        for leaf in constants:
            if leaf is not None and type(leaf) not in _CONSTANTS:
                raise Refused(f"it takes a {type(leaf).__name__}; let it take tensors and plain constants")
        self.__name__ = f"custom_function[{name_of(function)}]" + (repr(constants) if constants else "")
        self.__qualname__ = self.__name__
        self.result_leaves: list[Any] | None = None
        self.result_tree: pytree.TreeSpec | None = None
        self.carries: tuple[bool, ...] = ()
        self.written: tuple[int, ...] = ()

    def __repr__(self) -> str:
        """The same in every process."""
        return self.__name__

    def __call__(self, *values: Any) -> tuple[Tensor, ...]:
        """Call the function."""
        values = tuple(v.clone() if i in self.written and isinstance(v, Tensor) else v for i, v in enumerate(values))
        try:
            found, tree, written = self._run(values)
            if set(written) - set(self.written):
                raise Refused("it writes one of its arguments in place, and did not when traced; let it work on a copy")
        except Refused as problem:
            raise ExecutionError(f"{name_of(self.function)} is called as it is, and {problem}") from problem
        leaves = with_slots(found)
        if (leaves, tree) != (self.result_leaves, self.result_tree):
            raise ExecutionError(
                f"{name_of(self.function)} is called as it is, and it returns {leaves} in {tree}, when traced it was "
                f"{self.result_leaves} in {self.result_tree}"
            )
        returned = keyed_backward(on_own_memory(_tensors(found), values), self._draws.generators)
        return (*returned, *(values[position].detach() for position in self.written))

    def is_for(self, function: Any, leaves: Sequence[Any], tree: pytree.TreeSpec) -> bool:
        """Whether it stands for this call too; a number may be symbolic in one run of the model and not in another."""
        if function is not self.function or tree != self.tree:
            return False
        tensors, numbers, devices = self._places
        known = dict(zip(devices, self.devices, strict=True))
        return all(
            isinstance(leaf, Tensor)
            if place in tensors
            else isinstance(leaf, torch.SymInt) or type(leaf) is int
            if place in numbers
            else repr(leaf) == repr(known.get(place, self._leaves[place]))
            for place, leaf in enumerate(leaves)
        )

    def taken(self, leaves: Sequence[Any]) -> list[list[Any]]:
        """The tensors and the numbers among the arguments of a call."""
        return [[leaves[place] for place in places] for places in self._places[:2]]

    def rehearse(self, values: Sequence[Any]) -> tuple[Tensor, ...]:
        """Call the function on tensors without data, and note what it returns.

        Raises:
            Refused: it does what no operation of a graph may do.
        """
        given = [value.clone() if isinstance(value, Tensor) else value for value in values]
        with _OwnValues(given) as watch:
            found, tree, _ = self._run(given)
        tensors = _tensors(given)
        self.written = tuple(i for i, tensor in enumerate(tensors) if storage_of(tensor) in watch.written)
        self._refuse_returned(found, [tensors[position] for position in self.written])
        self._refuse_written_parts(values)
        if watch.is_foreign:
            raise Refused("it reads a tensor that is not among its arguments; pass it as one")
        for leaf in found:
            if leaf is not None and not isinstance(leaf, _RETURNED):
                raise Refused(f"it returns a {type(leaf).__name__}; let it return tensors")
        self.result_leaves, self.result_tree = with_slots(found), tree
        self.carries = tuple(leaf.requires_grad for leaf in found if isinstance(leaf, Tensor))
        self.carries += (False,) * len(self.written)
        return (*on_own_memory(_tensors(found), given), *(given[position] for position in self.written))

    def _refuse_returned(self, found: Sequence[Any], written: Sequence[Tensor]) -> None:
        """What is returned has the function's gradient, and later readers of the argument would have it, too."""
        storages = {storage_of(tensor) for tensor in written}
        if any(is_strided(leaf) and storage_of(leaf) in storages for leaf in found):
            raise Refused("it returns an argument that it writes in place (mark_dirty); let it work on a copy")

    def _refuse_written_parts(self, values: Sequence[Any]) -> None:
        """A copy of an argument is no part of another argument any more, nor of a parameter."""
        storages = [storage_of(value) for value in values if is_strided(value)]
        for position in self.written:
            value = values[position]
            if storages.count(storage_of(value)) > 1 or (value.is_leaf and value.requires_grad):
                raise Refused("it writes an argument in place that shares memory with another; let it work on a copy")

    def _run(self, values: Sequence[Any]) -> tuple[list[Any], pytree.TreeSpec, tuple[int, ...]]:
        """What the function returns, flattened, and the positions of the tensors that it has written."""
        given = [value for value in values if isinstance(value, Tensor)]
        versions = [tensor._version for tensor in given]
        leaves = [values[leaf.position] if isinstance(leaf, Slot) else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        found, tree = pytree.tree_flatten(applied(self.function, *args, **kwargs))
        written = [i for i, tensor in enumerate(given) if versions[i] != tensor._version]
        self._refuse_returned(found, [given[position] for position in written])
        if not all(is_strided(leaf) for leaf in found if isinstance(leaf, Tensor)):
            raise Refused("it returns a sparse tensor; let it return dense ones")
        return found, tree, tuple(written)


def name_of(function: Any) -> str:
    """Of a function's class, with the module that defines it."""
    return f"{function.__module__}.{function.__qualname__}"


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class _OwnValues(TorchDispatchMode):
    """Notices operations on tensors that are neither given nor made within, and which storages are written.

    By schemas: inside an operation's own code no version counter moves.
    """

    def __init__(self, given: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_foreign = False
        self._alive = [value for value in given if is_strided(value)]  # so that no storage takes another's place
        self._known = {storage_of(tensor) for tensor in self._alive}
        self.written: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_strided(leaf)]
        if func.overloadpacket not in _LIFTS:
            self.is_foreign |= any(storage_of(tensor) not in self._known for tensor in read)
        self.written.update(map(storage_of, written_by(func, args, kwargs or {})))
        out = func(*args, **(kwargs or {}))
        made = [leaf for leaf in pytree.tree_leaves(out) if is_strided(leaf)]
        self._alive.extend(made)
        self._known.update(map(storage_of, made))
        return out
