"""From a module to one flat graph of ATen operations with the original parameter names.

`torch.export` in non-strict mode traces what eager Python executes; every batched input gets a dynamic batch
dimension, so the graph runs at every micro-batch size.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast
from unittest import mock

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from profiler.conditions.asking import Questions
from profiler.conditions.chance import Ways
from profiler.errors import ArgumentError, NotTraceableError
from profiler.machine.backend import backend_of, device_of_first
from profiler.observe.kernel_orders import dispatch
from profiler.observe.source_place import Place, explanation, place_of, place_of_call, place_of_node
from profiler.opaque.custom_function_tracing import FunctionCalls
from profiler.opaque.opaque_calls import OpaqueCalls
from profiler.sample_spec import Decision, SampleSpec, TensorLeaf
from profiler.text import counted
from profiler.torch_private import (
    CAUSAL_MASK_TEST,
    FAKE_KERNELS,
    MODULE_CALL,
    depends_on_data,
    graph_called,
    lazy_graph_modules,
    parsed_move,
    registration_hooks_stay,
)
from profiler.tracing import progress
from profiler.tracing.batch_dependence import BatchQuestions, same_for_one_sample
from profiler.tracing.calls_alike import Changes, NotedCall, PythonState, buffers_put_back, each_call_alike
from profiler.tracing.harmless_changes import same_calls, same_graphs
from profiler.tracing.held_elsewhere import name_held_elsewhere
from profiler.tracing.inverse_stft import put_inverse_stft_into
from profiler.tracing.left_out import LeftOut, left_out
from profiler.tracing.plain_data import DataAsOperations
from profiler.tracing.progress import Part
from profiler.tracing.refusals import refuse_hidden_writes, refuse_own_generators, refused
from profiler.tracing.regions import forget_metadata_checks, write_out_regions
from profiler.tracing.sample import (
    TRACED_BATCH_SIZE_AT_LEAST,
    arguments_of,
    example_arguments,
    made_up_arguments,
    torch_dtype,
)
from profiler.tracing.writes import may_draw, may_write, moves_statistics, returns_what_it_writes

_ANY_KEYWORD = inspect.Parameter.VAR_KEYWORD
REHEARSED_SIZES = (2, 3, 5)  # two make a line, the third must lie on it
LARGEST_BATCH_SIZE = 2**31  # export gives an extent without upper limit a larger one


@dataclass(frozen=True, slots=True)
class TracedGraph:
    """A graph with its root module and the structure of what it returns.

    Attributes:
        module: `get_attr` targets resolve here; parameters are the model's own.
        inputs: placeholders of the sample's tensor leaves, in order.
        out_spec: structure of the model's output.
        decisions: on values of tensors; the graph checks each.
        chances: conditions that random numbers decide, with their usual answers; the graph has both ways.
        left_out: place in the output -> what stands there for a value that no layer can return.
    """

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    out_spec: pytree.TreeSpec
    decisions: tuple[Decision, ...]
    chances: tuple[Decision, ...] = ()
    left_out: Mapping[int, LeftOut] = field(default_factory=dict)


class Asking(Protocol):
    """Makes what answers questions about values, for each call of the model anew."""

    def __call__(self, model: nn.Module, ways: Ways | None = None) -> Questions:
        """Of a model; with ways to take where random numbers decide, if it lets them."""


def no_answers(model: nn.Module, ways: Ways | None = None) -> Questions:
    """Questions about values stay the errors that they are."""
    return Questions(model, None)


class OneBatchSizeError(NotTraceableError):
    """The forward pass is right for some batch sizes only; with static shapes it may be traced all the same."""


def export_graph(
    model: nn.Module,
    spec: SampleSpec,
    *,
    training: bool = True,
    dynamic: bool = True,
    called_as_is: Sequence[str] = (),
    ask: Asking = no_answers,
) -> TracedGraph:
    """Trace the model with `torch.export`.

    Args:
        model: any module, also on the meta device.
        spec: what it is called with.
        training: trace it as it trains, else as `model.eval()` leaves it.
        dynamic: with a dynamic batch, else for micro-batches of `spec.batch_size` samples only.
        called_as_is: paths of modules, and names of functions, that become one operation each, see `OpaqueCall`.
        ask: makes what answers questions about values, for each call of the model anew.

    Raises:
        NotTraceableError: the forward pass cannot be exported; the message names module path, source line and cause.
    """
    before = PythonState.of(model)
    with each_call_alike(model) as calls:
        with buffers_put_back(model):
            module, program, questions, decisions, foreign = _exported(
                model, spec, training, dynamic, called_as_is, ask
            )
        changes = Changes.of(model, before, calls)

        def traced_again() -> fx.GraphModule:
            return cast("fx.GraphModule", _exported(model, spec, training, dynamic, called_as_is, ask)[0])

        harmless = not changes or _same_graphs(model, module, traced_again, changes.attributes, calls)
    if not harmless and not _same_calls(model, spec, training):
        changes.refuse(model)
    if dynamic:
        _refuse_limited_batches(program, questions)
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            put_inverse_stft_into(part.graph)
            if part is not module:
                forget_metadata_checks(part)
    write_out_regions(module, under_autocast=spec.autocast is not None)
    refuse_hidden_writes(module.graph, module)
    refuse_own_generators(module)
    _refuse_open_momentum(model, module.graph)
    return _tidy(module, program, spec, decisions, foreign)


def _same_graphs(
    model: nn.Module,
    graph: fx.GraphModule,
    traced_again: Callable[[], fx.GraphModule],
    changed: Sequence[str],
    calls: Sequence[NotedCall],
) -> bool:
    """The proof by graphs; without one where what the first call has left is none of a second trace's."""
    if not calls:
        return False
    try:
        return same_graphs(model, graph, traced_again, changed, calls)
    except NotTraceableError:
        return False


def _same_calls(model: nn.Module, spec: SampleSpec, training: bool) -> bool:
    """The proof by calls."""
    device = device_of_first(model.parameters())
    size = max(spec.batch_size, TRACED_BATCH_SIZE_AT_LEAST)
    made_up = [made_up_arguments(spec, size, device, seed) for seed in (0, 1)]
    with mode_of(model, training), _quiet():
        return same_calls(model, made_up, lambda: autocasting(spec, device))


def _exported(
    model: nn.Module, spec: SampleSpec, training: bool, dynamic: bool, called_as_is: Sequence[str], ask: Asking
) -> tuple[Any, ExportedProgram, BatchQuestions, Sequence[Decision], Mapping[int, LeftOut]]:
    """The graph of one call of the model, as a module with the model's own parameters, and what came up meanwhile."""
    device = device_of_first(model.parameters())
    size = max(spec.batch_size, TRACED_BATCH_SIZE_AT_LEAST) if dynamic else spec.batch_size
    call = example_arguments(spec, size, device)
    with mode_of(model, training), _spelled_out(model, call.kwargs), left_out(model) as foreign:
        shapes = _dynamic_shapes(model, spec) if dynamic else None
        calls = OpaqueCalls(model, called_as_is, REHEARSED_SIZES if dynamic else (size,))
        functions = FunctionCalls(model)
        questions = BatchQuestions(model)
        values = ask(model)
        progress.begins()
        try:
            with (
                _quiet(),
                autocasting(spec, device),
                refused(model),
                calls.in_place(),
                functions.in_place(),
                values.answered(),
                questions.watched(),
                DataAsOperations(model),
                CAUSAL_MASK_TEST.replaced_by(_is_causal),
                MODULE_CALL.replaced_by(_called),
                mock.patch.object(nn.Module, "to", _moved_if_elsewhere),
                FAKE_KERNELS.replaced_by(dispatch),
                lazy_graph_modules(),
                registration_hooks_stay(),
                graph_called(model),
            ):
                program = torch.export.export(model, call.args, call.kwargs, dynamic_shapes=shapes, strict=False)
                progress.done(Part.MODULES)
                module = program.module()
        except NotTraceableError as problem:
            place = place_of(model, problem)
            problem.modules = problem.modules or place.modules
            problem.functions = problem.functions or place.functions
            raise
        except Exception as problem:
            if "Constraints violated" in str(problem):
                place = next(iter((*questions.numbers, *questions.places)), place_of_call(model))
                raise OneBatchSizeError(_fixed_text(place, problem), functions=place.functions) from problem
            place = place_of(model, problem)
            raise NotTraceableError(
                explanation(model, problem, place), modules=place.modules, functions=place.functions
            ) from problem
        name_held_elsewhere(module, model)
        values.put_into(module)
        progress.done(Part.GRAPH)
        if dynamic and questions.places:
            one = example_arguments(spec, 1, device)
            again = values.same_again().answered()
            with _quiet(), autocasting(spec, device), calls.in_place(), functions.in_place(), again:
                same = same_for_one_sample(model, module, one.args, one.kwargs)
            if not same:
                raise OneBatchSizeError(
                    f"cannot trace the model: in {questions.places[0]}: it takes another path for a batch of one "
                    "sample, and micro-batches may be that small; make the forward pass independent of the batch size"
                )
    progress.done(Part.ONE_SAMPLE)
    calls.put_into(module)
    functions.put_into(module)
    return module, program, questions, values.decided, foreign


def _is_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """What `nn.TransformerEncoder` would find out by looking at a mask's values: a shortcut that it can do without."""
    return is_causal is True


_call = MODULE_CALL.original


def _called(tracer: Any, *args: Any) -> Any:
    """Calls a module; one that raises, which models may catch, is taken from the stack of those that are called."""
    before = dict(tracer.module_stack)
    progress.module_called()
    try:
        return _call(tracer, *args)
    except BaseException:
        for path in [path for path in tracer.module_stack if path not in before]:
            del tracer.module_stack[path]
        raise


_move = nn.Module.to


def _moved_if_elsewhere(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """`module.to(...)` where it changes something; tracing knows no other parameters in the place of these."""
    device, dtype, _, memory_format = parsed_move(*args, **kwargs)
    held = (*module.parameters(), *module.buffers())
    same_dtype = dtype is None or all(t.dtype == dtype for t in held if t.is_floating_point() or t.is_complex())
    same_device = device is None or all(tensor.device == device for tensor in held)
    return module if same_dtype and same_device and memory_format is None else _move(module, *args, **kwargs)


def _fixed_text(place: Place, problem: Exception) -> str:
    """What fixes the batch extent: a Python number made of it, or a branch that only one extent takes."""
    details = [line.strip(" -") for line in str(problem).splitlines() if line.strip().startswith("-")]
    return (
        f"cannot trace the model: in {place}: the forward pass fixes the batch extent "
        f"({details[0] if details else 'as a Python number'}); make it independent of the batch size"
    )


def autocasting(spec: SampleSpec, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The autocast region that the model is traced, measured and trained in; casts of weights are not cached.

    A cache would tie the gradients of a weight's readers together within a forward pass, and so to the cut.
    """
    if spec.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(backend_of(device).type, torch_dtype(spec.autocast), cache_enabled=False)


def _dynamic_shapes(model: nn.Module, spec: SampleSpec) -> Any:
    """Every batch dimension dynamic, in the form that export takes: by the name of forward's parameter."""
    batched = [leaf for leaf in spec.leaves if isinstance(leaf, TensorLeaf) and leaf.batch_dim is not None]
    extent = Dim("batch") if len(batched) > 1 else Dim.DYNAMIC  # one name: the extents are one
    shapes = [
        {leaf.batch_dim: extent} if isinstance(leaf, TensorLeaf) and leaf.batch_dim is not None else None
        for leaf in spec.leaves
    ]
    call = arguments_of(spec, shapes)
    try:
        return dict(inspect.signature(model.forward).bind(*call.args, **call.kwargs).arguments)
    except TypeError as problem:
        raise ArgumentError(f"the model cannot be called with the sample: {problem}") from problem


@contextlib.contextmanager
def _spelled_out(model: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Within, the signature of forward names each keyword that its `**kwargs` would take.

    Export gives arguments under `**kwargs` no dynamic dimension: it looks for their shapes under two names (seen in
    torch 2.13; github.com/pytorch/pytorch/issues/164313).
    """
    forward, own = model.forward, model.__dict__.get("forward")
    signature = inspect.signature(forward)
    known = [parameter for parameter in signature.parameters.values() if parameter.kind is not _ANY_KEYWORD]
    more = [name for name in kwargs if name not in signature.parameters]
    if len(known) == len(signature.parameters) or not more:
        yield
        return

    @functools.wraps(forward)
    def spelled_out(*args: Any, **given: Any) -> Any:
        return forward(*args, **given)

    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in more]
    spelled_out.__signature__ = signature.replace(parameters=[*known, *named])  # type: ignore[attr-defined]
    model.forward = spelled_out
    try:
        yield
    finally:
        del model.__dict__["forward"]
        if own is not None:
            model.__dict__["forward"] = own


@contextlib.contextmanager
def mode_of(model: nn.Module, training: bool) -> Iterator[None]:
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


def _refuse_limited_batches(program: ExportedProgram, questions: BatchQuestions) -> None:
    """A forward pass that branches on the batch size is right for some micro-batch sizes only."""
    for symbol, extents in program.range_constraints.items():
        if depends_on_data(symbol):
            continue
        lower, upper = extents.lower, extents.upper
        if lower > TRACED_BATCH_SIZE_AT_LEAST or (upper.is_finite and upper < LARGEST_BATCH_SIZE):
            place = next(reversed(questions.branches.values()), place_of_call(questions.model))
            raise OneBatchSizeError(
                f"cannot trace the model: in {place}: it takes another path unless a batch extent ({symbol}) is "
                f"between {lower} and {upper}, and micro-batches may be smaller; make the forward pass independent of "
                "the batch size"
            )


def _tidy(
    module: Any,
    program: ExportedProgram,
    spec: SampleSpec,
    decisions: Sequence[Decision],
    foreign: Mapping[int, LeftOut],
) -> TracedGraph:
    """Drop guards and dead nodes, read batch extents from inputs, and find the placeholders of tensor leaves.

    A dead node that draws stays: without it all later ones would draw other numbers.
    """
    graph: fx.Graph = module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(spec.leaves):
        raise NotTraceableError(
            f"cannot trace the model: it takes {counted(len(placeholders), 'value')} where the sample has "
            f"{len(spec.leaves)}; pass the sample as a tuple of positional arguments or a dict of keyword arguments"
        )
    inputs = [node for node, leaf in zip(placeholders, spec.leaves, strict=True) if isinstance(leaf, TensorLeaf)]
    _refuse_moving_instance_norms(graph)
    _leave_out_copies_onto_themselves(graph)
    _return_own_values(graph)
    _read_extents_from_inputs(graph, inputs)
    for node in reversed(graph.nodes):
        if node.op in ("placeholder", "output") or node.users:
            continue
        if node.op != "call_function" or not (may_write(node) or may_draw(node)):
            graph.erase_node(node)
    out_spec = program.call_spec.out_spec
    return TracedGraph(module, tuple(inputs), out_spec, tuple(decisions), left_out=dict(foreign))


def _refuse_moving_instance_norms(graph: fx.Graph) -> None:
    """Instance normalization that tracks statistics would move them once per micro-batch and again when recomputed."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.instance_norm.default and node.args[3] is not None and node.args[5]:
            raise NotTraceableError(
                f"cannot trace the model: in {place_of_node(node)}: instance normalization moves running statistics; "
                "set track_running_stats=False (the default)"
            )


def _refuse_open_momentum(model: nn.Module, graph: fx.Graph) -> None:
    """A batch normalization without a momentum averages over all batches, of which the trace has seen one."""
    modules = dict(model.named_modules())
    for node in graph.nodes:
        path = (module_stack(node) or ("",))[-1] if moves_statistics(node) else ""
        if path in modules and getattr(modules[path], "momentum", 0.0) is None:
            raise NotTraceableError(
                f"cannot trace the model: in {place_of_node(node)}: batch normalization without a momentum; set it to "
                "a number (the default is 0.1)"
            )


def _leave_out_copies_onto_themselves(graph: fx.Graph) -> None:
    """`self.steps += 1` is a write in place and an assignment of the same tensor, which export ends the graph with.

    That copy does nothing, and no cut may part it from the write: a counter in the first layer made one layer of all.
    """
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.copy_.default and not node.users:
            held, value = node.args[:2]
            while isinstance(value, fx.Node) and value is not held and returns_what_it_writes(value):
                value = value.args[0]
            if value is held:
                graph.erase_node(node)


def _return_own_values(graph: fx.Graph) -> None:
    """Let a parameter or buffer that the model returns be the value of an operation, as all other outputs are."""
    output = next(node for node in graph.nodes if node.op == "output")
    for held in [node for node in output.all_input_nodes if node.op == "get_attr"]:
        with graph.inserting_before(output):
            copy = graph.call_function(torch.ops.aten.alias.default, (held,))
        copy.meta["val"] = held.meta["val"]
        output.replace_input_with(held, copy)


def _read_extents_from_inputs(graph: fx.Graph, inputs: list[fx.Node]) -> None:
    """Let `sym_size` ask the inputs, which every stage has, instead of values in between."""
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


def module_calls(root: fx.GraphModule) -> dict[str, int]:
    """Path of a module -> how often it is called, by the operations of a graph and its regions.

    Each call but the first has a number in its key: `L__self__block`, `L__self__block@1`.
    """
    keys: dict[str, set[str]] = defaultdict(set)
    for part in root.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
                keys[str(path)].add(key)
    return {path: len(found) for path, found in keys.items()}
