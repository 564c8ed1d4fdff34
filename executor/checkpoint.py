"""Training state on disk, in torch's own distributed format and under the model's original names.

A checkpoint knows nothing of stages: saved with K of them, it loads with any other number, or without a pipeline:

    state = {"model": model.state_dict()}
    torch.distributed.checkpoint.load(state, checkpoint_id="checkpoint")
    model.load_state_dict(state["model"])
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from executor.pipeline import Pipeline
from profiler.errors import ExecutionError


def save_checkpoint(path: str | Path, pipe: Pipeline, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write the training state; every process calls this. A crash leaves the old checkpoint or the new one.

    Args:
        path: folder; an older checkpoint there is replaced.
        pipe: what is trained.
        optimizer: over `pipe.parameters()`, if its state is to be kept.
    """
    target = Path(path)
    draft = target.with_name(f".{target.name}.draft")
    first = _rank() == 0
    if first:
        shutil.rmtree(draft, ignore_errors=True)
        draft.parent.mkdir(parents=True, exist_ok=True)
    _wait_for_all()
    with _expected_warnings():
        dcp.save(  # type: ignore[attr-defined]
            _state(pipe, optimizer), checkpoint_id=draft, no_dist=not dist.is_initialized()
        )
    _wait_for_all()
    if first:
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        draft.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    _wait_for_all()


def load_checkpoint(path: str | Path, pipe: Pipeline, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Continue from a checkpoint, whatever K it was written with; every process calls this.

    Raises:
        ExecutionError: there is no complete checkpoint, or it lacks what this process needs.
    """
    source = Path(path)
    if not (source / ".metadata").exists():
        raise ExecutionError(f"{source} holds no complete checkpoint; save one with save_checkpoint")
    if optimizer is not None:
        _create_state(optimizer)
    state = _state(pipe, optimizer)
    try:
        with _expected_warnings():
            dcp.load(  # type: ignore[attr-defined]
                state, checkpoint_id=source, no_dist=not dist.is_initialized()
            )
    except (Exception, CheckpointException) as problem:  # torch derives the latter from BaseException
        reason = str(problem).strip().splitlines()[-1]
        raise ExecutionError(
            f"cannot load {source}: {reason}; it must hold the state of this model and of this optimizer"
        ) from problem


def _state(pipe: Pipeline, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Model and optimizer state by original names; the tensors are the live ones."""
    state: dict[str, Any] = {"model": pipe.state_dict()}
    if optimizer is not None:
        state["optimizer"] = {
            f"{name}.{entry}": value
            for name, parameter in pipe.named_parameters()
            for entry, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }
    return state


def _create_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer create its state, without moving a parameter: a step with zero gradients and rate 0."""
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    values = [parameter.detach().clone() for parameter in parameters]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient, value in zip(parameters, gradients, values, strict=True):
        parameter.grad = gradient
        parameter.data.copy_(value)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


def _expected_warnings() -> warnings.catch_warnings[None]:
    """Silence what torch warns of in its own use of itself while it saves and loads."""
    return warnings.catch_warnings(action="ignore")
