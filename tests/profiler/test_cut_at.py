"""Modules that `trace` is told to begin a layer at, and the plans that are cut there."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor import Pipeline
from planner import autoplan
from planner.rules import rules_of
from planner.settings import Settings
from profiler import Cluster, trace
from profiler.errors import ArgumentError
from profiler.tracing.sequence import LayerSequence
from tests.coverage.model_list import MODELS, Entry
from tests.models.random_nested import WIDTH, Nested, random_nested

CLUSTER = Cluster.of("64xA100-40GB", link="hdr")
TRIED = 4
BLOCKS = 6


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.relu, self.last = nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.last(torch.sin(self.first(x))) + x)


def mostly_wide() -> nn.Module:
    """Blocks that do next to none of the work come after layers that do it."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 512), nn.Linear(512, 8))
    return nn.Sequential(wide, *(Block(8) for _ in range(BLOCKS))).double()


def taken(sequence: LayerSequence, path: str) -> bool:
    try:
        rules_of(sequence.layers, Settings.of(CLUSTER, 16, {"cut_at": [path]}))
    except ArgumentError:
        return False
    return True


def begins(sequence: LayerSequence, path: str) -> bool:
    """Whether a layer begins with the first operation of that module, or of one in it."""
    holds = [any(one == path or one.startswith(f"{path}.") for one in layer.module_paths) for layer in sequence.layers]
    first = sequence.layers[holds.index(True)].module_paths[0]
    return first == path or first.startswith(f"{path}.") or path.startswith(f"{first}.")


def test_the_inside_of_a_layer_may_be_behind_a_cut() -> None:
    """Of a DenseNet-121 18 of 61 parts were refused, however its layers were traced."""
    model, x = mostly_wide(), torch.zeros(2, 8, dtype=torch.float64)
    paths = [f"{block}.last" for block in range(1, BLOCKS + 1)]
    plain = trace(model, x, progress=False)
    refused = [path for path in paths if not taken(plain, path)]
    assert refused == paths
    for path in paths:
        sequence = trace(model, x, cut_at=[path], progress=False)
        assert taken(sequence, path), path
        assert begins(sequence, path), path
        assert len(plain) <= len(sequence) <= len(plain) + 1
    assert all(taken(trace(model, x, cut_at=paths, progress=False), path) for path in paths)


@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.name)
def test_more_layers_are_parts_of_those_without_it(entry: Entry) -> None:
    chance = random.Random(entry.name)
    case = entry.build(blocks=1)
    model, x = case.model, case.sample
    plain = trace(model, x, progress=False)
    held = {path for layer in plain.layers for path in layer.module_paths if path}
    for path in chance.sample(sorted(held), min(TRIED, len(held))):
        sequence = trace(model, x, cut_at=[path], progress=False)
        assert 0 <= len(sequence) - len(plain) <= 1
        if len(sequence) > len(plain):
            assert taken(sequence, path), path


def test_a_plan_cut_inside_a_layer_trains_as_the_model_does() -> None:
    model = mostly_wide()
    x, y = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.mse_loss
    cut_at = ["2.last", "5.last"]
    asked: dict[str, Any] = {"loss_fn": loss, "target": y, "micro_batches": 4, "schedule": "1f1b", "progress": False}
    plan = autoplan(model, x, 3, cut_at=cut_at, micro_batches_per_stage=1, **asked)
    assert plan.sample.cut_at == tuple(cut_at)
    layers = trace(model, plan.sample, progress=False).layers
    assert [layers[stage.first_layer].module_paths[0] for stage in plan.stages[1:]] == ["2.last", "5.last"]
    Pipeline(model, plan, loss_fn=loss).step(x, target=y)
    again = mostly_wide()
    Pipeline(again, autoplan(again, x, 1, **asked), loss_fn=loss).step(x, target=y)
    found = {name: value.grad for name, value in model.named_parameters()}
    for name, value in again.named_parameters():
        other = found[name]
        assert value.grad is not None
        assert other is not None
        assert torch.equal(value.grad, other), name


class Within(nn.Module):
    """Two modules in a region that is one operation of the graph."""

    def __init__(self, region: str) -> None:
        super().__init__()
        self.region, self.before, self.after = region, nn.Linear(8, 8), nn.Linear(8, 8)
        self.items = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for item in self.items:
            if self.region == "no_grad":
                with torch.no_grad():
                    held = item(x)
                x = x + held
            elif self.region == "autocast":
                with torch.autocast("cpu", torch.bfloat16):
                    held = item(x)
                x = held.float()
            elif torch.rand(()) > 0.3:
                x = x + item(x)
        out: Tensor = self.after(x)
        return out


@pytest.mark.parametrize("region", ["no_grad", "autocast", "layer drop"])
def test_a_region_begins_with_its_first_module(region: str) -> None:
    """It was said to be of its last module, and a layer drop of none."""
    model, x = Within(region), torch.zeros(4, 8)
    sequence = trace(model, x, cut_at=["items.1"], progress=False)
    assert taken(sequence, "items.1")
    layer = next(layer for layer in sequence.layers if "items.1.0" in layer.module_paths)
    assert layer.module_paths[:2] == ("items.1.0", "items.1.1")
    with pytest.raises(ArgumentError, match=r"cut_at names 'items.1.1', which begins inside layer .* no cut is safe"):
        trace(model, x, cut_at=["items.1.1"], progress=False)


class Listed(nn.Module):
    """Modules that hold others and are never called themselves, and one with two names, of which one is called."""

    def __init__(self) -> None:
        super().__init__()
        self.big, self.never = nn.Sequential(nn.Linear(8, 8192), nn.Linear(8192, 8)), nn.Linear(8, 8)
        self.start, self.items = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.end = nn.Sequential(nn.Linear(8, 8192), nn.Linear(8192, 8))
        self.same = self.start

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(self.big(x))
        for item in self.items:
            x = item(x)
        end: Tensor = self.end(x)
        return end


def test_a_list_of_modules_begins_with_its_first() -> None:
    """A module list is called by nobody, so nothing came of it."""
    model, x = Listed(), torch.zeros(4, 8)
    assert ("start", "items.0", "items.1") in [layer.module_paths for layer in trace(model, x, progress=False).layers]
    sequence = trace(model, x, cut_at=["items"], progress=False)
    assert taken(sequence, "items")
    assert ("start",) in [layer.module_paths for layer in sequence.layers]
    kept = trace(model, x, keep_together=["items"], cut_at=["items", "end"], stages=64, progress=False)
    assert ("items.0", "items.1") in [layer.module_paths for layer in kept.layers]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"cut_at": ["never"]}, "cut_at names 'never', and no layer holds a module of that path; there are big.0"),
        ({"cut_at": ["same"]}, "cut_at names 'same', which is the module 'start'; give that name"),
        ({"keep_together": ["same"]}, "keep_together names 'same', which is the module 'start'; give that name"),
        (
            {"keep_together": ["items"], "cut_at": ["items.1"]},
            "'items.1', which begins inside layer 2 .* after 'start', where no cut is safe, or none that keep_toge",
        ),
    ],
)
def test_a_cut_that_cannot_be_is_refused(asked: Any, said: str) -> None:
    """Nothing was said of it, and the layers were the same as without."""
    with pytest.raises(ArgumentError, match=said):
        trace(Listed(), torch.zeros(4, 8), progress=False, **asked)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["blocks.0.9"], "cut_at names 'blocks.0.9', which is no module"),
        ("2", "cut_at is '2'; give a list of module paths"),
        ([3], r"cut_at is \[3\]; give a list of module paths"),
        (None, "cut_at is None; give a list of module paths"),
    ],
)
def test_what_is_no_module_is_refused(asked: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        trace(mostly_wide(), torch.zeros(2, 8, dtype=torch.float64), cut_at=asked, progress=False)


def called_before(model: nn.Module, x: Tensor, path: str) -> tuple[set[nn.Parameter], set[nn.Parameter]]:
    """Parameters that the plain model reads before a module's first operation, and those of it and not among them."""
    inside, read = {*model.get_submodule(path).modules()}, list[nn.Parameter]()
    ends: list[int] = []

    def note(module: nn.Module, _: Any) -> None:
        if module in inside:
            ends.append(len(read))
        read.extend(module.parameters(recurse=False))

    handles = [module.register_forward_pre_hook(note) for module in model.modules()]
    model(x)
    for handle in handles:
        handle.remove()
    before = {*read[: ends[0]]} if ends else set()
    return before, {*model.get_submodule(path).parameters()} - before


def check_cut(model: nn.Module, x: Tensor, sequence: LayerSequence, path: str) -> None:
    """What comes before the module is before the cut, and nothing of the module is; else it is refused."""
    settings = Settings.of(CLUSTER, 64, {"cut_at": [path]})
    demanded = rules_of(sequence.layers, settings, sequence.sample.cut_at).demanded.nonzero()[0]
    cut = int(demanded[0]) if len(demanded) else 0
    read = [{sequence.parameters[name] for name in layer.parameters} for layer in sequence.layers]
    above, every = set[nn.Parameter]().union(*read[:cut]), set[nn.Parameter]().union(*read)
    before, own = called_before(model, x, path)
    assert before & every <= above, path
    assert not own & above, path


@pytest.mark.parametrize("seed", range(12))
def test_a_cut_of_a_random_model_lies_where_the_module_begins(seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    parts = [nn.Linear(WIDTH, WIDTH), random_nested(chance), random_nested(chance)]
    model, x = Nested("plain", parts), torch.randn(4, WIDTH)
    known = [name for name, _ in model.named_modules() if name]  # by another name it may be the second call
    plain = trace(model, x, progress=False)
    checked = []
    for path in known:
        try:
            check_cut(model, x, plain, path)
        except ArgumentError as refusal:
            clear = "begins inside layer", "no layer holds a module of that path", "give that name"
            assert any(text in str(refusal) for text in clear)
        else:
            checked.append(path)
    assert 2 * len(checked) > len(known)
    begun: list[str] = []
    for path in chance.sample(known, min(TRIED, len(known))):
        try:
            sequence = trace(model, x, cut_at=[*begun, path], progress=False)
        except ArgumentError as refusal:
            clear = "where no cut is safe;", "no layer holds a module of that path", "give that name"
            assert any(text in str(refusal) for text in clear)
            continue
        begun.append(path)
        assert trace(model, sequence.sample, progress=False).fingerprint == sequence.fingerprint
        for each in begun:
            check_cut(model, x, sequence, each)
