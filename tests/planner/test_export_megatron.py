"""Random transformers for Megatron-LM: its layout counts their blocks and nothing else, and ties what they tie."""

import re
from collections import OrderedDict
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.export.target import Export
from planner.export.units import block_paths, listed_paths, units_of
from profiler.errors import InfeasibleError
from tests.planner.exported import BATCH, priced
from tests.planner.test_export import megatron_stages

WIDTH = WORDS = 8
PLACES = 4
PAIR = {"stages": 2, "schedule": "1f1b", "recompute": "never"}


class Block(nn.Module):
    """Reads its one weight in two pieces, as fused attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first = nn.functional.linear(x, self.fused[:WIDTH])
        return x + self.out(torch.relu(nn.functional.linear(torch.tanh(first), self.fused[WIDTH:])))


class Other(Block):
    pass


class Transformer(nn.Module):
    """Its head may be the embedding's weight, by a name of its own or without one."""

    def __init__(self, blocks: list[nn.Module], *, named_head: bool = True, norm: bool = True) -> None:
        super().__init__()
        self.embed, self.before = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.places = nn.Embedding(PLACES, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.head = nn.Linear(WIDTH, WORDS, bias=False) if named_head else None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.before(self.places(torch.arange(ids.shape[1])) + self.embed(ids))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return nn.functional.linear(x, self.embed.weight) if self.head is None else self.head(x)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def for_megatron(model: nn.Module, **settings: Any) -> Export:
    ids = torch.randint(WORDS, (BATCH, 3))
    plan = priced(model, (ids,), ids, loss_of).plan(**{**PAIR, **settings})
    return plan.export("megatron-lm", model)


def options_of(made: Export) -> dict[str, str]:
    return dict(zip(made.value, made.value[1:], strict=False))


def sequential(*blocks: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks)


def random_sequential(random: Random) -> nn.Module:
    """A whole transformer, perhaps inside of another list, or with names that are no numbers."""
    before = [nn.Embedding(WORDS, WIDTH), *random.sample([nn.LayerNorm(WIDTH), nn.Dropout(0.0)], random.randint(0, 2))]
    after = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)][random.randint(0, 1) :]
    blocks = [Block() for _ in range(random.randint(2, 5))]
    modules = [*before, *blocks, *after]
    model = nn.Sequential(OrderedDict([(f"module{number}", module) for number, module in enumerate(modules)]))
    return random.choice([model, nn.Sequential(*modules), nn.Sequential(nn.Sequential(*modules))])


@pytest.mark.parametrize("seed", range(6))
def test_a_letter_stands_for_a_block_and_for_nothing_else(seed: int) -> None:
    """The embedding, the norm and the head of an `nn.Sequential` were counted with its blocks."""
    random = Random(seed)
    model = random_sequential(random)
    blocks = [path for path, module in model.named_modules() if isinstance(module, Block)]
    made = for_megatron(model, recompute=random.choice(["never", "always"]))
    options = options_of(made)
    stages = megatron_stages(options["--pipeline-model-parallel-layout"])
    held = [sum(f"{path}.fused" in stage.parameters for path in blocks) for stage in made.plan.stages]
    assert [stage.count("t") for stage in stages] == held
    assert options["--num-layers"] == str(len(blocks))
    assert "".join(stages) == "E" + "t" * len(blocks) + "L"
    recomputed = [segment for stage in made.plan.stages for segment in stage.recompute]
    assert len(recomputed) == (len(blocks) if "--recompute-method" in options else 0)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: sequential(Block(), nn.LayerNorm(WIDTH), Block()), "this model has none"),
        (lambda: sequential(Block(), Block(), Other(), Other()), "this model has none"),
        (lambda: Transformer([Block(), Other(), Block()]), "blocks.0 to blocks.2 holds members of 2: Block, Other"),
    ],
)
def test_blocks_that_cannot_be_told_are_refused(model: Any, message: str) -> None:
    with pytest.raises(InfeasibleError, match=re.escape(message)):
        for_megatron(model())


class Pair(nn.Module):
    """A wrapper of one class around unlike modules."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Stage(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        return in_a_row([*self.blocks], x)


def in_a_row(modules: list[nn.Module], x: Tensor) -> Tensor:
    """Lists have no forward pass of their own."""
    for module in modules:
        x = in_a_row([*module], x) if isinstance(module, nn.ModuleList) else module(x)
    return x


class Parts(nn.Module):
    """Modules by names, called in a row."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, module in parts.items():
            self.add_module(name, module)

    def forward(self, ids: Tensor) -> Tensor:
        return in_a_row([*self.children()], ids)


def group(random: Random) -> nn.Module:
    blocks = [Block() for _ in range(random.randint(1, 3))]
    return random.choice([nn.ModuleList(blocks), nn.Sequential(*blocks)])


def pair() -> nn.Module:
    halves = Pair(nn.Linear(WIDTH, WIDTH)), Pair(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    return nn.ModuleList(halves)


def random_parts(random: Random, kind: str) -> tuple[nn.Module, int | None]:
    """A transformer, and how many blocks it has; None if that cannot be told."""
    count = random.randint(2, 4)
    blocks: list[nn.Module] = [Block() for _ in range(count)]
    groups: list[nn.Module] = [group(random), nn.ModuleList([Block(), Block()]), nn.Sequential(Block())]
    stages: list[nn.Module] = [Stage(blocks), Stage([*blocks, Block()])]
    two_kinds: list[nn.Module] = [nn.Sequential(*blocks), nn.Sequential(*(Other() for _ in blocks))]
    between: dict[str, nn.Module] = {
        "nested": Parts(stages=nn.ModuleList(groups)),
        "pairs": Parts(layers=nn.ModuleList(pair() for _ in range(count))),
        "list before": Parts(stem=nn.ModuleList([Block()]), blocks=nn.ModuleList(blocks)),
        "block after": Parts(blocks=nn.ModuleList(blocks), last=Block()),
        "wrapped": Parts(blocks=nn.ModuleList(blocks), last=Pair(Block())),
        "stages": Parts(stages=nn.ModuleList(stages)),
        "two kinds": Parts(stages=nn.ModuleList(two_kinds)),
    }
    model = Parts(embed=nn.Embedding(WORDS, WIDTH), body=between[kind], head=nn.Linear(WIDTH, WORDS))
    nested = sum(isinstance(module, Block) for module in model.modules())
    return model, {"nested": nested, "pairs": count}.get(kind)


@pytest.mark.parametrize("kind", ["nested", "pairs", "list before", "block after", "wrapped", "stages", "two kinds"])
def test_blocks_in_groups_and_beside_their_list_are_counted_or_refused(kind: str) -> None:
    """Of lists in a list each was a block, and a block in a list of its own went into E or L."""
    model, count = random_parts(Random(kind), kind)
    ids = torch.randint(WORDS, (BATCH, 3))
    known = priced(model, (ids,), ids, loss_of)
    plan = known.plan(**PAIR)
    if kind == "nested":
        layers = plan.export("deepspeed", model).value["layers"]
        torch.testing.assert_close(in_a_row([model.get_submodule(path) for path in layers], ids), model(ids))
        device_map = known.plan(stages=1).export("huggingface", model).value["device_map"]
        assert not [path for path in device_map if isinstance(model.get_submodule(path), nn.ModuleList)]
    if count is None:
        with pytest.raises(InfeasibleError, match=r"Megatron-LM lays out blocks .* export to torch.distributed"):
            plan.export("megatron-lm", model)
        return
    options = options_of(plan.export("megatron-lm", model))
    assert options["--num-layers"] == str(count)
    assert "".join(megatron_stages(options["--pipeline-model-parallel-layout"])) == "E" + "t" * count + "L"


def test_torchtitan_recomputes_blocks_and_not_what_is_beside_them() -> None:
    model = sequential(*(Block() for _ in range(4)), nn.LayerNorm(WIDTH))
    ids = torch.randint(WORDS, (BATCH, 3))
    known = priced(model, (ids,), ids, loss_of)
    for unit_paths in (listed_paths, block_paths):
        assert units_of(known.sequence, model, unit_paths).blocks == {"": ("1", "2", "3", "4")}
    made = known.plan(**{**PAIR, "recompute": "always"}).export("torchtitan", model)
    assert len([segment for stage in made.plan.stages for segment in stage.recompute]) == 4


UNTIED = "--untie-embeddings-and-output-weights"


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("tied", ["by name", "in forward", "not"])
def test_the_embedding_is_tied_where_the_model_ties_it(tied: str, norm: bool) -> None:
    """Any parameter that two layers read, as a fused one in a block is, left out the flag of an untied head."""
    model = Transformer([Block() for _ in range(4)], named_head=tied != "in forward", norm=norm)
    if tied == "by name":
        assert model.head is not None
        model.head.weight = model.embed.weight
    assert (UNTIED in for_megatron(model).value) == (tied == "not")


def share_of_blocks(model: Transformer) -> None:
    model.get_submodule("blocks.1.out").weight = model.get_parameter("blocks.0.out.weight")


def share_with_embedding(model: Transformer) -> None:
    model.get_submodule("blocks.1.out").weight = model.embed.weight


def share_norms(model: Transformer) -> None:
    model.norm.weight = model.before.weight


def share_with_places(model: Transformer) -> None:
    """The head says which of the places comes next."""
    model.head = nn.Linear(WIDTH, PLACES, bias=False)
    model.head.weight = model.places.weight


def repeat_a_block(model: Transformer) -> None:
    model.blocks[1] = model.blocks[0]


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (share_of_blocks, "blocks.0.out.weight and blocks.1.out.weight is one parameter that blocks.0, blocks.1 use"),
        (share_with_embedding, "is one parameter that E, blocks.1 use"),
        (share_with_places, "places.weight and head.weight is one parameter that E, L use"),
        (share_norms, "before.weight and norm.weight is one parameter that E, L use"),
        (repeat_a_block, "calls 'blocks.0' and 'blocks.1', one module, 2 times, and Megatron-LM counts on one call"),
    ],
)
@pytest.mark.parametrize("stages", [1, 2])
def test_other_tied_parameters_are_refused(share: Any, message: str, stages: int) -> None:
    """Megatron-LM would train two of them, without a word about it where one rank had both."""
    model = Transformer([Block() for _ in range(4)])
    share(model)
    with pytest.raises(InfeasibleError, match=re.escape(message)):
        for_megatron(model, stages=stages)
