"""How a call of a custom `torch.autograd.Function` becomes one node of the graph.

All of them are noticed at one place, which every call passes however its function was reached: `f = MyFunction.apply`
bound when a module is imported, a `functools.partial`, the default of an argument. While the model is traced such a
call becomes an operator that stands for it; in the finished graph `FunctionCall`s take the place of that operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from profiler.errors import NotTraceableError
from profiler.observe.source_place import keep_together_advice, place_now
from profiler.opaque.call import Slot
from profiler.opaque.custom_functions import FunctionCall, name_of
from profiler.opaque.held import Refused
from profiler.opaque.operators import LIBRARY, replace_operator
from profiler.torch_private import CUSTOM_FUNCTION_CALL, MACHINERY, applied, without_torch_function

Handler = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]

_HANDLER: ContextVar[Handler | None] = ContextVar("what takes the place of functions' calls", default=None)
_CALLS: ContextVar[list[FunctionCall] | None] = ContextVar("functions' calls of the trace under way", default=None)

_REENTRANT = (
    "cannot trace the model: torch.utils.checkpoint with use_reentrant=True would lose its gradients; use "
    "use_reentrant=False, or none: the plan decides what to recompute"
)


@contextlib.contextmanager
def functions_noticed(handler: Handler) -> Iterator[None]:
    """Within, in this thread, `handler(function, args, kwargs)` takes the place of each call of a custom function.

    Modules that are rehearsed meanwhile, in another thread, call them as they are. Only the reentrant checkpoint is
    nothing for them either, whose backward pass calls the module with its own parameters.
    """
    token = _HANDLER.set(handler)
    try:
        with CUSTOM_FUNCTION_CALL.replaced_by(classmethod(_apply)):
            yield
    finally:
        _HANDLER.reset(token)


def _apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What `torch.autograd.Function.apply` ends in, whatever name it was called by."""
    handler = _HANDLER.get()
    if function.__name__ == "CheckpointFunction":
        raise NotTraceableError(_REENTRANT)
    if handler is None or function is _Traced or function.__module__.startswith(MACHINERY):
        return applied(function, *args, **kwargs)
    return handler(function, args, kwargs)


class FunctionCalls:
    """The calls of custom functions in one trace; equal calls are one.

    Args:
        model: that is traced.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._calls: list[FunctionCall] = []

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, such a call becomes a node of the graph."""
        token = _CALLS.set(self._calls)
        try:
            with functions_noticed(self._traced):
                yield
        finally:
            _CALLS.reset(token)

    def _traced(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What takes the place of a function's call."""
        leaves, tree = pytree.tree_flatten((args, dict(kwargs)))
        try:
            site = self._site(function, leaves, tree)
            call = self._calls[site]
            tensors, numbers = call.taken(leaves)
            outputs = _Traced.apply(call, site, tensors, numbers, *tensors)  # type: ignore[no-untyped-call]
            for position, value in zip(call.written, outputs[len(outputs) - len(call.written) :], strict=True):
                tensors[position].detach().copy_(value)
        except Refused as problem:
            raise self._refusal(function, str(problem)) from problem
        except Exception as problem:
            first = (str(problem).strip().splitlines() or [""])[0]
            reason = f"it cannot run on tensors without data ({type(problem).__name__}: {first})"
            raise self._refusal(function, reason) from problem
        assert call.result_leaves is not None, "it has been rehearsed"
        assert call.result_tree is not None, "it has been rehearsed"
        result = [outputs[leaf.position] if isinstance(leaf, Slot) else leaf for leaf in call.result_leaves]
        return pytree.tree_unflatten(result, call.result_tree)

    def _site(self, function: Any, leaves: Sequence[Any], tree: pytree.TreeSpec) -> int:
        """The number of the call with these arguments."""
        for site, call in enumerate(self._calls):
            if call.is_for(function, leaves, tree):
                return site
        self._calls.append(FunctionCall(function, leaves, tree))
        return len(self._calls) - 1

    def _refusal(self, function: Any, reason: str) -> NotTraceableError:
        place = place_now(self._model)
        return NotTraceableError(
            f"cannot trace the model: in {place}: {name_of(function)} is a torch.autograd.Function, whose own backward "
            f"pass a graph would lose; so it is to be called as it is, and {reason}; or "
            f"{keep_together_advice(place.modules)}",
            modules=place.modules,
        )

    def put_into(self, root: fx.GraphModule) -> None:
        """Replace the operator by the calls, in the graph and in its regions."""
        operator = torch.ops.gpipe_autoplan.custom_function.default
        replace_operator(root, operator, self._calls, lambda site: self._calls[site].devices)


class _Traced(torch.autograd.Function):
    """The operator with the gradients of the function: what the model asks of `requires_grad` is answered right."""

    @staticmethod
    def forward(ctx: Any, call: FunctionCall, site: int, tensors: list[Tensor], numbers: list[Any], *_: Tensor) -> Any:
        outputs = torch.ops.gpipe_autoplan.custom_function(tensors, numbers, site)
        ctx.mark_non_differentiable(*(o for o, carries in zip(outputs, call.carries, strict=True) if not carries))
        return tuple(outputs)


def _without_data(tensors: Sequence[Tensor], numbers: Sequence[Any], site: int) -> list[Tensor]:
    """What the operator returns for tensors without data: what the function returns for them."""
    calls = _CALLS.get()
    assert calls is not None, "the operator exists in traces only"
    call = calls[site]
    values = (*tensors, *numbers, *call.devices)
    token = _HANDLER.set(None)
    try:
        with without_torch_function(), torch.enable_grad():
            outputs = call.rehearse(values) if call.result_leaves is None else call(*values)
    finally:
        _HANDLER.reset(token)
    return [output.detach() for output in outputs]


torch.library.register_fake("gpipe_autoplan::custom_function", _without_data, lib=LIBRARY)
