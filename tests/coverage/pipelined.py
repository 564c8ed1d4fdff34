"""What comes of a model that is planned and trained as a user would: three stages, micro-batches of 2 samples.

trace, profile, plan_from_profile: what `autoplan` does
Pipeline(model, plan of 3 stages).step  against  a loop over the micro-batches that adds up the model's gradients
                                        or, if the model draws random numbers, which are keyed by layer, against
                                        Pipeline(model, plan of 1 stage).step
and the layers of the trace against the model, both with torch's stream of random numbers
"""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from executor import Pipeline
from planner import Plan, plan_from_profile
from profiler import Cluster, LayerSequence, Profile, profile, trace
from profiler.device import Link
from profiler.machine.local import local_devices
from profiler.run.loss import loss_of
from profiler.tracing.sample import call_arguments
from tests.coverage.fidelity import Run, difference, eager, run
from tests.coverage.library_parts import MINI_BATCH
from tests.coverage.model_list import Case
from tests.coverage.survey_models import Candidate

STAGES = 3
MICRO_BATCH = 2
MICRO_BATCHES = MINI_BATCH // MICRO_BATCH
# Between CPU workers; what it is does not matter here, and to measure it takes processes of their own.
LINK = Link(latency_s=1e-4, bytes_per_s=4e9)


def differences(candidate: Candidate, *, double: bool = False) -> dict[str, float]:
    """How far gradients and losses are apart, relative, by what is compared.

    Args:
        candidate: the model; it is built anew for each that trains it, as in processes of their own.
        double: in float64, where rounding plays no part.

    Raises:
        PlanError: it is refused.
    """
    case = built(candidate, double)
    first = part(case, 0)
    sequence = trace(case.model, first.sample)
    measured = measure(sequence, first)
    parted = stepped(built(candidate, double), planned(measured, min(STAGES, len(sequence))))
    if any(layer.draws for layer in sequence.layers):
        apart = {"3 stages and 1": difference(parted, stepped(built(candidate, double), planned(measured, 1)))}
    else:
        apart = {"3 stages and eager": difference(parted, accumulated(built(candidate, double)))}
    seed_all()
    expected = eager(sequence, part(case, 0))  # some models write into the lists that they are given
    seed_all()
    apart["layers and eager"] = difference(run(sequence, part(case, 0), seeded=False), expected)
    return apart


def built(candidate: Candidate, double: bool) -> Case:
    """The model and its mini-batch."""
    random.seed(0)
    np.random.seed(0)
    case = candidate.build()
    if not double:
        return case
    sample = pytree.tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, case.sample)
    return replace(case, model=case.model.double(), sample=sample)


def part(case: Case, position: int) -> Case:
    """The same model with one micro-batch."""

    def cut(value: Tensor) -> Tensor:
        has_batch = value.dim() > 0 and len(value) == MINI_BATCH
        return value[position * MICRO_BATCH :][:MICRO_BATCH].clone() if has_batch else value

    target = None if case.target is None else cut(case.target)
    return replace(case, sample=pytree.tree_map_only(torch.Tensor, cut, case.sample), target=target)


def seed_all() -> None:
    """Every stream of random numbers."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def measure(sequence: LayerSequence, case: Case) -> Profile:
    """Its layers' times and bytes, as fast as can be."""
    alone = local_devices(1)  # nothing else runs, so no neighbours are started
    return profile(
        sequence,
        Cluster(devices=alone.devices, link=LINK),
        sample=case.sample,
        batch_size=MINI_BATCH,
        micro_batch_sizes=[MICRO_BATCH],
        loss_fn=case.loss_fn,
        target=case.target,
        time_budget_s=0,
        progress=False,
        cache=False,
    )


def planned(measured: Profile, stages: int) -> Plan:
    """A plan with that many stages."""
    return plan_from_profile(
        measured,
        Cluster(devices=local_devices(STAGES).devices, link=LINK),
        batch_size=MINI_BATCH,
        stages=stages,
        micro_batches=MICRO_BATCHES,
        micro_batch_sizes=[MICRO_BATCH],
        micro_batches_per_stage=1,
    )


def stepped(case: Case, plan: Plan) -> Run:
    """One step of training by a plan, all stages in this process."""
    pipe = Pipeline(case.model, plan, loss_fn=case.loss_fn)
    args, kwargs = call_arguments(case.sample)
    loss = pipe.step(*args, **kwargs) if case.target is None else pipe.step(*args, target=case.target, **kwargs)
    gradients = {name: held.grad for name, held in pipe.named_parameters() if held.grad is not None}
    return Run((), loss, gradients, {})


def accumulated(case: Case) -> Run:
    """The same by a plain loop over the micro-batches that adds up gradients."""
    total = torch.zeros((), dtype=torch.float64)
    for position in range(MICRO_BATCHES):
        one = part(case, position)
        args, kwargs = call_arguments(one.sample)
        loss = loss_of(case.model(*args, **kwargs), one.target, case.loss_fn) / MICRO_BATCHES
        loss.backward()
        total += loss.detach()
    gradients: dict[str, Any] = {n: p.grad for n, p in case.model.named_parameters() if p.grad is not None}
    return Run((), total, gradients, {})
