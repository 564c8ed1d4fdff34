"""One training step of a random model by a random plan, against the plain model and against K = 1."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import executor.pipeline
from executor import Pipeline
from planner import Plan, plan_from_profile
from planner.cost.layer_costs import CostModel
from planner.plan.schedules import SCHEDULES, ScheduleName
from profiler import Cluster, LayerSequence, profile, trace
from tests.executor.conftest import _plan as plan_for
from tests.executor.messages_in_order import messages_in_order
from tests.executor.random_orders import orders_for
from tests.executor.same_result import random_segments
from tests.models.random_called import AroundCalled, loss_around
from tests.models.random_models import Recipe, RecipeModel, loss_of, sample

WITHIN = 1e-9  # of the largest gradient, in float64


@dataclass(frozen=True)
class Case:
    """A plan for a recipe, or for a model that has one `within` it: `repr` is what a test holds."""

    recipe: str
    batch_size: int
    micro_batches: int
    cuts: tuple[int, ...] = ()
    schedule: ScheduleName = "gpipe"
    recompute: tuple[tuple[tuple[int, int], ...], ...] = ((),)
    skips: bool = False
    replicas: int = 1
    chunks: int = 1
    orders: tuple[str, ...] = ()
    within: str = ""

    @property
    def asked(self) -> Asked:
        """What is trained."""
        return asked_of(Recipe.parse(self.recipe), self.within)

    def plan(self, sequence: LayerSequence) -> Plan:
        """The plan."""
        return plan_for(
            sequence,
            self.cuts,
            batch_size=self.batch_size,
            micro_batches=self.micro_batches,
            schedule=self.schedule,
            recompute=self.recompute,
            skips=self.skips,
            replicas=self.replicas,
            chunks=self.chunks,
            orders=self.orders,
        )

    def with_schedule(self, schedule: ScheduleName) -> Case:
        """The same with another schedule, of one chunk a rank and fixed orders."""
        return dataclasses.replace(self, schedule=schedule, chunks=1, orders=())

    @property
    def whole(self) -> Case:
        """The same micro-batches in one stage, with a backward pass in one."""
        schedule = "1f1b" if SCHEDULES[self.schedule].splits_backward else self.schedule
        return dataclasses.replace(self, cuts=(), recompute=((),), skips=False, schedule=schedule, chunks=1, orders=())


class Asked(NamedTuple):
    """A model and its loss."""

    model: nn.Module
    loss_fn: Callable[[Any, Tensor], Tensor]


def asked_of(recipe: Recipe, within: str) -> Asked:
    """Of a recipe by itself, or of a model that calls it as it is, in these ways."""
    if within:
        return Asked(AroundCalled(recipe, within), loss_around(recipe))
    return Asked(RecipeModel(recipe), loss_of(recipe))


def random_case(
    recipe: Recipe, layers: int, chance: random.Random, stages: int | None = None, within: str = ""
) -> Case:
    """A plan at random cuts, of any schedule; with chunks where the number of stages allows them.

    Micro-batches have two samples or more where the recipe's model is called as it is: see `by_hand`.
    """
    replicas = chance.choice((1, 1, 1, 2))
    micro_batches = chance.choice((1, 2, 3, 4))
    ones = chance.random() < 0.6
    samples = micro_batches if ones else micro_batches * chance.choice((1, 2)) + chance.choice((0, 1))
    samples += micro_batches if within else 0
    stages = min(stages or chance.choice((2, 2, 3, 4)), layers)
    cuts = tuple(sorted(chance.sample(range(1, layers), stages - 1)))
    segments = [random_segments(chance, *bounds) for bounds in pairwise([0, *cuts, layers])]
    schedule = chance.choice([name for name, record in SCHEDULES.items() if stages % record.fewest_chunks == 0])
    record = SCHEDULES[schedule]
    least, most = record.fewest_chunks, min(record.most_chunks, stages)
    able = [number for number in range(least, most + 1) if stages % number == 0]
    chunks = chance.choice([number for number in able if number > 1] or able)
    return Case(
        recipe=str(recipe),
        batch_size=replicas * samples,
        micro_batches=micro_batches,
        cuts=cuts,
        schedule=schedule,
        chunks=chunks,
        orders=orders_for(schedule, stages, micro_batches, chance, chunks),
        recompute=tuple(map(tuple, segments)) if chance.random() < 0.5 else ((),) * stages,
        skips=chunks == 1 and chance.random() < 0.5,  # chunks relay their values
        replicas=replicas,
        within=within,
    )


def planned_case(subject: Subject, chance: random.Random) -> Case:
    """The plan that the planner makes for a model, a number of stages and a batch, from costs that it counts."""
    recipe, size, micro_batches = subject.recipe, 6, chance.choice((2, 3, 6))
    cluster = Cluster.of("4xT4", link="pcie3")
    counted = profile(
        subject.sequence,
        cluster,
        sample=sample(size),
        loss_fn=loss_of(recipe),
        target=target_of(size),
        micro_batch_sizes=sorted({size // micro_batches, 1}),
        progress=False,
        cache=False,
    )
    costs, most = CostModel(counted), min(4, micro_batches, len(subject.sequence))
    splits = all(costs.splits_backward(device.kind) for device in cluster.devices)
    able = [name for name in SCHEDULES if _least_stages(name) <= most]
    schedule = chance.choice([name for name in able if splits or not SCHEDULES[name].splits_backward])
    chunks, split = SCHEDULES[schedule].fewest_chunks, SCHEDULES[schedule].splits_backward
    plan = plan_from_profile(
        counted,
        cluster,
        batch_size=size,
        stages=chance.randrange(_least_stages(schedule), most + 1, chunks),
        chunks=chunks,
        micro_batches=micro_batches,
        micro_batches_per_stage=1,
        recompute=chance.choice(("auto", "always", "never")),
        schedule=schedule,
        skips="relayed" if split else chance.choice(("relayed", "direct")),
    )
    return Case(
        recipe=str(recipe),
        batch_size=size,
        micro_batches=len(plan.micro_batch_sizes),
        cuts=tuple(stage.first_layer for stage in plan.stages[1:]),
        schedule=plan.schedule,
        recompute=tuple(tuple((part.first, part.stop) for part in stage.recompute) for stage in plan.stages),
        skips=bool(plan.skips),
        chunks=plan.chunks,
        orders=plan.orders,
    )


def _least_stages(schedule: ScheduleName) -> int:
    """The planner has chunks for two ranks or more."""
    chunks = SCHEDULES[schedule].fewest_chunks
    return chunks if chunks == 1 else 2 * chunks


@dataclass(frozen=True)
class Trained:
    """Of a step: the loss, gradients (None where there is none), buffers."""

    loss: float
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def target_of(size: int) -> Tensor:
    return torch.linspace(-0.5, 0.5, size, dtype=torch.float64)


class Subject:
    """A recipe's model, traced once: what a pipeline traces again is the same."""

    def __init__(self, recipe: str, within: str = "") -> None:
        self.recipe = Recipe.parse(recipe)
        self.model, self.loss_fn = asked_of(self.recipe, within)
        self.sequence = trace(self.model, sample(4))
        self._buffers = {name: value.clone() for name, value in self.model.named_buffers()}

    def trained(self, case: Case) -> Trained:
        """What a step of the pipeline leaves, of this process's stages."""
        self.model.zero_grad()
        for name, value in self.model.named_buffers():
            value.copy_(self._buffers[name])
        with mock.patch.object(executor.pipeline, "traced_as_planned", lambda model, plan: self.sequence):
            pipe = Pipeline(self.model, case.plan(self.sequence), loss_fn=self.loss_fn)
        with messages_in_order():
            loss = pipe.step(*sample(case.batch_size), target=target_of(case.batch_size))
        return Trained(
            loss.item(),
            {name: parameter.grad for name, parameter in pipe.named_parameters()},
            {name: value.clone() for name, value in pipe.state_dict().items() if name in self._buffers},
        )


def by_hand(case: Case) -> Trained:
    """The plain model's gradients of each micro-batch, weighted, added up where nothing shares their memory.

    A micro-batch of one sample holds it twice, which changes no mean: `contiguous` and `reshape` copy a transposed
    tensor of several samples and may not copy that of one. What is written later shows the difference, and a pipeline
    trains every micro-batch as the larger ones.
    """
    model, loss_fn = case.asked
    start = {name: value.clone() for name, value in model.named_buffers()}
    kept: dict[str, Tensor] = {}
    inputs, target = sample(case.batch_size), target_of(case.batch_size)
    total: dict[str, Tensor | None] = {name: None for name, _ in model.named_parameters()}
    losses = 0.0
    for replica, indices in enumerate(torch.arange(case.batch_size).tensor_split(case.replicas)):
        for name, value in model.named_buffers():
            value.copy_(start[name])
        for part in indices.tensor_split(case.micro_batches):
            model.zero_grad()
            rows = part.repeat(2) if len(part) == 1 else part
            loss = loss_fn(model(*(tensor[rows] for tensor in inputs)), target[rows])
            loss = loss * (len(part) / case.batch_size)
            loss.backward()
            losses += loss.item()
            for name, parameter in model.named_parameters():
                old, new = total[name], parameter.grad
                if new is not None:
                    total[name] = new.clone() if old is None else old + new
        if replica == 0:
            kept = {name: value.clone() for name, value in model.named_buffers()}
    return Trained(losses, total, kept)


def off(found: Trained, plain: Trained) -> list[str]:
    """What differs from the plain model's by more than rounding."""
    names = [] if abs(found.loss - plain.loss) <= WITHIN * max(1.0, abs(plain.loss)) else ["loss"]
    largest = max([1e-3, *(g.abs().max().item() for g in plain.gradients.values() if g is not None and g.numel())])
    names += [name for name, mine in found.gradients.items() if not _close(mine, plain.gradients[name], largest)]
    return names + [name for name, mine in found.buffers.items() if not _close(mine, plain.buffers[name], 1.0)]


def _close(mine: Tensor | None, theirs: Tensor | None, scale: float) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return bool(((mine - theirs).abs() <= WITHIN * scale).all())  # also where there is no element


def differing(found: Trained, whole: Trained) -> list[str]:
    """What is not equal in every bit."""
    names = [] if found.loss == whole.loss else ["loss"]
    for mine, theirs in ((found.gradients, whole.gradients), (found.buffers, whole.buffers)):
        names += [name for name, value in mine.items() if not _same(value, theirs[name])]
    return names


def _same(mine: Any, theirs: Any) -> bool:
    return mine is theirs if mine is None or theirs is None else torch.equal(mine, theirs)


def wrong(case: Case, subject: Subject) -> dict[str, list[str]]:
    """What is wrong with a case, in one process; empty if nothing is."""
    found, whole, plain = subject.trained(case), subject.trained(case.whole), by_hand(case)
    faults = {
        "off the plain model": off(found, plain),
        "K = 1 off the plain model": off(whole, plain),
        "not the bits of K = 1": differing(found, whole),
    }
    return {fault: names for fault, names in faults.items() if names}
