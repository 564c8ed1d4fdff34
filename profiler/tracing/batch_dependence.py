"""Branches of a forward pass on the batch size, which a graph for every micro-batch size would decide once for all.

`torch.export` tells of them as limits on the extent, with one exception: it takes for granted that a dynamic extent is
not 1. So while a model is traced we watch what its own code asks of extents, and where an answer would be another one
for a single sample we compare what graph and model compute from a single sample. Both run on tensors without data,
and each value gets a number made of the operation and the numbers of what it reads, as compilers number values; an
operation that changes nothing (an `expand` to the shape that is there) passes its number on.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any
from unittest import mock

import sympy
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.observe.both_branches import sees_both_branches
from profiler.observe.source_place import Place, place_now
from profiler.observe.standing_in import standing_in
from profiler.observe.without_data import without_data
from profiler.torch_private import COMPILING_FLAG, EXPORTING_FLAG, EXTENT_FIXED, depends_on_data, schema_of, storage_of


class BatchQuestions:
    """What a model's own code asked of extents, as far as the answer depends on the batch size.

    Attributes:
        model: that asks.
        places: where the answer would be another one for a single sample.
        numbers: where an extent became a number, in Python or because an operation takes no other.
        branches: by line of code, where the answer depends on the batch at all.
    """

    def __init__(self, model: nn.Module) -> None:
        self.places: list[Place] = []
        self.numbers: list[Place] = []
        self.branches: dict[Any, Place] = {}
        self.model = model

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within, questions are noted."""
        ask, convert = torch.SymBool.__bool__, torch.SymInt.__int__

        def asked(question: torch.SymBool) -> bool:
            answer: bool = ask(question)  # type: ignore[no-untyped-call]
            frame = sys._getframe(1)
            if _of_the_model(frame) and getattr(question.node.expr, "free_symbols", None):
                line = frame.f_code, frame.f_lineno
                if line not in self.branches:
                    self.branches[line] = place_now(self.model)
                if _at_one_sample(question) is (not answer):
                    self.places.append(self.branches[line])
            return answer

        def converted(extent: torch.SymInt) -> int:
            if _of_the_model(sys._getframe(1)) and extent.node.expr.free_symbols:
                self.numbers.append(place_now(self.model))
            number: int = convert(extent)  # type: ignore[no-untyped-call]
            return number

        replace = EXTENT_FIXED.original

        def replaced(environment: Any, symbol: sympy.Symbol, value: sympy.Expr, reason: str) -> None:
            if value.is_number and (place := place_now(self.model)).modules:
                self.numbers.append(place)
            replace(environment, symbol, value, reason)

        with (
            mock.patch.object(torch.SymBool, "__bool__", asked),
            mock.patch.object(torch.SymInt, "__int__", converted),
            EXTENT_FIXED.replaced_by(replaced),
        ):
            yield


def _of_the_model(frame: FrameType) -> bool:
    """Whether it is neither code of torch's nor code that torch has generated."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package not in ("torch", "sympy") and not frame.f_code.co_filename.startswith("<")


def _at_one_sample(question: torch.SymBool) -> bool | None:
    """The answer for a batch of one; None if it depends on data too."""
    expression = question.node.expr
    symbols = getattr(expression, "free_symbols", ())
    if any(map(depends_on_data, symbols)):
        return None
    answer = expression.subs(dict.fromkeys(symbols, 1)) if symbols else expression
    if answer in (sympy.true, sympy.false):
        return bool(answer)
    return None


# Operations that return what they are given if the shape stays the same.
_NOTHING = {
    getattr(torch.ops.aten, name)
    for name in ("expand", "view", "_unsafe_view", "reshape", "alias", "detach", "slice", "squeeze", "unsqueeze")
}


@sees_both_branches
class _ValueNumbers(TorchDispatchMode):
    """Numbers the value of every tensor by how it is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: list[Any] = []  # so that no storage takes the place of another
        self._values: dict[Any, tuple[int, str]] = {}  # a tensor's place in memory -> version of the memory, number
        self._memory: dict[int, tuple[int, str]] = {}  # storage -> version, number
        self._random = 0

    def name(self, tensor: Tensor, number: str) -> None:
        """Give a value from outside a number."""
        self._alive.append(tensor)
        self._memory[storage_of(tensor)] = (0, number)
        self._values[_place(tensor)] = (0, number)

    def number(self, tensor: Tensor) -> str:
        """The number of a tensor's present value."""
        version, whole = self._memory.get(storage_of(tensor), (0, "made of nothing"))
        known = self._values.get(_place(tensor))
        if known is not None and known[0] == version:
            return known[1]
        return _hash(whole, *_place(tensor)[1:])

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves, tree = pytree.tree_flatten((args, kwargs or {}))
        read = [self.number(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._random += 1
        own = _hash(str(func), str(tree), self._random if torch.Tag.nondeterministic_seeded in func.tags else 0, *read)
        given = {storage_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for position, value in enumerate(pytree.tree_leaves(out)):
            if not isinstance(value, Tensor):
                continue
            self._alive.append(value)
            storage = storage_of(value)
            if storage not in given:
                self._memory[storage] = (0, _hash(own, position))
            elif schema_of(func).is_mutable:
                self._memory[storage] = (self._memory.get(storage, (0, ""))[0] + 1, _hash(own, position))
            passes = func.overloadpacket in _NOTHING and value.shape == args[0].shape
            self._values[_place(value)] = (
                self._memory.get(storage, (0, ""))[0],
                read[0] if passes else _hash(own, position),
            )
        return out


def _place(tensor: Tensor) -> tuple[int, Any, Any, Any]:
    shape = tuple(map(int, tensor.shape))
    strides = tuple(int(s) for s, extent in zip(tensor.stride(), shape, strict=True) if extent != 1)
    return storage_of(tensor), int(tensor.storage_offset()), shape, strides


def _hash(*parts: Any) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


def _numbers_of_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str] | None:
    """Numbers of what the model returns and of its buffers afterwards; None if it cannot be called so."""
    members = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    mode, emptied = without_data((*members.values(), *pytree.tree_leaves((args, kwargs))))
    fakes: dict[str, Tensor] = {name: emptied(tensor) for name, tensor in members.items()}
    numbers = _ValueNumbers()
    given = pytree.tree_map_only(Tensor, emptied, (args, kwargs))
    _name_inputs(numbers, given)
    for name, fake in fakes.items():
        numbers.name(fake, name)
    try:
        with (
            mode,
            EXPORTING_FLAG.replaced_by(True),
            COMPILING_FLAG.replaced_by(True),
            numbers,
            torch.enable_grad(),
            standing_in(model, fakes),
        ):
            output = model(*given[0], **given[1])
    except Exception:  # a batch of one sample is nothing for this model
        return None
    outputs = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    written = [fakes[name] for name, _ in model.named_buffers()]
    return [numbers.number(tensor) for tensor in (*outputs, *written)]


def _numbers_of_graph(
    model: nn.Module, module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[str]:
    """The same of the graph."""
    names = {id(tensor): name for name, tensor in (*model.named_buffers(), *model.named_parameters())}
    mode, emptied = without_data((*model.parameters(), *model.buffers(), *pytree.tree_leaves((args, kwargs))))
    fakes: dict[str, Tensor] = {}
    numbers = _ValueNumbers()
    given = pytree.tree_map_only(Tensor, emptied, (args, kwargs))
    _name_inputs(numbers, given)
    inputs = iter(pytree.tree_leaves(given))
    values: dict[fx.Node, Any] = {}
    with mode, numbers, torch.enable_grad():
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "get_attr":
                held: Any = module
                for part in str(node.target).split("."):
                    held = getattr(held, part)
                if isinstance(held, Tensor):
                    name = names.get(id(held), "made of nothing")
                    if name not in fakes:
                        fakes[name] = emptied(held)
                        numbers.name(fakes[name], name)
                    held = fakes[name]
                values[node] = held
            elif node.op == "call_module":  # checks of the inputs, which export adds
                continue
            elif node.op == "output":
                outputs = [values[leaf] for leaf in pytree.tree_leaves(node.args[0]) if isinstance(leaf, fx.Node)]
            else:
                read, keywords = fx.node.map_arg((node.args, node.kwargs), lambda argument: values[argument])
                values[node] = node.target(*read, **keywords)
    for name, buffer in model.named_buffers():
        if name not in fakes:
            fakes[name] = emptied(buffer)
            numbers.name(fakes[name], name)
    written = [fakes[name] for name, _ in model.named_buffers()]
    return [numbers.number(t) for t in (*(o for o in outputs if isinstance(o, Tensor)), *written)]


def _name_inputs(numbers: _ValueNumbers, given: Any) -> None:
    for position, leaf in enumerate(pytree.tree_leaves(given)):
        if isinstance(leaf, Tensor):
            numbers.name(leaf, f"input {position}")


def same_for_one_sample(
    model: nn.Module, module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether graph and model compute the same from a single sample.

    Args:
        model: in the mode in which it was traced.
        module: the exported graph.
        args: positional arguments with one sample; values do not matter.
        kwargs: keyword arguments.
    """
    expected = _numbers_of_model(model, args, kwargs)
    return expected is not None and expected == _numbers_of_graph(model, module, args, kwargs)
