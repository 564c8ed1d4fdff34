"""Python attributes that a forward pass changes: whether what it computes depends on them.

A graph is that of a first call. It serves for all calls if later ones compute the same, whatever earlier ones have left
behind, as with a cache of a table, or a counter that nothing reads. Two proofs are tried:

- by graphs: a second trace, from the attributes that the first call has left, gives the same graph and constants; so
  does one from counters that have come far.
- by calls: for made-up data the model returns the same, and gives the same gradients, in a first call and in one that
  comes after a call with other data and other parameters, and with counters that have come far. It needs the model's
  values.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from profiler.errors import NotTraceableError
from profiler.machine.backend import HOST, device_of_first
from profiler.observe.python_state import (
    Attribute,
    attributes_of,
    put_all_back,
    put_back,
    replaced,
    tensors_held,
)
from profiler.observe.random_states import OF_PYTHON_AND_NUMPY, generators_of, preserved, seeded
from profiler.observe.standing_in import standing_in
from profiler.observe.untouched import untouched
from profiler.tracing.sample import Arguments

_FAR = 1_000_003  # [chosen] calls; odd, so that what every other call does differently shows
_Attributes = Mapping[str, Attribute]


def lasting_changes(earlier: _Attributes, later: _Attributes) -> list[str]:
    """Names of the numbers, strings and containers' lengths that differ between the ends of two calls."""
    return [name for name in later if name in earlier and later[name].plain != earlier[name].plain]


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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _far(before: Any, after: Any) -> Any:
    return after + (after - before) * _FAR if _is_number(before) and _is_number(after) else after


def same_graphs(
    model: nn.Module,
    graph: fx.GraphModule,
    traced_again: Callable[[], fx.GraphModule],
    between: _Attributes,
    changed: Sequence[str],
    calls: Sequence[_Attributes],
) -> bool:
    """The proof by graphs.

    Args:
        model: the model.
        graph: of the first call.
        traced_again: makes the graph of a call from the attributes as they are.
        between: attributes after the first call.
        changed: names of those that it changed.
        calls: attributes after each call so far; it grows.

    Raises:
        Exception: it cannot be traced from these attributes, or not as such.
    """
    begin, expected = attributes_of(model), graph_text(graph)
    try:
        put_back(between, changed)
        if graph_text(traced_again()) != expected:
            return False
        after = calls[-1]
        lasting = lasting_changes(between, after)
        if not lasting:
            return True
        put_back(after, lasting)
        return let_come_far(between, after, lasting) and graph_text(traced_again()) == expected
    finally:
        put_all_back(begin, attributes_of(model))


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
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with untouched(model):
            expected = _computed(model, second, around)
        with untouched(model):
            found = _computed_later(model, first, second, around)
    except Exception:  # the user's code, on made-up data: no proof
        return False
    finally:
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
    return bool(found) and all(_same(one, other) for each in found for one, other in zip(each, expected, strict=True))


def _computed_later(
    model: nn.Module, first: Arguments, second: Arguments, around: Callable[[], Any]
) -> list[list[Any]]:
    """What the second call computes after the first, with other parameters, and after many; [] if that is unknown."""
    others = {name: (1.5 * held.detach()).requires_grad_(held.requires_grad) for name, held in model.named_parameters()}
    with standing_in(model, others):
        _computed(model, first, around)
    between = attributes_of(model)
    found = [_computed(model, second, around)]
    after = attributes_of(model)
    lasting = lasting_changes(between, after)
    if lasting and not let_come_far(between, after, lasting):
        return []
    return [*found, _computed(model, second, around)] if lasting else found


def _computed(model: nn.Module, call: Arguments, around: Callable[[], Any]) -> list[Any]:
    """What a call returns, and the gradients of its sum for all parameters."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = device_of_first(parameters)
    with preserved([device]), seeded(OF_PYTHON_AND_NUMPY, 0), around():
        for generator in generators_of(device):
            generator.manual_seed(0)
        returned = pytree.tree_leaves(model(*call.args, **call.kwargs))
        roots = [leaf for leaf in returned if isinstance(leaf, Tensor) and leaf.requires_grad]
        ones = [torch.ones_like(root) for root in roots]
        gradients = torch.autograd.grad(roots, parameters, ones, allow_unused=True) if roots else ()
    return [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in (*returned, *gradients)]


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
        and isinstance(value := getattr(root, str(node.target), None), Tensor)
        and id(value) not in held
        and not value.is_meta
    ]
    return "\n".join((*regions, *constants))


def tensor_digest(value: Tensor) -> str:
    """Text that is equal for tensors of equal bytes."""
    if isinstance(value, FakeTensor):
        return f"of a trace {id(value)}"  # that an attribute has kept: equal to nothing
    held = value.detach().to(HOST).contiguous()
    return hashlib.sha256(held.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


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


@contextlib.contextmanager
def each_call_alike(model: nn.Module) -> Iterator[list[dict[str, Attribute]]]:
    """Within, each call of the model begins with the same attributes; noted are those at the end of each call.

    An export runs the model several times for one graph: a table that the first run has kept would be none of the
    graph's in the next.
    """
    noted: list[dict[str, Attribute]] = []
    begin: list[dict[str, Attribute]] = []
    held: list[dict[str, int]] = []
    register = nn.Module.register_buffer

    def note_begin(*_: Any) -> None:
        begin.append(attributes_of(model))
        held.append(tensors_held(model))

    def note_end(*_: Any) -> None:
        refuse_replaced(held.pop(), tensors_held(model))
        after = attributes_of(model)
        noted.append(after)
        put_all_back(begin.pop(), after)

    def registered(module: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """A new buffer is one more attribute: export knows those alone that were there before."""
        if begin and name not in module._buffers:
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
