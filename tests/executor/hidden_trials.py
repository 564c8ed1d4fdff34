"""What comes of a model that hides something: right, refused by name, or a defect.

    trace, plan of 3 stages, Pipeline.step for several batches   against   a plain loop over their micro-batches
    or, for models that draw random numbers,                     against   one stage; and results must vary as theirs do

and in the end the parameters and buffers.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from executor import Pipeline
from profiler import trace
from profiler.errors import ExecutionError, PlanError, UnfaithfulTraceError
from profiler.run.loss import LossFunction
from tests.executor.conftest import _plan as plan_for
from tests.models.hidden_state import DRAWING, FEATURES, fresh, hiding

for _kind in ("backward", "between", "gradients", "means", "more", "novel", "regions", "tensors", "world"):
    importlib.import_module(f"tests.models.hidden_{_kind}")  # which adds its bodies

T = TypeVar("T")
SIZE, M, STEPS = 8, 4, 5
WITHIN = 1e-9  # relative, in float64


class Outcome(StrEnum):
    """What came of a model."""

    RIGHT = "right"
    REFUSED = "refused"
    STOPPED = "stopped"  # a later micro-batch took another branch
    WRONG = "WRONG"
    CRASHED = "CRASHED"
    UNCLEAR = "UNCLEAR"  # refused, without a place or a next step
    NOTHING = "does not train"


GOOD = frozenset({Outcome.RIGHT, Outcome.REFUSED, Outcome.STOPPED, Outcome.NOTHING})
AT_TIMES = frozenset({"an object's number"})
"""What is the same in two traces by chance: an object takes the address of one that has just gone."""
KNOWN = frozenset({"a text of numbers", "the precision of decimals"})  # what notebooks/limits.md says is not noticed


@dataclass(frozen=True)
class Found:
    """What came of it, and why."""

    outcome: Outcome
    why: str = ""


@dataclass(frozen=True)
class Training:
    """What some steps yield."""

    losses: tuple[Tensor, ...]
    gradients: tuple[dict[str, Tensor], ...]
    state: dict[str, Any]


def batches(steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    """Unlike ones: later ones are larger, and of another sign."""
    made = torch.Generator().manual_seed(11)
    scales = [(-1) ** step * (1.0 + step) for step in range(steps)]
    return [
        (
            torch.randn(SIZE, FEATURES, generator=made, dtype=torch.float64) * scale,
            torch.randn(SIZE, FEATURES, generator=made, dtype=torch.float64),
        )
        for scale in scales
    ]


def by_hand(names: Sequence[str], data: Sequence[tuple[Tensor, Tensor]], rate: float = 0.05) -> Training:
    """A plain loop."""
    model = hiding(names)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses, gradients = [], []
    for x, y in data:
        total = torch.zeros((), dtype=torch.float64)
        for part, aims in zip(x.clone().chunk(M), y.chunk(M), strict=True):
            loss = functional.mse_loss(model(part), aims) / M
            loss.backward()
            total += loss.detach()
        losses.append(total)
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    known = hiding(names).state_dict().keys()  # a call may give a module one more name
    return Training(tuple(losses), tuple(gradients), {k: v for k, v in model.state_dict().items() if k in known})


def by_plan(
    names: Sequence[str],
    data: Sequence[tuple[Tensor, Tensor]],
    stages: int,
    rate: float = 0.05,
    recompute: Sequence[bool] | None = None,
    loss_fn: LossFunction = functional.mse_loss,
) -> Training:
    """By a plan, of which by default the first of several stages is recomputed.

    Raises:
        PlanError: it is refused.
    """
    model = hiding(names)
    with left_as_it_was(model):
        sequence = trace(model, data[0][0][: SIZE // M].clone(), progress=False)
    fresh()
    layers = len(sequence)
    stages = min(stages, layers)
    again = recompute or [stages > 1, *[False] * (stages - 1)]
    cuts = [round(layers * stage / stages) for stage in range(1, stages)]
    plan = plan_for(sequence, cuts, batch_size=SIZE, micro_batches=M, recompute=again[:stages])
    pipe = Pipeline(model, plan, loss_fn=loss_fn)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=rate)
    losses, gradients = [], []
    for x, y in data:
        losses.append(pipe.step(x.clone(), target=y).detach().clone())
        gradients.append({name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return Training(tuple(losses), tuple(gradients), dict(pipe.state_dict()))


@contextlib.contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Whatever comes of the block, the model's parameters and buffers are what they were, and have no gradients."""
    held_now = model.state_dict().items()
    before = {name: held.clone() for name, held in held_now if isinstance(held, Tensor) and not is_lazy(held)}
    try:
        yield
    finally:
        now = model.state_dict()
        moved = [name for name, held in before.items() if name not in now or not torch.equal(now[name], held)]
        moved += [name for name, held in model.named_parameters() if held.grad is not None]
        assert not moved, f"the trace has changed {moved}"


def tried(names: Sequence[str]) -> Found:
    """What comes of a model of these bodies; scripting warns that it is deprecated."""
    return quietly(_tried, names)


def quietly(call: Callable[..., T], *args: Any) -> T:
    """What a call returns, whatever it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args)


def _tried(names: Sequence[str]) -> Found:
    data = batches()
    try:
        expected = by_hand(names, data)
    except Exception as problem:
        return Found(Outcome.NOTHING, f"{type(problem).__name__}: {problem}")
    try:
        found = by_plan(names, data, 3)
        if DRAWING.intersection(names):
            expected = by_plan(names, data, 1)
            if frozen(names):
                return Found(Outcome.WRONG, "its random numbers are the same in each step")
    except PlanError as problem:
        return refused(problem, at_times=bool(AT_TIMES.intersection(names)))
    except Exception as problem:
        return Found(Outcome.CRASHED, f"{type(problem).__name__}: {problem}")
    apart = difference(found, expected)
    return Found(Outcome.RIGHT if not apart else Outcome.WRONG, apart)


def refused(problem: PlanError, at_times: bool = False) -> Found:
    """Whether it says where, and what to do; what changes at times alone may be found out without a place."""
    text = str(problem).partition("\n")[0]
    if isinstance(problem, ExecutionError) and "in this micro-batch and was" in text:
        return Found(Outcome.STOPPED, text)
    if isinstance(problem, UnfaithfulTraceError):
        return Found(Outcome.REFUSED, text)
    told = (
        r"module '.*' is to be called as it is.* writes its (parameter|buffer) '.*'; use|"
        r"module '.*' is to be called as it is.* it returns something else: .*; keep|"  # in a plan, so no line is named
        r"torch\.utils\.checkpoint with use_reentrant=True .*; use|"
        r"forward pass of module '.*' makes, replaces or takes away its .*; make|has no shape before the first call|"
        r"\.py:\d+|backward hook|module '.*' is called as it is.*; (make it|use) a buffer|traced twice in a row, its "
    )
    told += "|if it is the same, what it computes changes at times" if at_times else ""
    clear = re.search(told, text) is not None
    return Found(Outcome.REFUSED if clear else Outcome.UNCLEAR, f"{type(problem).__name__}: {text}")


def frozen(names: Sequence[str]) -> bool:
    """Whether the same step again yields the same where the model's own varies."""
    data = batches(1) * 6
    its_own = {float(loss) for loss in by_hand(names, data, rate=0.0).losses}
    return len(its_own) > 1 and len({float(loss) for loss in by_plan(names, data, 3, rate=0.0).losses}) == 1


def difference(found: Training, expected: Training) -> str:
    """The first difference in words; "" if there is none."""
    for step, (one, other) in enumerate(zip(found.losses, expected.losses, strict=True)):
        if not torch.allclose(one.double(), other.double(), rtol=WITHIN, atol=0):
            return f"the loss of step {step} is {float(one):.6g} and was to be {float(other):.6g}"
        ours, theirs = found.gradients[step], expected.gradients[step]
        scale = max((float(gradient.abs().max()) for gradient in theirs.values()), default=0.0)
        for name in ours.keys() | theirs.keys():
            zero = torch.zeros((), dtype=torch.float64)
            gap = float((ours.get(name, zero) - theirs.get(name, zero)).abs().max())
            if not gap <= WITHIN * scale:
                return f"the gradient of {name} in step {step} is {gap:.1e} off, of {scale:.1e}"
    if found.state.keys() != expected.state.keys():
        return f"the state has {sorted(found.state.keys() ^ expected.state.keys())} on one side only"
    for name, value in expected.state.items():
        if isinstance(value, Tensor) and not torch.allclose(found.state[name], value, rtol=WITHIN, atol=1e-12):
            return f"{name} in the end is {float((found.state[name] - value).abs().max()):.1e} off"
    return ""
