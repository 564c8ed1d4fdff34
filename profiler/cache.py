"""What was measured before: JSON files in the user's cache folder.

    profile(sequence, 2)                      # measures
    profile(sequence, 2)                      # reads
    profile(sequence, 2, cache=False)         # measures
    profile(sequence, 2, cache="folder")      # a folder of its own

An entry holds what was measured of one model at one micro-batch size on one kind of device, or an optimizer, or a link.
It is found by everything that its figures depend on: the signatures of all layers (operations, shapes, dtypes), size,
device, threads and busy neighbours, processor, torch version, autocast, loss function and target. Layers are not found
one by one: their times are scaled to the stage that they stand in, and their bytes depend on their neighbours.

Files are written beside their place and moved there, so that no reader meets half a file and two writers do no harm. A
damaged file is worth a warning and no more.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import platform
import tempfile
import warnings
from collections.abc import Mapping
from functools import cache as remembered
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import cloudpickle
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.utils import _pytree as pytree

from profiler.errors import ArgumentError
from profiler.record import LayerCost
from profiler.value import Value

CacheSetting: TypeAlias = str | Path | bool | None

VARIABLE = "GPIPE_AUTOPLAN_CACHE"  # a folder, or "off"
FORMAT = 3  # of the entries and of what is measured how; older ones are not found any more

Entry = TypeVar("Entry", bound=Value)


class CachedCosts(Value):
    """Costs of all layers of a model at one micro-batch size on one kind of device."""

    costs: tuple[LayerCost, ...]


class Cache:
    """A folder of entries.

    Args:
        folder: where they are; None to remember nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    @classmethod
    def of(cls, setting: CacheSetting) -> Cache:
        """The cache that a user's setting means.

        Args:
            setting: a folder; False or "off" for none; None or True for the folder that the environment variable
                `GPIPE_AUTOPLAN_CACHE` names (or none if that is `off`), else for `gpipe-autoplan` in the user's cache
                folder.

        Raises:
            ArgumentError: the setting is something else.
        """
        if setting is False or setting == "off":
            return cls(None)
        if isinstance(setting, str | Path) and str(setting):
            return cls(Path(setting))
        if setting is not None and setting is not True:
            raise ArgumentError(f"cache={setting!r}; pass a folder, or False to remember nothing")
        named = os.environ.get(VARIABLE, "")
        if named:
            return cls(None if named == "off" else Path(named))
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return cls(Path(base).expanduser() / "gpipe-autoplan")

    def get(self, key: Mapping[str, Any], kind: type[Entry]) -> Entry | None:
        """The entry with that key; None if there is none, or if it is damaged."""
        path = self._path(key)
        if path is None or not path.exists():
            return None
        try:
            return kind.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ValidationError) as problem:
            first = str(problem).splitlines()[0]
            warnings.warn(f"the cached measurement {path} is damaged and not used: {first}", stacklevel=2)
            return None

    def put(self, key: Mapping[str, Any], entry: Value) -> None:
        """Remember an entry; where the folder cannot be written, warn and go on."""
        path = self._path(key)
        if path is None:
            return
        draft = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=path.parent, prefix=".draft-", delete=False
            ) as file:
                draft = file.name
                file.write(entry.to_json())
            Path(draft).replace(path)
        except OSError as problem:
            if draft:
                with contextlib.suppress(OSError):
                    Path(draft).unlink()
            warnings.warn(
                f"cannot remember measurements in {path.parent}: {problem.strerror or problem}; set {VARIABLE} to "
                "a folder of yours, or to off",
                stacklevel=2,
            )

    def _path(self, key: Mapping[str, Any]) -> Path | None:
        if self.folder is None:
            return None
        whole = {"format": FORMAT, "torch": torch.__version__, "processor": processor(), **key}
        text = json.dumps(whole, sort_keys=True)
        return self.folder / f"{key['what']}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


@remembered
def processor() -> str:
    """The model of this machine's processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def digest_of(value: Any) -> str:
    """A text that is equal for equal functions (same code) and for targets of the same shapes and dtypes."""
    leaves, tree = pytree.tree_flatten(value)
    return hashlib.sha256("\n".join([str(tree), *map(_leaf_text, leaves)]).encode()).hexdigest()


def _leaf_text(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)}"
    if not callable(leaf):
        return repr(leaf)
    texts = [f"{getattr(leaf, '__module__', '')}.{getattr(leaf, '__qualname__', type(leaf).__qualname__)}"]
    with contextlib.suppress(OSError, TypeError):
        texts.append(inspect.getsource(leaf))
    with contextlib.suppress(Exception):  # whatever a strange callable raises when it is pickled
        texts.append(hashlib.sha256(cloudpickle.dumps(leaf)).hexdigest())  # with what a local function closes over
    return "\n".join(texts)
