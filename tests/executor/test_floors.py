"""The executor runs a plan without what found it."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from planner import Plan
from profiler import trace
from tests.test_repository import PLAN_FOLDER

TRAIN = """
import sys, torch
from torch import nn
from executor import Pipeline
from planner import Plan

model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
pipe = Pipeline(model, Plan.load("plan.json"), loss_fn=nn.functional.mse_loss)
pipe.step(torch.ones(8, 4), target=torch.ones(8, 4))
unneeded = ("planner", "numba", "scipy", "pandas", "matplotlib")  # networkx comes with torch's export
print(*sorted(name for name in sys.modules if name.partition(".")[0] in unneeded))
"""


def test_a_run_loads_neither_the_solver_nor_its_libraries(
    plan_for: Callable[..., Plan], python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    sequence = trace(model, torch.ones(2, 4))
    plan_for(sequence, [1], batch_size=8, micro_batches=8).save(tmp_path / "plan.json")
    result = python("-c", TRAIN)
    loaded = set(result.stdout.split()) - {"planner", PLAN_FOLDER}
    assert loaded and all(name.startswith(f"{PLAN_FOLDER}.") for name in loaded), result.stdout + result.stderr
