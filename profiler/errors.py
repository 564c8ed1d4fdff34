"""The one tree of errors that this project raises.

Everything that a caller can cause ends in a `PlanError`; its subclasses say which step failed. `exit_code` is what
the command `autoplan` exits with when the error reaches it.
"""

from typing import ClassVar

from profiler.text import printable


class PlanError(Exception):
    """Base of every error that gpipe-autoplan raises on purpose.

    Attributes:
        exit_code: what the command `autoplan` exits with.
        first_rank: of the processes that train together the one that failed first, where the message names it.
    """

    exit_code: ClassVar[int] = 1
    first_rank: int | None = None

    def __str__(self) -> str:
        """The message; what a terminal would obey in names from files, models and arguments is escaped."""
        return printable(super().__str__())


class ArgumentError(PlanError, ValueError):
    """An argument has a value that cannot mean anything (a negative batch, no devices)."""

    exit_code = 2


class UserFunctionError(ArgumentError):
    """What was passed, such as the model or the loss function, raised an error of its own, which is the cause."""

    exit_code = 1


class InfeasibleError(PlanError):
    """No plan satisfies the batch size, the memory limits and the rules at once."""

    exit_code = 3


class NotTraceableError(PlanError):
    """The model cannot be turned into a graph (its forward branches on data, for instance).

    Attributes:
        modules: paths of the modules in which it happens, outermost first, as far as known.
        functions: names of the functions that the innermost of them is in, outermost first, as far as known.
    """

    exit_code = 4

    def __init__(self, message: str, *, modules: tuple[str, ...] = (), functions: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.modules = modules
        self.functions = functions


class UnfaithfulTraceError(NotTraceableError):
    """The layers of a model compute something else than the model does."""


class PlanFileError(PlanError):
    """A plan file is damaged, has a wrong type or an unknown key, or another schema version."""

    exit_code = 5


class ForeignPlanError(PlanFileError):
    """A plan is sound, but was made for another model or for other processes."""


class ProfileError(PlanError):
    """A profile is damaged, or does not hold what is asked of it."""

    exit_code = 5


class ExecutionError(PlanError):
    """Training by a plan failed; the message names rank, stage, micro-batch and the first cause."""
