"""The peak memory of each rank against the plan's prediction.

    pytest tests/benchmarks/test_peak_memory.py -m benchmark -s

A GPT whose activations outweigh its parameters, planned by a real profile, trained by two processes under both
schedules, with and without recompute. Tensors' bytes at the worst moment of a step, the optimizer's state left out on
both sides.
"""

from itertools import product
from typing import Any

import pandas
import pytest
import torch
from gpt import GPT, Config, next_token_loss

from executor import Pipeline, launch
from planner import Plan, plan_from_profile
from profiler import profile, trace
from profiler.local import local_devices

CONFIG = Config(context=128, width=192, heads=4, blocks=6)
BATCH_SIZE, M = 16, 8
WITHIN = 0.05


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def peaks(plan: Plan) -> pandas.DataFrame:
    pipe = Pipeline(make_model(), plan, loss_fn=next_token_loss)
    ids = torch.randint(256, (BATCH_SIZE, CONFIG.context), generator=torch.Generator().manual_seed(0))
    pipe.step(ids, target=ids)
    with pipe.watch_memory():
        pipe.step(ids, target=ids)
    frame = pipe.measured()
    return frame[frame["what"] == "peak_bytes"]


@pytest.mark.benchmark
def test_each_rank_peaks_where_the_plan_says() -> None:
    cluster = local_devices(["cpu", "cpu"])
    ids = torch.zeros(BATCH_SIZE, CONFIG.context, dtype=torch.int64)
    sequence = trace(make_model(), ids)
    found = profile(sequence, cluster, sample=ids, batch_size=BATCH_SIZE, loss_fn=next_token_loss, target=ids)
    frames = []
    for schedule, recompute in product(("gpipe", "1f1b"), ("never", "always")):
        settings: dict[str, Any] = {"stages": 2, "micro_batches": M, "recompute": recompute, "schedule": schedule}
        plan = plan_from_profile(found, cluster, batch_size=BATCH_SIZE, optimizer="AdamW", **settings)
        frames.append(launch(peaks, plan)[0].assign(schedule=schedule, recompute=recompute))
    table = pandas.concat(frames).set_index(["schedule", "recompute", "stage"])[["predicted", "measured", "ratio"]]
    print(f"\npeak bytes of each rank, K = 2, M = {M}\n{table.to_string(float_format='{:.3f}'.format)}")
    assert ((table["ratio"] - 1).abs() <= WITHIN).all()
