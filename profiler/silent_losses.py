"""What a graph would lose without a word: refused while the model is traced.

A traced graph holds operations on tensors. A backward pass of the user's own, a hook on a gradient, and random numbers
of Python or numpy are not among them: the graph would train on, differently.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import torch
from torch import Tensor, fx, nn

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

    def checked_apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        home = function.__module__
        if home.startswith("torch.") and function.__name__ != "CheckpointFunction":
            return apply.__func__(function, *args, **kwargs)  # type: ignore[attr-defined]
        raise NotTraceableError(_lost_backward(function))

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
    if before != _python_and_numpy_states():
        raise NotTraceableError(
            "cannot trace the model: its forward pass draws from Python's or numpy's random generator, whose numbers a "
            "graph would freeze; draw with torch, or turn it off (layer drop: set layerdrop to 0)"
        )


def _python_and_numpy_states() -> tuple[Any, bytes, int]:
    """The states of the global generators, which models draw from."""
    state = np.random.get_state(legacy=False)
    return random.getstate(), state["state"]["key"].tobytes(), state["state"]["pos"]


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
