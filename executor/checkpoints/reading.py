"""All that loading a checkpoint changes: read and checked before any of it is made."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.checkpoints.failures import unreadable
from executor.checkpoints.manifest import FORMAT_WITHOUT_MANIFEST, METADATA, TRAINING, Manifest
from executor.checkpoints.optimizers import Optimizers
from executor.checkpoints.saved import Resumable, Stateful
from executor.checkpoints.tensors import StoredTensor, stored_tensors
from executor.checkpoints.together import gathered, is_first
from executor.checkpoints.training import OptimizerEntry, Training, common_options, key_of
from profiler.errors import ExecutionError
from profiler.machine.backend import HOST
from profiler.run.layouts import each_once
from profiler.text import counted


def checked_training(source: Path, manifest: Manifest | None) -> Training:
    """What a checkpoint holds in addition to tensors, from the file that was saved."""
    if manifest is not None:
        manifest.check(source, [TRAINING, METADATA])
    training = Training.of(source)
    if manifest is None and training.format != FORMAT_WITHOUT_MANIFEST:
        raise unreadable(source, "its manifest.json is missing")
    if manifest is not None and training.format != manifest.format:
        raise unreadable(
            source, f"its manifest.json is of format {manifest.format}, its {TRAINING} of {training.format}"
        )
    if manifest is None and is_first():
        warnings.warn(
            f"{source} was saved by a version that kept no checksums: if it is damaged, that may not be noticed. Save "
            "it anew",
            stacklevel=4,
        )
    return training


@dataclass(frozen=True)
class Change:
    """All that loading changes, ready to be made; nothing of it can fail.

    Attributes:
        tensors: of the model, each with the value that it is to hold.
        states: of the optimizers, by parameter.
        options: of the optimizers' groups.
        optimizers: which these are.
    """

    tensors: list[tuple[Tensor, Tensor]]
    states: list[tuple[nn.Parameter, dict[str, Any]]]
    options: list[tuple[dict[str, Any], dict[str, Any]]]
    optimizers: Optimizers | None

    def make(self) -> None:
        """Change model and optimizer."""
        with torch.no_grad():
            for held, value in self.tensors:
                held.copy_(value)
        for group, options in self.options:
            group.update(options)
        for parameter, state in self.states:
            assert self.optimizers is not None
            self.optimizers.change_state(parameter, state)


def change_by(
    source: Path,
    manifest: Manifest | None,
    training: Training,
    pipe: Resumable,
    optimizers: Optimizers | None,
) -> Change:
    """Read what this process needs; nothing of the training is touched."""
    entries = training.entries_for(source, dict(pipe.named_parameters()), optimizers)
    stored = stored_tensors(source)
    held, stepped = pipe.state_dict(), dict(pipe.stepped_parameters())
    wanted = {f"model.{name}" for name in held}
    wanted |= {
        f"optimizer.{key_of(name, tensor)}"
        for name, entry in entries.items()
        for tensor in entry.tensors
        if name in stepped
    }
    absent = min(wanted - stored.keys(), default=None)
    if absent is not None:
        raise unreadable(source / METADATA, f"it says nothing of {absent}")
    for name, tensor in held.items():
        _check_kind(source, name, tensor, stored[f"model.{name}"])
    if manifest is not None:
        manifest.check(source, sorted({stored[name].file for name in wanted}))
    in_order = sorted(wanted, key=lambda name: (stored[name].file, stored[name].offset))
    values = {name: stored[name].read(source) for name in in_order}
    states: list[tuple[nn.Parameter, dict[str, Any]]] = []
    options: list[tuple[dict[str, Any], dict[str, Any]]] = []
    name_of = {parameter: name for name, parameter in pipe.named_parameters()}
    for group in () if optimizers is None else optimizers.groups:
        named = [name_of[parameter] for parameter in group["params"] if parameter in name_of]
        if named:
            options.append((group, common_options(source, {name: entries[name] for name in named})))
        for parameter in group["params"]:
            if parameter in name_of:
                name, entry = name_of[parameter], entries[name_of[parameter]]
                state = _state(name, parameter, entry, {**group, **entry.options}, values) if name in stepped else {}
                states.append((parameter, state))
    tensors = [_copy(source, name, tensor, values[f"model.{name}"]) for name, tensor in held.items()]
    return Change(tensors, states, options, optimizers)


def options_of_others(change: Change, optimizers: Optimizers | None) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The options of groups whose parameters are all in other processes: there, too, they are to be the checkpoint's.

    Nothing is stepped by them here, but a learning rate is read, and a scheduler goes on from it.
    """
    if not dist.is_initialized():
        return []
    groups = [] if optimizers is None else optimizers.groups
    loaded = {id(group): options for group, options in change.options}
    own = {number: loaded[id(group)] for number, group in enumerate(groups) if id(group) in loaded}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    others = {number: options for part in reversed(parts) for number, options in part.items()}
    return [(group, others[number]) for number, group in enumerate(groups) if number in others and number not in own]


def refuse_left_out(source: Path, training: Training, pipe: Resumable, optimizers: Optimizers | None) -> None:
    """See, in the first process, that no state is left out for want of a parameter in any process's optimizer.

    Raises:
        ExecutionError: the optimizer that was saved held more.
    """
    own = dict(pipe.named_parameters())
    stepped = {name for name, parameter in own.items() if optimizers is not None and parameter in optimizers}
    trained = {name for name, parameter in own.items() if parameter.requires_grad}
    parts: list[tuple[bool, set[str], set[str]]] = gathered((optimizers is not None, stepped, trained))
    if not is_first() or training.optimizer is None or not any(given for given, *_ in parts):
        return
    everywhere, trained = (set[str]().union(*found) for found in zip(*(names for _, *names in parts), strict=True))
    kept = {name for name, entry in training.optimizer.items() if name in trained or entry.tensors or entry.others}
    lost = sorted(kept - everywhere)
    if lost:
        raise ExecutionError(
            f"{source} was saved with an optimizer of {counted(len(training.optimizer), 'parameter')}, "
            f"{len(lost)} of which this one does not hold, such as {lost[0]}; their state would be lost: let the "
            "optimizer hold the same parameters"
        )


def take_over(pipe: Resumable, change: Change, training: Training, source: Path, manifest: Manifest | None) -> None:
    """Make the change; step, seed and run are the checkpoint's then."""
    change.make()
    pipe.resume(training.step, training.seed)
    pipe.run.go_on_from(source, manifest)


def _check_kind(source: Path, name: str, held: Tensor, stored: StoredTensor) -> None:
    if stored.shape == tuple(held.shape) and stored.dtype != held.dtype:
        raise ExecutionError(
            f"{source} belongs to another model, or to another precision of this one: {name} is {stored.dtype} there, "
            f"and {held.dtype} in this one; load it with the precision that it was saved with"
        )
    if stored.shape != tuple(held.shape):
        raise ExecutionError(
            f"{source} belongs to another model: {name} is {stored.dtype} of shape {stored.shape} there, and "
            f"{held.dtype} of shape {tuple(held.shape)} in this one"
        )


def _copy(source: Path, name: str, held: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Where a value goes: of a tensor that was expanded, whose elements share memory, to each element once."""
    held, part = each_once(held, value)
    if part is not value and not torch.equal(part.expand_as(value), value):
        raise ExecutionError(
            f"{source} belongs to another model: the elements of {name} differ there, and share memory in this one"
        )
    return held, part


def _state(
    name: str, parameter: nn.Parameter, entry: OptimizerEntry, group: Mapping[str, Any], values: Mapping[str, Tensor]
) -> dict[str, Any]:
    """A parameter's state in the optimizer, on the devices where torch wants it."""
    on_host = {"step"} if not (group.get("capturable") or group.get("fused")) else set()  # as torch does
    tensors = {
        tensor: values[f"optimizer.{key_of(name, tensor)}"].to(HOST if tensor in on_host else parameter.device)
        for tensor in entry.tensors
    }
    return {**tensors, **entry.others}


@contextmanager
def continued(others: Mapping[str, Stateful], states: Mapping[str, Any]) -> Iterator[None]:
    """Let `others` continue from their states; if that or what is inside fails, they are as before."""
    before = {name: copy.deepcopy(one.state_dict()) for name, one in others.items()}
    tried = []
    try:
        for name, one in others.items():
            tried.append(name)
            one.load_state_dict(states[name])
        yield
    except BaseException:
        for name in tried:
            others[name].load_state_dict(before[name])
        raise
