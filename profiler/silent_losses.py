"""What a graph would lose without a word: refused while the model is traced.

A traced graph holds operations on tensors. A backward pass of the user's own, a hook on a gradient, and random numbers
of Python or numpy are not among them: the graph would train on, differently.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from profiler.blame import Place, keep_together_advice, place_now
from profiler.errors import NotTraceableError
from profiler.random_states import python_and_numpy_states
from profiler.writes import moves_statistics, written_arguments

_TRACING: ContextVar[bool] = ContextVar("a model is being traced, in this thread", default=False)


@contextlib.contextmanager
def refused(model: nn.Module) -> Iterator[None]:
    """Refuse a model that, inside the block, uses what a graph would lose.

    Modules that are rehearsed meanwhile, in another thread, may use it: they are called as they are. Only the
    reentrant checkpoint is nothing for them either, whose backward pass calls the module with its own parameters.

    Raises:
        NotTraceableError: naming what it is and what to use in its place.
    """
    _refuse_hooks(model)
    before = python_and_numpy_states()
    apply = torch.autograd.Function.apply
    calls: list[tuple[Any, list[Any], Place]] = []

    def checked_apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.__name__ == "CheckpointFunction":
            raise NotTraceableError(_REENTRANT)
        if _TRACING.get() and not function.__module__.startswith("torch."):
            calls.append((function, [_described(argument) for argument in args], place_now(model)))
        return apply.__func__(function, *args, **kwargs)  # type: ignore[attr-defined]

    register_hook = Tensor.register_hook

    def refuse_hook(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _TRACING.get():
            return register_hook(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]
        place = place_now(model)
        raise NotTraceableError(
            f"cannot trace the model: in {place}: the forward pass registers a hook on a tensor's gradient, which a "
            f"graph would lose; express it by operations, or {keep_together_advice(place.modules)}",
            modules=place.modules,
        )

    token = _TRACING.set(True)
    try:
        with (
            mock.patch.object(torch.autograd.Function, "apply", classmethod(checked_apply)),
            mock.patch.object(Tensor, "register_hook", refuse_hook),
        ):
            yield
    finally:
        _TRACING.reset(token)
    for function, arguments, place in calls:
        if not _backward_is_the_forwards(function, arguments):
            raise NotTraceableError(
                f"cannot trace the model: in {place}: {function.__module__}.{function.__qualname__} is a "
                "torch.autograd.Function, whose own backward pass a graph would lose; "
                f"{keep_together_advice(place.modules)}, or express it by differentiable operations "
                "(x + (f(x) - x).detach())",
                modules=place.modules,
            )
    if before != python_and_numpy_states():
        raise NotTraceableError(
            "cannot trace the model: its forward pass draws from Python's or numpy's random generator, whose numbers a "
            "graph would freeze; draw with torch, or turn it off (layer drop: set layerdrop to 0)"
        )


_REENTRANT = (
    "cannot trace the model: torch.utils.checkpoint with use_reentrant=True would lose its gradients; use "
    "use_reentrant=False, or none: the plan decides what to recompute"
)


@dataclass(frozen=True, slots=True)
class _TensorArgument:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def real(self, generator: torch.Generator) -> Tensor:
        """A tensor of this kind on the CPU with random values."""
        if not self.dtype.is_floating_point:
            return torch.zeros(self.shape, dtype=self.dtype)
        return torch.randn(self.shape, generator=generator).to(self.dtype).requires_grad_(self.requires_grad)


def _described(argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    shape = tuple(extent.node.hint if isinstance(extent, torch.SymInt) else int(extent) for extent in argument.shape)
    return _TensorArgument(shape, argument.dtype, argument.requires_grad)


class _NoContext:
    """What a Function's forward pass is given in place of its context: it may store what it likes."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def _backward_is_the_forwards(function: Any, arguments: list[Any]) -> bool:
    """Whether the backward pass that a Function defines is, numerically, that of its forward pass.

    Some do it to save memory (GELU in transformers' BLOOM); others mean another gradient (rounding, reversal).
    """
    gradients = []
    try:
        for run in (function.apply, _forward_of(function)):
            generator = torch.Generator().manual_seed(0)
            values = [a.real(generator) if isinstance(a, _TensorArgument) else a for a in arguments]
            leaves = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
            with torch.enable_grad():
                results = [r for r in pytree.tree_leaves(run(*values)) if isinstance(r, Tensor) and r.requires_grad]
                weighted = [(result * torch.randn(result.shape, generator=generator)).sum() for result in results]
            gradients.append(torch.autograd.grad(weighted, leaves, allow_unused=True) if weighted else ())
    except Exception:  # whatever it needs that is not here: it cannot be shown to be harmless
        return False
    own, traced = gradients
    if len(own) != len(traced):
        return False
    return all(
        (a is None and b is None)
        or (a is not None and b is not None and torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True))
        for a, b in zip(own, traced, strict=True)
    )


def _forward_of(function: Any) -> Callable[..., Any]:
    """The forward pass as plain operations, whichever of torch's two ways it is written in."""
    if function.setup_context is not torch.autograd.Function.setup_context:
        forward: Callable[..., Any] = function.forward
        return forward
    return partial(function.forward, _NoContext())


def _refuse_hooks(model: nn.Module) -> None:
    owners = [name or "the model" for name, m in model.named_modules() if m._backward_hooks or m._backward_pre_hooks]
    owners += [name for name, parameter in model.named_parameters() if getattr(parameter, "_backward_hooks", None)]
    if owners:
        raise NotTraceableError(
            f"cannot trace the model: {owners[0]!r} has a backward hook, which a graph would lose; remove it before "
            "planning"
        )


def refuse_hidden_writes(graph: fx.Graph, root: fx.GraphModule) -> None:
    """Refuse writes inside a region without gradient or under autocast to values from outside it.

    Raises:
        NotTraceableError: naming the operation.
    """
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        for source in node.all_input_nodes:
            region = getattr(root, str(source.target), None) if source.op == "get_attr" else None
            written = _written_from_outside(region) if isinstance(region, fx.GraphModule) else None
            if written is not None:
                raise NotTraceableError(
                    f"cannot trace the model: {written.target} inside a region without gradient or under autocast "
                    "writes a value from outside, in every micro-batch and again when recomputed; update it outside "
                    "the model's forward pass"
                )


def refuse_own_generators(root: fx.GraphModule) -> None:
    """Refuse random numbers of a generator of the model's own: a recomputed pass would draw other ones.

    Raises:
        NotTraceableError: naming the module.
    """
    for module in root.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if _given_generator(node):
                paths = tuple(str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values())
                raise NotTraceableError(
                    f"cannot trace the model: {f'module {paths[-1]!r}' if paths and paths[-1] else 'the model'} draws "
                    f"random numbers ({node.target}) from a torch.Generator of its own, which a recomputed pass would "
                    "draw anew; draw from torch's own generator (leave generator out)"
                )


def _given_generator(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    for position, argument in enumerate(node.target._schema.arguments):
        if "Generator" in str(argument.type):
            return (node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)) is not None
    return False


def _written_from_outside(region: fx.GraphModule) -> fx.Node | None:
    node: fx.Node
    for node in region.graph.nodes:
        if moves_statistics(node):
            return node
        for argument in written_arguments(node):
            base = argument
            while base.op == "call_function" and base.args and isinstance(base.args[0], fx.Node):
                if not isinstance(base.target, torch._ops.OpOverload) or not _aliases(base.target):
                    break
                base = base.args[0]
            if base.op == "placeholder":
                return node
    return None


def _aliases(operation: torch._ops.OpOverload) -> bool:
    """Whether the result shares memory with the first argument."""
    return any(result.alias_info is not None for result in operation._schema.returns)
