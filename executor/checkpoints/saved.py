"""What a checkpoint asks of that which it saves and continues."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor, nn

from executor.checkpoints.run_identity import Run


class Resumable(Protocol):
    """A training of which this process has a part; `executor.pipeline.Pipeline` is one."""

    run: Run

    @property
    def steps(self) -> int:
        """Training steps done."""

    @property
    def seed(self) -> int:
        """Of all random numbers that the model draws."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this process trains, by original name."""

    def stepped_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those whose optimizer state this process keeps."""

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers of this process."""

    def extra_state(self) -> dict[str, Any]:
        """What modules keep in addition to tensors, in one process."""

    def state_names(self) -> list[str]:
        """Of all parameters and buffers of the model, in every process."""

    def resume(self, steps: int, seed: int) -> None:
        """Go on as after so many steps."""


class Stateful(Protocol):
    """A learning-rate scheduler, a `GradScaler`, whatever is the same in every process."""

    def state_dict(self) -> dict[str, Any]:
        """What to keep."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Continue from what was kept."""
