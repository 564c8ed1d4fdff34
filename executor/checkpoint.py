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

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from executor.checkpoints.folder import CheckpointFolder, checkpoint_at
from executor.checkpoints.manifest import Manifest
from executor.checkpoints.optimizers import Optimizers, optimizers_of, refuse_beside, refuse_sparse_state
from executor.checkpoints.reading import (
    change_by,
    checked_training,
    continued,
    options_of_others,
    refuse_left_out,
    take_over,
)
from executor.checkpoints.saved import Stateful
from executor.checkpoints.tensor_writer import TensorWriter
from executor.checkpoints.together import failures_named, is_first, of_the_first, wait_for_all
from executor.checkpoints.writing import complete, tensors_of
from executor.pipeline import Pipeline
from executor.watch.position import Phase
from profiler.arguments import fits_its_arguments
from profiler.errors import ArgumentError
from profiler.quantities import shown

__all__ = ["Stateful", "load_checkpoint", "save_checkpoint"]


@fits_its_arguments
def save_checkpoint(
    folder: str | Path,
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
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
        optimizer: over `pipe.parameters()`, if its state is to be kept; or a list of several, each over some of them.
        also: what else to keep, by name: anything with `state_dict` that is the same in every process. What differs is
            kept as rank 0 has it, with a warning.
        keep: how many of this run's checkpoints to keep; older ones are removed when the new one is whole. All if
            None: no space is worth a checkpoint that someone still needs.

    Returns:
        The checkpoint.

    Raises:
        ArgumentError: `keep` is no number of checkpoints, or an argument is of another type, or the optimizer keeps a
            sparse tensor.
        ExecutionError: another run saves into the folder, or nothing can be written there, or another process failed;
            `latest` is what it was, and nothing half written is left.
    """
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ArgumentError(f"keep is {keep!r}; pass how many checkpoints to keep, at least 1, or None for all")
    home, optimizers = _checked(folder, pipe, optimizer)
    with pipe.watch.call(Phase.SAVE, {"the call": "save_checkpoint", "the folder": str(home)}):
        refuse_beside(also or {}, set(pipe.parameters()), "pass all optimizers as a list, optimizer=[first, second]")
        if optimizers is not None:
            refuse_sparse_state(optimizers, pipe.stepped_parameters())
        checkpoints = CheckpointFolder(home, pipe.run)
        with failures_named(home):
            begun = checkpoints.begin(pipe.steps) if is_first() else None
        try:
            name = of_the_first(begun)
            draft = checkpoints.draft_of(name)
            with failures_named(draft):
                with warnings.catch_warnings(action="ignore"):  # torch warns of its own use of itself
                    dcp.save(  # type: ignore[attr-defined]
                        tensors_of(pipe, optimizers),
                        storage_writer=TensorWriter(draft),
                        no_dist=not dist.is_initialized(),
                    )
                complete(draft, pipe, optimizers, also or {})
                if begun is not None:
                    checkpoints.finish(begun, pipe.steps, keep)
        except BaseException:
            if begun is not None:
                checkpoints.give_up(begun)
            raise
        wait_for_all()
    return home / name


@fits_its_arguments
def load_checkpoint(
    path: str | Path,
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    also: Mapping[str, Stateful] | None = None,
) -> int:
    """Continue from a checkpoint, whatever K it was written with; every process calls this.

    While it loads, the tensors of this process's stages are in memory twice.

    Args:
        path: a folder of checkpoints, whose newest is loaded, or one checkpoint of it.
        pipe: what is trained; its parameters, buffers, step and seed become the checkpoint's.
        optimizer: over `pipe.parameters()`, the same ones as when it was saved; its state and the options of its groups
            become the checkpoint's. Several in the same order.
        also: what else to continue, by the names that it was saved under.

    Returns:
        How many training steps were done.

    Raises:
        ArgumentError: an argument is of another type.
        ExecutionError: there is no checkpoint, it is damaged or cannot be read, or it belongs to another model or
            optimizer. Nothing has changed then, on any rank.
    """
    given, optimizers = _checked(path, pipe, optimizer)
    others = also or {}
    with pipe.watch.call(Phase.LOAD, {"the call": "load_checkpoint", "the checkpoint": str(given)}):
        source = Path(of_the_first(str(checkpoint_at(given)) if is_first() else None))
        manifest = Manifest.of(source)
        training = checked_training(source, manifest)
        training.check_model(source, pipe.state_names())
        training.check_also(source, list(others))
        if dist.is_initialized():  # one process saved it right, of several the first one's is there alone
            refuse_beside(
                others, set(pipe.parameters()), "load it in one process, and save it anew with a list of them"
            )
        change = change_by(source, manifest, training, pipe, optimizers)
        refuse_left_out(source, training, pipe, optimizers)
        change.options.extend(options_of_others(change, optimizers))
        with continued(others, training.also):
            wait_for_all()  # none has changed anything but `others`, which come back if one fails until here
        try:
            take_over(pipe, change, training, source, manifest)
        except KeyboardInterrupt:  # half of it would be another training; to do all of it twice does no harm
            take_over(pipe, change, training, source, manifest)
            raise
        wait_for_all()
    return training.step


def _checked(path: object, pipe: object, optimizer: object) -> tuple[Path, Optimizers | None]:
    """The folder or the checkpoint, and the optimizers, where what is given is what is asked for."""
    if not isinstance(path, str | Path):
        raise ArgumentError(f"the checkpoint is {shown(path)}; give the path of a folder")
    if not isinstance(pipe, Pipeline):
        raise ArgumentError(f"a checkpoint is of a Pipeline, and this is a {type(pipe).__name__}; pass the pipeline")
    return Path(path).absolute(), optimizers_of(optimizer)
