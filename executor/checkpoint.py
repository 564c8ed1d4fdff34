"""Training state on disk, in torch's own distributed format and under the model's original names.

A folder holds whole checkpoints of one run, and a link to the newest that moves in one step: whenever a process is
killed, `latest` is a whole checkpoint (`executor.checkpoints.folder`).

    checkpoints/step-00000100/      parameters, buffers, optimizer state (torch.distributed.checkpoint); training.pt;
                                    manifest.json: whose it is, and the checksum of each file
    checkpoints/latest -> step-00000100

Loading is all or nothing: every file that a rank reads is checked, everything is read into memory of its own, and
model, optimizer, step and seed change when all ranks have got so far. No file can make code run, whoever wrote it.

A run owns what it saved, and what the run that it goes on from had saved until then
(`executor.checkpoints.run_identity`); `keep` removes nothing else. Two runs cannot save into one folder at a time.

A checkpoint knows nothing of stages: saved with K of them, it loads with any other number, or without a pipeline:

    state = {"model": model.state_dict()}
    torch.distributed.checkpoint.load(state, checkpoint_id="checkpoints/latest")
    model.load_state_dict(state["model"])

That is torch's own reader, which compares no checksums and lets files run code: only for checkpoints that you trust. A
`Pipeline` in a process of its own loads all of a model by `load_checkpoint`.
"""

from __future__ import annotations

import copy
import errno
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from executor.checkpoints.folder import CheckpointFolder, checkpoint_at
from executor.checkpoints.manifest import (
    FORMAT_WITHOUT_MANIFEST,
    METADATA,
    TRAINING,
    FileSum,
    Manifest,
    reason_of,
    sums_of,
    unreadable,
)
from executor.checkpoints.tensors import StoredTensor, stored_tensors
from executor.checkpoints.training import OptimizerEntry, Training, common_options, key_of, optimizer_entries
from executor.pipeline import Pipeline
from executor.watch.position import Phase
from profiler.arguments import fits_its_arguments
from profiler.errors import ArgumentError, ExecutionError
from profiler.machine.backend import HOST
from profiler.quantities import shown
from profiler.text import counted


class Stateful(Protocol):
    """A learning-rate scheduler, a `GradScaler`, whatever is the same in every process."""

    def state_dict(self) -> dict[str, Any]:
        """What to keep."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Continue from what was kept."""


@fits_its_arguments
def save_checkpoint(
    folder: str | Path,
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    also: Mapping[str, Stateful] | None = None,
    keep: int | None = None,
) -> Path:
    """Write the training state as the newest checkpoint of a folder; every process calls this.

        save_checkpoint("checkpoints", pipe, optimizer, also={"scheduler": scheduler})

    Once the new checkpoint is whole, whatever goes wrong with `latest` or with old ones is a warning.

    Args:
        folder: where checkpoints lie, of this run alone; on a file system that all machines share.
        pipe: what is trained.
        optimizer: over `pipe.parameters()`, if its state is to be kept.
        also: what else to keep, by name: anything with `state_dict` that is the same in every process.
        keep: how many of this run's checkpoints to keep; older ones are removed when the new one is whole. All if
            None: no space is worth a checkpoint that someone still needs.

    Returns:
        The checkpoint.

    Raises:
        ArgumentError: `keep` is no number of checkpoints, or an argument is of another type.
        ExecutionError: another run saves into the folder, or nothing can be written there, or another process failed;
            `latest` is what it was, and nothing half written is left.
    """
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ArgumentError(f"keep is {keep!r}; pass how many checkpoints to keep, at least 1, or None for all")
    home = _checked(folder, pipe, optimizer)
    with pipe.watch.call(Phase.SAVE, {"the call": "save_checkpoint", "the folder": str(home)}):
        checkpoints = CheckpointFolder(home, pipe.run)
        with _failures_named(home):
            begun = checkpoints.begin(pipe.steps) if _is_first() else None
        try:
            name = _shared(begun)
            draft = checkpoints.draft_of(name)
            with _failures_named(draft):
                with warnings.catch_warnings(action="ignore"):  # torch warns of its own use of itself
                    dcp.save(  # type: ignore[attr-defined]
                        _tensors(pipe, optimizer), checkpoint_id=draft, no_dist=not dist.is_initialized()
                    )
                _complete(draft, pipe, optimizer, also or {})
                if begun is not None:
                    checkpoints.finish(begun, pipe.steps, keep)
        except BaseException:
            if begun is not None:
                checkpoints.give_up(begun)
            raise
        _wait_for_all()
    return home / name


@fits_its_arguments
def load_checkpoint(
    path: str | Path,
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    also: Mapping[str, Stateful] | None = None,
) -> int:
    """Continue from a checkpoint, whatever K it was written with; every process calls this.

    While it loads, the tensors of this process's stages are in memory twice.

    Args:
        path: a folder of checkpoints, whose newest is loaded, or one checkpoint of it.
        pipe: what is trained; its parameters, buffers, step and seed become the checkpoint's.
        optimizer: over `pipe.parameters()`, the same ones as when it was saved; its state and the options of its groups
            become the checkpoint's.
        also: what else to continue, by the names that it was saved under.

    Returns:
        How many training steps were done.

    Raises:
        ArgumentError: an argument is of another type.
        ExecutionError: there is no checkpoint, it is damaged, or it belongs to another model or optimizer. Nothing has
            changed then, on any rank.
    """
    given = _checked(path, pipe, optimizer)
    others = also or {}
    with pipe.watch.call(Phase.LOAD, {"the call": "load_checkpoint", "the checkpoint": str(given)}):
        source = Path(_shared(str(checkpoint_at(given)) if _is_first() else None))
        manifest = Manifest.of(source)
        training = _checked_training(source, manifest)
        training.check_model(source, pipe.state_names())
        training.check_also(source, list(others))
        change = _change(source, manifest, training, pipe, optimizer)
        _refuse_left_out(source, training, pipe, optimizer)
        change.options.extend(_options_of_others(change, optimizer))
        with _continued(others, training.also):
            _wait_for_all()  # none has changed anything but `others`, which come back if one fails until here
        try:
            _take_over(pipe, change, training, source, manifest)
        except KeyboardInterrupt:  # half of it would be another training; to do all of it twice does no harm
            _take_over(pipe, change, training, source, manifest)
            raise
        _wait_for_all()
    return training.step


# What is written.


def _checked(path: object, pipe: object, optimizer: object) -> Path:
    """The folder or the checkpoint, where what is given is what is asked for."""
    if not isinstance(path, str | Path):
        raise ArgumentError(f"the checkpoint is {shown(path)}; give the path of a folder")
    if not isinstance(pipe, Pipeline):
        raise ArgumentError(f"a checkpoint is of a Pipeline, and this is a {type(pipe).__name__}; pass the pipeline")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise ArgumentError(
            f"the optimizer is a {type(optimizer).__name__}; pass an optimizer over pipe.parameters(), and a scheduler "
            "or scaler in also={...}"
        )
    return Path(path).absolute()


def _tensors(pipe: Pipeline, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Parameters, buffers and the tensors of the optimizer's state, by original names."""
    state: dict[str, Any] = {"model": {**pipe.state_dict(), **pipe.extra_state()}}
    if optimizer is not None:
        state["optimizer"] = {
            key_of(name, entry): value
            for name, parameter in pipe.stepped_parameters()
            for entry, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }
    return state


def _complete(
    draft: Path, pipe: Pipeline, optimizer: torch.optim.Optimizer | None, also: Mapping[str, Stateful]
) -> None:
    """Add to a draft with all tensors what is kept in addition to them, and the manifest."""
    entries = None if optimizer is None else dict(optimizer_entries(dict(pipe.stepped_parameters()), optimizer))
    own = sums_of(draft, [path.name for path in draft.glob(f"__{_rank()}_*.distcp")])
    trains = any(True for _ in pipe.stepped_parameters())
    parts: list[tuple[dict[str, OptimizerEntry] | None, dict[str, FileSum], bool]] = _gathered((entries, own, trains))
    if not _is_first():
        return
    stepped = 0 if optimizer is None else sum(len(group["params"]) for group in optimizer.param_groups)
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
        optimizer_class=None if optimizer is None else type(optimizer).__name__,
        also={name: one.state_dict() for name, one in also.items()},
    )
    training.save(draft)
    files = {name: found for _, part, _ in parts for name, found in part.items()}
    files |= sums_of(draft, [METADATA, TRAINING])
    Manifest(run=pipe.run.id, inherits=pipe.run.inherits, step=pipe.steps, files=files).save(draft)


# What is read.


def _checked_training(source: Path, manifest: Manifest | None) -> Training:
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
    if manifest is None and _is_first():
        warnings.warn(
            f"{source} was saved by a version that kept no checksums: if it is damaged, that may not be noticed. Save "
            "it anew",
            stacklevel=4,
        )
    return training


@dataclass(frozen=True)
class _Change:
    """All that loading changes, ready to be made; nothing of it can fail.

    Attributes:
        tensors: of the model, each with the value that it is to hold.
        states: of the optimizer, by parameter.
        options: of the optimizer's groups.
    """

    tensors: list[tuple[Tensor, Tensor]]
    states: list[tuple[nn.Parameter, dict[str, Any]]]
    options: list[tuple[dict[str, Any], dict[str, Any]]]
    optimizer: torch.optim.Optimizer | None

    def make(self) -> None:
        """Change model and optimizer."""
        with torch.no_grad():
            for held, value in self.tensors:
                held.copy_(value)
        for group, options in self.options:
            group.update(options)
        for parameter, state in self.states:
            assert self.optimizer is not None
            if state:
                self.optimizer.state[parameter] = state
            else:
                self.optimizer.state.pop(parameter, None)


def _change(
    source: Path,
    manifest: Manifest | None,
    training: Training,
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | None,
) -> _Change:
    """Read what this process needs; nothing of the training is touched."""
    entries = training.entries_for(source, dict(pipe.named_parameters()), optimizer)
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
    for group in () if optimizer is None else optimizer.param_groups:
        named = [name_of[parameter] for parameter in group["params"] if parameter in name_of]
        if named:
            options.append((group, common_options(source, {name: entries[name] for name in named})))
        for parameter in group["params"]:
            if parameter in name_of:
                name, entry = name_of[parameter], entries[name_of[parameter]]
                state = _state(name, parameter, entry, {**group, **entry.options}, values) if name in stepped else {}
                states.append((parameter, state))
    tensors = [_copy(source, name, tensor, values[f"model.{name}"]) for name, tensor in held.items()]
    return _Change(tensors, states, options, optimizer)


def _options_of_others(
    change: _Change, optimizer: torch.optim.Optimizer | None
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The options of groups whose parameters are all in other processes: there, too, they are to be the checkpoint's.

    Nothing is stepped by them here, but a learning rate is read, and a scheduler goes on from it.
    """
    if not dist.is_initialized():
        return []
    groups = [] if optimizer is None else optimizer.param_groups
    loaded = {id(group): options for group, options in change.options}
    own = {number: loaded[id(group)] for number, group in enumerate(groups) if id(group) in loaded}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    others = {number: options for part in reversed(parts) for number, options in part.items()}
    return [(group, others[number]) for number, group in enumerate(groups) if number in others and number not in own]


def _refuse_left_out(source: Path, training: Training, pipe: Pipeline, optimizer: torch.optim.Optimizer | None) -> None:
    """See, in the first process, that no state is left out for want of a parameter in any process's optimizer.

    Raises:
        ExecutionError: the optimizer that was saved held more.
    """
    own = dict(pipe.named_parameters())
    held = {id(parameter) for group in (optimizer.param_groups if optimizer else ()) for parameter in group["params"]}
    stepped = {name for name, parameter in own.items() if id(parameter) in held}
    trained = {name for name, parameter in own.items() if parameter.requires_grad}
    parts: list[tuple[bool, set[str], set[str]]] = _gathered((optimizer is not None, stepped, trained))
    if not _is_first() or training.optimizer is None or not any(given for given, *_ in parts):
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


def _take_over(pipe: Pipeline, change: _Change, training: Training, source: Path, manifest: Manifest | None) -> None:
    change.make()
    pipe.resume(training.step, training.seed)
    pipe.run.go_on_from(source, manifest)


def _check_kind(source: Path, name: str, held: Tensor, stored: StoredTensor) -> None:
    if (stored.dtype, stored.shape) != (held.dtype, tuple(held.shape)):
        raise ExecutionError(
            f"{source} belongs to another model: {name} is {stored.dtype} of shape {stored.shape} there, and "
            f"{held.dtype} of shape {tuple(held.shape)} in this one"
        )


def _copy(source: Path, name: str, held: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Where a value goes: of a tensor that was expanded, whose elements share memory, to each element once."""
    part = value
    for dim, stride in enumerate(held.stride()):
        if stride == 0 and held.shape[dim] > 1:
            held, part = held.narrow(dim, 0, 1), part.narrow(dim, 0, 1)
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
def _continued(others: Mapping[str, Stateful], states: Mapping[str, Any]) -> Iterator[None]:
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


# What the processes do together.


def _is_first() -> bool:
    return _rank() == 0


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


def _shared(value: str | None) -> str:
    """The first process's value, in every process."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    assert values[0] is not None
    return values[0]


def _gathered(value: Any) -> list[Any]:
    """All processes' values, in the first process; elsewhere its own."""
    if not dist.is_initialized():
        return [value]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(value, parts if _is_first() else None)
    return parts if _is_first() else [value]


@contextmanager
def _failures_named(place: Path) -> Iterator[None]:
    """Turn what the file system and torch raise into an error of ours."""
    try:
        yield
    except OSError as problem:
        raise ExecutionError(_failure(place, problem)) from problem
    except CheckpointException as problem:  # torch derives it from BaseException
        causes = [cause for cause, _ in problem.failures.values() if isinstance(cause, OSError)]
        if causes:
            raise ExecutionError(_failure(place, causes[0])) from problem
        raise ExecutionError(f"cannot write {place}: {reason_of(problem)}") from problem


def _failure(place: Path, problem: OSError) -> str:
    advice = "save into a folder of yours"
    if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        advice = "make room, or keep fewer checkpoints (keep=...)"
    elif problem.errno == errno.ENOENT:
        advice = "someone removed it while it was written"
    return f"cannot write {place}: {reason_of(problem)}; {advice}"
