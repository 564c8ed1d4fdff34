"""The modes around a call that change what a model computes: models are traced and measured as they train."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from profiler.machine.backend import BACKENDS
from profiler.torch_private import keeping_no_casts


@contextlib.contextmanager
def as_in_training() -> Iterator[None]:
    """Within, autograd records, and there is no autocast but the sequence's own.

    A caller's `torch.no_grad`, `torch.inference_mode` or `torch.autocast` would give times of backward passes that
    do nothing, or bytes of another dtype.

    Autocast regions of the model's own cast a weight at each use, as that around the sequence does: torch keeps the
    casts of leaves within a region, and so adds the gradients of their uses up in the lower precision. But which values
    are leaves depends on where the model is cut. So does a region that says `cache_enabled=True` itself.
    """
    with keeping_no_casts(), _recording():
        yield


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Within, autograd records, and there is no autocast."""
    enabled = [device_type for device_type in BACKENDS if torch.is_autocast_enabled(device_type)]
    if torch.is_grad_enabled() and not enabled and not torch.is_inference_mode_enabled():
        try:
            yield  # the usual case: to enter modes that are on takes as long as a small layer
        except BaseException:  # torch's own regions in a graph leave their modes on behind an error
            torch.set_grad_enabled(True)
            for device_type in BACKENDS:
                torch.set_autocast_enabled(device_type, False)
            raise
        return
    with contextlib.ExitStack() as modes:
        modes.enter_context(torch.inference_mode(mode=False))
        modes.enter_context(torch.enable_grad())
        for device_type in enabled:
            modes.enter_context(torch.autocast(device_type, enabled=False))
        yield
