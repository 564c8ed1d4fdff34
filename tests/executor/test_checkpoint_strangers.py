"""A checkpoint from a stranger: an error of ours that names the file, and none of the stranger's code runs."""

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from executor.checkpoints import tensors as checkpoint_tensors
from executor.checkpoints.manifest import MANIFEST, METADATA, TRAINING, Manifest, sums_of
from executor.checkpoints.tensors import stored_tensors
from planner import ExecutionError, Plan
from tests.executor.rich_training import Training, plans_of, same

DATA = "__0_0.distcp"
Attack = Callable[[Path, Path], None]  # changes a checkpoint so that a folder comes into being where code runs


class Evil:
    """What runs when it is unpickled makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


class Built:
    """What makes a folder is called with an instruction that sets attributes."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return getattr, (Metadata, "__init__"), {"__wrapped__": Evil(self.mark)}


def metadata(folder: Path) -> Any:
    return pickle.loads((folder / METADATA).read_bytes())


def write(folder: Path, about: Any) -> None:
    (folder / METADATA).write_bytes(pickle.dumps(about, protocol=4))


def bare_pickle(folder: Path, mark: Path) -> None:
    write(folder, Evil(mark))


def old_protocol(folder: Path, mark: Path) -> None:
    (folder / METADATA).write_bytes(pickle.dumps(Evil(mark), protocol=0))


def inside_of_sound_metadata(folder: Path, mark: Path) -> None:
    about = metadata(folder)
    about.planner_data = Evil(mark)
    write(folder, about)


def attribute_of_a_class(folder: Path, mark: Path) -> None:
    about = metadata(folder)
    about.planner_data = Built(mark)
    write(folder, about)


def bytes_for_a_weight(folder: Path, mark: Path) -> None:
    """torch unpickles what the metadata calls bytes, whatever it is asked for."""
    about = metadata(folder)
    about.state_dict_metadata["model.first.weight"] = BytesStorageMetadata()
    (place,) = (info for key, info in about.storage_data.items() if key.fqn == "model.first.weight")
    buffer = io.BytesIO()
    torch.save(Evil(mark), buffer)
    data = buffer.getvalue()
    with (folder / DATA).open("r+b") as file:
        place.offset, place.length = file.seek(0, io.SEEK_END), len(data)
        file.write(data)
    about.storage_data[MetadataIndex("model.first.weight")] = place
    write(folder, about)


def object_for_a_tensor(folder: Path, mark: Path) -> None:
    about = metadata(folder)
    (place,) = (info for key, info in about.storage_data.items() if key.fqn == "model.first.weight")
    buffer = io.BytesIO()
    torch.save(Evil(mark), buffer)
    with (folder / DATA).open("r+b") as file:
        place.offset, place.length = file.seek(0, io.SEEK_END), len(buffer.getvalue())
        file.write(buffer.getvalue())
    write(folder, about)


def object_for_the_training(folder: Path, mark: Path) -> None:
    torch.save({"format": 1, "step": Evil(mark)}, folder / TRAINING)


def pickle_for_the_training(folder: Path, mark: Path) -> None:
    (folder / TRAINING).write_bytes(pickle.dumps(Evil(mark)))


def file_elsewhere(folder: Path, mark: Path) -> None:
    outside = mark.with_name("outside.distcp")
    shutil.copy(folder / DATA, outside)
    about = metadata(folder)
    for info in about.storage_data.values():
        info.relative_path = f"../{outside.name}"
    write(folder, about)


def absolute_file(folder: Path, mark: Path) -> None:
    outside = mark.with_name("outside.distcp")
    shutil.copy(folder / DATA, outside)
    about = metadata(folder)
    for info in about.storage_data.values():
        info.relative_path = str(outside)
    write(folder, about)


def endless_size(folder: Path, mark: Path) -> None:
    about = metadata(folder)
    name = "optimizer.first.weight.exp_avg"
    shape = torch.Size([10**9, 10**9])
    whole = [ChunkStorageMetadata(torch.Size([0, 0]), shape)]
    about.state_dict_metadata[name] = TensorStorageMetadata(TensorProperties(torch.float32), shape, whole)
    write(folder, about)


def no_part_at_all(folder: Path, mark: Path) -> None:
    """torch then leaves the tensor as it was, whatever it held."""
    about = metadata(folder)
    about.state_dict_metadata["optimizer.first.weight.exp_avg"].chunks = []
    write(folder, about)


def pipe_for_a_file(name: str) -> Attack:
    def attack(folder: Path, mark: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return attack


def parameters_among_options(folder: Path, mark: Path) -> None:
    kept = torch.load(folder / TRAINING, weights_only=True)
    for entry in kept["optimizer"].values():
        entry["options"]["params"] = [torch.zeros(2)]
    torch.save(kept, folder / TRAINING)


def strange_step(folder: Path, mark: Path) -> None:
    kept = torch.load(folder / TRAINING, weights_only=True)
    torch.save({**kept, "step": -1}, folder / TRAINING)


ATTACKS: dict[Attack, str] = {
    bare_pickle: METADATA,
    old_protocol: METADATA,
    inside_of_sound_metadata: METADATA,
    attribute_of_a_class: METADATA,
    bytes_for_a_weight: METADATA,
    object_for_a_tensor: DATA,
    object_for_the_training: TRAINING,
    pickle_for_the_training: TRAINING,
    file_elsewhere: METADATA,
    absolute_file: METADATA,
    endless_size: METADATA,
    no_part_at_all: METADATA,
    pipe_for_a_file(METADATA): METADATA,
    pipe_for_a_file(TRAINING): TRAINING,
    pipe_for_a_file(DATA): DATA,
    parameters_among_options: TRAINING,
    strange_step: TRAINING,
}


def sign(folder: Path) -> None:
    """Let the manifest fit: a stranger can do so, too."""
    manifest = Manifest.of(folder)
    assert manifest is not None
    names = [name for name in manifest.files if (folder / name).is_file()]
    manifest.model_copy(update={"files": {**manifest.files, **sums_of(folder, names)}}).save(folder)


def unsign(folder: Path) -> None:
    """Let it be one of version 0.1.0, which had no checksums."""
    (folder / MANIFEST).unlink()
    if (folder / TRAINING).is_file():
        try:
            kept = torch.load(folder / TRAINING, weights_only=True)
        except pickle.UnpicklingError:
            return
        torch.save({**kept, "format": 1}, folder / TRAINING)


@pytest.mark.filterwarnings("ignore:.*was saved by a version that kept no checksums", "ignore:Detected pickle protocol")
def test_no_file_of_a_strangers_makes_code_run(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    """torch unpickled `.metadata`, and with it whatever a stranger had put there."""
    training = Training(plans_of(plan_for)[1])
    training.steps(1)
    training.save(tmp_path)
    sound = (tmp_path / "latest").resolve()
    training.spoil()
    before = training.state()
    for attack, named in ATTACKS.items():
        for finish in (sign, unsign):
            folder, mark = tmp_path / "strange", tmp_path / "mark"
            shutil.copytree(sound, folder)
            attack(folder, mark)
            finish(folder)
            with pytest.raises(ExecutionError) as raised:
                training.load(folder)
            assert f"cannot load {folder / named}: " in str(raised.value), attack
            assert not mark.exists(), attack
            assert same(training.state(), before), attack
            shutil.rmtree(folder)
    assert training.load(sound) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{" * 100_000,
        '{"format": 3}',
        '{"format": 2, "run": "", "inherits": {}, "step": 0, "files": {"../elsewhere": {"crc32": 0, "size_bytes": 0}}}',
        '{"format": 2, "run": "", "inherits": {}, "step": 0, "files": {"/etc/passwd": {"crc32": 0, "size_bytes": 0}}}',
        '{"format": 2, "run": "", "inherits": {}, "step": 0, "files": {}}',
        '{"format": 2, "run": "", "inherits": {}, "step": 1e400, "files": {}}',
        b"\xff\xfe",
    ],
)
def test_no_manifest_of_a_strangers_leads_anywhere(
    plan_for: Callable[..., Plan], tmp_path: Path, text: str | bytes
) -> None:
    training = Training(plans_of(plan_for)[1])
    training.save(tmp_path)
    manifest = (tmp_path / "latest").resolve() / MANIFEST
    manifest.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ExecutionError, match=f"cannot load {manifest.parent}/"):
        training.load(tmp_path)


def named(kind: Any) -> bytes:
    """The instructions that push what a name means."""
    module, name = ("torch", "float32") if kind is torch.float32 else (kind.__module__, kind.__name__)
    texts = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    return texts + b"\x93"


def test_what_a_file_does_to_the_names_that_it_may_use_ends_with_it() -> None:
    """BUILD with a pair sets attributes of whatever there is, also of a class or a function."""
    kinds = [Metadata, TensorStorageMetadata, MetadataIndex, torch.Size, torch.float32, torch.serialization._get_layout]
    before = [dict(vars(kind)) for kind in kinds if hasattr(kind, "__dict__")]
    harm = pickle.dumps({"harm": 1}, protocol=4)[11:-1]  # without frame and end
    for kind in kinds:
        for state in (harm, b"N" + harm + b"\x86", harm + b"N\x86"):
            with pytest.raises((pickle.UnpicklingError, TypeError, AttributeError)):
                checkpoint_tensors._unpickled(b"\x80\x04" + named(kind) + state + b"b.").state["storage_data"]
    assert before == [dict(vars(kind)) for kind in kinds if hasattr(kind, "__dict__")]
    assert not any(hasattr(found, "harm") for found in (checkpoint_tensors._Record, checkpoint_tensors._nothing))


@pytest.mark.filterwarnings("ignore:ComplexHalf support", "ignore:torch.distributed is disabled")
def test_all_that_torch_writes_is_understood(tmp_path: Path) -> None:
    dtypes = [kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)]
    state: dict[str, Any] = {}
    for dtype in set(dtypes):
        try:
            state[str(dtype)] = torch.zeros(2, 3).to(dtype)
        except (RuntimeError, NotImplementedError):  # of those dtypes there are no tensors on the CPU yet
            continue
    state |= {"scalar": torch.tensor(1), "empty": torch.empty(0, 3), "turned": torch.randn(2, 3).t()}
    state |= {"last": torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last), "object": {"any": object}}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)  # type: ignore[attr-defined]
    found = stored_tensors(tmp_path)
    assert found.keys() == {name for name, value in state.items() if isinstance(value, torch.Tensor)}
    for name, stored in found.items():
        assert stored.read(tmp_path).dtype == state[name].dtype
        assert torch.equal(
            stored.read(tmp_path).reshape(-1).view(torch.uint8), state[name].reshape(-1).view(torch.uint8)
        )
