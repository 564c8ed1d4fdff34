"""Every notebook runs from its first cell to its last, and is committed with outputs that name no machine."""

import inspect
import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.executor.conftest import _plan as plan_for
from tests.executor.test_launching import Fragile, make_plan, mean

# What a notebook measures, it measures with as few repeats as can be, alone on the machine and with a made-up link, for
# which four processes would begin; its own cells run as they are.
HASTE = """
import contextlib, functools, profiler, profiler.measure, profiler.measured_kind
profiler.profile = functools.partial(profiler.profile, time_budget_s=0.0)
profiler.measure.measure_link = lambda *_, **__: profiler.Link(latency_s=1e-5, bytes_per_s=1e9)
profiler.measured_kind.neighbours = lambda *_, **__: contextlib.nullcontext(lambda: None)
"""
CELL = """
import torch
from torch import Tensor, nn
from executor import Pipeline, launch
from planner import Plan

{definitions}

def train(plan):
    torch.manual_seed(0)
    pipe = Pipeline(Fragile(), plan, loss_fn=mean)
    return [pipe.step(torch.ones(8, 4), target=torch.zeros(8, 1)).item() for _ in range(2)]

plan = Plan.load({path!r})
assert launch(train, plan) == [train(plan)] * 2
"""

NOTEBOOKS = sorted(Path(__file__).parent.parent.joinpath("notebooks").glob("*.ipynb"))
DEAR = ("choose_hardware", "gpipe_paper")
"""Minutes each: `tests/benchmarks/test_dear_notebooks.py` runs them."""


def executed(path: Path, *more: str) -> None:
    """Run a notebook from its first cell to its last, and then some more cells."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(HASTE))
    notebook.cells.extend(map(nbformat.v4.new_code_cell, more))
    NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": str(path.parent)}}).execute()


@pytest.mark.filterwarnings("ignore")  # what Jupyter's own client warns of
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem not in DEAR], ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    """And `launch` takes what its cells define: one more cell of one of them says so. A kernel takes long to start."""
    make_plan(plan_for).save(tmp_path / "plan.json")
    definitions = "\n".join(inspect.getsource(each) for each in (Fragile, mean))
    launching = CELL.format(definitions=definitions, path=str(tmp_path / "plan.json"))
    executed(path, *([launching] if path.stem == "inspect_plan" else []))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_with_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells[2:] if cell.cell_type == "code"]
    defines = re.compile(r"^(def|import|from|class|@|[a-z_, ]+ =)|^ |^$|^[\])}]", re.MULTILINE)
    silent = [
        cell.source
        for cell in cells
        if not cell.outputs and not all(defines.match(line) for line in cell.source.splitlines())
    ]
    assert not silent
    assert [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"] == [*range(1, len(cells) + 2)]
    assert not [output for cell in cells for output in cell.outputs if output.get("name") == "stderr"]
    assert not re.search(r"/(home|root|work|tmp|Users)/", json.dumps([cell.get("outputs") for cell in notebook.cells]))
