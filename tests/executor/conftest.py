"""Plans with made-up predictions, for tests of what runs them."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from executor import pipeline
from planner.cost.skips import plan_skips, routes_of
from planner.plan.of_model import traced_as_planned
from planner.plan.plan import Plan
from planner.plan.prediction import Prediction
from planner.plan.schedules import SCHEDULES, ScheduleName
from planner.plan.stage import Segment, Stage, StageMemory, StageTimes
from profiler.device import Device
from profiler.sample_spec import SampleSpec
from profiler.tracing.dataflow import skip_values
from profiler.tracing.sequence import LayerSequence
from tests import fork_server
from tests.executor import known_traces

PlanFor = Callable[..., Plan]
Segments = Sequence[Sequence[tuple[int, int]]]  # for each stage the recomputed segments
CPU = Device(name="cpu", kind="cpu", memory_bytes=2**30, threads=1)
NO_MEMORY = StageMemory(
    parameters=0, gradients=0, optimizer=0, activations=0, transient=0, receive_buffers=0, reserve=0
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """As many threads as a worker has: the order of additions depends on their number."""
    torch.set_num_threads(1)


def shared_traces() -> Callable[[nn.Module, Plan], LayerSequence]:
    """Stands in for `traced_as_planned` in a rank: the pipelines of a model that is left as it is share its trace."""
    traced: dict[tuple[int, SampleSpec], tuple[nn.Module, LayerSequence]] = {}

    def look_up(model: nn.Module, plan: Plan) -> LayerSequence:
        key = id(model), plan.sample
        if key not in traced:
            traced[key] = model, traced_as_planned(model, plan)  # with the model, so that its number stays taken
        return traced[key][1]

    return look_up


@pytest.fixture
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipelines take the layers that a test has traced for its plan, where their model is like the one it traced."""
    monkeypatch.setattr(pipeline, "traced_as_planned", known_traces.known_trace)


@pytest.fixture
def inherited(monkeypatch: pytest.MonkeyPatch, traced_once: None) -> Callable[..., LayerSequence]:
    """`sequence = inherited(function, "argument")`: what the function returns, which ranks do not trace again either.

    For models that many ranks train: their servers trace each once.
    """

    def make(function: Callable[[str], LayerSequence], argument: str = "") -> LayerSequence:
        monkeypatch.setenv(fork_server.INHERITED, known_traces.named(function, argument))
        return function(argument)

    return make


@pytest.fixture
def plan_for() -> Iterator[PlanFor]:
    """Builds a plan from cuts: `plan_for(sequence, [3, 5], batch_size=10, micro_batches=4, recompute=True)`.

    `recompute` is one flag, one flag a stage, or for each stage its segments; `batch_size` is that of all replicas;
    with `chunks` ranks have so many stages each; `orders` are those of schedules that each plan has its own of; with
    `skips` values go past stages that do not read them.
    """

    def make(sequence: LayerSequence, *cuts: Any, **settings: Any) -> Plan:
        known_traces.remember(sequence)
        return _plan(sequence, *cuts, **settings)

    yield make
    known_traces.forget()


def _plan(
    sequence: LayerSequence,
    cuts: Sequence[int] = (),
    *,
    batch_size: int,
    micro_batches: int,
    recompute: bool | Sequence[bool] | Segments = False,
    schedule: ScheduleName = "gpipe",
    ranks: Sequence[int] | None = None,
    replicas: int = 1,
    shard_optimizer: bool = False,
    skips: bool = False,
    chunks: int = 1,
    orders: Sequence[str] = (),
) -> Plan:
    bounds = [0, *cuts, len(sequence)]
    smaller, larger = divmod(batch_size // replicas, micro_batches)
    sizes = (smaller + 1,) * larger + (smaller,) * (micro_batches - larger)
    stages_bounds = list(itertools.pairwise(bounds))
    each: Any = [recompute] * len(stages_bounds) if isinstance(recompute, bool) else recompute
    segments = [
        (([both] if again else []) if isinstance(again, bool) else again)
        for both, again in zip(stages_bounds, each, strict=True)
    ]
    pass_s = 0.5 / (len(stages_bounds) * micro_batches)  # one after the other they take the step's second
    times = tuple(
        StageTimes(
            micro_batch_size=size,
            forward_s=pass_s,
            recompute_s=0.0,
            backward_s=pass_s,
            send_forward_s=0.0,
            send_backward_s=0.0,
        )
        for size in sorted(set(sizes))
    )
    ring = SCHEDULES[schedule].ring(len(stages_bounds) // chunks, chunks)
    stages = tuple(
        Stage(
            first_layer=first,
            stop_layer=stop,
            module_paths=(sequence.layers[first].name, sequence.layers[stop - 1].name),
            devices=(CPU,) * replicas,
            rank=ring.rank_of(index) if ranks is None else ranks[index],
            parameters=(),
            parameter_count=0,
            recompute=tuple(Segment(first=begin, stop=end) for begin, end in segments[index]),
            times=times,
            optimizer_s=0.0,
            memory=NO_MEMORY,
        )
        for index, (first, stop) in enumerate(stages_bounds)
    )
    routes = routes_of(skip_values(sequence, sizes), bounds[1:]) if skips else ()
    return Plan(
        model_fingerprint=sequence.fingerprint,
        profile_fingerprint="0",
        sample=sequence.sample,
        batch_size=batch_size,
        micro_batch_sizes=sizes,
        schedule=schedule,
        chunks=chunks,
        orders=tuple(orders),
        replicas=replicas,
        shard_optimizer=shard_optimizer,
        optimizer="AdamW",
        stages=stages,
        skips=plan_skips(routes, lambda *_: None, sorted(set(sizes))),
        prediction=Prediction(
            step_s=1.0,
            optimizer_s=0.0,
            bubble=1 - 1 / len({stage.rank for stage in stages}),
            samples_per_s=float(batch_size),
            lower_bound_s=1.0,
            gap=0.0,
            one_device_s=1.0,
        ),
    )
