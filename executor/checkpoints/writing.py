"""What a checkpoint holds, gathered from all processes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils import _pytree as pytree

from executor.checkpoints.manifest import METADATA, TRAINING, FileSum, Manifest, sums_of
from executor.checkpoints.optimizers import Optimizers
from executor.checkpoints.saved import Resumable, Stateful
from executor.checkpoints.together import gathered, is_first, rank
from executor.checkpoints.training import OptimizerEntry, Training, key_of, optimizer_entries
from executor.watch.contents import digest_of_data
from profiler.errors import ArgumentError
from profiler.text import counted

_Said: TypeAlias = tuple[str | None, Mapping[str, str]]
"""What a process says for comparison: classes of its optimizers, and digests by name."""


def tensors_of(pipe: Resumable, optimizers: Optimizers | None) -> dict[str, Any]:
    """Parameters, buffers and the tensors of the optimizer's state, by original names."""
    state: dict[str, Any] = {"model": {**pipe.state_dict(), **pipe.extra_state()}}
    if optimizers is not None:
        state["optimizer"] = {
            key_of(name, entry): value
            for name, parameter in pipe.stepped_parameters()
            for entry, value in optimizers.state_of(parameter).items()
            if isinstance(value, Tensor)
        }
    return state


def complete(draft: Path, pipe: Resumable, optimizers: Optimizers | None, also: Mapping[str, Stateful]) -> None:
    """Add to a draft with all tensors what is kept in addition to them, and the manifest."""
    entries = None if optimizers is None else dict(optimizer_entries(dict(pipe.stepped_parameters()), optimizers))
    own = sums_of(draft, [path.name for path in draft.glob(f"__{rank()}_*.distcp")])
    trains = any(True for _ in pipe.stepped_parameters())
    classes = None if optimizers is None else optimizers.classes
    states = {name: one.state_dict() for name, one in also.items()}
    digests = {name: digest_of_data((state, repr(pytree.tree_structure(state)))) for name, state in states.items()}
    found: list[tuple[tuple[dict[str, OptimizerEntry] | None, dict[str, FileSum], bool], _Said]]
    found = gathered(((entries, own, trains), (classes, digests)))
    if not is_first():
        return
    parts = [part for part, _ in found]
    _compare([said for _, said in found])
    stepped = 0 if optimizers is None else len(optimizers)
    if stepped and any(trains for *_, trains in parts) and not any(part for part, *_ in parts):
        raise ArgumentError(
            f"the optimizer steps {counted(stepped, 'parameter')}, and none of them is one of the pipeline's, so its "
            "state would be lost; give the one that was made of pipe.parameters()"
        )
    training = Training(
        step=pipe.steps,
        seed=pipe.seed,
        names=pipe.state_names(),
        optimizer=None if entries is None else {name: one for part, *_ in parts for name, one in (part or {}).items()},
        optimizer_class=classes,
        also=states,
    )
    training.save(draft)
    files = {name: found for _, part, _ in parts for name, found in part.items()}
    files |= sums_of(draft, [METADATA, TRAINING])
    Manifest(run=pipe.run.id, inherits=pipe.run.inherits, step=pipe.steps, files=files).save(draft)


def _compare(said: Sequence[_Said]) -> None:
    """See what all processes must have in common: the classes of their optimizers, and what is kept once for all.

    Args:
        said: by rank, the former, and a digest of each of the latter.

    Raises:
        ArgumentError: the optimizers differ.
    """
    classes, digests = said[0]
    for number, (others, theirs) in enumerate(said):
        if others != classes:
            raise ArgumentError(
                f"rank 0 saves the optimizer {classes} and rank {number} {others}; pass the same ones in the same "
                'order everywhere, where a stage has nothing for one of them with an empty group, [{"params": []}]'
            )
        apart = sorted(name for name, digest in digests.items() if theirs.get(name, digest) != digest)
        if apart:
            warnings.warn(
                f"also holds {apart[0]!r}, whose state on rank {number} is another than on rank 0: the checkpoint "
                "keeps that of rank 0, from which all processes will go on",
                stacklevel=4,
            )
            return
