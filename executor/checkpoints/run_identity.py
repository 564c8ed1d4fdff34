"""A training run, as its checkpoints know it: which of those in a folder are its own.

A run owns what it has saved, and what the run that it goes on from owned at the checkpoint that was loaded:

    run 1   step 100 ---- step 200 ---- step 300
                             |
    run 2                 (loads it) ---- step 250 ----       owns 100, 200 and 250, not 300, and nothing of others

So a run that is killed and comes back cleans up after itself, and nobody loses a checkpoint that his run has not saved:
not another run's, and not one of a later step, which a run that goes back to an earlier one leaves behind.
"""

from __future__ import annotations

import uuid
from pathlib import Path

from executor.checkpoints.lock import FolderLock, lock_folder
from executor.checkpoints.manifest import Manifest


class Run:
    """From the construction of a pipeline, or from the checkpoint that it loads, on.

    Attributes:
        id: names the run.
        inherits: the runs that it goes on from, each with the last step that it shares with this one.
        origin: the checkpoint that it goes on from.
    """

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.inherits: dict[str, int] = {}
        self.origin: Path | None = None
        self._locks: dict[Path, FolderLock] = {}

    def go_on_from(self, checkpoint: Path, manifest: Manifest | None) -> None:
        """The state of a checkpoint was loaded; one without a manifest belongs to nobody."""
        self.id = uuid.uuid4().hex
        self.origin = checkpoint.resolve()
        self.inherits = {} if manifest is None else {**manifest.inherits, manifest.run: manifest.step}

    def owns(self, manifest: Manifest, *, step: int) -> bool:
        """Whether a checkpoint is this run's, as of a step."""
        last = step if manifest.run == self.id else self.inherits.get(manifest.run, -1)
        return manifest.step <= min(last, step)

    def lock(self, folder: Path) -> FolderLock:
        """Keep other runs from saving into a folder for as long as this one lives.

        Raises:
            ExecutionError: another one saves there.
            OSError: nothing can be written there.
        """
        real = folder.resolve()  # it may have several names
        held = self._locks.get(real)
        if held is None or not held.in_place:
            self._locks[real] = held = lock_folder(folder)
        return held
