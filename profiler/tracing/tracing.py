"""`trace`: model and sample to a `LayerSequence`.

graph_of (front ends, facts of the nodes) -> take_out_counters -> prelude_nodes -> layer_starts -> build_layer for each
run of nodes
"""

from __future__ import annotations

import contextlib
import difflib
import gc
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from profiler.arguments import fits_its_arguments
from profiler.conditions.check import Check
from profiler.errors import ArgumentError, NotTraceableError
from profiler.module_paths import held_by, inside_text, span_of
from profiler.observe.ambient import as_in_training
from profiler.precision import autocast_named, precision_named, refuse_with_autocast
from profiler.quantities import LEAST_STAGES, MOST_LAYERS, check_count, paths_of
from profiler.sample_spec import SampleSpec
from profiler.text import counted
from profiler.torch_private import is_lazy
from profiler.tracing.batch_norm import take_out_counters
from profiler.tracing.build_layer import Compiler, build_function, build_layer
from profiler.tracing.computing_model import computing_model
from profiler.tracing.cuts import Body, first_operations, layer_starts, why_one_layer
from profiler.tracing.evaluation_cuts import stage_starts
from profiler.tracing.export import TracedGraph, module_calls
from profiler.tracing.front_ends import Served, graph_of
from profiler.tracing.node_text import (
    attribute,
    digest,
    node_text,
    operation_name,
    source_line,
    symbolic_shape,
    value_text,
)
from profiler.tracing.prelude import prelude_nodes
from profiler.tracing.progress import Part, done, shown
from profiler.tracing.sample import BatchDims, describe_sample, tensor_leaves
from profiler.tracing.sequence import BoundaryValue, Layer, LayerSequence, Prelude
from profiler.tracing.sites import sites_of
from profiler.tracing.unlike_types import refuse_unlike_types


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Within, no garbage is collected: a trace makes millions of objects that live as long as it does.

    To go through them many times would take a time that grows faster than the model.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@fits_its_arguments
@_without_collection()
@as_in_training()
def trace(
    model: nn.Module,
    sample: Any,
    *,
    batch_dims: BatchDims | None = None,
    autocast: torch.dtype | None = None,
    precision: str | None = None,
    keep_together: Sequence[str] = (),
    cut_at: Sequence[str] = (),
    stages: int = LEAST_STAGES,
    progress: bool = True,
) -> LayerSequence:
    """Turn a model into a sequence of layers.

        sequence = trace(model, torch.zeros(8, 128, dtype=torch.int64))
        sequence.to_frame()

    The model is traced as it trains: dropout on, batch normalization moving its statistics. It is not changed, and
    parameters are shared with it, not copied.

    Args:
        model: any module.
        sample: what it is called with: a tensor, a tuple of positional or a dict of keyword arguments; a
            `SampleSpec` serves as well, with its own settings. Values in the tensors matter only where the model
            branches on them: it is traced along the sample's branch, and every micro-batch is checked to take it too.
        batch_dims: where the batch dimension is not the first: argument position or keyword -> dimension, or None for
            tensors that every micro-batch gets whole.
        autocast: dtype of an autocast region around the whole model, `torch.bfloat16` or `torch.float16`.
        precision: recipe of mixed precision, such as `"bf16-mixed"`: a twin of the model is traced, whose parameters
            are cast as `profiler.precision` says.
        keep_together: paths of modules whose operations shall stay in one layer. One of them that cannot be traced is
            called as it is, as one operation: its forward pass may branch on data, have a backward pass of its own or
            hooks on gradients. It must return tensors whose shapes depend on the batch alone; random numbers (torch's,
            Python's and numpy's) and buffers that it writes are kept, and what no layer may do is an error when it
            happens.
        cut_at: paths of modules before which a layer shall begin. Modules without parameters may come between.
        stages: K that the layers shall be fine enough for: none holds more than an eighth of an even stage's work where
            there is a position to cut it. The same for up to 4, for 5 to 8, for 9 to 16, and so on.
        progress: show on a terminal what is done and how long it will take.

    Raises:
        NotTraceableError: the forward pass depends on data, or does what no layer may do.
        ArgumentError: the model or the sample is not one, autocast does not compute in such a dtype, or no cut is safe
            before a module of `cut_at`.
    """
    check_model(model)
    if isinstance(sample, SampleSpec):
        spec = sample
    else:
        spec = _spec(sample, batch_dims, autocast, precision, keep_together, cut_at, stages)
    _refuse_untrainable(model)
    model = computing_model(model, spec.precision)
    _check_paths(model, spec)
    values = None if isinstance(sample, SampleSpec) else tensor_leaves(sample, spec)
    with shown(model, wanted=progress):
        served = graph_of(model, spec, sample=values)
        refuse_unlike_types(served.graph.module.graph, spec)
        counters = take_out_counters(served.graph.module.graph)
        body = _body(served)
        starts = layer_starts(body, spec.keep_together, spec.cut_at, stages=spec.stages)
        sequence = _assemble(model, served, body, starts, counters)
        if len(sequence) == 1:
            sequence = replace(sequence, whole=why_one_layer(body, spec.keep_together))
        if not isinstance(sample, SampleSpec):
            _check_held(model, sequence, spec)
            _check_cuts(body, starts, sequence, spec)
        done(Part.LAYERS)
    return sequence


def check_model(model: nn.Module) -> None:
    """Refuse what is no model.

    Raises:
        ArgumentError: saying what it is.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"the model is a {type(model).__name__}; pass a torch.nn.Module")


def _refuse_untrainable(model: nn.Module) -> None:
    for name, held in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(held):
            raise NotTraceableError(
                f"cannot trace the model: {name!r} has no shape before the first call (a lazy module); call the model "
                "once on a sample before planning"
            )
        if held.is_inference():
            raise NotTraceableError(
                f"cannot trace the model: {name!r} was made within torch.inference_mode(), and such tensors cannot be "
                "trained; make the model outside of it"
            )


def _spec(
    sample: Any,
    batch_dims: BatchDims | None,
    autocast: torch.dtype | None,
    precision: str | None,
    keep_together: Sequence[str],
    cut_at: Sequence[str],
    stages: int,
) -> SampleSpec:
    recipe = precision_named(precision)
    refuse_with_autocast(recipe, autocast)
    check_count("stages", stages, most=MOST_LAYERS)
    settings = {
        "autocast": autocast_named(autocast),
        "precision": recipe,
        "keep_together": paths_of("keep_together", keep_together),
        "cut_at": paths_of("cut_at", cut_at),
        "stages": LEAST_STAGES << max(0, -(-stages // LEAST_STAGES) - 1).bit_length(),
    }
    return describe_sample(sample, batch_dims).model_copy(update=settings)


def _check_paths(model: nn.Module, spec: SampleSpec) -> None:
    """Every path that the layers depend on must name a submodule.

    Raises:
        ArgumentError: one does not; the message has the nearest names.
    """
    known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for name, paths in (("keep_together", spec.keep_together), ("cut_at", spec.cut_at)):
        for path in paths:
            if path not in known:
                near = difflib.get_close_matches(path, known) or known[:3]
                raise ArgumentError(f"{name} names {path!r}, which is no module of the model; nearest: {near}")


def _check_held(model: nn.Module, sequence: LayerSequence, spec: SampleSpec) -> None:
    """A module of several names is named by the one that the layers have of it.

    Raises:
        ArgumentError: by another.
    """
    names: dict[nn.Module, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names[module].append(name)
    for setting, paths in (("keep_together", spec.keep_together), ("cut_at", spec.cut_at)):
        for path in paths:
            others = [name for name in names[model.get_submodule(path)] if held_by(sequence.layers, name)]
            if others and path not in others:
                raise ArgumentError(f"{setting} names {path!r}, which is the module {others[0]!r}; give that name")


def _check_cuts(body: Body, starts: Sequence[int], sequence: LayerSequence, spec: SampleSpec) -> None:
    """Each module of `cut_at` begins a layer, or comes just behind activations that do.

    Raises:
        ArgumentError: one begins inside a layer, where no cut is safe, or no layer holds any of it.
    """
    begin = first_operations(body, spec.cut_at)
    why = "where no cut is safe" + (", or none that keep_together allows" if spec.keep_together else "")
    for path in spec.cut_at:
        first, _ = span_of(sequence.layers, "cut_at", path)
        inside = inside_text(sequence.layers[first], path)
        if inside and begin.get(path) not in starts:
            raise ArgumentError(
                f"cut_at names {path!r}, which {inside}, {why}; choose one of the modules that begin a layer"
            )


@_without_collection()
@as_in_training()
def trace_evaluation(
    model: nn.Module, sequence: LayerSequence, sample: SampleSpec, stages: Sequence[range]
) -> LayerSequence:
    """The model as `model.eval()` leaves it, one layer for each stage: no dropout, running statistics.

    Args:
        model: the model that `sequence` was traced from.
        sequence: its layers as they train.
        sample: what the model is called with.
        stages: layers of each of K stages.

    Returns:
        K layers, of which layer k reads those of the model's parameters and buffers that stage k has for its training.

    Raises:
        NotTraceableError: there are no such layers.
    """
    served = graph_of(model, _as_traced(sample, sequence), training=False)
    everywhere = sequence.prelude_of(sorted(sequence.prelude_names)).buffers
    held = [sequence.names_read(stage) for stage in stages]
    named = _names(model).difference(everywhere)
    body = _body(served, not_everywhere=named)
    starts = stage_starts(body, held, named)
    if starts is None:
        read = chain(*_sources((), served.graph.module))
        unknown = sorted(named.intersection(read).difference(*held))
        reads = (
            f"reads {unknown[0]}, which training does not read" if unknown else "reads its parameters in other places"
        )
        raise NotTraceableError(
            f"in evaluation mode the model {reads}, so its {len(stages)} stages cannot carry it out; load the state "
            "into the plain model to evaluate it"
        )
    return _assemble(model, served, body, starts, set())


def _names(model: nn.Module) -> set[str]:
    """All names of parameters and buffers."""
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name for name, _ in named}


def _as_traced(sample: SampleSpec, sequence: LayerSequence) -> SampleSpec:
    """What the model is called with, to be traced by the same means as before."""
    traced = sequence.sample
    means = {"front_end": traced.front_end, "called_as_is": traced.called_as_is, "decisions": traced.decisions}
    means["chances"] = traced.chances
    return sample.model_copy(update=means)


@_without_collection()
@as_in_training()
def trace_again(model: nn.Module, sequence: LayerSequence, sample: SampleSpec) -> LayerSequence:
    """The same layers for inputs of other shapes, such as another sequence length.

    Args:
        model: the model that `sequence` was traced from.
        sequence: its layers; the result has the same, operation for operation.
        sample: what the model is called with.

    Raises:
        NotTraceableError: the model does other operations then.
    """
    served = graph_of(model, _as_traced(sample, sequence))
    counters = take_out_counters(served.graph.module.graph)
    nodes = _operations(served.graph)
    planned, found = sequence.operations, tuple(operation_name(node) for node in nodes)
    if planned != found:
        same = next((i for i, (a, b) in enumerate(zip(planned, found, strict=False)) if a != b), len(planned))
        place = source_line(nodes[min(same, len(nodes) - 1)])
        raise NotTraceableError(
            f"the model computes something else for inputs of these shapes: {counted(len(found), 'operation')}, "
            f"{len(planned)} as "
            f"planned, from {place or 'the end'} on; pad the batch to the planned shape, or plan for this one"
        )
    prelude = {nodes[position] for position in sequence.prelude_positions}
    body = Body.of(served.graph.module.graph, prelude, served.facts)
    starts = list(accumulate((len(layer.operations) for layer in sequence.layers[:-1]), initial=0))
    return _assemble(model, served, body, starts, counters)


def _operations(traced: TracedGraph) -> list[fx.Node]:
    return [node for node in traced.module.graph.nodes if node.op == "call_function"]


def _body(served: Served, not_everywhere: Collection[str] = ()) -> Body:
    graph = served.graph.module.graph
    body = Body.of(graph, prelude_nodes(graph, served.facts, not_everywhere), served.facts)
    if not body.nodes:
        raise NotTraceableError("cannot trace the model: its forward pass computes nothing from its parameters")
    return body


def _assemble(model: nn.Module, served: Served, body: Body, starts: Sequence[int], counters: set[str]) -> LayerSequence:
    traced = served.graph
    bounds = list(pairwise((*starts, len(body.nodes))))
    layers: list[Layer] = []
    compiler = Compiler()
    last_write = {storage: i for i, node in enumerate(body.nodes) for storage in body.facts[node].writes}
    for index, (first, stop) in enumerate(bounds):
        own = body.nodes[first:stop]
        inside = set(own)
        leaving = [node for node in body.alive[stop] if node in inside]
        if stop == len(body.nodes):
            leaving = [node for node in own if body.last_use[node] == stop]
        later = frozenset(storage for storage, position in last_write.items() if position >= stop)
        draws = sum(layer.draws for layer in layers)
        layers.append(build_layer(index, own, leaving, body.facts, traced.module, counters, compiler, later, draws))
    names = {node.name: node for node in traced.module.graph.nodes}
    parameters, buffers = _sources(layers, traced.module)
    output = next(node for node in traced.module.graph.nodes if node.op == "output")
    return LayerSequence(
        layers=tuple(layers),
        boundaries=_boundaries(bounds, body, output),
        free_values=_free_values(bounds, body, traced.module.graph),
        inputs=tuple(node.name for node in traced.inputs),
        prelude_of=lambda wanted: _prelude([names[name] for name in wanted], traced.module),
        prelude_names=frozenset(
            node.name for node in traced.module.graph.nodes if node.op == "call_function" and node not in body.last_use
        ),
        operations=tuple(operation_name(node) for node in _operations(traced)),
        prelude_positions=frozenset(i for i, n in enumerate(_operations(traced)) if n not in body.last_use),
        sites=lambda: sites_of(traced.module.graph),
        outputs=tuple(
            leaf.name if isinstance(leaf, fx.Node) else (traced.left_out.get(place, leaf),)
            for place, leaf in enumerate(output.args[0])
        ),
        output_shapes={node.name: _shape(node.meta["val"]) for node in output.all_input_nodes},
        output_tree=traced.out_spec,
        parameters=parameters,
        buffers=buffers,
        aliases=_aliases(model, (*parameters, *buffers)),
        calls=module_calls(traced.module),
        tied=_tied(layers),
        sample=served.spec,
        refusals=served.refusals,
        fingerprint=_fingerprint(traced.module, bounds, served.spec),
    )


def _boundaries(
    bounds: Sequence[tuple[int, int]], body: Body, output: fx.Node
) -> tuple[tuple[BoundaryValue, ...], ...]:
    owner = {node: index for index, (first, stop) in enumerate(bounds) for node in body.nodes[first:stop]}
    owner[output] = len(bounds)
    position = {node: place for place, node in enumerate(body.nodes)}
    known = {
        node: _value(node, body, owner[node], {owner[user] for user in node.users})
        for _, stop in bounds[:-1]
        for node in body.alive[stop]
    }

    def at(stop: int, node: fx.Node) -> BoundaryValue:
        by = body.facts[node].trained_by
        return known[node] if by is None or position[by] < stop else replace(known[node], requires_grad=False)

    return ((), *(tuple(at(stop, node) for node in body.alive[stop]) for _, stop in bounds[:-1]), ())


def _value(node: fx.Node, body: Body, producer: int, consumers: set[int]) -> BoundaryValue:
    return BoundaryValue(
        name=node.name,
        dtype=node.meta["val"].dtype,
        shape=symbolic_shape(node.meta["val"]),
        dim_order=body.facts[node].dim_order or tuple(range(node.meta["val"].dim())),
        requires_grad=body.facts[node].requires_grad,
        producer=producer,
        consumers=tuple(sorted(consumers)),
    )


def _shape(value: object) -> tuple[Any, ...] | None:
    return symbolic_shape(value) if isinstance(value, Tensor) else None


def _free_values(bounds: Sequence[tuple[int, int]], body: Body, graph: fx.Graph) -> tuple[BoundaryValue, ...]:
    """Inputs and values of the prelude that layers read."""
    owner = {node: index for index, (first, stop) in enumerate(bounds) for node in body.nodes[first:stop]}
    values = []
    for node in graph.nodes:
        readers = {owner[user] for user in node.users if user in owner}
        free = node.op == "placeholder" or (node.op == "call_function" and node not in owner)
        if free and readers and isinstance(node.meta.get("val"), Tensor):
            values.append(_value(node, body, -1, readers))
    return tuple(values)


def _prelude(wanted: Sequence[fx.Node], root: fx.GraphModule) -> Prelude:
    sources, function = build_function(wanted, lambda node: node.op in ("placeholder", "get_attr"), root)
    inputs = {node.name for node in root.graph.nodes if node.op == "placeholder"}
    return Prelude(
        names=tuple(node.name for node in wanted),
        buffers=tuple(name for name in sources if name not in inputs),
        inputs=tuple(name for name in sources if name in inputs),
        function=function,
    )


def _sources(layers: Sequence[Layer], root: fx.GraphModule) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """Parameters and buffers that the graph reads, by original name."""
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, Tensor] = {}
    for node in root.graph.nodes:
        if node.op == "get_attr":
            held = attribute(root, str(node.target))
            if isinstance(held, nn.Parameter):
                parameters[str(node.target)] = held
            elif isinstance(held, Tensor):
                buffers[str(node.target)] = held
    for layer in layers:
        for entry in layer.statistics:
            if entry.num_batches_tracked is not None:
                buffers[entry.num_batches_tracked] = attribute(root, entry.num_batches_tracked)
    return parameters, buffers


def _aliases(model: nn.Module, used: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """For each name that the graph uses, all names of the same tensor in the model."""
    by_identity: dict[int, list[str]] = defaultdict(list)
    identity: dict[str, int] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        by_identity[id(tensor)].append(name)
        identity[name] = id(tensor)
    return {name: tuple(by_identity[identity[name]]) for name in used if name in identity}


def _tied(layers: Sequence[Layer]) -> dict[str, tuple[int, ...]]:
    users: dict[str, list[int]] = defaultdict(list)
    for layer in layers:
        for name in layer.parameters:
            users[name].append(layer.index)
    return {name: tuple(indices) for name, indices in users.items() if len(indices) > 1}


def _fingerprint(root: fx.GraphModule, bounds: Sequence[tuple[int, int]], spec: SampleSpec) -> str:
    lines = [str(bounds), str(spec.autocast), str(spec.only_micro_batch_size)]
    for node in root.graph.nodes:
        if node.op == "get_attr":
            lines.append(f"{node.target} {value_text(attribute(root, str(node.target)))}")
        elif node.op != "placeholder" or node.users:
            # A number is checked as it is, or as one that a condition is made of, which an earlier trace does not say.
            name = "condition" if isinstance(node.target, Check) else node.name
            lines.append(name + " " + node_text(node, lambda argument: argument.name))
    return digest(lines)
