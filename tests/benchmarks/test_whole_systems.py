"""Whole systems side by side: seconds of a step, peak memory, lines changed in the script, gradients right or not.

    OMP_NUM_THREADS=1 python -m pytest -m benchmark -o faulthandler_timeout=0 tests/benchmarks/test_whole_systems.py -s

A GPT of six blocks, 32 samples in 8 micro-batches, on two cores: this project, torchgpipe from PyPI, and
torch.distributed.pipelining with its own front end, cut in the middle by hand; each script as its user would write it
(whole_systems.py). Gradients of the first step are compared with the plain model's: of the GPT as it is, whose head
shares the embedding's weights, of one with a head of its own, and of that with 30 samples, which 8 micro-batches cannot
share evenly. The table is in whole_systems.md.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from torch import Tensor

from tests.benchmarks.kept_rows import kept
from tests.benchmarks.whole_systems import PLAIN, SCRIPTS, UNDER_TORCHRUN

REPOSITORY = Path(__file__).parents[2]
SUBJECTS = ("tied,32", "untied,32", "untied,30")
ROUNDS = int(os.environ.get("ROUNDS", "2"))
RIGHT = 1e-4
MIB = 2**20


def run(script: str, subject: str, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Tensor], str]:
    """What each process noted, all gradients, and the last line of what went wrong."""
    folder.mkdir()
    path = folder / "script.py"
    path.write_text(script)
    under = ["-m", "torch.distributed.run", "--nproc-per-node=2"] if script in UNDER_TORCHRUN else []
    environment = {
        "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/notebooks/demo", "OMP_NUM_THREADS": "1", "SUBJECT": subject,
        "FOUND": str(folder), "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *under, str(path)], cwd=folder, env={**os.environ, **environment}, capture_output=True,
        text=True, timeout=150, check=False,
    )  # fmt: skip
    errors = [line for line in done.stderr.splitlines() if "Error" in line and "ChildFailed" not in line]
    processes = [json.loads(one.read_text()) for one in folder.glob("*.json")]
    gradients = {name: one for file in folder.glob("*.pt") for name, one in torch.load(file).items()}
    return processes, gradients, (errors or done.stderr.splitlines()[-1:])[0] if done.returncode else ""


def changed_lines(script: str) -> int:
    """Lines that the plain script has not."""
    return sum(line.startswith("+ ") for line in difflib.ndiff(_lines(PLAIN), _lines(script)))


def _lines(script: str) -> list[str]:
    return [line.strip() for line in script.splitlines() if line.strip()]


@cache
def plain_gradients(subject: str, folder: Path) -> dict[str, Tensor]:
    return run(PLAIN, subject, folder / f"{len(list(folder.iterdir()))}")[1]


def compared(system: str, subject: str, number: int, folder: Path) -> dict[str, Any]:
    """A row of the table."""
    processes, gradients, failed = run(SCRIPTS[system], subject, folder / f"{len(list(folder.iterdir()))}")
    row: dict[str, Any] = {"system": system, "subject": subject, "lines": changed_lines(SCRIPTS[system])}
    if failed:
        return {**row, "gradients": f"fails: {failed[:160]}"}
    expected = plain_gradients(subject, folder)
    scale = max(one.abs().max().item() for one in expected.values())
    off = {
        name: (gradients[name] - one).abs().max().item() / scale if name in gradients else float("inf")
        for name, one in expected.items()
    }
    worst = max(off, key=lambda name: off[name])
    return {
        **row,
        "step, s": max(one["step_s"] for one in processes),
        "peak, MiB": [round(one["peak_bytes"] / MIB) for one in processes],
        "of the imports": [round(one["imported_bytes"] / MIB) for one in processes],
        "gradients": "right" if off[worst] <= RIGHT else f"wrong: {worst} by {off[worst]:.2g} of the largest",
        "worst": off[worst],
    }


@pytest.mark.benchmark
def test_ours_is_right_and_no_slower(tmp_path: Path) -> None:
    rows = [
        kept(f"systems {system} {subject} {number}", partial(compared, system, subject, number, tmp_path))
        for number in range(ROUNDS)
        for subject in (SUBJECTS if number == 0 else SUBJECTS[1:2])
        for system in SCRIPTS
    ]
    frame = pandas.DataFrame(rows)
    with pandas.option_context("display.width", 250, "display.max_columns", 30, "display.max_colwidth", 200):
        print(f"\n{frame.to_string(index=False, float_format='{:.3g}'.format)}")
    ours = frame[frame["system"].str.startswith("ours")]
    assert (ours["gradients"] == "right").all()
    best = frame[frame["system"].str.contains("torch") & (frame["subject"] == "untied,32")]["step, s"].min()
    assert ours[ours["subject"] == "untied,32"]["step, s"].min() <= 1.05 * best
