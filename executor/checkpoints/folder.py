"""A folder of checkpoints: one comes into being, `latest` moves to it, old ones of the same run go.

    checkpoints/.lock                      one run at a time saves here
    checkpoints/.draft-step-00000200/      being written, or the rest of a process that was killed
    checkpoints/step-00000100/             whole, with its manifest; moved here from its draft in one step
    checkpoints/latest -> step-00000100    moved in one step, too

Whenever a process is killed, what has a name is whole. Once a new checkpoint is, nothing that goes wrong in the folder
ends the training: it is a warning that says what to do.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import warnings
from itertools import count
from pathlib import Path

from executor.checkpoints.failures import reason_of
from executor.checkpoints.manifest import TRAINING, Manifest
from executor.checkpoints.run_identity import Run
from profiler.errors import ExecutionError
from profiler.files import DRAFT, flush_folder

LATEST = "latest"
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


class CheckpointFolder:
    """Where a run saves; the first process of those that train together looks after it.

    Args:
        home: the folder.
        run: that saves.
    """

    def __init__(self, home: Path, run: Run) -> None:
        self.home = home
        self._run = run

    def begin(self, step: int) -> str:
        """Make an empty draft of a checkpoint.

        Returns:
            The name that the checkpoint will have.

        Raises:
            ExecutionError: another run saves there.
            OSError: nothing can be written there.
        """
        if not self.home.exists():
            self.home.mkdir(parents=True, exist_ok=True)
            flush_folder(self.home.parent)
        lock = self._run.lock(self.home)
        if lock.guards:
            self._remove_drafts()
        name = self._free_name(step)
        self.draft_of(name).mkdir()
        return name

    def draft_of(self, name: str) -> Path:
        """Where a checkpoint lies while it is written."""
        return self.home / f"{DRAFT}{name}"

    def give_up(self, name: str) -> None:
        """Remove the draft of a checkpoint that could not be written: it may be what fills the disk."""
        shutil.rmtree(self.draft_of(name), ignore_errors=True)

    def finish(self, name: str, step: int, keep: int | None) -> None:
        """A draft is complete, manifest and all: let it have its name, and `latest` mean it.

        Args:
            name: of the checkpoint.
            step: training steps done.
            keep: how many of the run's checkpoints to keep; None for all.

        Raises:
            OSError: it could not be written.
        """
        self.draft_of(name).rename(self.home / name)
        try:
            self._warn_of_others()
            self._move_latest(name)
        except (OSError, MemoryError) as problem:
            _warn(
                f"{self.home / name} is whole, but {self.home / LATEST} could not be made to point to it "
                f"({reason_of(problem)}): load it by its own path; if a folder or a file of yours is called {LATEST}, "
                "rename it. Nothing was removed"
            )
            return
        if keep is not None:
            self._remove_old(name, step, keep)

    def _free_name(self, step: int) -> str:
        """A name that comes after those of all checkpoints of the same step."""
        taken = [int(found[2] or 0) for found in self._found().values() if int(found[1]) == step]
        for number in count(max(taken, default=-1) + 1):
            name = f"step-{step:08d}" + (f".{number}" if number else "")
            if not any(os.path.lexists(path) for path in (self.home / name, self.draft_of(name))):
                return name
        raise AssertionError  # count() does not end

    def _found(self) -> dict[Path, re.Match[str]]:
        """What has the name of a checkpoint."""
        names = {path: _NAME.fullmatch(path.name) for path in self.home.iterdir()}
        return {path: match for path, match in names.items() if match is not None}

    def _remove_drafts(self) -> None:
        """Remove what killed processes have left: no one else writes here, and none of it is a checkpoint."""
        for path in list(self.home.iterdir()):
            prefix, name = path.name[: len(DRAFT)], path.name[len(DRAFT) :]
            if prefix == DRAFT and (name == LATEST or _NAME.fullmatch(name)):
                self._remove(path)

    def _remove(self, path: Path) -> None:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as problem:
            _warn(f"{path} could not be removed ({reason_of(problem)}); it is no checkpoint: remove it by hand")

    def _warn_of_others(self) -> None:
        """Say so when `latest` leaves a checkpoint that this run does not go on from."""
        link = self.home / LATEST
        if not link.is_symlink() or not link.exists():
            return
        left = link.resolve()
        if left == self._run.origin:
            return
        manifest = _manifest_of(left)
        if manifest is None or manifest.run not in {self._run.id, *self._run.inherits}:
            _warn(
                f"{self.home} holds checkpoints of another run, the newest {left.name}; they stay, and {LATEST} is "
                "this run's from now on: load by the path of a step what was the other's, and give each run a folder"
            )

    def _move_latest(self, name: str) -> None:
        """Let `latest` point to a whole checkpoint, in one step of the file system."""
        flush_folder(self.home)
        latest = self.home / LATEST
        if os.path.lexists(latest) and not latest.is_symlink():
            raise OSError(errno.EEXIST, "it is no link, and not this run's to remove")
        link = self.home / f"{DRAFT}{LATEST}"
        link.unlink(missing_ok=True)
        link.symlink_to(name, target_is_directory=True)
        try:
            link.replace(latest)
        finally:
            link.unlink(missing_ok=True)
        flush_folder(self.home)

    def _remove_old(self, newest: str, step: int, keep: int) -> None:
        """Remove all but the newest of the run's checkpoints; a name is hidden before its files go."""
        try:
            found = sorted((int(match[1]), int(match[2] or 0), path) for path, match in self._found().items())
        except OSError as problem:
            _warn(f"cannot list {self.home} ({reason_of(problem)}): no old checkpoint was removed")
            return
        own = []
        for *_, path in found:
            manifest = None if path.is_symlink() or path.name == newest else _manifest_of(path)
            if manifest is not None and self._run.owns(manifest, step=step):
                own.append(path)
        for path in own[: max(len(own) + 1 - keep, 0)]:
            hidden = self.draft_of(path.name)
            try:
                path.rename(hidden)
            except OSError as problem:
                _warn(f"the old checkpoint {path} could not be removed ({reason_of(problem)}): remove it by hand")
            else:
                self._remove(hidden)


def checkpoint_at(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest of a folder; not by its link, which may move.

    Raises:
        ExecutionError: there is none.
    """
    try:
        for found in (path, path / LATEST):
            if (found / TRAINING).exists():
                return found.parent / found.readlink() if found.is_symlink() else found
        others = sorted(entry.name for entry in path.iterdir() if (entry / TRAINING).exists()) if path.is_dir() else []
    except OSError as problem:
        raise ExecutionError(f"cannot look for a checkpoint at {path}: {reason_of(problem)}") from problem
    if others:
        raise ExecutionError(
            f"{path} has no link {LATEST!r} to a complete checkpoint; load one by its own path: {path / others[-1]}"
        )
    raise ExecutionError(f"{path} holds no complete checkpoint; save one with save_checkpoint")


def _manifest_of(checkpoint: Path) -> Manifest | None:
    """Whose a checkpoint is; one that does not say so is nobody's."""
    try:
        return Manifest.of(checkpoint)
    except ExecutionError:
        return None


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)
