"""The calls of a model while it is exported: each begins with the same state of Python's, and its changes are noted.

An export may run the model several times for one graph: a table that the first run has kept would be none of the
graph's in the next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias
from unittest import mock

from torch import Tensor, nn

from profiler.errors import NotTraceableError
from profiler.observe.elsewhere import changed_spots, lasting_spots, put_spots_back, spots_of
from profiler.observe.python_state import (
    Attribute,
    attributes_of,
    attributes_of_tensors,
    changed_names,
    put_all_back,
    put_on_tensors,
    replaced,
    tensors_held,
)
from profiler.observe.source_place import keep_together_advice, place_of_call
from profiler.observe.walk import Spot, Spots


@dataclass(frozen=True, slots=True)
class PythonState:
    """What is no tensor of a model, at one moment.

    Attributes:
        attributes: of its modules.
        spots: what else its code reaches.
    """

    attributes: dict[str, Attribute]
    spots: Spots

    @classmethod
    def of(cls, model: nn.Module) -> PythonState:
        """As it is now."""
        return cls(attributes_of(model), spots_of(model))

    def put_back(self, model: nn.Module) -> None:
        """Let it be what it was."""
        put_all_back(self.attributes, attributes_of(model))
        put_spots_back(self.spots, spots_of(model))


@dataclass(frozen=True, slots=True)
class NotedCall:
    """One call of the model.

    Attributes:
        begin: the state before it.
        end: the state after it.
        replaced: names of the buffers in whose place it has put other tensors.
    """

    begin: PythonState
    end: PythonState
    replaced: Sequence[str]


@dataclass(frozen=True, slots=True)
class Changes:
    """What the first call of a trace has changed.

    Attributes:
        attributes: names of those of modules.
        spots: what is no attribute, as it was before.
        replaced: names of the buffers in whose place it has put other tensors.
    """

    attributes: Sequence[str]
    spots: Sequence[Spot]
    replaced: Sequence[str]

    def __bool__(self) -> bool:
        return bool(self.attributes or self.spots or self.replaced)

    @classmethod
    def of(cls, model: nn.Module, before: PythonState, calls: Sequence[NotedCall]) -> Changes:
        """Since a moment before the trace; of a graph, export runs the nodes without calling it."""
        if not calls:
            return cls((), lasting_spots(before.spots, spots_of(model)), ())
        first = calls[0]
        attributes = changed_names(before.attributes, first.end.attributes)
        return cls(attributes, changed_spots(first.begin.spots, first.end.spots), first.replaced)

    def refuse(self, model: nn.Module) -> NoReturn:
        """Refuse a forward pass that computes with what it changes, or counts.

        Raises:
            NotTraceableError: naming it.
        """
        if self.attributes or not self.spots:
            path, _, own_name = (*self.attributes, *self.replaced)[0].rpartition(".")
            if self.attributes:
                what = f"changes its Python attribute {own_name!r}, which a graph would hold as a constant"
                cure = f"keep it in a buffer, from the start (self.register_buffer({own_name!r}, torch.tensor(...)))"
            else:
                what = f"puts another tensor in the place of its buffer {own_name!r}, which a graph would go on reading"
                cure = f"write it in place (self.{own_name}.copy_(...))"
            cure += ", or change it outside the forward pass"
        else:
            spot = next((spot for spot in self.spots if spot.is_random), self.spots[0])
            path = spot.module
            if spot.is_random:
                what = f"draws from a random generator of its own, {spot.name!r}, whose numbers a graph would freeze"
                cure = keep_together_advice((path,))
            else:
                what = f"changes {spot.name!r}, which a graph would hold as a constant"
                cure = "keep it in a buffer (self.register_buffer), or change it outside the forward pass"
        raise NotTraceableError(
            f"cannot trace the model: in {place_of_call(model, path)}: the forward pass {what}; {cure}", modules=(path,)
        )


@contextlib.contextmanager
def each_call_alike(model: nn.Module) -> Iterator[list[NotedCall]]:
    """Within, each call of the model begins with the same state; yields the calls, as they are made."""
    noted: list[NotedCall] = []
    begins: list[tuple[PythonState, dict[str, int], dict[str, Tensor], _OnTensors]] = []
    register = nn.Module.register_buffer

    def note_begin(*_: Any) -> None:
        on_tensors = attributes_of_tensors(_tensors_of(model))
        begins.append((PythonState.of(model), tensors_held(model), dict(model.named_buffers()), on_tensors))

    def note_end(*_: Any) -> None:
        begin, held, buffers, on_tensors = begins[-1]
        refuse_replaced(held, tensors_held(model))
        _refuse_put_on_tensors(model, put_on_tensors(on_tensors, attributes_of_tensors(_tensors_of(model))))
        noted.append(NotedCall(begin, PythonState.of(model), replaced_buffers(model, buffers)))
        begin.put_back(model)
        begins.pop()

    def registered(module: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """A new buffer is one more attribute: export knows those alone that were there before."""
        if begins and name not in module._buffers:
            module.__dict__[name] = tensor
        else:
            register(module, name, tensor, persistent)

    handles = model.register_forward_pre_hook(note_begin), model.register_forward_hook(note_end)
    try:
        with mock.patch.object(nn.Module, "register_buffer", registered):
            yield noted
    finally:
        for handle in handles:
            handle.remove()
        for begin, *_ in begins[:1]:  # of a call that raised an error
            put_spots_back(begin.spots, spots_of(model))


_OnTensors: TypeAlias = Mapping[str, Mapping[str, Any]]


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _refuse_put_on_tensors(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse a forward pass that keeps something on a parameter or buffer: a trace has other tensors in their place."""
    if names:
        tensor, _, own_name = names[0].rpartition(".")
        path = tensor.rpartition(".")[0]
        raise NotTraceableError(
            f"cannot trace the model: in {place_of_call(model, path)}: the forward pass sets the attribute "
            f"{own_name!r} of {tensor!r}, which a graph would lose; keep it in a buffer (self.register_buffer)",
            modules=(path,),
        )


@contextlib.contextmanager
def empty_buffers_as_attributes(model: nn.Module) -> Iterator[None]:
    """Within, buffers that are None are attributes: what a call puts there is state like any other.

    Export would take what the first call puts there for what each call computes anew.
    """
    empty = [
        (module, list(module._buffers), [name for name, buffer in module._buffers.items() if buffer is None])
        for module in model.modules()
        if isinstance(module._buffers, dict)  # a scripted module's is no dict, and nothing of Python's fills it
    ]
    register = nn.Module.register_buffer

    def registered(module: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        if name in moved.get(module, ()):
            module.__dict__[name] = tensor
        else:
            register(module, name, tensor, persistent)

    moved = {module: names for module, _, names in empty}
    for module, names in moved.items():
        for name in names:
            del module._buffers[name]
            module.__dict__[name] = None
    try:
        with mock.patch.object(nn.Module, "register_buffer", registered):
            yield
    finally:
        for module, order, names in empty:
            for name in names:
                module.__dict__.pop(name, None)
            if names:
                held = {**dict.fromkeys(order), **module._buffers}
                module._buffers.clear()
                module._buffers.update(held)


@contextlib.contextmanager
def buffers_put_back(model: nn.Module) -> Iterator[None]:
    """Within, a call may put others in the place of the model's buffers, among them tensors of a trace."""
    held = [(part, dict(part._buffers)) for part in model.modules() if isinstance(part._buffers, dict)]
    try:
        yield
    finally:
        for part, buffers in held:
            part._buffers.update(buffers)


def replaced_buffers(model: nn.Module, before: Mapping[str, Tensor]) -> list[str]:
    """Names of the buffers that other tensors have taken the place of."""
    now = dict(model.named_buffers())
    return [name for name, buffer in before.items() if now.get(name, buffer) is not buffer]


def refuse_replaced(before: Mapping[str, int], after: Mapping[str, int]) -> None:
    """Refuse a forward pass that makes or replaces a parameter, or takes one or a buffer away.

    Raises:
        NotTraceableError: naming it.
    """
    names = replaced(before, after)
    if names:
        path, _, own_name = names[0].rpartition(".")
        raise NotTraceableError(
            f"cannot trace the model: the forward pass of {f'module {path!r}' if path else 'the model'} makes, "
            f"replaces or takes away its parameter or buffer {own_name!r}, which a graph cannot hold; make parameters "
            "in the constructor, or call the model once before planning",
            modules=(path,),
        )
