"""State of Python's that a forward pass changes: whether what it computes depends on it.

That is the attributes of modules, buffers that are replaced by other tensors, and what the code reaches elsewhere: in
helper objects, closures, iterators and variables of files (`profiler.observe.elsewhere`).

A graph is that of a first call. It serves for all calls if later ones compute the same, whatever earlier ones have left
behind, as with a cache of a table, or a counter that nothing reads. Two proofs are tried:

- by graphs: a second trace, from the state that the first call has left, gives the same graph and constants; so
  does one from counters that have come far.
- by calls: for made-up data the model returns the same, gives the same gradients and writes the same into its buffers,
  in a first call and in one that comes after a call with other data, other parameters and what the first call has
  written, and with counters that have come far. It needs the model's values. Parameters that are not trained, and
  buffers that nothing writes, stay what they are: a table that is made of them alone is kept with reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from profiler.machine.backend import HOST, device_of_first
from profiler.observe.elsewhere import Unwritten, lasting_spots, put_spots_back, spots_of
from profiler.observe.python_state import Attribute, key_of_value, lasting_changes, put_back
from profiler.observe.random_states import OF_PYTHON_AND_NUMPY, generators_of, preserved, seeded
from profiler.observe.standing_in import standing_in
from profiler.observe.untouched import untouched
from profiler.observe.walk import Spot, Spots
from profiler.torch_private import not_persistent_buffers
from profiler.tracing.calls_alike import NotedCall, PythonState, replaced_buffers
from profiler.tracing.sample import Arguments

_FAR = 1_000_003  # [chosen] calls; odd, so that what every other call does differently shows
_Attributes = Mapping[str, Attribute]


def let_come_far(earlier: _Attributes, later: _Attributes, names: Sequence[str]) -> bool:
    """Make counters what they are after many calls; whether all of these attributes are counters."""
    for name in names:
        items, before = later[name].items, earlier[name].items
        if isinstance(items, dict) and isinstance(before, dict) and items.keys() == before.keys():
            far: Any = {key: _far(before[key], items[key]) for key in items}
        elif isinstance(items, list | tuple) and isinstance(before, list | tuple) and len(items) == len(before):
            far = type(items)(map(_far, before, items))
        elif items is None and _is_number(later[name].value):
            far = _far(earlier[name].value, later[name].value)
        else:
            return False
        later[name].owner.__dict__[name.rpartition(".")[2]] = far
    return True


def let_spots_come_far(earlier: Spots, later: Sequence[Spot]) -> bool:
    """The same of what is no attribute; random generators, iterators and the like cannot."""
    before = {id(spot.holder): spot.items for spot in earlier.values()}
    for spot in later:
        items = before.get(id(spot.holder), {})
        known = items.keys() == spot.items.keys() and all(
            key_of_value(items[name]) == key_of_value(value) or (_is_number(items[name]) and _is_number(value))
            for name, value in spot.items.items()
        )
        if spot.write is None or not known:
            return False
        spot.write({name: _far(items[name], value) for name, value in spot.items.items()})
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _far(before: Any, after: Any) -> Any:
    return after + (after - before) * _FAR if _is_number(before) and _is_number(after) else after


def same_graphs(
    model: nn.Module,
    graph: fx.GraphModule,
    traced_again: Callable[[], fx.GraphModule],
    changed: Sequence[str],
    calls: Sequence[NotedCall],
) -> bool:
    """The proof by graphs.

    Args:
        model: the model.
        graph: of the first call.
        traced_again: makes the graph of a call from the state as it is.
        changed: names of the attributes that the first call changed.
        calls: so far, one at least; it grows.

    Raises:
        Exception: it cannot be traced from this state, or not as such.
    """
    first = calls[0]
    if first.replaced:
        return False
    begin, expected = PythonState.of(model), graph_text(graph)
    try:
        _let_be(model, first, first.end, changed)
        if graph_text(traced_again()) != expected:
            return False
        between, after = first.end, calls[-1].end
        lasting = lasting_changes(between.attributes, after.attributes)
        lasting_elsewhere = lasting_spots(between.spots, after.spots)
        if not lasting and not lasting_elsewhere:
            return True
        _let_be(model, first, first.end, changed)
        put_back(after.attributes, lasting)
        far = let_come_far(between.attributes, after.attributes, lasting)
        far = far and let_spots_come_far(between.spots, lasting_elsewhere)
        return far and graph_text(traced_again()) == expected
    finally:
        begin.put_back(model)


def _let_be(model: nn.Module, first: NotedCall, state: PythonState, changed: Sequence[str]) -> None:
    """Let the state be that after a call; export leaves copies of containers, so each object is put back first."""
    first.begin.put_back(model)
    put_back(state.attributes, changed)
    put_spots_back(state.spots, spots_of(model))


def same_calls(model: nn.Module, calls: Sequence[Arguments], around: Callable[[], Any]) -> bool:
    """The proof by calls; False also where it cannot be given.

    Args:
        model: in the mode in which it is to be called.
        calls: arguments of two calls.
        around: a context for each call.
    """
    held = (*model.parameters(), *model.buffers())
    if any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in held):
        return False
    first, second = calls
    buffers = dict(model.named_buffers())
    values = {name: buffer.clone() for name, buffer in buffers.items()}
    parameters = Unwritten(dict(model.named_parameters()))
    try:
        with untouched(model):
            expected = _computed(model, second, around)
            now = dict(model.named_buffers())
            replaced = {name: now[name].clone() for name in replaced_buffers(model, buffers)}
            written = {name: buffer for name, buffer in buffers.items() if name not in replaced}
            expected += [buffer.clone() for buffer in written.values()]

        def once_more() -> list[Any]:
            """From the same values of those buffers that the call writes, not the first one alone."""
            left = {name: buffer.clone() for name, buffer in written.items()}
            with untouched(model):
                _computed(model, second, around)
            with torch.no_grad():
                for name, buffer in written.items():
                    buffer.copy_(left[name] if torch.equal(buffer, left[name]) else values[name])
            return [*_computed(model, second, around), *(buffer.clone() for buffer in written.values())]

        with untouched(model):
            others: dict[str, Tensor] = {}
            found = _computed_later(model, first, around, once_more, others)
        unlike = [name for name, value in replaced.items() if name not in others or not _same(others[name], value)]
        if unlike and not _read_by_nothing(model, unlike, values, second, around):
            return False  # what the last call has left in a buffer is part of the model's state
    except Exception:  # the user's code, on made-up data: no proof
        return False
    finally:
        parameters.put_back()
        with torch.no_grad():
            for name, value in values.items():
                buffers[name].copy_(value)
    return bool(found) and all(_same(one, other) for each in found for one, other in zip(each, expected, strict=True))


def _read_by_nothing(
    model: nn.Module, names: Sequence[str], values: Mapping[str, Tensor], call: Arguments, around: Callable[[], Any]
) -> bool:
    """Whether these buffers, which each call puts something else in the place of, are neither saved nor evaluated with.

    A call in training does not read what the one before has left there, which is shown elsewhere.
    """
    owners = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
    if any(own not in not_persistent_buffers(owner) for owner, own in owners):
        return False
    evaluated = []
    for calls_before in (0, 1):
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(values[name])
        with untouched(model):
            if calls_before:
                _computed(model, call, around)
                left = [owner._buffers[own] for owner, own in owners]
        with untouched(model):
            for (owner, own), tensor in zip(owners, left if calls_before else (), strict=False):
                owner._buffers[own] = tensor
            model.eval()
            evaluated.append(_computed(model, call, around))
    return all(_same(one, other) for one, other in zip(*evaluated, strict=True))


def _computed_later(
    model: nn.Module,
    first: Arguments,
    around: Callable[[], Any],
    second: Callable[[], list[Any]],
    replaced: dict[str, Tensor],
) -> list[list[Any]]:
    """What the second call computes after the first, with other parameters, and after many; [] if that is unknown.

    What the first call puts in the place of buffers goes into `replaced`.
    """
    others = {name: (1.5 * p.detach()).requires_grad_() for name, p in model.named_parameters() if p.requires_grad}
    held = {**others, **dict(model.named_buffers())}
    with standing_in(model, held):
        _computed(model, first, around)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if held[name] is not buffer:  # it has put another in its place
                replaced[name] = held[name].detach().clone()
                if (buffer.shape, buffer.dtype) == (held[name].shape, held[name].dtype):
                    buffer.copy_(held[name])
                else:  # it was empty until the first call, or of another type
                    path, _, own_name = name.rpartition(".")
                    model.get_submodule(path)._buffers[own_name] = replaced[name].clone()
    between = PythonState.of(model)
    found = [second()]
    after = PythonState.of(model)
    lasting = lasting_changes(between.attributes, after.attributes)
    lasting_elsewhere = lasting_spots(between.spots, after.spots)
    if not lasting and not lasting_elsewhere:
        return found
    if not let_come_far(between.attributes, after.attributes, lasting):
        return []
    if not let_spots_come_far(between.spots, lasting_elsewhere):
        return []
    return [*found, second()]


def _computed(model: nn.Module, call: Arguments, around: Callable[[], Any]) -> list[Any]:
    """What a call returns, and the gradients of its sum for all parameters."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = device_of_first(parameters)
    with preserved([device]), seeded(OF_PYTHON_AND_NUMPY, 0), around():
        for generator in generators_of(device):
            generator.manual_seed(0)
        returned = pytree.tree_leaves(model(*call.args, **call.kwargs))
        roots = [leaf for leaf in returned if isinstance(leaf, Tensor) and leaf.requires_grad]
        gradients = _gradients(roots, parameters) if roots else ()
    return [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in (*returned, *gradients)]


def _gradients(roots: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Of the sum of the roots; a backward pass that runs modules again puts some into the parameters in any case."""
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        return [parameter.grad for parameter in parameters]
    finally:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient


def _same(found: Any, expected: Any) -> bool:
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    plain = found is None or isinstance(found, bool | int | float | str)
    return plain and type(found) is type(expected) and bool(found == expected)


def graph_text(root: fx.GraphModule) -> str:
    """A graph with its regions and constants as text: equal for graphs that compute the same."""
    regions = [module.code for module in root.modules() if isinstance(module, fx.GraphModule)]
    held = {id(tensor) for tensor in root.parameters()}
    constants = [
        f"{node.target} {tensor_digest(value)}"
        for node in root.graph.nodes
        if node.op == "get_attr"
        and isinstance(value := _held(root, str(node.target)), Tensor)
        and id(value) not in held
        and not value.is_meta
    ]
    return "\n".join((*regions, *constants))


def _held(root: fx.GraphModule, target: str) -> Any:
    owner, _, name = target.rpartition(".")
    return getattr(root.get_submodule(owner), name, None)


def tensor_digest(value: Tensor) -> str:
    """Text that is equal for tensors of equal bytes."""
    if isinstance(value, FakeTensor):
        return f"of a trace {id(value)}"  # that an attribute has kept: equal to nothing
    held = value.detach().to(HOST).contiguous()
    return hashlib.sha256(held.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
