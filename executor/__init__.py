"""Trains by a plan: the pipeline of stages, in one process or in one for each device. Part of gpipe-autoplan.

    pipe = Pipeline(model, plan)               # the same line in every process
    loss = pipe.step(x, target=y)              # all micro-batches, forward and backward

    results = launch(train, plan)              # train(plan) in one process for each stage

Names load on first use, so that `autoplan --help` never waits for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import planner  # noqa: F401 - it checks that the three packages belong together

if TYPE_CHECKING:
    from executor.launching import launch
    from executor.pipeline import Pipeline

__all__ = ["Pipeline", "launch"]

# Public name -> module. No module may have the name of something public: importing it would hide the other.
_HOME = {
    "Pipeline": "executor.pipeline",
    "launch": "executor.launching",
}

if not TYPE_CHECKING:  # a type checker that sees __getattr__ accepts every name

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
