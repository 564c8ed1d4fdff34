"""Measurements are remembered, and no damage is taken for one."""

import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from planner import autoplan
from profiler import ArgumentError, Link, Profile, measured_kind, profile, trace
from profiler.cache import Cache, CachedCosts, _signed, _unsigned, digest_of_work
from profiler.record import OptimizerCost
from profiler.timing import optimizers, sweeps

Case = tuple[nn.Module, Any]
KEY = {"what": "link", "number": 1}
LINK = Link(latency_s=1.0, bytes_per_s=2.0)


def _profile(model: nn.Module, x: Any, folder: Path | bool, **settings: Any) -> Profile:
    given: dict[str, Any] = {"micro_batch_sizes": [1, 2], "time_budget_s": 0.0, "progress": False, **settings}
    return profile(trace(model, x), 1, sample=x, cache=folder, **given)


@pytest.mark.usefixtures("nothing_beside")
def test_a_second_plan_measures_nothing(
    make_case: Callable[[str], Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = make_case("dropout")
    settings: dict[str, Any] = {"batch_size": 8, "time_budget_s": 0.0, "progress": False, "cache": tmp_path}
    first = autoplan(model, x, 2, **settings)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("measured again")

    for name in ("time_layers", "optimizer_cost", "memory_by_size", "neighbours"):
        monkeypatch.setattr(measured_kind, name, refuse)
    monkeypatch.setattr("profiler.measure.measure_link", refuse)
    assert autoplan(model, x, 2, **settings) == first


def test_what_changes_figures_changes_the_entry(make_case: Callable[[str], Case], tmp_path: Path) -> None:
    model, x = make_case("dropout")
    counts = []
    for changed in ({}, {}, {"threads": 2}, {"micro_batch_sizes": [1, 2, 4]}, {"optimizer": "SGD"}):
        _profile(model, x, tmp_path, **changed)
        counts.append(len(list(tmp_path.iterdir())))
    assert counts == [3, 3, 6, 7, 8]  # sizes and the optimizer
    _profile(model, x, tmp_path, loss_fn=lambda output, _: output.mean(), target=torch.zeros(4))
    assert len(list(tmp_path.iterdir())) == 10


def test_a_sample_in_another_memory_layout_has_an_entry_of_its_own(tmp_path: Path) -> None:
    model, images = nn.Conv2d(3, 4, 3), torch.randn(4, 3, 6, 6)
    for sample, entries in ((images, 3), (images.to(memory_format=torch.channels_last), 5), (images.clone(), 5)):
        _profile(model, sample, tmp_path)
        assert len(list(tmp_path.iterdir())) == entries  # sizes and the optimizer


def test_a_damaged_entry_is_measured_again(make_case: Callable[[str], Case], tmp_path: Path) -> None:
    model, x = make_case("dropout")
    _profile(model, x, tmp_path)
    for path in tmp_path.iterdir():
        path.write_text(path.read_text()[:-30])
    with pytest.warns(UserWarning, match="is damaged and not used"):
        _profile(model, x, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _profile(model, x, tmp_path)


def test_no_changed_figure_is_used(make_case: Callable[[str], Case], tmp_path: Path) -> None:
    """Another digit was a prediction of 28 ms in place of 0.9, and another thread count refused every later plan."""
    model, x = make_case("dropout")
    first = _profile(model, x, tmp_path)
    for path in tmp_path.iterdir():
        text = path.read_text()
        place = next(at for at in range(len(text) // 2, len(text)) if text[at].isdigit())
        path.write_text(f"{text[:place]}{(int(text[place]) + 1) % 10}{text[place + 1 :]}")
    with pytest.warns(UserWarning, match="is not what was written: .*; it is damaged and not used"):
        assert len(_profile(model, x, tmp_path).costs) == len(first.costs)
    first_entry, second_entry, *_ = sorted(tmp_path.glob("layers-*.json"))
    first_entry.write_text(second_entry.read_text())
    with pytest.warns(UserWarning, match="is not what was written"):
        _profile(model, x, tmp_path)


@given(place=st.floats(0, 1, exclude_max=True), letter=st.characters(codec="ascii"))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_with_another_letter_anywhere_is_not_used(tmp_path: Path, place: float, letter: str) -> None:
    cache = Cache(tmp_path)
    cache.put(KEY, LINK)
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    at = int(place * len(text))
    path.write_bytes(f"{text[:at]}{letter}{text[at + 1 :]}".encode())
    with warnings.catch_warnings(action="ignore"):
        assert (cache.get(KEY, Link) == LINK) == (text[at] == letter)


@pytest.mark.parametrize("change", ["fewer", "twice", "another size", "another kind"])
def test_an_entry_without_each_layer_once_is_measured_again(
    make_case: Callable[[str], Case], tmp_path: Path, change: str
) -> None:
    model, x = make_case("dropout")
    first = _profile(model, x, tmp_path, micro_batch_sizes=[2])
    (path,) = tmp_path.glob("layers-*.json")
    costs = list(CachedCosts.model_validate_json(_unsigned(path.read_text(), path)).costs)
    changed = {
        "fewer": costs[1:],
        "twice": [*costs, costs[0]],
        "another size": [cost.model_copy(update={"micro_batch_size": 4}) for cost in costs],
        "another kind": [cost.model_copy(update={"device_kind": "T4"}) for cost in costs],
    }
    path.write_text(_signed(CachedCosts(costs=tuple(changed[change])).to_json(), path))
    with pytest.warns(UserWarning, match=f"does not hold each of {len(costs)} layers once; it is not used"):
        again = _profile(model, x, tmp_path, micro_batch_sizes=[2])
    assert len(again.costs) == len(first.costs)
    assert _profile(model, x, tmp_path, micro_batch_sizes=[2]) == again


WRITER = """
import sys
from pathlib import Path
from profiler import Link
from profiler.cache import Cache
for number in range(50):
    link = Link(latency_s=float(number), bytes_per_s=2.0)
    Cache(Path(sys.argv[1])).put({"what": "link", "number": 1}, link)
"""


def test_two_writers_do_no_harm(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)]) for _ in range(2)]
    deadline = time.monotonic() + 300
    while any(writer.poll() is None for writer in writers) and time.monotonic() < deadline:
        found = Cache(tmp_path).get(KEY, Link)
        assert found is None or found.bytes_per_s == 2.0
        time.sleep(0.001)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert Cache(tmp_path).get(KEY, Link) is not None
    assert [path.name[:5] for path in tmp_path.iterdir()] == ["link-"]


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Cache.of(tmp_path).folder == tmp_path
    assert Cache.of(False).folder is None
    assert Cache.of(None).folder is None  # tests switch it off
    monkeypatch.setenv("GPIPE_AUTOPLAN_CACHE", str(tmp_path / "named"))
    assert Cache.of(None).folder == tmp_path / "named"
    monkeypatch.delenv("GPIPE_AUTOPLAN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Cache.of(True).folder == tmp_path / "gpipe-autoplan"
    with pytest.raises(ArgumentError, match="cache=3"):
        Cache.of(3)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="cannot remember measurements"):
        Cache(tmp_path / "file").put(KEY, LINK)


def test_functions_are_told_apart_by_their_code() -> None:
    assert digest_of_work(lambda x: x + 1) != digest_of_work(lambda x: x + 2)
    assert digest_of_work({"a": torch.zeros(2)}) == digest_of_work({"a": torch.ones(2)})
    assert digest_of_work({"a": torch.zeros(2)}) != digest_of_work({"a": torch.zeros(3)})


LOSSES = """
import functools
import torch
from torch import nn
from torch.nn import functional
from profiler.cache import digest_of_work

class Loss(nn.Module):
    kinds = frozenset({"a", "b", "c"})

    def __init__(self, weight):
        super().__init__()
        self.inner = nn.CrossEntropyLoss(weight=weight)
        self.names = {"x", "y", "z"}

    def forward(self, output, target):
        return self.inner(output, target) * (1.0 if "a" in {"a", "b"} else 2.0)

weight = torch.rand(5)
loss = Loss(weight)

def closed(output, target):
    return loss(output, target)

def outer():
    weighted = Loss(weight)
    return lambda output, target, share=0.5: weighted(output, target) * share

def smoothed(output, target):
    return functional.cross_entropy(output, target, label_smoothing=SMOOTHING)

losses = [nn.CrossEntropyLoss(weight=weight), loss, closed, outer(), smoothed, functional.cross_entropy, Loss.forward]
losses += [functools.partial(functional.cross_entropy, weight=weight), loss.forward]
for SMOOTHING in (0.1, 0.2):
    print(*(digest_of_work((each, torch.rand(3))) for each in losses))
"""


def test_losses_are_found_again_by_another_process(
    script: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Also by one without the file, and with the members of a set in another order, as two forks in a row have them."""
    (tmp_path / "script.py").write_text(LOSSES)
    (tmp_path / "other.py").write_text(f"exec(compile({LOSSES!r}, '<string>', 'exec'))")  # as `python -c` does
    (first, other), *again = (
        [line.split() for line in script(tmp_path / name).stdout.splitlines()] for name in ("script.py", "other.py")
    )
    assert len(set(first)) == 9
    assert [number for number in range(9) if first[number] != other[number]] == [4]
    assert again == [[first, other]]


def test_modules_are_told_apart_by_what_they_hold() -> None:
    def cross_entropy(size: int, **settings: Any) -> str:
        return digest_of_work(nn.CrossEntropyLoss(weight=torch.rand(size), **settings))

    assert cross_entropy(3) == cross_entropy(3)
    assert len({cross_entropy(3), cross_entropy(4), cross_entropy(3, label_smoothing=0.1)}) == 3
    assert digest_of_work(nn.CrossEntropyLoss()) != digest_of_work(nn.MSELoss())


class Endless:
    """Each of its attributes has another."""

    def __getattr__(self, name: str) -> "Endless":
        if name == "__wrapped__":
            return Endless()
        raise AttributeError(name)

    def __call__(self, output: Any, target: Any) -> Any:
        return output


def test_what_has_no_end_has_a_digest() -> None:
    looped: list[Any] = []
    looped.append(nn.MSELoss())
    looped[0].owner = looped[0]
    assert digest_of_work(looped) == digest_of_work(looped)
    endless = Endless()
    assert digest_of_work((endless, torch.zeros(2))) == digest_of_work((endless, torch.ones(2)))


def test_names_that_no_folder_can_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a\0b", "x" * 300, "y/" * 3000, str(tmp_path / "missing" / ("z" * 300)), "~nobody-of-that-name/c"):
        with pytest.raises(ArgumentError, match="is no folder"):
            Cache.of(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Cache.of("~/c").folder == tmp_path / "c"


def test_an_interrupt_keeps_what_was_measured(
    make_case: Callable[[str], Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = make_case("dropout")
    sizes = [1, 2, 3, 4]
    done: list[int] = []
    run = sweeps._Sweep.run

    def interrupted(*args: Any) -> Any:
        done.append(1)
        if len(done) > 3 * (1 + sweeps.FEWEST_SWEEPS):
            raise KeyboardInterrupt
        return run(*args)

    monkeypatch.setattr(sweeps._Sweep, "run", interrupted)
    with pytest.warns(UserWarning, match="interrupted: the profile holds"):
        found = _profile(model, x, tmp_path, micro_batch_sizes=sizes)
    assert {cost.micro_batch_size for cost in found.costs} == {1, 3, 4}
    done.clear()
    monkeypatch.setattr(sweeps._Sweep, "run", run)
    assert {cost.micro_batch_size for cost in _profile(model, x, tmp_path, micro_batch_sizes=sizes).costs} == {*sizes}


def test_an_interrupt_at_the_optimizer_keeps_the_layers(
    make_case: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[float] = []
    measure = optimizers.optimizer_cost

    def interrupted(*args: Any, budget_s: float, **types: Any) -> OptimizerCost:
        budgets.append(budget_s)
        if len(budgets) == 1:
            raise KeyboardInterrupt
        return measure(*args, budget_s=budget_s, **types)

    monkeypatch.setattr(measured_kind, "optimizer_cost", interrupted)
    model, x = make_case("dropout")
    with pytest.warns(UserWarning, match="interrupted: the profile holds"):
        found = _profile(model, x, False, micro_batch_sizes=[1, 2])
    assert {cost.micro_batch_size for cost in found.costs} == {1, 2}
    assert [entry.name for entry in found.optimizers] == ["AdamW"]
    assert budgets[1:] == [0.0]


def test_an_interrupt_before_anything_was_measured_goes_on(
    make_case: Callable[[str], Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweeps._Sweep, "run", interrupted)
    model, x = make_case("dropout")
    with pytest.raises(KeyboardInterrupt):
        _profile(model, x, tmp_path)


def test_an_interrupt_keeps_what_was_remembered(
    make_case: Callable[[str], Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    model, x = make_case("dropout")
    _profile(model, x, tmp_path, micro_batch_sizes=[1, 2])
    monkeypatch.setattr(sweeps._Sweep, "run", interrupted)
    with pytest.warns(UserWarning, match=r"interrupted: the profile holds micro-batches of \[1, 2\] samples alone"):
        found = _profile(model, x, tmp_path, micro_batch_sizes=[1, 2, 4])
    assert {cost.micro_batch_size for cost in found.costs} == {1, 2}


def test_a_size_without_memory_is_left_out(
    make_case: Callable[[str], Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sweeps._Sweep.run

    def short_of_memory(self: Any, watch: Any, brief: bool) -> Any:
        if next(iter(self._runner._inputs.values())).shape[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(self, watch, brief)

    monkeypatch.setattr(sweeps._Sweep, "run", short_of_memory)
    model, x = make_case("dropout")
    with pytest.warns(UserWarning, match="no memory for micro-batches of 4 samples"):
        found = _profile(model, x, tmp_path, micro_batch_sizes=[1, 2, 4])
    assert {cost.micro_batch_size for cost in found.costs} == {1, 2}
