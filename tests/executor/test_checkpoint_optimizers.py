"""Random optimizers, saved with one plan and loaded with another: all goes on in every bit, or nothing has changed."""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline, checkpoint, launch
from executor.checkpoint import load_checkpoint, save_checkpoint
from planner import ExecutionError, Plan, PlanError
from planner.plan.schedules import SCHEDULES
from profiler import LayerSequence, trace
from tests.executor import known_traces
from tests.executor.conftest import _plan as plan_of
from tests.executor.random_orders import orders_for, random_chunks

SIZE, M = 6, 2


class Model(nn.Module):
    """Tied, partly frozen, with statistics."""

    def __init__(self, *, tied: bool = False, frozen: Sequence[str] = ()) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=bias) for bias in (True, False, True, True))
        self.norm = nn.BatchNorm1d(4)
        if tied:
            self.layers[3].weight = self.layers[0].weight
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in frozen)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.norm(torch.tanh(layer(x)) + x * 0.5)
        return x


MODELS: tuple[dict[str, Any], ...] = (
    {},
    {"tied": True},
    {"frozen": ("layers.0.bias", "layers.2.weight")},
    {"tied": True, "frozen": ("norm.weight", "layers.1.weight")},
)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.01),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
}

Named = list[tuple[str, nn.Parameter]]
GROUPS: dict[str, Callable[[Named], list[Any]]] = {
    "all": lambda named: [parameter for _, parameter in named],
    "trained": lambda named: [parameter for _, parameter in named if parameter.requires_grad],
    "by kind": lambda named: [
        {"params": [own for name, own in named if name.endswith("weight")], "lr": 0.02},
        {"params": [own for name, own in named if name.endswith("bias")], "weight_decay": 0.0},
    ],
    "each": lambda named: [{"params": [own], "lr": 0.01 * (1 + len(name) % 3)} for name, own in named],
    "with names": lambda named: [{"params": named}],
    "turned": lambda named: [parameter for _, parameter in reversed(named)],
    "weights": lambda named: [parameter for name, parameter in named if name.endswith("weight")],
    "one": lambda named: [own for name, own in named if name == "layers.1.weight"],
}

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda _: None,
    "steps": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
}


@dataclass(frozen=True)
class Kind:
    """What a run trains with; a second optimizer takes the vectors from the first."""

    model: int
    optimizer: str
    groups: str
    scheduler: str
    second: str = ""

    @classmethod
    def drawn(cls, chance: random.Random) -> Kind:
        """Any."""
        model = chance.randrange(len(MODELS))
        second = chance.choice([*OPTIMIZERS]) if chance.random() < 0.4 else ""
        return cls(model, chance.choice([*OPTIMIZERS]), chance.choice([*GROUPS]), chance.choice([*SCHEDULERS]), second)

    def changed(self, chance: random.Random) -> Kind:
        """The same, or with another optimizer or other groups."""
        optimizer = chance.choice([*OPTIMIZERS]) if chance.random() < 0.15 else self.optimizer
        groups = chance.choice([*GROUPS]) if chance.random() < 0.6 else self.groups
        second = chance.choice(["", *OPTIMIZERS]) if chance.random() < 0.15 else self.second
        return Kind(self.model, optimizer, groups, self.scheduler, second)


class Run:
    """A training by a random plan."""

    def __init__(self, kind: Kind, plan: Plan) -> None:
        self.pipe = Pipeline(Model(**MODELS[kind.model]), plan, loss_fn=functional.mse_loss, compare_first_step=False)
        named = list(self.pipe.named_parameters())
        vectors = [own for _, own in named if own.dim() == 1] if kind.second else []
        self.optimizer = OPTIMIZERS[kind.optimizer](
            GROUPS[kind.groups]([(name, own) for name, own in named if own.dim() > 1 or not vectors])
        )
        self.optimizers = [self.optimizer, *([OPTIMIZERS[kind.second](vectors)] if vectors else [])]
        self.scheduler = SCHEDULERS[kind.scheduler](self.optimizer)
        self.also = {} if self.scheduler is None else {"scheduler": self.scheduler}

    def steps(self, numbers: Sequence[int]) -> list[float]:
        """Train on batches with these numbers."""
        losses = []
        for number in numbers:
            chance = torch.Generator().manual_seed(number)
            x, y = (torch.randn(SIZE, 4, generator=chance) for _ in range(2))
            losses.append(self.pipe.step(x, target=y).item())
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if self.scheduler is not None:
                self.scheduler.step()
        return losses

    def state(self) -> dict[str, Any]:
        """All that a checkpoint is to bring back, by name."""
        found: dict[str, Any] = {name: value.clone() for name, value in self.pipe.state_dict().items()}
        found["step"] = self.pipe.steps
        names = {id(parameter): name for name, parameter in self.pipe.named_parameters()}
        for optimizer, group in ((one, group) for one in self.optimizers for group in one.param_groups):
            for parameter in group["params"]:
                name = names[id(parameter)]
                found[f"options of {name}"] = {key: value for key, value in group.items() if not key.startswith("para")}
                for key, value in optimizer.state.get(parameter, {}).items():
                    found[f"{key} of {name}"] = value.clone() if isinstance(value, Tensor) else value
        return found


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what is not equal in every bit."""

    def same(name: str) -> bool:
        mine, theirs = one.get(name), other.get(name)
        if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
            return torch.equal(mine, theirs)
        return type(mine) is type(theirs) and bool(mine == theirs)

    return sorted(name for name in one.keys() | other.keys() if not same(name))


@cache
def traced(number: int) -> LayerSequence:
    return trace(Model(**MODELS[number]), torch.ones(SIZE, 4), progress=False)


def random_plan(sequence: LayerSequence, chance: random.Random) -> Plan:
    ranks = chance.choice((1, 2, 3))
    schedule = chance.choice(tuple(SCHEDULES))
    chunks = random_chunks(schedule, 1, chance)
    stages = min(ranks, len(sequence) // chunks) * chunks
    cuts = sorted(chance.sample(range(1, len(sequence)), stages - 1))
    orders = orders_for(schedule, stages, M, chance, chunks)
    return plan_of(sequence, cuts, batch_size=SIZE, micro_batches=M, schedule=schedule, chunks=chunks, orders=orders)


def check(seed: int, sequences: Sequence[LayerSequence]) -> str:
    """Save, load by another plan and, where that is refused, see that it was to be; says what came of it."""
    chance = random.Random(seed)
    kind = Kind.drawn(chance)
    later, sequence = kind.changed(chance), sequences[kind.model]
    begun, other = (Run(one, random_plan(sequence, chance)) for one in (kind, later))
    begun.steps(range(chance.choice((0, 1, 2))))
    other.steps(range(90, 90 + chance.choice((0, 1))))
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(folder, begun.pipe, begun.optimizers, also=begun.also)
        saved, before = begun.state(), other.state()
        try:
            load_checkpoint(folder, other.pipe, other.optimizers, also=other.also)
        except ExecutionError as problem:
            assert kind != later, problem
            assert differing(before, other.state()) == [], problem
            return "refused"
    assert [*map(type, begun.optimizers)] == [*map(type, other.optimizers)]
    lost = differing(saved, other.state())
    frozen = MODELS[kind.model].get("frozen", ())  # of which there is nothing but options
    lost = [name for name in lost if name.removeprefix("options of ") not in frozen or name in other.state()]
    assert lost == []
    if len(begun.optimizer.param_groups) == len(other.optimizer.param_groups):  # as schedulers want it
        assert other.steps((7, 8)) == begun.steps((7, 8))
    return "right"


@pytest.fixture
def sequences(traced_once: None) -> Any:
    found = [traced(number) for number in range(len(MODELS))]
    for sequence in found:
        known_traces.remember(sequence)
    yield found
    known_traces.forget()


def test_whatever_is_saved_goes_on_or_is_refused(sequences: list[LayerSequence]) -> None:
    """An optimizer that held fewer parameters than the saved one loaded what it held, and the rest was lost.

    And where parameters of two groups came into one, it had the options of the last.
    """
    found: list[str] = []

    @settings(derandomize=True, deadline=None, max_examples=25)
    @given(st.integers(0, 2**32))
    def some(seed: int) -> None:
        found.append(check(seed, sequences))

    some()
    assert {*found} == {"right", "refused"}


@pytest.mark.slow
def test_many_more(sequences: list[LayerSequence]) -> None:
    found = [check(seed, sequences) for seed in range(80)]
    assert min(found.count("right"), found.count("refused")) > 15


SAVED = Kind(0, "momentum", "all", "none")


@pytest.mark.parametrize(
    ("later", "told"),
    [
        (
            "weights",
            r"was saved with an optimizer of 9 parameters, 4 of which this one does not hold, such as layers.0.b",
        ),
        (
            "one",
            r"was saved with an optimizer of 9 parameters, 8 of which this one does not hold, such as layers.0.bias",
        ),
    ],
)
def test_an_optimizer_of_fewer_parameters_is_refused(
    sequences: list[LayerSequence], tmp_path: Path, later: str, told: str
) -> None:
    begun, other = (
        Run(Kind(0, "momentum", groups, "none"), plan_of(sequences[0], [2], batch_size=SIZE, micro_batches=M))
        for groups in ("all", later)
    )
    begun.steps([0])
    save_checkpoint(tmp_path, begun.pipe, begun.optimizer)
    with pytest.raises(ExecutionError, match=told):
        load_checkpoint(tmp_path, other.pipe, other.optimizer)


def test_groups_with_other_options_do_not_become_one(sequences: list[LayerSequence], tmp_path: Path) -> None:
    begun, other = (
        Run(Kind(0, "momentum", groups, "none"), plan_of(sequences[0], [], batch_size=SIZE, micro_batches=M))
        for groups in ("by kind", "all")
    )
    save_checkpoint(tmp_path, begun.pipe, begun.optimizer)
    with pytest.raises(
        ExecutionError, match=r"in two groups, which differ in lr.*, and this one has them in one; make"
    ):
        load_checkpoint(tmp_path, other.pipe, other.optimizer)


def in_processes(plan: Plan, folder: Path, groups: str) -> dict[str, Any]:
    """Load what one process has saved, with an optimizer of the parameters that each has."""
    run = Run(Kind(0, "momentum", "all", "none"), plan)
    if groups == "those of the last stage":
        held = [own for name, own in run.pipe.named_parameters() if name.startswith("layers.3")]
        run.optimizer = OPTIMIZERS["momentum"](held or [*run.pipe.parameters()][:1])
    load_checkpoint(folder, run.pipe, run.optimizer)
    return run.state()


def test_it_is_the_optimizers_of_all_processes_that_count(sequences: list[LayerSequence], tmp_path: Path) -> None:
    begun = Run(SAVED, plan_of(sequences[0], [], batch_size=SIZE, micro_batches=M))
    begun.steps([0, 1])
    save_checkpoint(tmp_path, begun.pipe, begun.optimizer)
    plan = plan_of(sequences[0], [2], batch_size=SIZE, micro_batches=M)
    first, second = launch(in_processes, plan, (tmp_path, "all"))
    assert differing({**first, **second}, begun.state()) == []
    with pytest.raises(
        ExecutionError, match=r"rank 0 of 2 failed: .* of which this one does not hold, such as layers.0"
    ):
        launch(in_processes, plan, (tmp_path, "those of the last stage"))


class Ema:
    """What is another in each process."""

    def __init__(self, pipe: Pipeline) -> None:
        self.held = {name: value.clone() for name, value in pipe.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.held = state_dict


def with_two(plan: Plan, folder: Path, what: str) -> dict[str, Any]:
    run = Run(Kind(0, "momentum", "all", "none", "AdamW"), plan)
    first, second = run.optimizers
    if what == "beside":
        save_checkpoint(folder, run.pipe, first, also={"second": second})
    elif what == "beside, loaded":
        load_checkpoint(folder, run.pipe, first, also={"second": second})
    elif what == "same twice":
        save_checkpoint(folder, run.pipe, [first, second, torch.optim.SGD(run.pipe.parameters(), lr=0.1)])
    elif what == "other order":
        in_order = [first, second] if torch.distributed.get_rank() == 0 else [second, first]
        save_checkpoint(folder, run.pipe, in_order)
    elif what == "unlike":
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            save_checkpoint(folder, run.pipe, also={"ema": Ema(run.pipe)})
        told = [str(one.message) for one in said if "whose state on rank 1 is another" in str(one.message)]
        return {"told": told}
    elif what == "save":
        run.steps((0, 1, 2))
        save_checkpoint(folder, run.pipe, run.optimizers)
        run.steps((3, 4))
    else:
        load_checkpoint(folder, run.pipe, run.optimizers)
        run.steps((3, 4))
    return run.state()


def test_a_training_with_two_optimizers_goes_on_in_processes(sequences: list[LayerSequence], tmp_path: Path) -> None:
    """One of them, saved beside the other, came back with the state of rank 0 on all, without a word."""
    plan = plan_of(sequences[0], [2], batch_size=SIZE, micro_batches=M)
    saved = launch(with_two, plan, (tmp_path, "save"))
    assert all(differing(*both) == [] for both in zip(saved, launch(with_two, plan, (tmp_path, "go on")), strict=True))
    alone = with_two(plan, tmp_path, "go on")
    assert differing({**saved[0], **saved[1]}, alone) == []


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("beside", r"also holds the optimizer 'second' of parameters .* pass all optimizers as a list"),
        ("same twice", "optimizers 0 and 2 step the same parameter, of shape"),
        ("other order", "rank 0 saves the optimizer SGD, AdamW and rank 1 AdamW, SGD; pass the same ones"),
    ],
)
def test_optimizers_that_cannot_be_kept_are_refused(
    sequences: list[LayerSequence], tmp_path: Path, what: str, told: str
) -> None:
    plan = plan_of(sequences[0], [2], batch_size=SIZE, micro_batches=M)
    with pytest.raises(PlanError, match=told):
        launch(with_two, plan, (tmp_path, what))
    assert [*tmp_path.glob("step-*")] == []


def test_a_checkpoint_with_an_optimizer_beside_loads_in_one_process_alone(
    sequences: list[LayerSequence], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions wrote such ones."""
    with monkeypatch.context() as earlier:
        earlier.setattr(checkpoint, "refuse_beside", lambda *_: None)
        with_two(plan_of(sequences[0], [], batch_size=SIZE, micro_batches=M), tmp_path, "beside")
    plan = plan_of(sequences[0], [2], batch_size=SIZE, micro_batches=M)
    with_two(plan, tmp_path, "beside, loaded")
    with pytest.raises(PlanError, match=r"also holds the optimizer 'second' .* load it in one process"):
        launch(with_two, plan, (tmp_path, "beside, loaded"))


def test_what_is_kept_once_and_differs_is_said(sequences: list[LayerSequence], tmp_path: Path) -> None:
    first, second = launch(with_two, plan_of(sequences[0], [2], batch_size=SIZE, micro_batches=M), (tmp_path, "unlike"))
    assert (len(first["told"]), len(second["told"])) == (1, 0)


class Tables(nn.Module):
    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.middle = nn.Embedding(8, 4, sparse=first), nn.Linear(4, 8)
        self.last = nn.Embedding(8, 4, sparse=last)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(ids) * torch.tanh(self.middle(self.first(ids))).sum(1, keepdim=True)


STEPPERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **OPTIMIZERS,
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True),
    "damped": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9, dampening=0.5),
}


def stepped_tables(plan: Plan, folder: Path, optimizer: str, sparse: tuple[bool, bool], load: bool) -> list[float]:
    """Losses of two steps after a checkpoint is saved, or loaded; its error without one."""
    pipe = Pipeline(Tables(*sparse), plan, loss_fn=functional.mse_loss)
    given = STEPPERS[optimizer](list(pipe.parameters()))

    def step() -> float:
        loss = pipe.step(torch.arange(SIZE), target=torch.ones(SIZE, 4)).item()
        given.step()
        given.zero_grad()
        return loss

    if load:
        load_checkpoint(folder, pipe, given)
    else:
        step(), step()
        save_checkpoint(folder, pipe, given)
    return [step(), step()]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("processes", [1, 2])
def test_what_an_optimizer_keeps_of_sparse_embeddings_is_saved_or_refused(
    tmp_path: Path, seed: int, processes: int
) -> None:
    """Its momentum ended in an error of torch's writer, which named neither the parameter nor what to do."""
    chance = random.Random(seed)
    sparse = chance.random() < 0.6, chance.random() < 0.6
    optimizer = chance.choice(["SGD", "momentum", "nesterov", "damped", "Adagrad"])
    sequence = trace(Tables(*sparse), torch.arange(SIZE))
    cuts = [chance.randrange(1, len(sequence))] if processes == 2 else []
    plan = plan_of(sequence, cuts, batch_size=SIZE, micro_batches=M)

    def run(load: bool) -> Any:
        arguments = (tmp_path, optimizer, sparse, load)
        return launch(stepped_tables, plan, arguments) if processes == 2 else [stepped_tables(plan, *arguments)]

    if any(sparse) and optimizer in ("momentum", "nesterov", "damped"):
        with pytest.raises(PlanError, match=r"keeps 'momentum_buffer' of '(first|last)\.weight' as a sparse tensor"):
            run(load=False)
        assert [*tmp_path.glob("*")] == []
    else:
        assert run(load=False) == run(load=True)
