"""`torch.fx.symbolic_trace` as a front end: it never looks inside modules of torch.nn, nor inside wrapped functions.

So it gets past code that `torch.export` stumbles over there. What it would lose in silence is refused here: regions
without gradient or under autocast, random numbers drawn once and for all, and constants that the forward pass writes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import fx, nn

from profiler.errors import NotTraceableError
from profiler.machine.backend import BACKENDS
from profiler.observe.elsewhere import Unwritten, changed_spots, constants_reached, put_spots_back, spots_of
from profiler.observe.operation_writes import WritesRefused
from profiler.observe.python_state import (
    attributes_of,
    attributes_of_tensors,
    changed_names,
    put_back,
    put_on_tensors,
    tensors_held,
)
from profiler.observe.random_states import python_and_numpy_states
from profiler.observe.source_place import place_now, place_of
from profiler.opaque.custom_function_tracing import functions_noticed
from profiler.sample_spec import SampleSpec, TensorLeaf
from profiler.torch_private import PH
from profiler.tracing.calls_alike import refuse_replaced, replaced_buffers
from profiler.tracing.refusals import refused
from profiler.tracing.sample import arguments_of

CONSTANT = "_tensor_constant"  # how torch.fx names tensors that the forward pass makes from nothing
_TRACEABLE = ("torch", "_operator", "operator", "builtins", "math")  # modules of functions that export understands


class FunctionModule(nn.Module):
    """A function of the user's as a module, so that it can be called as it is."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        return self.function(*args, **kwargs)


class _Applied:
    """A call of a custom function in the graph, which export, that comes next, notices as it does in the model."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)


class _Value(fx.Proxy):
    """A value in the graph. An attribute that is set on it, as `weight.data = ...` does, the graph would lose."""

    def __getattr__(self, name: str) -> Any:
        if name == "grad":
            raise NotTraceableError("symbolic_trace would lose that the forward pass reads the gradient of a tensor")
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node"):
            raise NotTraceableError(f"symbolic_trace would lose that the forward pass sets the {name!r} of a tensor")
        super().__setattr__(name, value)


class _Tracer(fx.Tracer):
    def __init__(self, model: nn.Module, leaves: Sequence[str]) -> None:
        super().__init__()
        self._model = model
        self._leaves = frozenset(leaves)
        self._around = _region()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._leaves or super().is_leaf_module(m, module_qualified_name)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _region() != self._around:
            raise NotTraceableError(
                f"in {place_now(self._model)}: symbolic_trace would lose a region without gradient or under autocast"
            )
        return super().create_node(*args, **kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def call_of(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A node in the place of a call of a custom function, which would be followed without its backward pass."""
        return self.create_proxy("call_function", _Applied(function), args, dict(kwargs), name=function.__name__)


def _region() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), *(torch.is_autocast_enabled(kind) for kind in BACKENDS)


def symbolic_module(model: nn.Module, spec: SampleSpec) -> fx.GraphModule:
    """The forward pass of a model's class as a graph of operations and leaf modules, with the names of its parameters.

    Hooks of the model itself are not in it, nor what its class does in a `__call__`: see `forward_by`.

    Args:
        model: in the mode in which it is to be traced.
        spec: what it is called with.

    Raises:
        NotTraceableError: it cannot be traced so, or the graph would lose something.
    """
    if "forward" in vars(model):
        raise NotTraceableError("symbolic_trace would lose the forward that was set on the model itself")
    tracer = _Tracer(model, spec.keep_together)
    before, states = attributes_of(model), (python_and_numpy_states(), torch.get_rng_state())
    changed: list[str] = []
    elsewhere, buffers = spots_of(model), dict(model.named_buffers())
    constants = Unwritten(constants_reached(model))

    def refuse(name: str) -> NoReturn:
        raise NotTraceableError(f"in {place_now(model)}: symbolic_trace would write {name!r} once, in the model itself")

    own = {**dict(model.named_parameters()), **buffers}
    on_tensors = [(tensor, dict(tensor.__dict__)) for tensor in own.values()]
    put_before = attributes_of_tensors(own)
    writes = WritesRefused(own, refuse)
    try:
        with torch.random.fork_rng(devices=[]), refused(model), functions_noticed(tracer.call_of), writes:
            held = tensors_held(model)
            graph = tracer.trace(model, concrete_args=_concrete_arguments(model, spec))
            refuse_replaced(held, tensors_held(model))
            drawn = not torch.equal(states[1], torch.get_rng_state())
        _name_as_called(graph, model)
        module = fx.GraphModule(model, graph)
        changed = [n for n in changed_names(before, attributes_of(model)) if not n.startswith(CONSTANT)]
        changed += replaced_buffers(model, buffers)
        changed += [spot.name for spot in changed_spots(elsewhere, spots_of(model))]
    except NotTraceableError:
        raise
    except Exception as problem:
        reason = (str(problem).splitlines() or [type(problem).__name__])[0]
        raise NotTraceableError(f"in {place_of(model, problem)}: {reason}") from problem
    finally:
        changed += constants.put_back()
        changed += put_on_tensors(put_before, attributes_of_tensors(own))
        for tensor, held_on_it in on_tensors:
            tensor.__dict__.clear()
            tensor.__dict__.update(held_on_it)
        after = changed_names(before, attributes_of(model))
        put_back(before, after)
        put_spots_back(elsewhere, spots_of(model))
        for name in after:
            if name.startswith(CONSTANT):
                del model.__dict__[name]
    if drawn or states[0] != python_and_numpy_states():
        raise NotTraceableError("symbolic_trace would freeze random numbers that the forward pass draws")
    if changed:
        raise NotTraceableError(f"the forward pass changes {changed[0]!r}, which is of Python")
    _wrap_functions(module)
    return module


@contextlib.contextmanager
def forward_by(graph: fx.GraphModule, model: nn.Module) -> Iterator[None]:
    """Within, the forward pass of a model is its graph's: who calls the model has its own hooks called, too."""
    tables: tuple[dict[str, Any], ...] = (model._modules, model._buffers)
    before = [dict(table) for table in tables]
    model._modules.update({name: part for name, part in graph._modules.items() if isinstance(part, FunctionModule)})
    model._buffers.update({name: value for name, value in graph._buffers.items() if name.startswith(CONSTANT)})
    vars(model)["forward"] = MethodType(type(graph).forward, model)
    try:
        yield
    finally:
        del vars(model)["forward"]
        for table, held in zip(tables, before, strict=True):
            table.clear()
            table.update(held)


def _concrete_arguments(model: nn.Module, spec: SampleSpec) -> dict[str, Any] | None:
    """What is no tensor, by the name of forward's parameter."""
    leaves = [PH if isinstance(leaf, TensorLeaf) else leaf.value for leaf in spec.leaves]
    call = arguments_of(spec, leaves)
    given = inspect.signature(model.forward).bind(*call.args, **call.kwargs)
    given.apply_defaults()
    concrete = {name: value for name, value in given.arguments.items() if value is not PH}
    return concrete or None


def _name_as_called(graph: fx.Graph, model: nn.Module) -> None:
    """Give inputs the names of forward's parameters again: those of constants have numbers, `mask_1` (torch 2.13)."""
    names = [*inspect.signature(model.forward).parameters]
    for node, name in zip(graph.find_nodes(op="placeholder"), names, strict=False):
        number = str(node.target).removeprefix(f"{name}_")
        if number != node.target and number.isdecimal():
            node.target = name


def _wrap_functions(module: fx.GraphModule) -> None:
    """Make a submodule of every call of a function that is not torch's or Python's own."""
    for node in list(module.graph.nodes):
        target = node.target
        if node.op != "call_function" or not callable(target) or isinstance(target, str):
            continue
        home = getattr(target, "__module__", None) or ""
        if home.split(".")[0] in _TRACEABLE or isinstance(target, _Applied):
            continue
        module.add_submodule(node.name, FunctionModule(target))
        with module.graph.inserting_before(node):
            call = module.graph.call_module(node.name, node.args, node.kwargs)
        node.replace_all_uses_with(call)
        module.graph.erase_node(node)
    module.recompile()


def leaf_modules(module: fx.GraphModule) -> tuple[str, ...]:
    """Paths of the modules that the graph calls."""
    return tuple(dict.fromkeys(str(node.target) for node in module.graph.nodes if node.op == "call_module"))
