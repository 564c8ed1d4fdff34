"""What a checkpoint holds in addition to the tensors of model and optimizer: `training.pt`, read without trust."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor, nn

from executor.checkpoints.failures import reading, unreadable
from executor.checkpoints.manifest import (
    FORMAT,
    FORMAT_WITHOUT_MANIFEST,
    FORMAT_WITHOUT_OWN_SUM,
    TRAINING,
    open_file,
)
from executor.checkpoints.optimizers import Optimizers
from executor.checkpoints.tensor_writer import disk_named
from profiler.errors import ExecutionError
from profiler.machine.backend import HOST
from profiler.text import counted

_NOT_OPTIONS = ("params", "param_names")  # what else a group of an optimizer holds


@dataclass(frozen=True)
class OptimizerEntry:
    """What is kept of one parameter's optimizer state in addition to its tensors.

    Attributes:
        options: of its parameter group: learning rate, weight decay, ...
        tensors: names of the state's tensors, which are kept with the model's.
        others: what else the state holds.
        place: of its optimizer among several.
    """

    options: dict[str, Any]
    tensors: list[str]
    others: dict[str, Any]
    place: Annotated[int, Field(strict=True, ge=0)] = 0


@dataclass(frozen=True)
class Training:
    """What a checkpoint holds in addition to tensors.

    Attributes:
        step: training steps done.
        seed: of the model's random numbers, which are keyed by seed and step.
        names: of all parameters and buffers.
        optimizer: by name of the parameter; None if no optimizer was saved.
        optimizer_class: its name, or those of several.
        also: states of what else was saved, by name.
        format: version of all this.
    """

    step: Annotated[int, Field(strict=True, ge=0)]
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
    names: list[str]
    optimizer: dict[str, OptimizerEntry] | None
    optimizer_class: str | None
    also: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def save(self, checkpoint: Path) -> None:
        """Write it, into a checkpoint that is not whole yet."""
        with (checkpoint / TRAINING).open("wb") as file:
            with disk_named():
                torch.save(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def of(cls, checkpoint: Path) -> Training:
        """What a checkpoint holds.

        Raises:
            ExecutionError: it is damaged, or of another version, or cannot be read.
        """
        path = checkpoint / TRAINING
        with reading(path):
            with open_file(path) as file, warnings.catch_warnings(action="ignore"):  # of strange pickles
                found = torch.load(file, map_location=HOST, weights_only=True)
            version = found.get("format")
            if version in (FORMAT_WITHOUT_MANIFEST, FORMAT_WITHOUT_OWN_SUM, FORMAT):
                return _VALID.validate_python(found)
        raise ExecutionError(
            f"{checkpoint} has format {version!r}, this version reads {FORMAT_WITHOUT_MANIFEST} to {FORMAT}; load it "
            "where it was made"
        )

    def check_model(self, checkpoint: Path, names: Collection[str]) -> None:
        """See that the names of parameters and buffers are `names`, the model's.

        Raises:
            ExecutionError: they are another's.
        """
        own, kept = set(names), set(self.names)
        if own != kept:
            only = [f"{len(kept - own)} that the model lacks, such as {min(kept - own)}"] if kept - own else []
            only += [f"not {len(own - kept)} of the model's, such as {min(own - kept)}"] if own - kept else []
            raise ExecutionError(
                f"{checkpoint} belongs to another model: it holds {counted(len(kept), 'parameter')} and buffers, "
                f"{' and '.join(only)}"
            )

    def check_also(self, checkpoint: Path, names: list[str]) -> None:
        """See that the states of what else is to be loaded are there, and no others.

        Raises:
            ExecutionError: they are not.
        """
        if sorted(names) != sorted(self.also):
            raise ExecutionError(
                f"{checkpoint} holds the states of {sorted(self.also)}, but {sorted(names)} are to be loaded; "
                f"give `also` the same names"
            )

    def entries_for(
        self, checkpoint: Path, parameters: Mapping[str, nn.Parameter], optimizers: Optimizers | None
    ) -> dict[str, OptimizerEntry]:
        """What the checkpoint keeps of this process's parameters, given by name, in the optimizer.

        Raises:
            ExecutionError: it was saved with another optimizer, or with one of other parameters.
        """
        if optimizers is None:
            return {}
        if self.optimizer is None:
            raise ExecutionError(f"{checkpoint} holds no optimizer state; it was saved without an optimizer")
        if self.optimizer_class != optimizers.classes:
            raise ExecutionError(
                f"{checkpoint} holds the state of {self.optimizer_class}, which means nothing to "
                f"{optimizers.classes}; use what it was saved with, in the same order"
            )
        names = [name for name, parameter in parameters.items() if parameter in optimizers]
        absent = [name for name in names if name not in self.optimizer]
        if absent:
            raise ExecutionError(
                f"{checkpoint} was saved with an optimizer of {counted(len(self.optimizer), 'parameter')}, "
                f"without {absent[0]}; let the optimizer hold the same parameters"
            )
        entries = {name: self.optimizer[name] for name in names}
        for name, entry in entries.items():
            if entry.place != optimizers.place_of(parameters[name]):
                raise ExecutionError(
                    f"{checkpoint} holds the state of {name} in optimizer {entry.place}, and it is in optimizer "
                    f"{optimizers.place_of(parameters[name])}; let each optimizer hold the same parameters"
                )
            if any(option in _NOT_OPTIONS for option in entry.options):
                raise unreadable(checkpoint / TRAINING, f"the options of {name} hold parameters")
        return entries


_VALID = TypeAdapter(Training)


def common_options(checkpoint: Path, entries: Mapping[str, OptimizerEntry]) -> dict[str, Any]:
    """The options that the parameters of one group were saved with, which are to be the group's.

    Raises:
        ExecutionError: they were in groups with other options.
    """
    (first, one), *others = entries.items()
    for name, entry in others:
        apart = sorted(
            option
            for option in one.options.keys() | entry.options.keys()
            if not _alike(one.options.get(option), entry.options.get(option))
        )
        if apart:
            raise ExecutionError(
                f"{checkpoint} was saved with an optimizer that has {first} and {name} in two groups, which differ in "
                f"{', '.join(apart)}, and this one has them in one; make the same groups"
            )
    return one.options


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def optimizer_entries(
    parameters: Mapping[str, nn.Parameter], optimizers: Optimizers
) -> Iterator[tuple[str, OptimizerEntry]]:
    """What is kept of this process's parameters, by name."""
    group_of = {parameter: group for group in optimizers.groups for parameter in group["params"]}
    for name, parameter in parameters.items():
        if parameter in group_of:
            state = optimizers.state_of(parameter)
            yield (
                name,
                OptimizerEntry(
                    {option: value for option, value in group_of[parameter].items() if option not in _NOT_OPTIONS},
                    [entry for entry, value in state.items() if isinstance(value, Tensor)],
                    {entry: value for entry, value in state.items() if not isinstance(value, Tensor)},
                    optimizers.place_of(parameter),
                ),
            )


def key_of(name: str, entry: str) -> str:
    """What a tensor of a parameter's optimizer state is called."""
    return f"{name}.{entry}"
