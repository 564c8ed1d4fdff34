"""What a checkpoint holds, gathered from all processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor.checkpoints.manifest import METADATA, TRAINING, FileSum, Manifest, sums_of
from executor.checkpoints.saved import Resumable, Stateful
from executor.checkpoints.together import gathered, is_first, rank
from executor.checkpoints.training import OptimizerEntry, Training, key_of, optimizer_entries
from profiler.errors import ArgumentError
from profiler.text import counted


def tensors_of(pipe: Resumable, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Parameters, buffers and the tensors of the optimizer's state, by original names."""
    state: dict[str, Any] = {"model": {**pipe.state_dict(), **pipe.extra_state()}}
    if optimizer is not None:
        state["optimizer"] = {
            key_of(name, entry): value
            for name, parameter in pipe.stepped_parameters()
            for entry, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }
    return state


def complete(
    draft: Path, pipe: Resumable, optimizer: torch.optim.Optimizer | None, also: Mapping[str, Stateful]
) -> None:
    """Add to a draft with all tensors what is kept in addition to them, and the manifest."""
    entries = None if optimizer is None else dict(optimizer_entries(dict(pipe.stepped_parameters()), optimizer))
    own = sums_of(draft, [path.name for path in draft.glob(f"__{rank()}_*.distcp")])
    trains = any(True for _ in pipe.stepped_parameters())
    parts: list[tuple[dict[str, OptimizerEntry] | None, dict[str, FileSum], bool]] = gathered((entries, own, trains))
    if not is_first():
        return
    stepped = 0 if optimizer is None else sum(len(group["params"]) for group in optimizer.param_groups)
    if stepped and any(trains for *_, trains in parts) and not any(part for part, *_ in parts):
        raise ArgumentError(
            f"the optimizer steps {counted(stepped, 'parameter')}, and none of them is one of the pipeline's, so its "
            "state would be lost; give the one that was made of pipe.parameters()"
        )
    training = Training(
        step=pipe.steps,
        seed=pipe.seed,
        names=pipe.state_names(),
        optimizer=None if entries is None else {name: one for part, *_ in parts for name, one in (part or {}).items()},
        optimizer_class=None if optimizer is None else type(optimizer).__name__,
        also={name: one.state_dict() for name, one in also.items()},
    )
    training.save(draft)
    files = {name: found for _, part, _ in parts for name, found in part.items()}
    files |= sums_of(draft, [METADATA, TRAINING])
    Manifest(run=pipe.run.id, inherits=pipe.run.inherits, step=pipe.steps, files=files).save(draft)
