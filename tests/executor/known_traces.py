"""A model is traced once, not by each pipeline and in each rank: tracing takes longer than all else that they do.

    remember(sequence)         what a test has traced for its plans, here or in the process that ranks are forks of
    known_trace(model, plan)   stands in for `traced_as_planned`: the same layers, with this model's own tensors

That ranks trace alike by themselves is tested where neither is used: in test_bugs, test_predict, test_launching and
under torchrun.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from executor import pipeline
from planner.plan.of_model import traced_as_planned
from planner.plan.plan import Plan
from profiler.sample_spec import SampleSpec
from profiler.tracing.sequence import LayerSequence

_KNOWN: dict[tuple[str, SampleSpec], LayerSequence] = {}


def remember(sequence: LayerSequence) -> None:
    """Pipelines of such a model need not trace it."""
    _KNOWN[sequence.fingerprint, sequence.sample] = sequence


def forget() -> None:
    """Later pipelines trace again."""
    _KNOWN.clear()


def known_trace(model: nn.Module, plan: Plan) -> LayerSequence:
    """The layers of a model like the one that the plan was made for; traced if it is unlike it."""
    known = _KNOWN.get((plan.model_fingerprint, plan.sample))
    own = dict(_named(model))
    if known is None or not _alike(known, own):
        return traced_as_planned(model, plan)
    parameters = {name: own[name] for name in known.parameters}
    buffers = {name: own.get(name, value) for name, value in known.buffers.items()}  # or a constant of the graph
    return replace(known, parameters=parameters, buffers=buffers)


def _named(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


def _alike(known: LayerSequence, own: dict[str, Any]) -> bool:
    """Whether a model has the same tensors under the same names, tied alike."""
    held = {**known.parameters, **known.buffers}
    same = all(_described(own[name]) == _described(value) for name, value in held.items() if name in own)
    tied = all(own.get(other) is own.get(name) for name, others in known.aliases.items() for other in others)
    apart = len({id(own.get(name)) for name in known.parameters}) == len(known.parameters)
    return same and tied and apart and own.keys() >= known.parameters.keys()


def _described(value: Tensor) -> tuple[Any, ...]:
    return type(value), value.shape, value.dtype, value.device, value.stride(), value.requires_grad


def named(function: Callable[[str], LayerSequence], argument: str) -> str:
    """What `fork_server.INHERITED` holds, for ranks that inherit `function(argument)`."""
    path = os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path)
    return "\n".join((path, function.__module__, function.__qualname__, argument))


def make(module: str, function: str, argument: str) -> None:
    """In a server: trace what its later forks inherit."""
    remember(getattr(import_module(module), function)(argument))


def inherit() -> None:
    """In a fork: let pipelines take what its server has made."""
    pipeline.traced_as_planned = known_trace  # type: ignore[attr-defined]
