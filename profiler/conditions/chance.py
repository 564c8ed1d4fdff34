"""Branches that random numbers decide: both ways are in the graph, as one operation that runs either.

if torch.rand(()) < 0.9:          lt = rand(()) < 0.9
    x = layer(x)          ---->   x' = either_way[...](lt; layer(x) or x)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from profiler.conditions.check import are_made_up
from profiler.observe.source_place import Place
from profiler.opaque.call import on_own_memory
from profiler.sample_spec import Decision, code_of
from profiler.torch_private import can_carry


@dataclass(frozen=True, slots=True)
class Ways:
    """Which ways a trace takes where random numbers decide.

    Attributes:
        places: module and code of the lines where they do; None where that is to be found out.
        answers: of the conditions there, in order; after the last the first again, for a trace may call the model
            twice.
    """

    places: frozenset[tuple[str, str]] | None = None
    answers: tuple[bool, ...] = (False,)

    def decide_at(self, module: str, line: str) -> bool:
        """Whether random numbers decide there."""
        return self.places is not None and (module, code_of(line)) in self.places

    def way(self, number: int) -> bool:
        """The answer of the condition with that number."""
        return self.answers[number % len(self.answers)]


class Lot:
    """Marks in a graph where a condition was asked that random numbers decide. It takes what a `Check` takes.

    Args:
        decision: where, and which way was traced.
        place: where, for messages.
        counts: what the model had counted before it asked, see `profiler.observe.counts`.
        numbers: see `Check`.
    """

    def __init__(
        self,
        decision: Decision,
        place: Place,
        counts: Mapping[str, int | float],
        numbers: Callable[..., tuple[Any, ...]] | None = None,
    ) -> None:
        self.decision = decision
        self.place = place
        self.counts = counts
        self.__name__ = self.__qualname__ = f"lot[{decision.code}]"
        self._numbers = numbers

    def __repr__(self) -> str:
        """The same in every process."""
        return self.__name__

    def __call__(self, *values: Any) -> None:
        """Nothing: it is a mark."""

    def answer(self, *values: Any) -> bool:
        """What was drawn."""
        found = values[0] if self._numbers is None else self._numbers(*values)[0]
        return bool(found)


class EitherWay:
    """Runs one of two regions of a graph, as random numbers say.

    It takes both regions, what the condition is computed from, and what the regions take. What it returns has memory of
    its own and is dense, whichever way it goes. On tensors without values, and on made-up ones that are measured, it
    goes the usual way, which is the dearer one.

    Args:
        lot: the condition.
        usual: its answer on the usual way.
        conditions: how many values it is computed from.
    """

    def __init__(self, lot: Lot, conditions: int, *, usual: bool) -> None:
        self.lot = lot
        self.conditions = conditions
        self.usual = usual
        self.__name__ = self.__qualname__ = f"either_way[{lot.decision.code} is {usual}]"

    def __repr__(self) -> str:
        """The same in every process."""
        return self.__name__

    def __call__(
        self, usual: Callable[..., tuple[Tensor, ...]], other: Callable[..., tuple[Tensor, ...]], *values: Any
    ) -> tuple[Tensor, ...]:
        """Run one of the regions."""
        drawn, taken = values[: self.conditions], values[self.conditions :]
        unknown = any(isinstance(value, FakeTensor) or (isinstance(value, Tensor) and value.is_meta) for value in drawn)
        is_usual = unknown or are_made_up() or self.lot.answer(*drawn) == self.usual
        found = [output.contiguous() for output in (usual if is_usual else other)(*taken)]
        carries = torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in taken)
        return tuple(
            output.detach().requires_grad_()  # this way without gradient: what comes back for it ends here
            if carries and can_carry(output) and not output.requires_grad
            else output
            for output in on_own_memory(found, taken)
        )
