"""Models that do more than call their modules one after the other, each once: exported as they are, or refused."""

import re
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from planner import Plan
from planner.export.units import calls_each_child_once
from profiler.errors import InfeasibleError
from tests.planner.exported import BATCH, Case, priced

WIDTH = WORDS = 8
SEEDS = range(8)


# An `nn.Sequential`.


class Scaled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2 + x


class Doubled(nn.Sequential):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2


class Reversed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for module in reversed(list(self)):
            x = module(x)
        return x


class Iterated(nn.Sequential):
    """Its children in a row are not what it calls in a row."""

    def __iter__(self) -> Any:
        return reversed([*self._modules.values()])


class Counted(nn.Sequential):
    """For engines it has a child less."""

    def __len__(self) -> int:
        return super().__len__() - 1


class Implemented(nn.Sequential):
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return super()._call_impl(*args, **kwargs) * 2


class Named(nn.Sequential):
    """Only a name of its own."""


def linears(count: int) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


def hooked(*modules: nn.Module) -> nn.Module:
    model = nn.Sequential(*modules)
    model.register_forward_hook(lambda module, given, output: output * 3)
    return model


def hooked_before(*modules: nn.Module) -> nn.Module:
    model = nn.Sequential(*modules)
    model.register_forward_pre_hook(lambda module, given: (given[0] * 3,))
    return model


def hooked_child(*modules: nn.Module) -> nn.Module:
    modules[1].register_forward_hook(lambda module, given, output: output * 3)
    return nn.Sequential(*modules)


def called_by_its_instance(*modules: nn.Module) -> nn.Module:
    model = nn.Sequential(*modules)
    vars(model)["_call_impl"] = lambda x: nn.Sequential.forward(model, x) * 2
    return model


def named_twice(*modules: nn.Module) -> nn.Module:
    act = nn.Tanh()
    return nn.Sequential(*(one for module in modules for one in (module, act)))


PLAIN = (nn.Sequential, Named, hooked_child)
OTHERS = (
    *(Scaled, Doubled, Reversed, Iterated, Counted, Implemented),
    *(called_by_its_instance, hooked, hooked_before, named_twice),
)


def in_a_row(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x


def regression(model: nn.Module) -> Case:
    x = torch.randn(BATCH, WIDTH)
    return priced(model, (x,), torch.randn(BATCH, WIDTH), nn.functional.mse_loss)


@pytest.mark.parametrize("kind", [*PLAIN, *OTHERS])
def test_what_torchgpipe_gets_is_the_model(kind: Any) -> None:
    """Of any `nn.Sequential` its children in a row: a loss of 1.063 where the model's was 0.100."""
    modules = [one for pair in zip(linears(3), (nn.Tanh(), nn.Sigmoid(), nn.ReLU()), strict=True) for one in pair]
    model = kind(*modules)
    known = regression(model)
    made = known.plan(stages=2, schedule="gpipe").export("torchgpipe", model)
    assert isinstance(made.module, nn.Sequential)
    torch.testing.assert_close(in_a_row([*made.module], *known.inputs), model(*known.inputs))
    assert sum(made.value["balance"]) == len(made.module) == len({*made.module})
    assert (made.module is model) == (kind in PLAIN)


@pytest.mark.parametrize("kind", [*PLAIN, *OTHERS])
def test_layers_for_deepspeed_are_the_model_or_it_is_said(kind: Any) -> None:
    model = kind(*linears(4))
    known = regression(model)
    plan = known.plan(stages=2, schedule="1f1b")
    if kind is named_twice:
        with pytest.raises(InfeasibleError, match="calls '1' and '3' and '5' and '7', one module, 4 times, and Deep"):
            plan.export("deepspeed", model)
        return
    made = plan.export("deepspeed", model)
    layers = [model.get_submodule(path) for path in made.value["layers"]]
    said = "what the model does between these modules must become part of them" in " ".join(made.notes)
    assert said == (kind not in PLAIN)
    assert said or torch.equal(in_a_row(layers, *known.inputs), model(*known.inputs))


def test_a_hook_of_all_modules_is_one_of_the_whole() -> None:
    model = nn.Sequential(*linears(2))
    handle = register_module_forward_hook(lambda module, given, output: output * 2)
    assert not calls_each_child_once(model)
    handle.remove()
    assert calls_each_child_once(model)


# A list of blocks.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.relu(self.inner(x)))


class Transformer(nn.Module):
    """Calls blocks in an order of its own.

    Args:
        held: number of the block at each place of the list.
        order: places that are called.
        past: of the calls those that go past the block itself, to its `forward`.
    """

    def __init__(self, held: Sequence[int], order: Sequence[int], past: Sequence[int] = ()) -> None:
        super().__init__()
        blocks = [Block() for _ in range(max(held) + 1)]
        self.embed, self.unused = nn.Embedding(WORDS, WIDTH), nn.Tanh()
        self.blocks = nn.ModuleList(blocks[number] for number in held)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.order, self.past = order, past

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, place in enumerate(self.order):
            x = self.blocks[place].forward(x) if number in self.past else self.blocks[place](x)
        return self.head(self.norm(x))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def called_otherwise(random: Random) -> tuple[list[int], list[int]]:
    """What a list holds, and the places that are called: perhaps all once, in some order."""
    count = random.randint(4, 5)
    held, order = list(range(count)), list(range(count))
    match random.choice(("in order", "shuffled", "left out", "again", "each again", "held twice")):
        case "shuffled":
            random.shuffle(order)
        case "left out":
            del order[random.randrange(count)]
        case "again":
            order.insert(random.randrange(count), random.randrange(count))
        case "each again":
            order = [place for place in order for _ in range(2)]
        case "held twice":
            held = [max(0, number - 1) for number in held]
    return held, order


def exported(plan: Plan, target: str, model: nn.Module) -> Any:
    """The value; None if it is refused for the calls, or for weights that several ranks would have."""
    try:
        return plan.export(target, model).value
    except InfeasibleError as refused:
        assert re.search(r"calls 'blocks\.\d'.* (never|\d times)|is one parameter that ranks", str(refused)), refused
        return None


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_exported_has_each_call_of_a_block(seed: int) -> None:
    """Blocks that ran twice, or never, were counted once each."""
    random = Random(seed)
    held, order = called_otherwise(random)
    torch.manual_seed(seed)
    model = Transformer(held, order, random.choice(([], [0, 2], range(10))))
    ids = torch.randint(WORDS, (BATCH, 3))
    known = priced(model, (ids,), ids, loss_of)
    once = Counter(held[place] for place in order) == Counter(range(max(held) + 1))
    plan = known.plan(stages=2, schedule="1f1b")
    options = exported(plan, "megatron-lm", model)
    assert (options is not None) == once
    assert options is None or options[options.index("--num-layers") + 1] == str(len(order))
    layers = exported(plan, "deepspeed", model)
    assert (layers is not None) == once
    if layers is not None:
        paths = layers["layers"]
        assert layers["parts"][-1] == len(paths)
        torch.testing.assert_close(in_a_row([model.get_submodule(path) for path in paths], ids), model(ids))
    parts = exported(plan, "torchtitan", model)
    assert (parts is not None) == once
    if parts is not None:
        paths = [path for part in parts["parallelism"]["module_fqns_per_model_part"] for path in part]
        assert [path for path in paths if path.startswith("blocks")] == [f"blocks.{place}" for place in order]


# What stands beside the modules.


class WithPlaces(nn.Module):
    """A parameter and a buffer of the model itself, each added before one of its modules."""

    scale: Tensor

    def __init__(self, at: int, scaled_at: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linears(6))
        self.places = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("scale", torch.rand(WIDTH))
        self.at, self.scaled_at = at, scaled_at

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x + self.places if number == self.at else x
            x = torch.tanh(layer(x * self.scale if number == self.scaled_at else x))
        return x


@pytest.mark.parametrize("seed", SEEDS)
def test_what_the_model_holds_itself_lies_where_values_are(seed: int) -> None:
    """It was on the first device of all. Between two modules they are where the first of them is."""
    random = Random(seed)
    at, scaled_at = random.randrange(6), random.randrange(6)
    model = WithPlaces(at, scaled_at)
    made = regression(model).plan(stages=3, schedule="gpipe").export("huggingface", model)
    device_map = made.value["device_map"]
    assert len({*device_map.values()}) == 3
    assert device_map["places"] == device_map[f"layers.{max(0, at - 1)}"]
    assert device_map["scale"] == device_map[f"layers.{max(0, scaled_at - 1)}"]


class Around(nn.Module):
    """Goes on without the modules that it lacks; may scale what it is called with, and return."""

    def __init__(self, scale: float = 1, width: int = WIDTH) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Linear(WIDTH, width), nn.ModuleList(linears(4)), nn.Linear(width, WIDTH)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.scale == 1 else x * self.scale
        for module in (self.embed, *self.layers, self.head):
            x = module(x) if module is not None else x
        return x


LINE = f"{__file__}:{Around.forward.__code__.co_firstlineno + 1} (aten.mul.Tensor)"


class Within(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def with_hook(model: nn.Module) -> nn.Module:
    model.register_forward_hook(lambda module, given, output: output * 3)
    return model


def with_pre_hook(model: nn.Module) -> nn.Module:
    model.register_forward_pre_hook(lambda module, given: (given[0] * 3,))
    return model


@pytest.mark.parametrize(
    ("model", "target", "said"),
    [
        (Around(), "torchtitan", None),
        (Around(scale=2), "torchtitan", f"runs in each part; let one alone do {LINE}."),
        (with_hook(Around()), "torchtitan", InfeasibleError),
        (with_pre_hook(Around()), "torchtitan", InfeasibleError),
        (Around(), "deepspeed", None),
        (Around(scale=2), "deepspeed", f"must become part of them: {LINE}."),
        (with_hook(Around()), "deepspeed", "Forward hooks of the model itself are not called there."),
        (with_pre_hook(Within(with_hook(Around()))), "deepspeed", "Forward hooks of the model itself and 'body' are"),
    ],
)
def test_what_a_model_does_around_its_modules_is_named(model: nn.Module, target: str, said: Any) -> None:
    """In torchtitan each part scaled embeddings again and called hooks of the whole, without a word."""
    plan = regression(model).plan(stages=2, schedule="1f1b")
    if said is InfeasibleError:
        with pytest.raises(said, match="the model's own forward hooks and pre-hooks in each of 2 parts; put them on"):
            plan.export(target, model)
        return
    notes = " ".join(plan.export(target, model).notes)
    assert said in notes if said else not re.search(r"hooks|aten|runs in each part", notes)


class Meeting(nn.Module):
    """Adds earlier values between its modules, some moved to the device of the later one."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.layers, self.body = nn.ModuleList(linears(3)), Within(nn.ModuleList(linears(3)))
        self.places = nn.Parameter(torch.randn(WIDTH))
        kinds = random.choice(("first", "moved")), "places"
        self.added = {random.randrange(6): random.choice(kinds) for _ in range(2)}

    def forward(self, x: Tensor) -> Tensor:
        first = torch.sigmoid(x)
        for number, layer in enumerate((*self.layers, *self.body.body.children())):
            x = torch.tanh(layer(x))
            first = x if number == 0 else first
            match self.added.get(number):
                case "first":
                    x = x + first
                case "moved":
                    x = x + first.to(x.device)
                case "places":
                    x = x + self.places
        return x


def runs_with(model: nn.Module, device_map: dict[str, str], x: Tensor) -> bool:
    """Whether it runs where the map says, and modules in it alone get what they are called with moved there."""
    there = dict(zip(dict.fromkeys(device_map.values()), ("cpu", "meta"), strict=True))
    for path, device in device_map.items():
        if path == "places":
            model.register_parameter(path, nn.Parameter(model.get_parameter(path).to(there[device])))
            continue
        module = model.get_submodule(path).to(there[device])
        module.register_forward_pre_hook(lambda _, given, to=there[device]: tuple(one.to(to) for one in given))
    try:
        model(x)
    except RuntimeError as problem:
        assert "device" in str(problem), problem
        return False
    return True


@pytest.mark.parametrize("seed", SEEDS)
def test_where_tensors_of_several_devices_meet_is_said(seed: int) -> None:
    """`head(y + first)` was exported without a word, and the addition failed with accelerate."""
    model = Meeting(Random(seed))
    known = regression(model)
    made = known.plan(stages=2, schedule="gpipe").export("huggingface", model)
    said = re.search(rf"move one to the other's device in {__file__}:\d+ \(aten.add.Tensor\)", " ".join(made.notes))
    assert runs_with(model, made.value["device_map"], *known.inputs) == (said is None)
