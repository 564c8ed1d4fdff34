"""Read tensors from torch's distributed format without running what a file says.

torch's own reader unpickles `.metadata`, and what that calls bytes, so a file from a stranger runs code. Here a pickle
may consist of the few instructions that torch writes, and may name nothing but torch's dtypes and the records below,
in whose place stand-ins without any behaviour come. What they hold is checked before it is used: files in the
checkpoint's own folder, parts inside of the files, one whole tensor each. The tensors themselves come through
`torch.load(weights_only=True)`.

Names in files of torch 2.13; a file that names others is refused:

    torch.distributed.checkpoint.metadata     Metadata, TensorStorageMetadata, TensorProperties, ...
    torch.distributed.checkpoint.filesystem   _StorageInfo
    torch.serialization._get_layout, torch.Size, torch.float32, ..., pathlib.PosixPath
    builtins.getattr                          how Python 3.11.0 to 3.11.3 pickled a member of an Enum
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from executor.checkpoints.failures import reading, unreadable
from executor.checkpoints.manifest import DATA_NAME, METADATA, open_file, size_of
from profiler.machine.backend import HOST

_RECORDS = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_OF_NO_INTEREST = {
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("builtins", "getattr"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "WindowsPath"),
}
# Of protocols 4 and 5. Without those that grow the memory of what was read before to any size that a file asks for.
# fmt: off
_INSTRUCTIONS = {
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "BININT",
    "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2",
    "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "STACK_GLOBAL", "NEWOBJ",
    "REDUCE", "BUILD",
}
# fmt: on


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies in a checkpoint, and what it is.

    Attributes:
        dtype: of the tensor.
        shape: of the tensor.
        file: of the checkpoint's folder.
        offset: of its first byte in that file.
        length: bytes that it takes there.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int

    def read(self, checkpoint: Path) -> Tensor:
        """The tensor, on the CPU.

        Raises:
            ExecutionError: it is not there, or not what it should be, or cannot be read.
        """
        path = checkpoint / self.file
        with reading(path):
            with open_file(path) as file:
                file.seek(self.offset)
                part = file.read(self.length)
            if len(part) < self.length:
                raise EOFError(f"it ends {self.length - len(part)} bytes too early")
            with warnings.catch_warnings(action="ignore"):  # of strange pickles, and of dtypes that are new
                value = torch.load(io.BytesIO(part), map_location=HOST, weights_only=True)
        if not isinstance(value, Tensor) or value.device != HOST or value.layout != torch.strided:
            raise unreadable(path, f"a part of it holds no tensor, but a {type(value).__name__}")
        if value.dtype != self.dtype or tuple(value.shape) != self.shape:
            raise unreadable(
                path,
                f"a part of it holds {value.dtype} of shape {tuple(value.shape)}, and {METADATA} says {self.dtype} of "
                f"{self.shape}",
            )
        return value.detach()


def stored_tensors(checkpoint: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint, by name.

    Raises:
        ExecutionError: the checkpoint's `.metadata` is damaged, or asks for more than to be read, or cannot be read.
    """
    path = checkpoint / METADATA
    with reading(path):
        with open_file(path) as file:
            data = file.read()
        root = _unpickled(data).state
        places = {key.state["fqn"]: info.state for key, info in root["storage_data"].items()}
        tensors = {
            name: about.state
            for name, about in root["state_dict_metadata"].items()
            if type(about).__name__ == "TensorStorageMetadata"
        }
        found = {name: _stored(path, name, about, places[name]) for name, about in tensors.items()}
        sizes = {file: size_of(checkpoint / file) for file in {stored.file for stored in found.values()}}
        for name, stored in found.items():
            _check_place(path, name, stored, sizes[stored.file])
    return found


def _stored(path: Path, name: str, about: Mapping[str, Any], place: Mapping[str, Any]) -> StoredTensor:
    """One tensor, of the types that torch writes."""
    dtype, shape = about["properties"].state[0], about["size"]
    file, offset, length = place["relative_path"], place["offset"], place["length"]
    if not isinstance(dtype, torch.dtype) or not all(type(number) is int for number in (*shape, offset, length)):
        raise unreadable(path, f"what it says of {name!r} has other types than torch writes")
    if not re.fullmatch(DATA_NAME, file):
        raise unreadable(path, f"it looks for {name!r} in {file!r}, which is no file of a checkpoint")
    (chunk,) = about["chunks"]
    if chunk.state["sizes"] != shape or any(chunk.state["offsets"]) or place.get("transform_descriptors"):
        raise unreadable(path, f"{name!r} is not stored whole and as it is")
    return StoredTensor(dtype, tuple(shape), file, offset, length)


def _check_place(path: Path, name: str, stored: StoredTensor, size_bytes: int) -> None:
    """See that a tensor has room where it is said to lie: a stranger may ask for any memory."""
    needed_bytes = prod(stored.shape, start=stored.dtype.itemsize)
    inside = stored.offset + stored.length <= size_bytes and needed_bytes <= stored.length
    if min(*stored.shape, stored.offset, stored.length, 0) < 0 or not inside:
        raise unreadable(
            path,
            f"it looks for {needed_bytes} bytes of {name!r} in {stored.length} bytes from {stored.offset} on of "
            f"{stored.file}, which has {size_bytes}",
        )


class _Record:
    """Stands for a record of torch's: has its state, and does nothing."""

    __slots__ = ("state",)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Knows stand-ins only, made anew for each file: what a file does to them is gone with them."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._kinds: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """What a name of the file means."""
        asked = module, name
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if asked not in self._kinds:
            if asked in _RECORDS:
                self._kinds[asked] = type(name, (_Record,), {"__slots__": ()})
            elif asked == ("torch", "Size"):
                self._kinds[asked] = partial(tuple)
            elif asked in _OF_NO_INTEREST:
                self._kinds[asked] = partial(_nothing)
            else:
                raise pickle.UnpicklingError(
                    f"it asks for {module}.{name}, which torch's format does not need: it may be made to run code"
                )
        return self._kinds[asked]


def _nothing(*_: Any) -> None:
    """What the layout, the memory format and the folder of a checkpoint are to us."""


def _unpickled(data: bytes) -> Any:
    for instruction, _, _ in pickletools.genops(data):
        if instruction.name not in _INSTRUCTIONS:
            raise pickle.UnpicklingError(f"it has the instruction {instruction.name}, which torch does not write")
    return _Unpickler(data).load()
