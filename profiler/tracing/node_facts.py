"""What each node of a traced graph does, found by running the graph once on fake tensors.

A fake tensor has shape, strides, storage and autograd history but no data, so this run costs neither memory nor
arithmetic and works from the meta device. It tells what a graph alone does not: FLOPs, aliasing, randomness and
which values carry a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from profiler.conditions.chance import EitherWay
from profiler.errors import NotTraceableError
from profiler.machine.backend import device_of_first
from profiler.observe.flops import FlopCounter
from profiler.observe.kernel_orders import dim_order
from profiler.observe.source_place import keep_together_advice, place_of_node
from profiler.observe.storage_watch import is_strided
from profiler.observe.without_data import without_data
from profiler.opaque.call import OpaqueCall
from profiler.opaque.opaque_calls import opaque_calls_of, runs_code_in_backward
from profiler.sample_spec import SampleSpec
from profiler.torch_private import is_inside_function_transform, storage_of
from profiler.tracing.export import TracedGraph, autocasting, module_stack
from profiler.tracing.sample import example_arguments, tensor_leaves
from profiler.tracing.writes import statistics_arguments, written_arguments


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What one node does at the sample's batch size.

    Attributes:
        flops: multiply-adds counted as two, as `torch.utils.flop_counter` does.
        written_bytes: bytes of the storages that it fills, views not counted: a measure of memory traffic.
        value_bytes: bytes of its value if it is one tensor, as it would be sent (contiguous).
        storage: identity of the storage of its value; None if the value is not one tensor.
        is_tensor: whether its value is one tensor.
        dim_order: its dimensions from the outermost to the innermost in memory, as the real kernel gives them; None if
            its elements do not fill their memory without gaps and overlaps (a slice, an expanded tensor).
        requires_grad: whether a gradient flows back through its value, at the end.
        draws_random: whether it draws random numbers.
        writes: storages that it writes in place.
        apart: operations that it reads and must not share memory with, though torch may let it.
        trained_by: the operation whose write in place brought the gradient; None if the value had it from the start.
    """

    flops: int
    written_bytes: int
    value_bytes: int
    storage: int | None
    is_tensor: bool
    dim_order: tuple[int, ...] | None
    requires_grad: bool
    draws_random: bool
    writes: frozenset[int]
    apart: tuple[fx.Node, ...] = ()
    trained_by: fx.Node | None = None


def analyse(traced: TracedGraph, spec: SampleSpec) -> dict[fx.Node, NodeFacts]:
    """Run the graph on fake tensors at the sample's batch size.

    Args:
        traced: the graph.
        spec: what it is called with.

    Returns:
        The facts of every node but the output.
    """
    device = device_of_first(traced.module.parameters())
    mode, emptied = without_data((*traced.module.parameters(), *traced.module.buffers()))
    with mode:
        call = example_arguments(spec, spec.batch_size, device)
    sample = call.kwargs if call.kwargs and not call.args else call.args
    inputs = dict(zip(traced.inputs, tensor_leaves(sample, spec), strict=True))
    values: dict[fx.Node, Any] = {}
    facts: dict[fx.Node, NodeFacts] = {}
    trained_by: dict[fx.Node, fx.Node] = {}
    counter = FlopCounter()
    with autocasting(spec, device), mode, counter, torch.enable_grad():
        for node in traced.module.graph.nodes:
            if node.op == "output":
                break
            counter.reset()
            try:
                values[node] = _evaluate(node, values, inputs, traced.module, emptied)
            except Exception as problem:
                place = place_of_node(node)
                raise NotTraceableError(
                    _dynamic_text(node, problem), modules=module_stack(node), functions=place.functions
                ) from problem
            counter.draws_random |= isinstance(node.target, EitherWay)  # the other way may draw
            for opaque in opaque_calls_of(node):
                counter.flops += opaque.cost.flops.at(spec.batch_size)
                counter.draws_random = True  # whether it does may depend on data
            counter.draws_random |= runs_code_in_backward(node)  # which may draw, too
            _refuse_wrapped(node, values[node])
            _refuse_sparse(node, values[node])
            facts[node] = _facts(node, values, counter)
            trained_by.update(dict.fromkeys(_newly_trained(facts, values, facts[node].writes, trained_by), node))
    _refuse_shared_writes(traced.module.graph, values, facts)
    _correct_types(values)
    apart = _apart(facts)
    # A value that is written in place later can come to carry a gradient then, so ask at the end.
    return {
        node: replace(
            fact,
            requires_grad=any(t.requires_grad for t in _tensors(values[node])),
            apart=apart.get(node, ()),
            trained_by=trained_by.get(node),
        )
        for node, fact in facts.items()
    }


def _correct_types(values: Mapping[fx.Node, Any]) -> None:
    """Give the graph's values the types that they have in training.

    An export switches oneDNN off, without which an LSTM in an autocast region on a CPU returns another type. What is
    sent is sent in the type that the graph knows, so each cut would have rounded in another place.
    """
    for node, value in values.items():
        known = node.meta.get("val")
        if isinstance(known, Tensor) and isinstance(value, Tensor) and known.dtype != value.dtype:
            node.meta["val"] = known.detach().to(value.dtype)


def _newly_trained(
    facts: Mapping[fx.Node, NodeFacts],
    values: Mapping[fx.Node, Any],
    written: frozenset[int],
    known: Collection[fx.Node],
) -> list[fx.Node]:
    """Nodes whose values have come to carry a gradient, now that these storages were written."""
    return [
        node
        for node, fact in (facts.items() if written else ())
        if fact.storage in written and not fact.requires_grad and node not in known and values[node].requires_grad
    ]


def _apart(facts: Mapping[fx.Node, NodeFacts]) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Which operations made memory of their own that is written, or read what is, and so must always make it.

    Some copy only where they have to: `x.transpose(0, 1).contiguous()` is `x` itself for one sample, and so is
    `x[:, ::2].contiguous()` where a boundary has copied the slice already. What writes the one would write both.

    Returns:
        These operations, and what they read that they must not share memory with.
    """
    written = frozenset().union(*(fact.writes for fact in facts.values()))
    apart: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node, fact in facts.items() if written else ():
        sources = [source for source in node.all_input_nodes if facts[source].is_tensor]
        if not fact.is_tensor or fact.writes or any(facts[source].storage == fact.storage for source in sources):
            continue
        others = tuple(source for source in sources if {fact.storage, facts[source].storage} & written)
        if others:
            apart[node] = others
    return apart


def _refuse_wrapped(node: fx.Node, value: Any) -> None:
    """Inside a function transform (`torch.vmap`, `torch.func.grad`) a value is no tensor that a layer could return."""
    if any(is_inside_function_transform(tensor) for tensor in _tensors(value)):
        place = place_of_node(node)
        raise NotTraceableError(
            f"cannot trace the model: in {place}: the forward pass transforms functions (torch.vmap, torch.func), "
            f"which a graph of operations cannot hold; {keep_together_advice(place.modules)}, or use operations on "
            "whole tensors",
            modules=place.modules,
            functions=place.functions,
        )


def _refuse_sparse(node: fx.Node, value: Any) -> None:
    """A sparse or nested value lies in several memories, which a boundary could not send, nor memory be counted of."""
    for tensor in _tensors(value):
        if not is_strided(tensor) or tensor.is_nested:
            place = place_of_node(node)
            raise NotTraceableError(
                f"cannot trace the model: in {place}: {node.target} gives a sparse or nested tensor "
                f"({tensor.layout}); use dense ones, or {keep_together_advice(place.modules)}",
                modules=place.modules,
                functions=place.functions,
            )


def _dynamic_text(node: fx.Node, problem: Exception) -> str:
    place = place_of_node(node)
    return (
        f"cannot trace the model: in {place}: {node.target} gives a result whose shape or value depends on data "
        f"({type(problem).__name__}); use operations with fixed shapes, such as torch.where in place of x[mask], or "
        f"{keep_together_advice(place.modules)}"
    )


def _refuse_shared_writes(graph: fx.Graph, values: Mapping[fx.Node, Any], facts: Mapping[fx.Node, NodeFacts]) -> None:
    """What a module that is called as it is takes and returns may share memory, depending on data.

    So if one of these is written later, none of the others may be read after that.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    if not any(isinstance(node.target, OpaqueCall) for node in nodes):
        return
    read = [{storage_of(t) for source in node.all_input_nodes for t in _tensors(values[source])} for node in nodes]
    for position, node in enumerate(nodes):
        if not isinstance(node.target, OpaqueCall):
            continue
        shared = {storage_of(t) for t in (*_tensors(values[node]), *_taken(node, values))}
        for later in range(position + 1, len(nodes)):
            written = facts[nodes[later]].writes & shared
            if any((shared - written) & storages for storages in (read[later + 1 :] if written else ())):
                raise NotTraceableError(
                    f"cannot trace the model: in {place_of_node(nodes[later])}: {nodes[later].target} writes in place "
                    f"what module {node.target.path!r} takes or returns, which may be the same memory, for that "
                    "module is called as it is; use the operation that is not in place"
                )


def _taken(node: fx.Node, values: Mapping[fx.Node, Any]) -> list[Tensor]:
    """The tensors that a module which is called as it is takes, without its own parameters and buffers."""
    assert isinstance(node.target, OpaqueCall)
    taken = [values[a] for a in node.args[node.target.own_arguments :] if isinstance(a, fx.Node)]
    return _tensors(taken)


def _tensors(value: Any) -> list[Tensor]:
    return [item for item in pytree.tree_leaves(value) if isinstance(item, Tensor)]


def _evaluate(
    node: fx.Node,
    values: dict[fx.Node, Any],
    inputs: Mapping[fx.Node, Tensor],
    module: fx.GraphModule,
    emptied: Callable[[Tensor], Tensor],
) -> Any:
    if node.op == "placeholder":
        return inputs.get(node)
    if node.op == "get_attr":
        target: Any = module
        for part in str(node.target).split("."):
            target = getattr(target, part)
        return emptied(target) if isinstance(target, Tensor) else target
    assert callable(node.target)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda argument: values[argument])
    return node.target(*args, **kwargs)


def _facts(node: fx.Node, values: dict[fx.Node, Any], counter: FlopCounter) -> NodeFacts:
    value = values[node]
    single = isinstance(value, Tensor)
    arguments = pytree.tree_leaves([values[argument] for argument in node.all_input_nodes])
    before = {storage_of(item) for item in arguments if isinstance(item, Tensor)}
    produced = [item for item in pytree.tree_leaves(value) if isinstance(item, Tensor)]
    writes = {storage_of(values[argument]) for argument in (*written_arguments(node), *statistics_arguments(node))}
    return NodeFacts(
        flops=counter.flops,
        written_bytes=sum(item.nbytes for item in produced if storage_of(item) not in before),
        value_bytes=value.nbytes if single else 0,
        storage=storage_of(value) if single else None,
        is_tensor=single,
        dim_order=dim_order(value) if single else None,
        requires_grad=any(item.requires_grad for item in produced),
        draws_random=counter.draws_random,
        writes=frozenset(writes),
    )
