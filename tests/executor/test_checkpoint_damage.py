"""Whatever happens to a checkpoint: what was saved is loaded, or an error of ours, and nothing has changed."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from executor import Pipeline, launch
from executor.checkpoint import Stateful, load_checkpoint, save_checkpoint
from executor.checkpoints.failures import unreadable
from executor.checkpoints.manifest import MANIFEST, TRAINING, Manifest, sum_of
from executor.checkpoints.reading import Change
from executor.checkpoints.tensors import StoredTensor
from planner import ExecutionError, Plan
from profiler import trace
from tests.executor.rich_training import Rich, Training, X, plans_of, same

CASES = 400


def flip(files: list[Path], _: list[Path], numbers: random.Random) -> str:
    victim = numbers.choice(files)
    data = bytearray(victim.read_bytes())
    bit = numbers.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    victim.write_bytes(data)
    return f"bit {bit} of {victim.name}"


def truncate(files: list[Path], _: list[Path], numbers: random.Random) -> str:
    victim = numbers.choice(files)
    length = numbers.randrange(victim.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:length])
    return f"{victim.name} cut at {length}"


def extend(files: list[Path], _: list[Path], numbers: random.Random) -> str:
    victim = numbers.choice(files)
    victim.write_bytes(victim.read_bytes() + numbers.randbytes(numbers.randint(1, 100)))
    return f"{victim.name} longer"


def blank(files: list[Path], _: list[Path], numbers: random.Random) -> str:
    """Zeros in place of a block, as after a loss of power."""
    victim = numbers.choice(files)
    data = bytearray(victim.read_bytes())
    start = numbers.randrange(len(data))
    stop = min(start + 512, len(data))
    data[start:stop] = bytes(stop - start)
    victim.write_bytes(data)
    return f"{victim.name} blank from {start} on"


def delete(files: list[Path], _: list[Path], numbers: random.Random) -> str:
    victim = numbers.choice(files)
    victim.unlink()
    return f"{victim.name} gone"


def swap(files: list[Path], _: list[Path], numbers: random.Random) -> str:
    first, second = numbers.sample(files, 2)
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    return f"{first.name} and {second.name} swapped"


def mix(files: list[Path], others: list[Path], numbers: random.Random) -> str:
    """Some of the files are another step's, or another run's."""
    taken = numbers.sample(range(len(files)), numbers.randint(1, len(files) - 1))
    for number in taken:
        shutil.copy(others[number], files[number])
    return f"{[files[number].name for number in taken]} of another"


DAMAGES = (flip, flip, truncate, extend, blank, delete, swap, mix)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def test_random_damage(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    """A flipped bit loaded without complaint, and what is missing showed after weights had been overwritten."""
    training = Training(plans_of(plan_for)[1], seed=5)
    training.steps(1)
    training.save(tmp_path / "first")
    state = training.state()
    training.steps(1)
    training.save(tmp_path / "second")
    sound, other = ((tmp_path / name / "latest").resolve() for name in ("first", "second"))
    numbers = random.Random(0)
    loaded: list[str] = []
    for case in range(CASES):
        damaged = tmp_path / "damaged"
        shutil.copytree(sound, damaged)
        what = numbers.choice(DAMAGES)(files_of(damaged), files_of(other), numbers)
        training.spoil()
        before = training.state()
        try:
            training.load(damaged)
        except ExecutionError as problem:
            assert "damaged" in str(problem), f"case {case}, {what}: {problem}"
            assert same(training.state(), before), f"case {case}, {what}: refused, but something has changed"
        else:
            loaded.append(what)
        shutil.rmtree(damaged)
    assert loaded == []
    assert training.load(sound) == 1
    assert same(training.state(), state)


def test_each_bit_of_the_manifest(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    """A flip in whose run it is, or of which step, loaded without complaint: `keep` removed it too early, or never."""
    training = Training(plans_of(plan_for)[1])
    training.save(tmp_path)
    path = (tmp_path / "latest").resolve()
    data = (path / MANIFEST).read_bytes()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        (path / MANIFEST).write_bytes(flipped)
        with pytest.raises(ExecutionError, match="it is damaged"):
            Manifest.of(path)
            training.load(path)
    (path / MANIFEST).write_bytes(data)
    assert training.load(path) == 0


def load_where_a_disk_fails(plan: Plan, source: Path, rank: int) -> str:
    """In each of two ranks, one of which cannot read its third tensor: what the load ends with."""
    training = Training(plan, seed=9)
    training.load(source)
    training.spoil()
    before = training.state()
    if training.pipe.rank == rank:
        read, begun = StoredTensor.read, []

        def fail_late(stored: StoredTensor, checkpoint: Path) -> torch.Tensor:
            begun.append(stored)
            if len(begun) == 3:
                raise unreadable(checkpoint / stored.file, OSError(5, "Input/output error"))
            return read(stored, checkpoint)

        StoredTensor.read = fail_late  # type: ignore[method-assign, assignment]
    try:
        training.load(source)
    except ExecutionError as problem:
        assert same(training.state(), before)
        return str(problem)
    return "loaded"


def test_if_one_rank_cannot_load_none_has_changed(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    """The other one had the checkpoint's weights by then."""
    plans = plans_of(plan_for)
    training = Training(plans[1])
    training.steps(1)
    training.save(tmp_path)
    said = launch(load_where_a_disk_fails, plans[2], (tmp_path, 1))
    file = tmp_path / "step-00000001" / "__0_0.distcp"
    assert len(set(said)) == 1
    assert said[0].startswith(f"rank 1 of 2 failed: cannot load {file}: Input/output error; see to its disk")


class Refusing:
    """A scheduler of other settings, which does not take what was saved."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, int], /) -> None:
        self.seen = state_dict["seen"]
        if self.seen:
            raise ValueError("17 milestones, not 3")


def test_what_else_is_loaded_comes_back_too(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    """The scheduler had refused when model and optimizer were the checkpoint's already."""
    training, refusing = Training(plans_of(plan_for)[1]), Refusing()
    training.steps(1)
    also: dict[str, Stateful] = {"scheduler": training.scheduler, "refusing": refusing}
    refusing.seen = 1
    save_checkpoint(tmp_path, training.pipe, training.optimizer, also=also)
    training.spoil()
    refusing.seen = 0
    before = training.state()
    with pytest.raises(ExecutionError, match="17 milestones, not 3"):
        load_checkpoint(tmp_path, training.pipe, training.optimizer, also=also)
    assert refusing.seen == 0
    assert same(training.state(), before)


def test_an_interrupt_comes_before_or_after(
    plan_for: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two tensors it left half of a checkpoint in the model."""
    training = Training(plans_of(plan_for)[1])
    training.steps(1)
    training.save(tmp_path)
    state = training.state()
    training.spoil()
    make, calls = Change.make, []

    def interrupted(change: Change) -> None:
        calls.append(change)
        if len(calls) == 1:
            change.tensors[0][0].copy_(change.tensors[0][1])
            raise KeyboardInterrupt
        make(change)

    monkeypatch.setattr(Change, "make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.load(tmp_path)
    assert same(training.state(), state)


def without_checksums(path: Path) -> None:
    """Make a checkpoint what version 0.1.0 wrote."""
    (path / MANIFEST).unlink()
    kept = torch.load(path / TRAINING, weights_only=True)
    torch.save({**kept, "format": 1}, path / TRAINING)


def test_checkpoints_of_0_1_0_load_with_a_warning(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    training = Training(plans_of(plan_for)[1])
    training.steps(1)
    training.save(tmp_path)
    state = training.state()
    without_checksums((tmp_path / "latest").resolve())
    training.spoil()
    with pytest.warns(UserWarning, match="kept no checksums: if it is damaged, that may not be noticed. Save it anew"):
        training.load(tmp_path)
    assert same(training.state(), state)
    save_checkpoint(tmp_path, training.pipe, keep=1)
    assert (tmp_path / "step-00000001").exists(), "it says not whose it is, so nobody removes it"


def test_a_manifest_that_is_gone_is_noticed(plan_for: Callable[..., Plan], tmp_path: Path) -> None:
    training = Training(plans_of(plan_for)[1])
    training.save(tmp_path)
    (tmp_path / "latest" / MANIFEST).unlink()
    with pytest.raises(ExecutionError, match=r"its manifest.json is missing; it is damaged"):
        training.load(tmp_path)


class Expanded(Rich):
    """A buffer whose elements share memory, as masks of constants do."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1, 1).expand(10, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale[0])


def test_shapes_and_dtypes_are_compared_and_expanded_buffers_load(
    plan_for: Callable[..., Plan], tmp_path: Path
) -> None:
    """Numbers of another precision were rounded in silence; an expanded buffer was an error of torch's, half way."""

    def pipe_of(model: torch.nn.Module, x: torch.Tensor = X) -> Pipeline:
        plan = plan_for(trace(model, x), batch_size=10, micro_batches=4)
        return Pipeline(model, plan, loss_fn=torch.nn.functional.cross_entropy)

    model = Expanded()
    pipe = pipe_of(model)
    save_checkpoint(tmp_path, pipe)
    with torch.no_grad():
        model.scale[:1, :1].fill_(3)
    load_checkpoint(tmp_path, pipe)
    assert torch.equal(model.scale, torch.ones(10, 4))
    other = Expanded().double()
    said = r"another precision .* first.bias is torch.float32 there, and torch.float64"
    with pytest.raises(ExecutionError, match=said):
        load_checkpoint(tmp_path, pipe_of(other, X.double()))


@pytest.mark.filterwarnings("error")
def test_checkpoints_whose_manifest_has_no_checksum_of_its_own_load(
    plan_for: Callable[..., Plan], tmp_path: Path
) -> None:
    """Those of format 2 are as good as before; a flipped bit makes no checkpoint of format 3 one of them."""
    training = Training(plans_of(plan_for)[1])
    training.steps(1)
    training.save(tmp_path)
    state, path = training.state(), (tmp_path / "latest").resolve()
    signed = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**signed, "format": 2, "crc32": None}))
    training.spoil()
    with pytest.raises(ExecutionError, match=r"manifest.json is of format 2, its training.pt of 3; it is damaged"):
        training.load(path)
    kept = torch.load(path / TRAINING, weights_only=True)
    torch.save({**kept, "format": 2}, path / TRAINING)
    files = {**signed["files"], TRAINING: sum_of(path / TRAINING).model_dump()}
    own = {name: value for name, value in signed.items() if name != "crc32"}
    (path / MANIFEST).write_text(json.dumps({**own, "format": 2, "files": files}))
    assert training.load(path) == 1
    assert same(training.state(), state)
