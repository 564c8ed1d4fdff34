"""Training state on disk, in torch's own distributed format and under the model's original names.

A folder holds whole checkpoints, and a link to the newest that moves in one step: whenever a process is killed,
`latest` is a whole checkpoint.

    checkpoints/step-00000100/      parameters, buffers, optimizer state (torch.distributed.checkpoint); training.pt
    checkpoints/latest -> step-00000100

A checkpoint knows nothing of stages: saved with K of them, it loads with any other number, or without a pipeline:

    state = {"model": model.state_dict()}
    torch.distributed.checkpoint.load(state, checkpoint_id="checkpoints/latest")
    model.load_state_dict(state["model"])
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from executor.pipeline import Pipeline
from executor.position import Phase
from profiler.errors import ArgumentError, ExecutionError

LATEST = "latest"
FORMAT = 1
_TRAINING = "training.pt"
_DRAFT = ".draft-"
_NAME = re.compile(r"step-\d{8,}(\.\d+)?")


class Stateful(Protocol):
    """A learning-rate scheduler, a `GradScaler`, whatever is the same in every process."""

    def state_dict(self) -> dict[str, Any]:
        """What to keep."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Continue from what was kept."""


@dataclass(frozen=True)
class _OptimizerEntry:
    """What is kept of one parameter's optimizer state beside its tensors.

    Attributes:
        options: of its parameter group: learning rate, weight decay, ...
        tensors: names of the state's tensors, which are kept with the model's.
        others: what else the state holds.
    """

    options: dict[str, Any]
    tensors: list[str]
    others: dict[str, Any]


@dataclass(frozen=True)
class _Training:
    """What a checkpoint holds beside tensors.

    Attributes:
        step: training steps done.
        seed: of the model's random numbers, which are keyed by seed and step.
        names: of all parameters and buffers.
        optimizer: by name of the parameter; None if no optimizer was saved.
        optimizer_class: its name.
        also: states of what else was saved, by name.
        format: version of all this.
    """

    step: int
    seed: int
    names: list[str]
    optimizer: dict[str, dict[str, Any]] | None
    optimizer_class: str | None
    also: dict[str, dict[str, Any]] = field(default_factory=dict)
    format: int = FORMAT


def save_checkpoint(
    folder: str | Path,
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    also: Mapping[str, Stateful] | None = None,
    keep: int = 1,
) -> Path:
    """Write the training state as the newest checkpoint of a folder; every process calls this.

        save_checkpoint("checkpoints", pipe, optimizer, also={"scheduler": scheduler})

    Args:
        folder: where checkpoints lie; on a file system that all machines share.
        pipe: what is trained.
        optimizer: over `pipe.parameters()`, if its state is to be kept.
        also: what else to keep, by name: anything with `state_dict` that is the same in every process.
        keep: how many checkpoints to keep; older ones are removed when the new one is whole.

    Returns:
        The checkpoint.

    Raises:
        ExecutionError: it could not be written, or another process failed; `latest` is what it was.
    """
    if keep < 1:
        raise ArgumentError(f"keep is {keep}; at least the newest checkpoint is kept")
    home = Path(folder).absolute()
    with pipe.watch.call(Phase.SAVE, {"the call": "save_checkpoint", "the folder": str(home)}):
        name = _shared(_free_name(home, pipe.steps) if _is_first() else None)
        draft = home / f"{_DRAFT}{name}"
        if _is_first():
            _remove_drafts(home)
            draft.mkdir(parents=True)
        _wait_for_all()
        try:
            with _expected_warnings():
                dcp.save(  # type: ignore[attr-defined]
                    _tensors(pipe, optimizer), checkpoint_id=draft, no_dist=not dist.is_initialized()
                )
        except CheckpointException as problem:  # torch derives it from BaseException
            raise ExecutionError(f"cannot write {draft}: {_reason(problem)}") from problem
        training = _training(pipe, optimizer, also or {})
        if _is_first():
            _write_training(draft / _TRAINING, training)
            _flush_folder(draft)
            draft.rename(home / name)
            _move_latest(home, name)
            _remove_old(home, name, keep)
        _wait_for_all()
    return home / name


def load_checkpoint(
    path: str | Path,
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    also: Mapping[str, Stateful] | None = None,
) -> int:
    """Continue from a checkpoint, whatever K it was written with; every process calls this.

    Args:
        path: a folder of checkpoints, whose newest is loaded, or one checkpoint of it.
        pipe: what is trained; its parameters, buffers, step and seed become the checkpoint's.
        optimizer: over `pipe.parameters()`; its state and the options of its groups become the checkpoint's.
        also: what else to continue, by the names that it was saved under.

    Returns:
        How many training steps were done.

    Raises:
        ExecutionError: there is no checkpoint, it is damaged, or it belongs to another model or optimizer.
    """
    source = _checkpoint_at(Path(path).absolute())
    with pipe.watch.call(Phase.LOAD, {"the call": "load_checkpoint", "the checkpoint": str(source)}):
        training = _read_training(source)
        _check_names(source, pipe, training)
        entries = _entries_for(source, training, pipe, optimizer)
        missing = sorted(set(also or {}) ^ set(training.also))
        if missing:
            raise ExecutionError(
                f"{source} holds the states of {sorted(training.also)}, but {sorted(also or {})} are to be loaded; "
                f"give `also` the same names"
            )
        state: dict[str, Any] = {"model": pipe.state_dict(), "optimizer": _empty_tensors(source, entries)}
        try:
            with _expected_warnings():
                dcp.load(  # type: ignore[attr-defined]
                    state, checkpoint_id=source, no_dist=not dist.is_initialized()
                )
        except (Exception, CheckpointException) as problem:
            raise _unreadable(source, problem) from problem
        if optimizer is not None:
            _fill(pipe, optimizer, entries, state["optimizer"])
        for name, one in (also or {}).items():
            one.load_state_dict(training.also[name])
        pipe.resume(training.step, training.seed)
        _wait_for_all()
    return training.step


# What is written.


def _tensors(pipe: Pipeline, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Parameters, buffers and the tensors of the optimizer's state, by original names."""
    state: dict[str, Any] = {"model": {**pipe.state_dict(), **pipe.extra_state()}}
    if optimizer is not None:
        state["optimizer"] = {
            _key(name, entry): value
            for name, parameter in pipe.named_parameters()
            for entry, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }
    return state


def _key(name: str, entry: str) -> str:
    return f"{name}.{entry}"


def _training(pipe: Pipeline, optimizer: torch.optim.Optimizer | None, also: Mapping[str, Stateful]) -> _Training:
    """What is kept beside tensors, of all processes together."""
    own = None if optimizer is None else dict(_optimizer_entries(pipe, optimizer))
    parts = _gathered(own)
    entries = None if optimizer is None else {name: entry for part in parts for name, entry in (part or {}).items()}
    states = {name: one.state_dict() for name, one in also.items()}
    class_name = None if optimizer is None else type(optimizer).__name__
    return _Training(pipe.steps, pipe.seed, pipe.state_names(), entries, class_name, states)


def _optimizer_entries(pipe: Pipeline, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentError("LBFGS keeps one state for all parameters, which does not follow the stages; use another")
    group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in pipe.named_parameters():
        if parameter in group_of:
            state = optimizer.state.get(parameter, {})
            yield (
                name,
                asdict(
                    _OptimizerEntry(
                        _options(group_of[parameter]),
                        [entry for entry, value in state.items() if isinstance(value, Tensor)],
                        {entry: value for entry, value in state.items() if not isinstance(value, Tensor)},
                    )
                ),
            )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {option: value for option, value in group.items() if option not in ("params", "param_names")}


def _write_training(path: Path, training: _Training) -> None:
    with path.open("wb") as file:
        torch.save(asdict(training), file)
        file.flush()
        os.fsync(file.fileno())


# What lies in the folder.


def _free_name(home: Path, step: int) -> str:
    """A name for the checkpoint of a step that no checkpoint has yet."""
    for number in count():
        name = f"step-{step:08d}" + (f".{number}" if number else "")
        if not (home / name).exists():
            return name
    raise AssertionError  # count() does not end


def _remove_drafts(home: Path) -> None:
    """Remove what a killed process has left."""
    for draft in home.glob(f"{_DRAFT}*"):
        if draft.is_dir() and not draft.is_symlink():
            shutil.rmtree(draft)
        else:
            draft.unlink()


def _move_latest(home: Path, name: str) -> None:
    """Let `latest` point to a whole checkpoint, in one step of the file system."""
    _flush_folder(home)
    link = home / f"{_DRAFT}{LATEST}"
    link.symlink_to(name, target_is_directory=True)
    link.replace(home / LATEST)
    _flush_folder(home)


def _remove_old(home: Path, newest: str, keep: int) -> None:
    """Remove all but the newest checkpoints; a name is hidden before its files go."""
    found = [path for path in home.iterdir() if _NAME.fullmatch(path.name) and path.name != newest]
    found.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in found[keep - 1 :]:
        hidden = home / f"{_DRAFT}{path.name}"
        path.rename(hidden)
        shutil.rmtree(hidden)


def _flush_folder(folder: Path) -> None:
    """Let the names in a folder reach the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# What is read.


def _checkpoint_at(path: Path) -> Path:
    """The checkpoint that a path means, without links, so that a later one does not move it under our feet."""
    if (path / _TRAINING).exists():
        return path.resolve()
    if (path / LATEST / _TRAINING).exists():
        return (path / LATEST).resolve()
    raise ExecutionError(f"{path} holds no complete checkpoint; save one with save_checkpoint")


def _read_training(source: Path) -> _Training:
    try:
        found = torch.load(source / _TRAINING, weights_only=True)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            version = found.get("format") if isinstance(found, dict) else None
            raise ExecutionError(
                f"{source} has format {version}, this version reads {FORMAT}; load it where it was made"
            )
        return _Training(**found)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError) as problem:
        raise _unreadable(source, problem) from problem


def _check_names(source: Path, pipe: Pipeline, training: _Training) -> None:
    own, kept = set(pipe.state_names()), set(training.names)
    if own != kept:
        only = [f"{len(kept - own)} that the model lacks, such as {min(kept - own)}"] if kept - own else []
        only += [f"not {len(own - kept)} of the model's, such as {min(own - kept)}"] if own - kept else []
        raise ExecutionError(
            f"{source} belongs to another model: it holds {len(kept)} parameters and buffers, {' and '.join(only)}"
        )


def _entries_for(
    source: Path, training: _Training, pipe: Pipeline, optimizer: torch.optim.Optimizer | None
) -> dict[str, _OptimizerEntry]:
    """What the checkpoint keeps of this process's parameters in the optimizer."""
    if optimizer is None:
        return {}
    if training.optimizer is None:
        raise ExecutionError(f"{source} holds no optimizer state; it was saved without an optimizer")
    if training.optimizer_class != type(optimizer).__name__:
        raise ExecutionError(
            f"{source} holds the state of {training.optimizer_class}, which means nothing to "
            f"{type(optimizer).__name__}; use the optimizer that it was saved with"
        )
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    names = [name for name, parameter in pipe.named_parameters() if parameter in held]
    absent = [name for name in names if name not in training.optimizer]
    if absent:
        raise ExecutionError(
            f"{source} was saved with an optimizer of {len(training.optimizer)} parameters, without {absent[0]}; let "
            "the optimizer hold the same parameters"
        )
    return {name: _OptimizerEntry(**training.optimizer[name]) for name in names}


def _empty_tensors(source: Path, entries: Mapping[str, _OptimizerEntry]) -> dict[str, Tensor]:
    """Memory for the optimizer's tensors, with the shapes and dtypes of the checkpoint."""
    if not any(entry.tensors for entry in entries.values()):
        return {}
    try:
        with _expected_warnings():
            kept: Any = dcp.FileSystemReader(source).read_metadata().state_dict_metadata  # type: ignore[attr-defined]
            keys = [_key(name, tensor) for name, entry in entries.items() for tensor in entry.tensors]
            found = {key: kept[f"optimizer.{key}"] for key in keys}
            return {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in found.items()}
    except Exception as problem:
        raise _unreadable(source, problem) from problem


def _fill(
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer,
    entries: Mapping[str, _OptimizerEntry],
    tensors: Mapping[str, Tensor],
) -> None:
    """Give the optimizer the state and the options of the checkpoint."""
    name_of = {parameter: name for name, parameter in pipe.named_parameters()}
    for group in optimizer.param_groups:
        named = [(parameter, name_of[parameter]) for parameter in group["params"] if parameter in name_of]
        for parameter, name in named:
            entry = entries[name]
            group.update(entry.options)
            on_cpu = {"step"} if not (group.get("capturable") or group.get("fused")) else set()  # as torch does
            state = {
                tensor: tensors[_key(name, tensor)].to("cpu" if tensor in on_cpu else parameter.device)
                for tensor in entry.tensors
            }
            if state or entry.others:
                optimizer.state[parameter] = {**state, **entry.others}
            else:
                optimizer.state.pop(parameter, None)


def _unreadable(source: Path, problem: BaseException) -> ExecutionError:
    return ExecutionError(
        f"cannot load {source}: {_reason(problem)}; it is damaged or was not written by save_checkpoint: load another"
    )


def _reason(problem: BaseException) -> str:
    lines = [line.strip() for line in str(problem).strip().splitlines() if line.strip()]
    return f"{type(problem).__name__}: {lines[-1] if lines else 'no reason given'}"


# What the processes do together.


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


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


def _expected_warnings() -> warnings.catch_warnings[None]:
    """Silence what torch warns of in its own use of itself while it saves and loads."""
    return warnings.catch_warnings(action="ignore")
