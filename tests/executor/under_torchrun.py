"""What torchrun runs in each rank: trains from the newest checkpoint on, saves, and writes its losses and weights.

    torchrun --nproc-per-node K under_torchrun.py FOLDER

`FOLDER` holds plan.json and settings.json; it gets checkpoints and one result-RANK.pt for each rank. In the first runs
of a rank that the settings name, the process is killed at the step given there: before it, or where the settings say so
in the loss of its second micro-batch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor import Pipeline
from executor.checkpoint import load_checkpoint, save_checkpoint
from planner import Plan
from tests.executor.fault_trials import BATCH, WIDTH, Deep


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))


def train(
    plan: Plan, steps: int, checkpoints: Path, dies: tuple[int, int] = (-1, -1), *, in_loss: bool = False
) -> dict[str, Any]:
    """Losses and seconds of each step that this process made, and the weights at the end."""
    micro_batches = 0

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        nonlocal micro_batches
        micro_batches += 1
        if in_loss and (pipe.rank, pipe.steps) == dies and micro_batches % plan.M == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return mean(output, target)

    torch.manual_seed(0)
    pipe = Pipeline(Deep(), plan, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    begun = load_checkpoint(checkpoints, pipe, optimizer) if (checkpoints / "latest").exists() else 0
    losses, seconds = {}, []
    for step in range(begun, steps):
        if not in_loss and (pipe.rank, step) == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        before = time.perf_counter()
        losses[step] = pipe.step(batch(step), target=batch(step)).item()
        seconds.append(time.perf_counter() - before)
        optimizer.step()
        optimizer.zero_grad()
        save_checkpoint(checkpoints, pipe, optimizer)
    return {"begun": begun, "losses": losses, "seconds": seconds, "weights": pipe.state_dict()}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    settings = json.loads((folder / "settings.json").read_text())
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    dies = tuple(settings["dies"][restart]) if restart < len(settings["dies"]) else (-1, -1)
    checkpoints = folder / settings.get("checkpoints", "checkpoints")
    in_loss = settings.get("in_loss", False)
    result = train(Plan.load(folder / "plan.json"), settings["steps"], checkpoints, dies, in_loss=in_loss)
    torch.save(result, folder / f"result-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
