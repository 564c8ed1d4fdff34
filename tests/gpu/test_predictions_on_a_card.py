"""Predicted steps, passes and bytes of unlike models against measured ones, on one card.

    pytest tests/gpu/test_predictions_on_a_card.py -s

Each model is profiled, planned and trained: as one stage that keeps all and as one that recomputes all, whose steps are
the prediction's, and as four stages of one process, which take turns on the card, so that their passes are. Memory is
that of the allocator, with the optimizer's state; a plan is judged without its reserve, the context of CUDA. Beside it
what data sheets alone say of the same step.
"""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean, median

import pytest
import torch
from gpt import GPT, Config, next_token_loss
from torch import Tensor
from torch.nn import functional

from executor import Pipeline
from planner import ExecutionError, Plan, plan_from_profile
from planner.keywords import RecomputeMode
from planner.plan.schedules import ScheduleName
from planner.plan.units import bytes_text
from profiler import Cluster, Link, Profile, profile, trace
from profiler.datasheets import DATA_SHEETS, sheet_of_kind
from profiler.tracing.sample import call_arguments
from tests.benchmarks.stage_models import Model
from tests.gpu.on_a_card import card, densenet, unet
from tests.models.amoebanet import AmoebaNet
from tests.models.gnmt import GNMT
from tests.models.mixture_of_experts import MixtureOfExperts

WITHIN_THE_CARD = Link(latency_s=1e-5, bytes_per_s=1e12)  # no message: all stages are in this process
M = 4
STAGES = 4
WARM_UPS, STEPS = 3, 10
WHOLE: tuple[tuple[ScheduleName, RecomputeMode], ...] = (("1f1b", "never"), ("gpipe", "always"))
BUDGET_S = 5.0  # of timing, for each model
MEMORY_OVER = 0.01  # of 1.5 GiB: blocks that are not split
SHARES = (1.0, 1.03, 1.1)  # of the predicted bytes that are tried as a limit


@dataclass(frozen=True)
class Case:
    """A model, its batch and how it computes.

    Attributes:
        time_within: share by which a step may miss the plan.
        least_memory: of the predicted bytes, what is asked for at least.
    """

    make: Callable[[int], Model]
    batch: int
    precision: str | None = None
    time_within: float = 0.12
    least_memory: float = 0.85


def _tokens(batch: int, vocabulary: int, length: int) -> Tensor:
    return torch.randint(3, vocabulary, (batch, length))


def _gpt(batch: int) -> Model:
    ids = _tokens(batch, 50_304, 1024)
    return Model(GPT(Config(50_304, 1024, 1024, 16, 12)), ids, next_token_loss, ids)


def _small_gpt(batch: int) -> Model:
    ids = _tokens(batch, 256, 256)
    return Model(GPT(Config(256, 256, 512, 8, 8)), ids, next_token_loss, ids)


def _amoebanet(batch: int) -> Model:
    images, classes = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
    return Model(AmoebaNet(6, 192, 1000), images, functional.cross_entropy, classes)


def _lstm(batch: int) -> Model:
    sample = (_tokens(batch, 16_000, 50), _tokens(batch, 16_000, 50))
    return Model(GNMT(16_000, width=1024, layers=4, dropout=0.2), sample, next_token_loss, sample[1])


def _experts(batch: int) -> Model:
    ids = _tokens(batch, 256, 256)
    return Model(MixtureOfExperts(width=512, blocks=6, experts=8), {"ids": ids, "labels": ids.clone()})


CASES: Mapping[str, Case] = {
    "GPT, 203 M, bf16-mixed": Case(_gpt, 32, "bf16-mixed"),
    "GPT, 203 M": Case(_gpt, 16),
    "GPT, 25 M": Case(_small_gpt, 64),
    "U-Net": Case(unet, 64),
    "DenseNet-121": Case(densenet, 128),
    "AmoebaNet-D": Case(_amoebanet, 64, time_within=0.35),  # the host is slower than its kernels, see h100.md
    "LSTM (GNMT)": Case(_lstm, 256),
    "mixture of experts": Case(_experts, 64),
}


@pytest.fixture(scope="module", autouse=True)
def tables() -> None:
    print("\n| model | stages | recompute | what | predicted | measured | ratio |")
    print("|---|---:|---|---|---:|---:|---:|", flush=True)


def row(name: str, plan: Plan, what: str, predicted: str, measured: str, ratio: float) -> None:
    recompute = "all" if plan.stages[0].recompute else "none"
    print(f"| {name} | {plan.K} | {recompute} | {what} | {predicted} | {measured} | {ratio:.3f} |", flush=True)


def measured_steps(model: Model, plan: Plan, steps: int = STEPS) -> tuple[Pipeline, list[float], dict[str, int]]:
    """A pipeline after some steps, their seconds with the optimizer's, and the most bytes of the allocator.

    Printed is when the host was through with the step and with the optimizer: where that is when the card is, too, the
    card waits for the host.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    pipe = Pipeline(model.model, plan, loss_fn=model.loss_fn, compare_first_step=False)
    optimizer = torch.optim.AdamW(pipe.parameters())
    args, kwargs = call_arguments(model.sample)
    seconds = []
    given: list[tuple[float, float]] = []
    for _ in range(WARM_UPS + steps):
        begun_s = time.perf_counter()
        pipe.step(*args, target=model.target, **kwargs)
        stepped_s = time.perf_counter() - begun_s
        optimizer.step()
        optimizer.zero_grad()
        given.append((stepped_s, time.perf_counter() - begun_s))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun_s)
    host = " and ".join(f"{median(moments) * 1e3:.1f} ms" for moments in zip(*given[WARM_UPS:], strict=True))
    print(f"the host was through with the step after {host} with the optimizer", flush=True)
    after = torch.cuda.memory_stats()
    most = {
        what: after[f"{what}_bytes.all.peak"] - before[f"{what}_bytes.all.current"]
        for what in ("requested", "allocated", "reserved")
    }
    return pipe, seconds[WARM_UPS:], most


def row_of_passes(name: str, plan: Plan, pipe: Pipeline) -> None:
    """Of all passes of the last step, by the card's clock: what is left of the step is its end and the optimizer."""
    prediction = plan.prediction
    predicted_s = prediction.step_s - prediction.optimizer_s
    measured_s = sum(timed.duration_s for timed in pipe.last_step_actions())
    predicted, measured = f"{predicted_s * 1e3:.1f} ms", f"{measured_s * 1e3:.1f} ms"
    row(name, plan, "passes of a step", predicted, measured, measured_s / predicted_s)


def row_of_bytes(name: str, plan: Plan, most: Mapping[str, int]) -> float:
    """Of what the allocator was asked for, gave out and took from the card; the ratio of the first."""
    predicted = sum(memory.total - memory.reserve for memory in plan.device_memories)
    for what, size in most.items():
        row(name, plan, what, bytes_text(predicted), bytes_text(size), size / predicted)
    return most["requested"] / predicted


def runs_within(model: Model, plan: Plan) -> float:
    """The least share of the predicted bytes, of some, that the allocator can do with."""
    predicted = sum(memory.total - memory.reserve for memory in plan.device_memories)
    whole = torch.cuda.get_device_properties(0).total_memory
    for share in SHARES:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + share * predicted) / whole)
        try:
            measured_steps(model, plan, steps=1)
        except (torch.OutOfMemoryError, ExecutionError) as problem:
            if "out of memory" not in str(problem):
                raise
        else:
            return share
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    return float("inf")


def plan_of(found: Profile, batch: int, stages: int, schedule: ScheduleName, recompute: RecomputeMode) -> Plan:
    devices = Cluster(devices=(card(),) * stages, link=WITHIN_THE_CARD)
    return plan_from_profile(
        found, devices, batch_size=batch, stages=stages, micro_batches=M, micro_batches_per_stage=1, schedule=schedule,
        recompute=recompute, time_limit_s=10.0,
    )  # fmt: skip


def listed_step_s(case: Case, model: Model) -> float:
    """What the data sheet of the card says."""
    sheet = sheet_of_kind(card().kind)
    if sheet is None:
        return float("nan")
    (name,) = (name for name, one in DATA_SHEETS.items() if one is sheet)
    sequence = trace(model.model, model.sample, precision=case.precision)
    devices = Cluster.of(f"1x{name}")
    found = profile(
        sequence, devices, sample=model.sample, loss_fn=model.loss_fn, target=model.target, progress=False,
        micro_batch_sizes=[case.batch // M],
    )  # fmt: skip
    plan = plan_from_profile(found, devices, batch_size=case.batch, micro_batches=M, schedule="1f1b", recompute="never")
    return plan.prediction.step_s


@pytest.mark.parametrize("name", CASES)
def test_predictions(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make(case.batch)
    begun_s = time.perf_counter()
    found = profile(
        trace(model.model, model.sample, precision=case.precision), [card()], sample=model.sample,
        loss_fn=model.loss_fn, target=model.target, micro_batch_sizes=[case.batch // M], time_budget_s=BUDGET_S,
        progress=False, cache=False,
    )  # fmt: skip
    took_s = time.perf_counter() - begun_s
    ratios, memory, plain_s = [], [], 0.0
    for schedule, recompute in WHOLE:
        plan = plan_of(found, case.batch, 1, schedule, recompute)
        pipe, seconds, most = measured_steps(model, plan)
        row_of_passes(name, plan, pipe)
        del pipe
        step_s, doubt = plan.prediction.step_s, plan.prediction.doubt
        ratios.append(median(seconds) / step_s)
        row(name, plan, "step", f"{step_s * 1e3:.1f} ms", f"{median(seconds) * 1e3:.1f} ms", ratios[-1])
        if doubt is not None:
            inside = fmean(step_s * (1 - doubt.step_less) <= one <= step_s * (1 + doubt.step_more) for one in seconds)
            print(f"stated -{doubt.step_less:.0%} +{doubt.step_more:.0%}, {inside:.0%} of steps inside", flush=True)
        memory.append(row_of_bytes(name, plan, most))
        if recompute == "never":
            print(f"runs within {runs_within(model, plan)} of it", flush=True)
            plain_s = median(seconds)
    plan = plan_of(found, case.batch, STAGES, "1f1b", "never")
    pipe, _, most = measured_steps(model, plan)
    row_of_bytes(name, plan, most)
    passes = pipe.measured()
    passes = passes[passes["what"].isin(["forward_s", "backward_s"])]
    for _, (stage, what, predicted_s, measured_s, ratio) in passes.iterrows():
        row(name, plan, f"{what} of {stage}", f"{predicted_s * 1e3:.2f} ms", f"{measured_s * 1e3:.2f} ms", ratio)
    listed_s = listed_step_s(case, model)
    row(name, plan, "step by data sheet", f"{listed_s * 1e3:.1f} ms", f"{plain_s * 1e3:.1f} ms", plain_s / listed_s)
    print(f"{name}: {time.perf_counter() - begun_s:.0f} s in all, {took_s:.0f} of tracing and profiling", flush=True)
    assert max(memory) <= 1 + MEMORY_OVER
    assert min(memory) >= case.least_memory
    assert max(abs(ratio - 1) for ratio in ratios) <= case.time_within
