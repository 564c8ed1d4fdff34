"""What a plan leaves unused, and why: devices, and a faster plan that a rule forbids."""

from __future__ import annotations

from pydantic import Field

from planner.plan.units import seconds_text
from profiler.value import Value


class LooserPlan(Value):
    """The best plan that was found with fewer micro-batches for each stage than the rule asks for.

    Attributes:
        stages: its K.
        chunks: stages that each rank has. Files leave it out where it is 1.
        micro_batches: its M.
        micro_batches_per_stage: the rule that it was forbidden by.
        step_s: its predicted seconds.
    """

    stages: int = Field(gt=0)
    chunks: int = Field(default=1, gt=0, exclude_if=lambda chunks: chunks == 1)
    micro_batches: int = Field(gt=0)
    micro_batches_per_stage: int = Field(gt=1)
    step_s: float = Field(gt=0)

    @property
    def setting(self) -> str:
        """What allows it: the rule that it keeps, which is one of ranks."""
        return f"micro_batches_per_stage={self.micro_batches * self.chunks // self.stages}"


class Unused(Value):
    """What a plan leaves unused.

    Attributes:
        devices: how many of those given stay idle.
        reason: why they do; empty if none does.
        looser: a faster plan that the rule M >= n K forbids; None if there is none that is worth it.
    """

    devices: int = Field(default=0, ge=0)
    reason: str = ""
    looser: LooserPlan | None = None

    def lines(self, step_s: float) -> list[str]:
        """The same for people.

        Args:
            step_s: seconds of the plan's own step.
        """
        found = []
        if self.devices:
            one = self.devices == 1
            found.append(f"{self.devices} {'device stays' if one else 'devices stay'} idle: {self.reason}")
        if self.looser is not None:
            other = self.looser
            chunks = f" in {other.chunks} chunks a rank" if other.chunks > 1 else ""
            found.append(
                f"without the rule M >= {other.micro_batches_per_stage}K: K = {other.stages}{chunks}, "
                f"M = {other.micro_batches}, step {seconds_text(other.step_s)}, {1 - other.step_s / step_s:.0%} less; "
                f"set {other.setting} for it"
            )
        return found
