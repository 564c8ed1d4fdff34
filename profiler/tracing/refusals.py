"""What a graph would lose without a word: refused while the model is traced.

A traced graph holds operations on tensors. A hook on a gradient or on what is saved for one, a backward pass in the
midst of the forward pass, and random numbers of Python or numpy are not among them: the graph would train on,
differently.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from profiler.errors import NotTraceableError
from profiler.observe.elsewhere import arrays_reached
from profiler.observe.random_states import python_and_numpy_states
from profiler.observe.source_place import (
    OWN_GENERATOR,
    OWN_GENERATOR_CURE,
    Place,
    keep_together_advice,
    place_now,
    place_of_call,
    place_of_node,
    setting_advice,
)
from profiler.torch_private import (
    HigherOrderOperator,
    OpOverload,
    has_backward_hooks,
    has_backward_hooks_of_all_modules,
    schema_of,
)
from profiler.tracing.lost_gradients import TRACING, lost_gradients_refused
from profiler.tracing.writes import statistics_arguments, written_arguments


@contextlib.contextmanager
def refused(model: nn.Module) -> Iterator[None]:
    """Refuse a model that, inside the block, uses what a graph would lose.

    Modules that are rehearsed meanwhile, in another thread, may use it: they are called as they are.

    Raises:
        NotTraceableError: naming what it is and what to use in its place.
    """
    handles = _refuse_hooks(model)
    before = python_and_numpy_states()
    token = TRACING.set(True)
    draws: list[Place] = []
    try:
        with lost_gradients_refused(model), _noted_draws(model, draws):
            yield
    except Exception as problem:
        if draws and before != python_and_numpy_states():  # what went wrong later may follow from what was drawn
            raise _draws(model, draws) from problem
        raise
    finally:
        TRACING.reset(token)
        for handle in handles:
            handle.remove()
    if before != python_and_numpy_states():
        raise _draws(model, draws)


def _draws(model: nn.Module, places: Sequence[Place]) -> NotTraceableError:
    place = places[0] if places else place_of_call(model)
    advice = setting_advice(model, place) or keep_together_advice(place.modules)
    return NotTraceableError(
        f"cannot trace the model: in {place}: the forward pass draws from Python's or numpy's random generator, whose "
        f"numbers a graph would freeze; {advice}",
        modules=place.modules,
        functions=place.functions,
    )


@contextlib.contextmanager
def _noted_draws(model: nn.Module, places: list[Place]) -> Iterator[None]:
    """Within, places are noted where the forward pass calls `random.random`, `numpy.random.rand` and the like."""

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            if TRACING.get():
                places.append(place_now(model))
            return function(*args, **kwargs)

        return draw

    with contextlib.ExitStack() as patches:
        for package in (random, np.random):
            for name, function in list(vars(package).items()):
                if isinstance(getattr(function, "__self__", None), random.Random | np.random.RandomState):
                    patches.enter_context(mock.patch.object(package, name, noted(function)))
        yield


def _refuse_hooks(model: nn.Module) -> list[RemovableHandle]:
    """Refuse backward hooks of parameters and of the model; and what refuses those of modules when these are called."""
    if has_backward_hooks_of_all_modules():
        raise NotTraceableError(
            "cannot trace the model: there is a backward hook of all modules (register_module_full_backward_hook), "
            "which a graph would lose; remove it before planning"
        )
    for name, parameter in model.named_parameters():
        if has_backward_hooks(parameter):
            raise _has_backward_hook(model, repr(name), name.rpartition(".")[0])

    if has_backward_hooks(model):  # at once: `fx.symbolic_trace` calls the model's forward and none of its own hooks
        raise _has_backward_hook(model, "the model itself", "")

    def refuse(name: str, *_: Any) -> None:
        if TRACING.get():
            raise _has_backward_hook(model, repr(name), name)

    return [
        module.register_forward_pre_hook(partial(refuse, name))
        for name, module in model.named_modules()
        if has_backward_hooks(module)
    ]


def _has_backward_hook(model: nn.Module, owner: str, path: str) -> NotTraceableError:
    return NotTraceableError(
        f"cannot trace the model: in {place_of_call(model, path)}: {owner} has a backward hook, which a graph would "
        "lose; remove it before planning, and change gradients between step() and the optimizer's step, if that is "
        "what it is for"
    )


def refuse_parameters_as_arrays(model: nn.Module) -> None:
    """Refuse an array of numpy in a parameter's memory: what is read there, a graph would hold as it was.

    Raises:
        NotTraceableError: naming it.
    """
    where = {}
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and not isinstance(parameter, FakeTensor) and not is_lazy(parameter):
            try:
                where[parameter.untyped_storage().data_ptr()] = name
            except TypeError as problem:  # its class takes no functions of torch's
                place = place_of_call(model, name.rpartition(".")[0])
                raise NotTraceableError(
                    f"cannot trace the model: in {place}: the parameter {name!r} is a {type(parameter).__name__}, "
                    "which refuses functions of torch's; let plain parameters hold the numbers"
                ) from problem
    for name, array in arrays_reached(model) if where else ():
        owner: Any = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        held = where.get(owner.__array_interface__["data"][0])
        if held is not None:
            place = place_of_call(model, name.rpartition(".")[0])
            raise NotTraceableError(
                f"cannot trace the model: in {place}: {name!r} is an array of numpy in the memory of the parameter "
                f"{held!r}, whose values a graph would hold as they are now; read the parameter itself"
            )


def refuse_hidden_writes(graph: fx.Graph, root: fx.GraphModule) -> None:
    """Refuse writes inside a region without gradient or under autocast to values from outside it.

    Raises:
        NotTraceableError: naming the operation.
    """
    for node in graph.nodes:
        if not isinstance(node.target, HigherOrderOperator):
            continue
        for source in node.all_input_nodes:
            region = getattr(root, str(source.target), None) if source.op == "get_attr" else None
            written = written_from_outside(region) if isinstance(region, fx.GraphModule) else None
            if written is not None:
                place = place_of_node(written)
                raise NotTraceableError(
                    f"cannot trace the model: in {place}: {written.target} inside a region without gradient or under "
                    "autocast writes a value from outside, in every micro-batch and again when recomputed; update it "
                    f"outside the model's forward pass, or {keep_together_advice(place.modules)}",
                    modules=place.modules,
                )


def refuse_own_generators(root: fx.GraphModule) -> None:
    """Refuse random numbers of a generator of the model's own: a recomputed pass would draw other ones.

    Raises:
        NotTraceableError: naming the module.
    """
    for module in root.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if _given_generator(node):
                raise NotTraceableError(
                    f"cannot trace the model: in {place_of_node(node)}: {node.target} draws random numbers "
                    f"{OWN_GENERATOR}; {OWN_GENERATOR_CURE}"
                )


def _given_generator(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    for position, argument in enumerate(schema_of(node.target).arguments):
        if "Generator" in str(argument.type):
            return (node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)) is not None
    return False


def written_from_outside(region: fx.GraphModule) -> fx.Node | None:
    """The first operation of a region that writes what the region takes."""
    return next((writer for writer, base in _writes_of(region) if base.op == "placeholder"), None)


def written_bases(region: fx.GraphModule) -> list[fx.Node]:
    """What a region takes and writes."""
    return [base for _, base in _writes_of(region) if base.op == "placeholder"]


def _writes_of(region: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Operations that write, in regions of the region too, each with what it is a view of that it writes."""
    for node in region.graph.nodes:
        written = statistics_arguments(node) or written_arguments(node)
        yield from ((node, _base(argument)) for argument in written)
        for source in node.all_input_nodes if isinstance(node.target, HigherOrderOperator) else ():
            inner = getattr(region, str(source.target), None) if source.op == "get_attr" else None
            if isinstance(inner, fx.GraphModule):
                taken = [each for each in inner.graph.nodes if each.op == "placeholder"]
                given = dict(zip(taken, node.args[len(node.args) - len(taken) :], strict=True))
                for writer, base in _writes_of(inner):
                    if isinstance(outer := given.get(base), fx.Node):
                        yield writer, _base(outer)


def _base(value: fx.Node) -> fx.Node:
    """What a value is a view of."""
    while value.op == "call_function" and value.args and isinstance(value.args[0], fx.Node):
        if not isinstance(value.target, OpOverload) or not _aliases(value.target):
            break
        value = value.args[0]
    return value


def _aliases(operation: OpOverload) -> bool:
    """Whether the result shares memory with the first argument."""
    return any(result.alias_info is not None for result in schema_of(operation).returns)
