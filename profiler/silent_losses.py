"""What a graph would lose without a word: refused while the model is traced.

A traced graph holds operations on tensors. A backward pass of the user's own, a hook on a gradient, and random numbers
of Python or numpy are not among them: the graph would train on, differently.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from profiler.errors import NotTraceableError
from profiler.writes import moves_statistics, written_arguments


@contextlib.contextmanager
def refused(model: nn.Module) -> Iterator[None]:
    """Refuse a model that, inside the block, uses what a graph would lose.

    Raises:
        NotTraceableError: naming what it is and what to use in its place.
    """
    _refuse_hooks(model)
    before = _python_and_numpy_states()
    apply = torch.autograd.Function.apply
    calls: list[tuple[Any, list[Any]]] = []

    def checked_apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.__name__ == "CheckpointFunction":
            raise NotTraceableError(_lost_backward(function))
        if not function.__module__.startswith("torch."):
            calls.append((function, [_described(argument) for argument in args]))
        return apply.__func__(function, *args, **kwargs)  # type: ignore[attr-defined]

    def refuse_hook(*_: Any, **__: Any) -> NoReturn:
        raise NotTraceableError(
            "cannot trace the model: its forward pass registers a hook on a tensor's gradient, which a graph would "
            "lose; express it by operations, or move it to where the optimizer steps"
        )

    with (
        mock.patch.object(torch.autograd.Function, "apply", classmethod(checked_apply)),
        mock.patch.object(Tensor, "register_hook", refuse_hook),
    ):
        yield
    for function, arguments in calls:
        if not _backward_is_the_forwards(function, arguments):
            raise NotTraceableError(_lost_backward(function))
    if before != _python_and_numpy_states():
        raise NotTraceableError(
            "cannot trace the model: its forward pass draws from Python's or numpy's random generator, whose numbers a "
            "graph would freeze; draw with torch, or turn it off (layer drop: set layerdrop to 0)"
        )


def _python_and_numpy_states() -> tuple[Any, bytes, int]:
    """The states of the global generators, which models draw from."""
    state = np.random.get_state(legacy=False)
    return random.getstate(), state["state"]["key"].tobytes(), state["state"]["pos"]


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


def _lost_backward(function: Any) -> str:
    if function.__name__ == "CheckpointFunction":
        return (
            "cannot trace the model: torch.utils.checkpoint with use_reentrant=True would lose its gradients; use "
            "use_reentrant=False, or none: the plan decides what to recompute"
        )
    return (
        f"cannot trace the model: {function.__module__}.{function.__qualname__} is a torch.autograd.Function, whose "
        "own backward pass a graph would lose; express it by differentiable operations (x + (f(x) - x).detach())"
    )


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
