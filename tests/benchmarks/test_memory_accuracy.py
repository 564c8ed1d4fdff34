"""Predicted bytes of stages against a watch on every tensor of a real run.

    make bench

Unlike models are cut into 2 and 4 stages of about equally many layers, and each stage runs forward and backward on one
micro-batch, of a size that the profiler looked at and of one between. Against more micro-batches in flight, whose kept
bytes add up, the transients of one weigh less: a single one is the hardest case.

`kept`: what is held between forward and backward pass; `most`: the largest bytes at any moment. Inputs of the stage,
gradients that it receives, parameters and their gradients are not counted on either side. `tensors`: against a watch on
tensors, without what kernels allocate inside themselves; `allocator`: against the allocator, with it.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from planner.costs import CostModel
from planner.stage_bytes import StageBytes
from profiler import Cluster, Device, profile, trace
from profiler.stand_ins import micro_batch, resized_target
from profiler.storage_watch import StorageWatch
from tests.benchmarks.stage_models import MODELS, build
from tests.models.tracked import CPU, Allocator, run_stages

CLUSTER = Cluster(devices=(Device(name="cpu", kind="cpu", memory_bytes=2**34, threads=1),))
SIZES = (1, 2, 4, 8)
RUN = (3, 8)
OVER = 0.02
OF_KERNELS = 0.12


@pytest.mark.benchmark
@pytest.mark.parametrize("name", MODELS)
def test_predicted_bytes(name: str) -> None:
    model = build(name)
    sequence = trace(model.model, model.sample)
    measured = profile(
        sequence,
        CLUSTER,
        sample=model.sample,
        loss_fn=model.loss_fn,
        target=model.target,
        micro_batch_sizes=SIZES,
        time_budget_s=0.0,
        progress=False,
        cache=False,
    )
    costs = CostModel(measured)
    of_size = {size: StageBytes.of([c for c in measured.costs if c.micro_batch_size == size]) for size in SIZES}
    of_size[3] = of_size[2].between(of_size[4], 0.5)
    print("\n| model | samples | stage | kept, MB | predicted | tensors, MB | predicted | allocator, MB | predicted |")
    print("|---|---:|---|---:|---:|---:|---:|---:|---:|")
    shares = []
    for size in RUN:
        tensors_alone = replace(of_size[size], workspace_bytes=np.zeros(len(sequence)))
        most_tensors = tensors_alone.most(tensors_alone.kept())
        inputs = micro_batch(sequence, model.sample, size, CPU)
        target = resized_target(model.target, size, CPU)
        for count in (2, 4):
            bounds = [len(sequence) * part // count for part in range(count + 1)]
            tensors, allocator = (
                run_stages(sequence, bounds, inputs, model.loss_fn, target, has_loss=True, meter=meter)
                for meter in (StorageWatch, Allocator)
            )
            for index, (first, stop) in enumerate(pairwise(bounds)):
                kept, most = costs.stage("cpu", size, first, stop)
                pairs = (
                    (kept, tensors[index][0]),
                    (most_tensors[first, stop], tensors[index][1]),
                    (most, allocator[index][1]),
                )
                found = [predicted / real - 1 for predicted, real in pairs]
                cells = " | ".join(
                    f"{real / 1e6:.2f} | {share:+.2%}" for (_, real), share in zip(pairs, found, strict=True)
                )
                print(f"| {name} | {size} | {index + 1} of {count} | {cells} |")
                shares.append(found)
    under, over = np.min(shares, axis=0), np.max(shares, axis=0)
    print(f"{name}: kept {under[0]:+.2%} to {over[0]:+.2%}, tensors {under[1]:+.2%} to {over[1]:+.2%}, ", end="")
    print(f"allocator {under[2]:+.2%} to {over[2]:+.2%}")
    assert min(under) >= 0
    assert max(over[:2]) <= OVER
    assert over[2] <= OF_KERNELS
