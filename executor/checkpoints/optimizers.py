"""The optimizers whose state a checkpoint keeps: one, or several that share the parameters among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from executor.checkpoints.saved import Stateful
from profiler.errors import ArgumentError


class Optimizers:
    """One or several optimizers, each parameter in one of them.

    Args:
        given: at least one.

    Raises:
        ArgumentError: two of them step the same parameter, or one keeps a state that is of no parameter.
    """

    def __init__(self, given: Sequence[torch.optim.Optimizer]) -> None:
        self._given = tuple(given)
        self._place: dict[nn.Parameter, int] = {}
        for place, one in enumerate(self._given):
            if isinstance(one, torch.optim.LBFGS):
                raise ArgumentError(
                    "LBFGS keeps one state for all parameters, which does not follow the stages; use another"
                )
            for parameter in (held for group in one.param_groups for held in group["params"]):
                if self._place.setdefault(parameter, place) != place:
                    raise ArgumentError(
                        f"optimizers {self._place[parameter]} and {place} step the same parameter, of shape "
                        f"{list(parameter.shape)}, and a checkpoint keeps one state for each; leave it to one of them"
                    )

    @property
    def classes(self) -> str:
        """Their names."""
        return ", ".join(type(one).__name__ for one in self._given)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all."""
        return [group for one in self._given for group in one.param_groups]

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._place

    def __len__(self) -> int:
        return len(self._place)

    def place_of(self, parameter: nn.Parameter) -> int:
        """Which of them steps it."""
        return self._place[parameter]

    def state_of(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        """What is kept for it; empty where it has not been stepped, or is in none of them."""
        place = self._place.get(parameter)
        found: Mapping[str, Any] = {} if place is None else self._given[place].state.get(parameter, {})
        return found

    def change_state(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        """Replace it; none where it is empty."""
        states = self._given[self._place[parameter]].state
        if state:
            states[parameter] = state
        else:
            states.pop(parameter, None)


def optimizers_of(given: object) -> Optimizers | None:
    """What a caller gave: an optimizer, several in a list, or None.

    Raises:
        ArgumentError: it is something else.
    """
    if given is None:
        return None
    several = given if isinstance(given, list | tuple) else (given,)
    strange = next((one for one in several if not hasattr(one, "param_groups")), None)
    if strange is not None:
        raise ArgumentError(
            f"the optimizer is a {type(strange).__name__}; pass an optimizer over pipe.parameters(), or a list of "
            "several, and a scheduler or scaler in also={...}"
        )
    return Optimizers(several) if several else None


def refuse_beside(also: Mapping[str, Stateful], parameters: set[nn.Parameter], do: str) -> None:
    """See that `also` holds no optimizer of the pipeline's parameters, whose state is another one in each process.

    Args:
        also: by name.
        parameters: of the pipeline, in this process.
        do: what to do about it.

    Raises:
        ArgumentError: it does.
    """
    for name, one in also.items():
        groups = getattr(one, "param_groups", ()) if isinstance(one, torch.optim.Optimizer) else ()
        if any(parameter in parameters for group in groups for parameter in group["params"]):
            raise ArgumentError(
                f"also holds the optimizer {name!r} of parameters of the pipeline, and what is in `also` is kept once "
                f"for all processes; {do}"
            )


def refuse_sparse_state(optimizers: Optimizers, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """See that no optimizer keeps a sparse tensor, such as SGD's momentum of a sparse embedding.

    Made dense it adds up in another order, so training would not go on in every bit.

    Args:
        optimizers: whose state is to be saved.
        parameters: of this process, by name.

    Raises:
        ArgumentError: one does.
    """
    for name, parameter in parameters:
        for entry, value in optimizers.state_of(parameter).items():
            if isinstance(value, Tensor) and value.layout != torch.strided:
                raise ArgumentError(
                    f"the optimizer keeps {entry!r} of {name!r} as a sparse tensor, which a checkpoint cannot hold; "
                    "make its gradient dense (nn.Embedding(..., sparse=False)), or step it without momentum, in a "
                    "group of its own"
                )
