"""What a graph would lose without a word: refused while the model is traced.

A traced graph holds operations on tensors. A backward pass of the user's own, a hook on a gradient, and random numbers
of Python or numpy are not among them: the graph would train on, differently.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from profiler.blame import Place, keep_together_advice, place_now, place_of_call, place_of_node, setting_advice
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
            _noted_draws(model) as draws,
        ):
            yield
    finally:
        _TRACING.reset(token)
    for function, arguments, place in calls:
        carries = any(isinstance(argument, _TensorArgument) and argument.requires_grad for argument in arguments)
        if carries and not _backward_is_the_forwards(function, arguments):
            raise NotTraceableError(
                f"cannot trace the model: in {place}: {function.__module__}.{function.__qualname__} is a "
                "torch.autograd.Function, whose own backward pass a graph would lose; "
                f"{keep_together_advice(place.modules)}, or express it by differentiable operations "
                "(x + (f(x) - x).detach())",
                modules=place.modules,
            )
    if before != python_and_numpy_states():
        place = draws[0] if draws else place_of_call(model)
        raise NotTraceableError(
            f"cannot trace the model: in {place}: the forward pass draws from Python's or numpy's random generator, "
            f"whose numbers a graph would freeze; {setting_advice(model, place) or 'draw with torch, or turn it off'}"
        )


@contextlib.contextmanager
def _noted_draws(model: nn.Module) -> Iterator[list[Place]]:
    """Within, places are noted where the forward pass calls `random.random`, `numpy.random.rand` and the like."""
    places: list[Place] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            if _TRACING.get():
                places.append(place_now(model))
            return function(*args, **kwargs)

        return draw

    with contextlib.ExitStack() as patches:
        for package in (random, np.random):
            for name, function in list(vars(package).items()):
                if isinstance(getattr(function, "__self__", None), random.Random | np.random.RandomState):
                    patches.enter_context(mock.patch.object(package, name, noted(function)))
        yield places


_REENTRANT = (
    "cannot trace the model: torch.utils.checkpoint with use_reentrant=True would lose its gradients; use "
    "use_reentrant=False, or none: the plan decides what to recompute"
)


@dataclass(frozen=True, slots=True)
class _TensorArgument:
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def real(self, generator: torch.Generator, spread: float, integer: int) -> Tensor:
        """A tensor of this kind on the CPU, with random values or the same integer everywhere."""
        if not self.dtype.is_floating_point:
            return torch.full(self.shape, integer, dtype=self.dtype)
        values = spread * torch.randn(self.shape, generator=generator)
        return values.to(self.dtype).requires_grad_(self.requires_grad)


def _described(argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    shape = tuple(extent.node.hint if isinstance(extent, torch.SymInt) else int(extent) for extent in argument.shape)
    return _TensorArgument(shape, argument.dtype, argument.requires_grad)


class _NoContext:
    """What a Function's forward pass is given in place of its context: it may store what it likes."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


# What made-up arguments hold: a function may be defined for small values only (acos, log1p), and integers may be a mask
# that lets nothing through or indices of which only the first is there.
_SPREADS = (1.0, 0.1, 0.01)
_INTEGERS = (1, 0)


def _backward_is_the_forwards(function: Any, arguments: list[Any]) -> bool:
    """Whether the backward pass that a Function defines is, numerically, that of its forward pass.

    Some do it to save memory (GELU in transformers' BLOOM); others mean another gradient (rounding, reversal).
    Gradients that are zero, infinite or no numbers show nothing: some must be neither.
    """
    told = []
    for spread, integer in product(_SPREADS, _INTEGERS):
        try:
            own, traced = (
                _gradients(run, arguments, spread, integer) for run in (function.apply, _forward_of(function))
            )
        except Exception:  # whatever it needs that is not here: these arguments show nothing
            continue
        present = [gradient for gradient in (*own, *traced) if gradient is not None]
        if all(gradient.isfinite().all() for gradient in present) and any(gradient.any() for gradient in present):
            told.append(_same(own, traced))
    return bool(told) and all(told)


def _gradients(run: Callable[..., Any], arguments: list[Any], spread: float, integer: int) -> tuple[Tensor | None, ...]:
    """Of a random weighting of what a function returns for made-up values."""
    generator = torch.Generator().manual_seed(0)
    values = [a.real(generator, spread, integer) if isinstance(a, _TensorArgument) else a for a in arguments]
    leaves = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
    with torch.enable_grad():
        results = [r for r in pytree.tree_leaves(run(*values)) if isinstance(r, Tensor) and r.requires_grad]
        weighted = [(result * torch.randn(result.shape, generator=generator)).sum() for result in results]
    return torch.autograd.grad(weighted, leaves, allow_unused=True) if weighted else ()


def _same(own: Sequence[Tensor | None], traced: Sequence[Tensor | None]) -> bool:
    if len(own) != len(traced):
        return False
    return all(
        (a is None and b is None)
        or (a is not None and b is not None and torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max())))
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
                    f"cannot trace the model: in {place_of_node(node)}: {node.target} draws random numbers from a "
                    "torch.Generator of the model's own, which a recomputed pass would draw anew; draw from torch's "
                    "own generator (leave generator out)"
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
