"""What do trace, profile and plan take, in seconds and memory, from 12 to 400 blocks and from 2 to 1,024 devices?

    OMP_NUM_THREADS=1 python -m pytest -m benchmark -o faulthandler_timeout=0 tests/benchmarks/test_planning_scale.py -s

A GPT of width 1024 on the meta device, for A100s by data sheets, batch 1024. "1f1b" searches that schedule to its end,
"auto" all schedules for 10 s. Each case runs in a process of its own, on one thread; seconds are the processor's. The
table is in planning_scale.md.
"""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pandas
import pytest

from tests.benchmarks.kept_rows import kept

REPOSITORY = Path(__file__).parents[2]
BATCH = 1024
CASES = [(12, 8), (48, 8), (96, 8), (200, 8), (96, 2), (96, 32), (96, 128), (96, 1024), (400, 8), (400, 1024)]
SECONDS_AT_MOST = 240
"""Of the processor, for a case; the phases until then are shown."""

PROGRAM = """
import json, resource, sys, time, warnings
warnings.simplefilter("ignore")
import torch
from gpt import GPT, Config, next_token_loss
from planner import plan_from_profile
from profiler import profile, trace
from profiler.device import Cluster
from tests.peak_resident import peak_resident_bytes

blocks, devices, batch, limit = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
with torch.device("meta"):
    model = GPT(Config(vocabulary=50257, context=1024, width=1024, heads=16, blocks=blocks))
    ids = torch.zeros(4, 1024, dtype=torch.int64)
    trace(torch.nn.Linear(2, 2), torch.zeros(2, 2))  # what the first trace in a process loads
cluster = Cluster.of(f"{devices}xA100-80GB", link="nvlink3")
row = {}
def done(what, begun):
    row[what + ", s"] = time.process_time() - begun
    row[what + ", GiB"] = peak_resident_bytes() / 2**30
    print(json.dumps(row), flush=True)
    return time.process_time()
now = done("imports", 0.0)
sequence = trace(model, ids, stages=devices)
now = done("trace", now)
found = profile(
    sequence, cluster, batch_size=batch, loss_fn=next_token_loss, target=ids, progress=False, cache=False
)
now = done("profile", now)
row["layers"] = len(sequence)
for what, asked in ("1f1b", {"schedule": "1f1b"}), ("auto", {"time_limit_s": 10.0}):
    plan = plan_from_profile(found, cluster, batch_size=batch, **asked)
    row[what] = f"{plan.schedule}, K = {plan.K}, M = {plan.M}"
    row[what + ", gap"] = plan.prediction.gap
    row[what + ", step s"] = plan.prediction.step_s
    now = done(what, now)
"""


def row(blocks: int, devices: int) -> dict[str, Any]:
    """Of the table."""
    running = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(blocks), str(devices), str(BATCH), str(SECONDS_AT_MOST)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/notebooks/demo", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    printed, _ = running.communicate()
    assert running.returncode in (0, -signal.SIGXCPU), printed
    return {"blocks": blocks, "devices": devices, **json.loads(printed.splitlines()[-1])}


@pytest.mark.benchmark
def test_planning_grows_no_faster_than_the_model() -> None:
    rows = []
    for case in CASES:
        rows.append(kept(f"scale {case}", partial(row, *case)))
        print(rows[-1], flush=True)
    frame = pandas.DataFrame(rows)
    with pandas.option_context("display.width", 250, "display.max_columns", 30):
        print(f"\n{frame.to_string(index=False, float_format='{:.3g}'.format)}")
    assert frame["auto, gap"].notna().all(), "each case ends in time"
