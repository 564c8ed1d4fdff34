"""What changes gradients and is no operation: refused where it happens, while a model is traced.

Each is noticed at the one place in torch that all ways to it pass, so that it does not matter by what name a model
reaches it. What stands in its way there lets all threads pass in which no model is traced.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import noop_context_fn
from torch.utils.hooks import RemovableHandle

from profiler.errors import NotTraceableError
from profiler.observe.gradients_so_far import READS_GRADIENT, GradientsLeftAlone
from profiler.observe.outside_world import outside_told
from profiler.observe.source_place import keep_together_advice, place_now
from profiler.torch_private import BACKWARD_PASS, CHECKPOINT, INFERENCE_MODE, SAVED_TENSORS_HOOKS

TRACING: ContextVar[bool] = ContextVar("a model is being traced, in this thread", default=False)

Refusal = Callable[[str], NoReturn]
"""Is called with what the forward pass does."""
_HOOKS_OF_THE_FORWARD_PASS = ("forward", "state_dict", "_registration_hook")  # in the names of what registers them


@contextlib.contextmanager
def lost_gradients_refused(model: nn.Module) -> Iterator[None]:
    """Within, where `TRACING` is set, what changes gradients and is no operation is refused.

    Raises:
        NotTraceableError: naming the place, what it does and what to do.
    """
    refuse = partial(_refuse, model)
    parameters = {id(parameter) for parameter in model.parameters()}

    def outside(what: str) -> None:
        if TRACING.get():
            refuse(what)

    def is_trained(tensor: torch.Tensor) -> bool:
        stands_in = isinstance(tensor, FakeTensor) and tensor.is_leaf and tensor.requires_grad
        return TRACING.get() and (stands_in or id(tensor) in parameters)

    with (
        outside_told(outside),
        GradientsLeftAlone(is_trained, partial(refuse, READS_GRADIENT)),
        mock.patch.object(RemovableHandle, "__init__", _without_gradient_hooks(refuse)),
        SAVED_TENSORS_HOOKS.replaced_by(_without_hooks_on_saved(refuse)),
        CHECKPOINT.replaced_by(_without_checkpoints()),
        BACKWARD_PASS.replaced_by(_without_backward_passes(refuse)),
        INFERENCE_MODE.replaced_by(_without_inference_mode()),
    ):
        yield


def _refuse(model: nn.Module, what: str) -> NoReturn:
    place = place_now(model)
    raise NotTraceableError(
        f"cannot trace the model: in {place}: the forward pass {what}, which a graph would lose; express it by "
        f"operations, or {keep_together_advice(place.modules)}",
        modules=place.modules,
        functions=place.functions,
    )


def _without_gradient_hooks(refuse: Refusal) -> Callable[..., None]:
    make_handle = RemovableHandle.__init__

    def made_handle(handle: RemovableHandle, *args: Any, **kwargs: Any) -> None:
        caller = sys._getframe(1).f_code.co_name
        if TRACING.get() and not any(kind in caller for kind in _HOOKS_OF_THE_FORWARD_PASS):
            refuse("registers a hook on a gradient")
        make_handle(handle, *args, **kwargs)

    return made_handle


def _without_hooks_on_saved(refuse: Refusal) -> Callable[..., None]:
    push_hooks = SAVED_TENSORS_HOOKS.original

    def pushed_hooks(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        if TRACING.get() and not str(getattr(pack, "__module__", "")).startswith("torch."):
            refuse("has hooks on tensors saved for the backward pass (saved_tensors_hooks)")
        push_hooks(pack, unpack)

    return pushed_hooks


def _without_checkpoints() -> Callable[..., Iterator[None]]:
    """The plan decides what is recomputed; of checkpoints in checkpoints export makes regions without gradient."""
    checkpointed = CHECKPOINT.original

    def uncheckpointed(function: Any, preserve: bool, context: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if TRACING.get() and context is noop_context_fn:
            yield
        else:
            yield from checkpointed(function, preserve, context, *args, **kwargs)

    return uncheckpointed


def _without_backward_passes(refuse: Refusal) -> Callable[..., Any]:
    run_backward = BACKWARD_PASS.original

    def ran_backward(*args: Any, **kwargs: Any) -> Any:
        if TRACING.get():
            refuse("runs a backward pass (torch.autograd.grad, backward)")
        return run_backward(*args, **kwargs)

    return ran_backward


def _without_inference_mode() -> Callable[[bool], Any]:
    """A graph holds regions without gradient, and none of inference mode; what they compute is the same."""
    inference_mode = INFERENCE_MODE.original

    def region(enabled: bool) -> Any:
        return torch.no_grad() if TRACING.get() and enabled else inference_mode(enabled)

    return region
