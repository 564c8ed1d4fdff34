"""The first cause of a failure, as it travels from the rank that met it to all others."""

from __future__ import annotations

from dataclasses import dataclass

from profiler import errors
from profiler.errors import ExecutionError, PlanError
from profiler.left_out_sizes import is_out_of_memory
from profiler.text import raised_text


@dataclass(frozen=True, slots=True)
class FirstCause:
    """What ended the training, told once by the rank that met it and repeated in the same words by all others.

    Attributes:
        text: which rank failed, where, and why.
        error: name of the class of our errors that it is raised as.
        rank: that failed first.
    """

    text: str
    error: str
    rank: int

    @classmethod
    def of(cls, problem: BaseException, *, rank: int, world_size: int, position: str) -> FirstCause:
        """The cause that an exception on this rank is.

        Args:
            problem: our own errors say themselves what is wrong, and with `first_rank` who failed; of others the class
                is named too.
            rank: of this process.
            world_size: number of ranks.
            position: of the rank when it happened, for an exception that is not ours.
        """
        if isinstance(problem, PlanError) and problem.first_rank is not None:
            return cls(str(problem), type(problem).__name__, problem.first_rank)
        ours = isinstance(problem, PlanError)
        text = str(problem) if ours else f"{position}: {raised_text(problem)}{_advice(problem)}"
        error = type(problem).__name__ if ours else ExecutionError.__name__
        return cls(f"{named(rank, world_size)} failed: {text}" if world_size > 1 else text, error, rank)

    def exception(self) -> PlanError:
        """The error to raise."""
        error = getattr(errors, self.error, ExecutionError)
        known = isinstance(error, type) and issubclass(error, PlanError)
        raised: PlanError = (error if known else ExecutionError)(self.text)
        raised.first_rank = self.rank
        return raised


def _advice(problem: BaseException) -> str:
    """What to do about an exception that is not ours, where we know."""
    if is_out_of_memory(problem):
        return "; out of memory: plan with a smaller memory_limit, so that stages recompute more or get smaller"
    return ""


def named(rank: int, world_size: int) -> str:
    """A rank in an error message."""
    return f"rank {rank} of {world_size}"
