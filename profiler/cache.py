"""What was measured before: JSON files in the user's cache folder.

    profile(sequence, 2)                      # measures
    profile(sequence, 2)                      # reads
    profile(sequence, 2, cache=False)         # measures
    profile(sequence, 2, cache="folder")      # a folder of its own

An entry holds what was measured of one model at one micro-batch size on one kind of device, or an optimizer, or a link.
It is found by everything that its figures depend on: the signatures of all layers (operations, shapes, dtypes), size,
device, threads and busy neighbours, processor, torch version, autocast, loss function and target. Layers are not found
one by one: their times are scaled to the stage that they stand in, and their bytes depend on their neighbours.

The time budget is no part of that: figures of a short one are medians of a few repeats, not other figures, and
`LayerCost.spread` says how good they are. To measure again with a longer one, pass `cache="off"` or another folder.

Files come to their place whole (see `profiler.files`), with the rights that the user's files get: those who share a
folder may read what one has measured, if the user's umask lets them. A damaged file, or one of another name, does not
have the sum that it states; it is worth a warning and no more.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import platform
import re
import warnings
from collections.abc import Mapping
from functools import cache as remembered
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias, TypeVar

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from profiler.errors import ArgumentError, ProfileError
from profiler.files import replace_file
from profiler.record import LayerCost
from profiler.value import Value, read_file

CacheSetting: TypeAlias = str | Path | bool | None

VARIABLE = "GPIPE_AUTOPLAN_CACHE"  # a folder, or "off"
FORMAT = 10  # of the entries and of what is measured how; older ones are not found any more
LONGEST_NAME = 255  # bytes, of a file on the usual file systems
LONGEST_ENTRY = 64  # bytes, of the names that this module gives to files

Cached = TypeVar("Cached", bound=Value)


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
            ArgumentError: the setting is something else, or no folder can have that name.
        """
        if setting is False or setting == "off":
            return cls(None)
        if isinstance(setting, str | Path) and str(setting):
            return cls(_folder(setting))
        if setting is not None and setting is not True:
            raise ArgumentError(f"cache={setting!r}; pass a folder, or False to remember nothing")
        named = os.environ.get(VARIABLE, "")
        if named:
            return cls(None if named == "off" else _folder(named))
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return cls(_folder(base) / "gpipe-autoplan")

    def get(self, key: Mapping[str, Any], kind: type[Cached]) -> Cached | None:
        """The entry with that key; None if there is none, or if it is damaged."""
        path = self._path(key)
        if path is None:
            return None
        try:
            text = read_file(path, "cached measurement", ProfileError)
            source = f"the cached measurement {path}"
            return kind.parse_json(_unsigned(text, path), source=source, error=ProfileError)
        except ProfileError as problem:
            if isinstance(problem.__cause__, FileNotFoundError | NotADirectoryError):
                return None
            warnings.warn(f"{problem}; it is damaged and not used", stacklevel=2)
            return None

    def put(self, key: Mapping[str, Any], entry: Value) -> None:
        """Remember an entry; where the folder cannot be written, warn and go on."""
        path = self._path(key)
        if path is None:
            return
        try:
            replace_file(path, _signed(entry.to_json(), path).encode())
        except OSError as problem:
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


def _signed(entry: str, path: Path) -> str:
    """What a file holds: JSON with the entry, and a sum of that and of the file's name."""
    return f'{{"sum": "{_sum(entry, path)}", "entry":\n{entry}}}\n'


def _unsigned(text: str, path: Path) -> str:
    """The entry in such a file.

    Raises:
        ProfileError: the sum is another.
    """
    head, _, rest = text.partition("\n")
    entry = rest.removesuffix("}\n")
    if text != _signed(entry, path):
        raise ProfileError(f"the cached measurement {path} is not what was written: its head is {head[:80]!r}")
    return entry


def _sum(entry: str, path: Path) -> str:
    return hashlib.sha256(f"{path.name}\n{entry}".encode()).hexdigest()


def _folder(named: str | Path) -> Path:
    """The folder of that name, `~` being the user's."""
    try:
        folder = Path(named).expanduser()
        longest = max((len(os.fsencode(part)) for part in folder.parts), default=0)
        if longest > LONGEST_NAME:
            raise ValueError(f"a part of it has {longest} bytes, of at most {LONGEST_NAME}")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            os.lstat(folder / ("x" * LONGEST_ENTRY))
    except (OSError, RuntimeError, ValueError) as problem:  # RuntimeError: a user without a folder
        reason = getattr(problem, "strerror", None) or problem
        shown = repr(str(named))
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        raise ArgumentError(f"cache={shown} is no folder: {reason}; pass another, or False for none") from problem
    return folder


@remembered
def processor() -> str:
    """The model of this machine's processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def digest_of_work(value: Any) -> str:
    """A text that is equal, in any process, for functions and modules that do the same work.

    Of functions it holds the code, what they close over, defaults, and what they use of their file's own; of modules
    and other objects code and attributes; of tensors shapes and dtypes.
    """
    leaves, tree = pytree.tree_flatten(value)
    text = "\n".join([_without_addresses(str(tree)), *map(_leaf_text, leaves)])
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


def _leaf_text(leaf: Any) -> str:
    try:
        return _Texts().of(leaf)
    except Exception:  # whatever strange objects raise when they are looked at; endless ones a RecursionError
        return _fallback_text(leaf)


class _Texts:
    """Texts of values, without addresses and without the values of tensors; what was met before is not told again."""

    def __init__(self) -> None:
        self._met: dict[int, tuple[int, Any]] = {}  # holds the objects, or their ids would be given away again

    def of(self, value: Any) -> str:
        """The text of a value with all that it holds."""
        leaves, tree = pytree.tree_flatten(value)
        return "\n".join([_without_addresses(str(tree)), *map(self._of_leaf, leaves)])

    def _of_leaf(self, leaf: Any) -> str:
        if isinstance(leaf, Tensor | np.ndarray):
            return f"{leaf.dtype} {tuple(leaf.shape)}"
        if leaf is None or isinstance(leaf, str | bytes | int | float | complex):
            return repr(leaf)
        if isinstance(leaf, ModuleType):
            return leaf.__name__
        if id(leaf) in self._met:
            return f"#{self._met[id(leaf)][0]}"
        self._met[id(leaf)] = len(self._met), leaf
        if isinstance(leaf, set | frozenset):
            return repr(sorted(repr(item) for item in leaf))
        return self._of_object(leaf)

    def _of_object(self, leaf: Any) -> str:
        if isinstance(leaf, FunctionType):
            return self._of_function(leaf)
        if isinstance(leaf, type):
            return self._of_class(leaf)
        parts = _parts(leaf)
        return self._of_parts(*parts) if parts else _fallback_text(leaf)

    def _of_parts(self, *parts: Any) -> str:
        return "\n".join(map(self.of, parts))

    def _of_function(self, function: FunctionType) -> str:
        used = []
        if not _is_torchs(function):
            names = sorted(_names(function.__code__) & function.__globals__.keys())
            found = {name: function.__globals__[name] for name in names}
            used = [(name, value) for name, value in found.items() if _belongs_to(value, function.__module__)]
        cells = []
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # a variable that has no value yet
                cells.append(cell.cell_contents)
        parts = (self._of_code(function.__code__), function.__defaults__, function.__kwdefaults__, cells, used)
        return f"{_name_of(function)}\n{self._of_parts(*parts)}"

    def _of_code(self, code: CodeType) -> str:
        constants = [self._of_code(item) if isinstance(item, CodeType) else self.of(item) for item in code.co_consts]
        return repr((code.co_code.hex(), code.co_names, code.co_freevars, constants))

    def _of_class(self, kind: type) -> str:
        if _is_torchs(kind) or kind.__module__ == "builtins":
            return _name_of(kind)
        code = FunctionType, staticmethod, classmethod, property
        held = {
            name: item
            for name, item in vars(kind).items()
            if isinstance(item, code) or (not name.startswith("_") and isinstance(item, _PLAIN))
        }
        return f"{_name_of(kind)}\n{self._of_parts(kind.__bases__, held)}"


def _parts(leaf: Any) -> tuple[Any, ...]:
    """What an object consists of; nothing where only its own text can say."""
    if isinstance(leaf, MethodType):
        return leaf.__func__, leaf.__self__
    if isinstance(leaf, partial):
        return leaf.func, leaf.args, leaf.keywords
    if isinstance(leaf, property):
        return leaf.fget, leaf.fset
    if isinstance(leaf, staticmethod | classmethod) or (callable(leaf) and hasattr(leaf, "__wrapped__")):
        return type(leaf).__qualname__, leaf.__wrapped__
    held = _attributes(leaf)
    return (type(leaf), held) if isinstance(leaf, nn.Module) or (held and not _is_torchs(type(leaf))) else ()


_PLAIN = (str, bytes, int, float, complex, tuple, list, dict, frozenset, type(None))


def _attributes(leaf: Any) -> dict[str, Any]:
    """The attributes of an object; none where it has no dictionary."""
    return dict(getattr(leaf, "__dict__", {}))


def _names(code: CodeType) -> set[str]:
    """Names of globals that code and the functions in it may use."""
    return set(code.co_names).union(*(_names(item) for item in code.co_consts if isinstance(item, CodeType)))


def _belongs_to(value: Any, module: str) -> bool:
    """Whether a global is a setting or something of that module's own."""
    return isinstance(value, (*_PLAIN, Tensor)) or getattr(value, "__module__", None) == module


def _is_torchs(item: Any) -> bool:
    return str(getattr(item, "__module__", "")).split(".")[0] == "torch"  # the key holds torch's version


def _name_of(item: Any) -> str:
    return f"{getattr(item, '__module__', '')}.{getattr(item, '__qualname__', type(item).__qualname__)}"


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _fallback_text(leaf: Any) -> str:
    """Of what this module knows no better."""
    if not callable(leaf):
        return _without_addresses(repr(leaf))
    texts = [_name_of(leaf)]
    with contextlib.suppress(OSError, TypeError, ValueError):  # ValueError: wrapped without end
        texts.append(inspect.getsource(leaf))
    with contextlib.suppress(Exception):  # whatever a strange callable raises when it is pickled
        texts.append(hashlib.sha256(cloudpickle.dumps(leaf)).hexdigest())
    return "\n".join(texts)
