"""From a module to one flat graph of ATen operations with the original parameter names.

`torch.export` in non-strict mode traces what eager Python executes; every batched input gets a dynamic batch
dimension, so the graph runs at every micro-batch size.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import linecache
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from profiler.errors import NotTraceableError
from profiler.sample import TRACED_BATCH_SIZE_AT_LEAST, example_call, torch_dtype
from profiler.sample_spec import SampleSpec, TensorLeaf
from profiler.silent_losses import refuse_hidden_writes, refused
from profiler.writes import may_write

LARGEST_BATCH_SIZE = 2**31  # export gives an extent without upper limit a larger one


@dataclass(frozen=True, slots=True)
class TracedGraph:
    """A graph with its root module and the structure of what it returns.

    Attributes:
        module: `get_attr` targets resolve here; parameters are the model's own.
        inputs: placeholders of the sample's tensor leaves, in order.
        out_spec: structure of the model's output.
    """

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    out_spec: pytree.TreeSpec


def export_graph(model: nn.Module, spec: SampleSpec, *, training: bool = True) -> TracedGraph:
    """Trace the model with a dynamic batch.

    Args:
        model: any module, also on the meta device.
        spec: what it is called with.
        training: trace it as it trains, else as `model.eval()` leaves it.

    Raises:
        NotTraceableError: the forward pass cannot be exported; the message names module path, source line and cause.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    call = example_call(spec, max(spec.batch_size, TRACED_BATCH_SIZE_AT_LEAST), device)
    try:
        with _mode(model, training), _quiet(), autocasting(spec, device), refused(model):
            program = torch.export.export(
                model, call.args, call.kwargs, dynamic_shapes=_dynamic_shapes(model, spec), strict=False
            )
            module = program.module()
    except NotTraceableError:
        raise
    except Exception as problem:
        raise NotTraceableError(_explanation(model, problem)) from problem
    _refuse_limited_batches(program)
    refuse_hidden_writes(module.graph, module)
    return _tidy(module, program, spec)


def autocasting(spec: SampleSpec, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The autocast region that the model is traced, measured and trained in; casts of weights are not cached.

    A cache would tie the gradients of a weight's readers together within a forward pass, and so to the cut.
    """
    if spec.autocast is None:
        return contextlib.nullcontext()
    device_type = "cpu" if device.type == "meta" else device.type
    return torch.autocast(device_type, torch_dtype(spec.autocast), cache_enabled=False)


def _layer_drop_setting(trace: TracebackType | None) -> str:
    """Name of the layer-drop probability near the user's lines in a traceback; "" if there is none."""
    while trace is not None:
        code = trace.tb_frame.f_code
        if not str(trace.tb_frame.f_globals.get("__name__", "")).startswith("torch."):
            lines = (linecache.getline(code.co_filename, trace.tb_lineno + offset) for offset in range(-4, 2))
            found = re.search(r"\b\w*layer_?drop\w*", " ".join(lines))
            if found:
                return found[0]
        trace = trace.tb_next
    return ""


def _dynamic_shapes(model: nn.Module, spec: SampleSpec) -> Any:
    """Every batch dimension dynamic, in the form that export takes: by position, or by name if there are keywords."""
    shapes = [
        {leaf.batch_dim: Dim.DYNAMIC} if isinstance(leaf, TensorLeaf) and leaf.batch_dim is not None else None
        for leaf in spec.leaves
    ]
    args, kwargs = pytree.tree_unflatten(shapes, pytree.treespec_loads(spec.tree))
    if not kwargs:
        return args
    return {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}


@contextlib.contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    """The model in the wanted mode; modules that a training model holds in evaluation mode (frozen) stay so."""
    flags = [(module, module.training) for module in model.modules()]
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep export from printing graphs and warnings: what matters of them ends up in our error."""
    previous = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


def _explanation(model: nn.Module, problem: Exception) -> str:
    """What cannot be traced, where, and what to do."""
    first_line = next((line for line in str(problem).splitlines() if line.strip()), type(problem).__name__)
    if "data-dependent" in str(problem):
        cause = "the forward pass branches on the values of a tensor"
        cure = (
            "make the branch independent of data (torch.where, or a flag set before planning), or move it out of the "
            "model"
        )
        setting = _layer_drop_setting(problem.__traceback__)
        if setting:
            cure = f"this is layer drop: set {setting} to 0 in the model or its configuration"
    else:
        cause = first_line.strip()
        cure = "change that line to operations on tensors that torch.export can follow"
    path, place = _user_frame(model, problem.__traceback__)
    return f"cannot trace the model: in {path}, {place}: {cause}; {cure}"


def _refuse_limited_batches(program: ExportedProgram) -> None:
    """A forward pass that branches on the batch size is right for some micro-batch sizes only."""
    for symbol, extents in program.range_constraints.items():
        lower, upper = extents.lower, extents.upper
        if lower > TRACED_BATCH_SIZE_AT_LEAST or (upper.is_finite and upper < LARGEST_BATCH_SIZE):
            raise NotTraceableError(
                f"cannot trace the model: it takes another path unless a batch extent ({symbol}) is between {lower} "
                f"and {upper}, and micro-batches may be smaller; make the forward pass independent of the batch size"
            )


def _user_frame(model: nn.Module, trace: TracebackType | None) -> tuple[str, str]:
    """Path of the innermost module of the model in a traceback, and its source line."""
    paths = {id(module): name for name, module in model.named_modules()}
    found = ("the model", "its call")
    while trace is not None:
        frame = trace.tb_frame
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        owner = frame.f_locals.get(names[0]) if names else None
        torch_own = str(frame.f_globals.get("__name__", "")).startswith("torch.")
        if isinstance(owner, nn.Module) and id(owner) in paths and not torch_own:
            filename = frame.f_code.co_filename
            code = linecache.getline(filename, trace.tb_lineno).strip()
            path = paths[id(owner)]
            module = f"module {path!r}" if path else f"the model ({type(owner).__name__})"
            found = (module, f'{filename}:{trace.tb_lineno} "{code}"')
        trace = trace.tb_next
    return found


def _tidy(module: Any, program: ExportedProgram, spec: SampleSpec) -> TracedGraph:
    """Drop guards and dead nodes, read batch extents from inputs, and find the placeholders of tensor leaves."""
    graph: fx.Graph = module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(spec.leaves):
        raise NotTraceableError(
            f"cannot trace the model: it takes {len(placeholders)} values where the sample has {len(spec.leaves)}; "
            "pass the sample as a tuple of positional arguments or a dict of keyword arguments"
        )
    inputs = [node for node, leaf in zip(placeholders, spec.leaves, strict=True) if isinstance(leaf, TensorLeaf)]
    _refuse_moving_instance_norms(graph)
    _return_own_values(graph)
    _read_extents_from_inputs(graph, inputs)
    for node in reversed(graph.nodes):
        if node.op in ("placeholder", "output") or node.users:
            continue
        if node.op != "call_function" or not may_write(node):
            graph.erase_node(node)
    return TracedGraph(module, tuple(inputs), program.call_spec.out_spec)


def _refuse_moving_instance_norms(graph: fx.Graph) -> None:
    """Instance normalization that tracks statistics would move them once per micro-batch and again when recomputed."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.instance_norm.default and node.args[3] is not None and node.args[5]:
            path = module_stack(node)[-1] if module_stack(node) else "the model"
            raise NotTraceableError(
                f"cannot trace the model: instance normalization {path!r} moves running statistics; set "
                "track_running_stats=False (the default)"
            )


def _return_own_values(graph: fx.Graph) -> None:
    """Let a parameter or buffer that the model returns be the value of an operation, as all other outputs are."""
    output = next(node for node in graph.nodes if node.op == "output")
    for held in [node for node in output.all_input_nodes if node.op == "get_attr"]:
        with graph.inserting_before(output):
            copy = graph.call_function(torch.ops.aten.alias.default, (held,))
        copy.meta["val"] = held.meta["val"]
        output.replace_input_with(held, copy)


def _read_extents_from_inputs(graph: fx.Graph, inputs: list[fx.Node]) -> None:
    """Let `sym_size` ask the inputs, which every stage has, instead of values on the way."""
    sources: dict[Any, tuple[fx.Node, int]] = {}
    for node in inputs:
        for dim, extent in enumerate(node.meta["val"].shape):
            if isinstance(extent, torch.SymInt):
                sources.setdefault(extent.node.expr, (node, dim))
    for node in graph.nodes:
        if node.target is torch.ops.aten.sym_size.int and isinstance(node.meta["val"], torch.SymInt):
            source = sources.get(node.meta["val"].node.expr)
            if source is not None:
                node.args = source


def module_stack(node: fx.Node) -> tuple[str, ...]:
    """Paths of the modules that the operation comes from, outermost first; of a shared module its first path."""
    stack = node.meta.get("nn_module_stack") or {}
    return tuple(str(path) for path, _ in stack.values())
