"""For Megatron-LM: `--pipeline-model-parallel-layout` and the options that go with it.

    Ettt|tttt|tttt|ttL        E: all before the first block, t: a block, L: all after the last; | begins a stage

Stage k runs on rank k mod (ranks), as here. Megatron builds the model itself, so blocks are counted and not named.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import groupby

from torch import nn

from planner.export.refusing import OURS, calls_of, refuse_other_calls
from planner.export.target import Made, Recompute, Request, Target
from planner.export.units import Units, block_paths, holds_modules, is_group, kind_of, owners
from planner.plan.schedules import schedules_of
from profiler.errors import InfeasibleError
from profiler.precision import recipe_of
from profiler.text import counted
from profiler.tracing.sequence import LayerSequence

EMBEDDING, BLOCK, LOSS, NEXT_STAGE = "E", "t", "L", "|"
_TAKES_ANY = "export to torch.distributed.pipelining, which takes any model"
_PLAIN = 3
"""So many equal letters are written out; more as a letter with a count."""


def _blocks(units: Units) -> range:
    """Positions of the transformer's blocks; none if there is not one list of them in a row."""
    lists = [sorted(map(units.paths.index, blocks)) for blocks in units.blocks.values() if len(blocks) > 1]
    if len(lists) != 1 or lists[0] != list(range(lists[0][0], lists[0][-1] + 1)):
        return range(0)
    return range(lists[0][0], lists[0][-1] + 1)


def _borders(units: Units) -> range:
    """A stage may begin with any block, and with what follows the last."""
    blocks = _blocks(units)
    return range(max(1, blocks.start), min(len(units.paths), blocks.stop + 1)) if blocks else range(0)


def _letters(units: Units) -> dict[str, str]:
    """Where each unit goes: `EMBEDDING`, `LOSS`, or its own path if it is a block."""
    blocks = _blocks(units)
    return {
        path: EMBEDDING if number < blocks.start else LOSS if number >= blocks.stop else path
        for number, path in enumerate(units.paths)
    }


def _places(units: Units, sequence: LayerSequence) -> list[set[str]]:
    """Where the units of each layer go; what is of none goes with what is before it."""
    letters = _letters(units)
    own = [{letters[path] for path in owners(layer.module_paths, letters)} for layer in sequence.layers]
    inside = [index for index, places in enumerate(own) if places - {EMBEDDING, LOSS}] or [len(own)]
    for index, places in enumerate(own):
        if not places:
            own[index] = {EMBEDDING} if index < inside[0] else {LOSS} if index > inside[-1] else own[index - 1]
    return own


def _users(places: Sequence[set[str]]) -> set[str]:
    """Where the layers that read a parameter go; units that cannot be parted have a layer of both."""
    if common := set.intersection(*places):
        return {min(common)}
    return set().union(*(one & {EMBEDDING, LOSS} or one for one in places))


def _ties_embedding(request: Request) -> bool:
    """Whether E and L share a matrix, as Megatron-LM's word embedding and head can.

    Raises:
        InfeasibleError: the model shares another parameter, such as an embedding that is smaller than another one.
    """
    units, sequence = request.units, request.sequence
    assert units is not None
    letters, places = _letters(units), _places(units, sequence)
    known = {name: sequence.aliases.get(name, (name,)) for name in sequence.parameters}
    tables = [name for name, names in known.items() if any(_is_embedding(request.model, one) for one in names)]
    largest = max(tables, key=lambda name: sequence.parameters[name].numel(), default=None)
    ties = False
    for name, layers in sequence.tied.items():
        found = _users([places[layer] for layer in layers])
        names = known[name]
        if len(names) > 1:
            found |= {letters.get(path, path) for one in names for path in owners([one], letters) or {one}}
        if len(found) == 1:
            continue
        if found != {EMBEDDING, LOSS} or sequence.parameters[name].dim() != 2 or ties or largest not in (None, name):
            raise InfeasibleError(
                f"Megatron-LM shares one weight, between the embedding and the head, and {' and '.join(names)} is one "
                f"parameter that {', '.join(sorted(found))} use; untie it and plan again, or {OURS}"
            )
        ties = True
    return ties


def _is_embedding(model: nn.Module, parameter: str) -> bool:
    return isinstance(model.get_submodule(parameter.rpartition(".")[0]), nn.Embedding)


def _check(request: Request) -> None:
    plan, units = request.plan, request.units
    assert units is not None
    blocks = [units.paths[position] for position in _blocks(units)]
    if not blocks:
        found = ", ".join(f"{len(paths)} in {name!r}" for name, paths in units.blocks.items()) or "none"
        raise InfeasibleError(
            f"Megatron-LM lays out a transformer of one list of blocks, and this model has {found} (of an "
            f"nn.Sequential, the members of its most frequent class if they are in a row); {_TAKES_ANY}"
        )
    _refuse_other_kinds(request.model, blocks)
    _refuse_blocks_elsewhere(request, blocks)
    refuse_other_calls(request, "Megatron-LM", blocks)
    _ties_embedding(request)
    if plan.chunks > 1 and plan.M % plan.ranks:
        raise InfeasibleError(
            f"Megatron-LM's interleaved schedule takes whole groups of {plan.ranks} micro-batches, and M = {plan.M}; "
            f"plan with micro_batches={plan.ranks * max(1, round(plan.M / plan.ranks))}"
        )


def _refuse_other_kinds(model: nn.Module, blocks: Sequence[str]) -> None:
    """Refuse a list of blocks of which some are of other kinds, or groups of more blocks, than others."""
    kinds = {kind_of(model.get_submodule(path)): model.get_submodule(path) for path in blocks}
    if len(kinds) > 1:
        raise InfeasibleError(
            f"Megatron-LM lays out blocks of one class, and the list of {blocks[0]} to {blocks[-1]} holds members of "
            f"{len(kinds)}: {', '.join(map(_class_text, kinds.values()))}; keep nothing but blocks in it, or "
            f"{_TAKES_ANY}"
        )
    first: dict[str, tuple[str, int]] = {}
    for path in blocks:
        for name, inner in model.get_submodule(path).named_modules():
            count = len([*inner.children()])
            other, known = first.setdefault(name, (path, count)) if is_group(inner) else (path, count)
            if known != count:
                raise InfeasibleError(
                    f"Megatron-LM lays out blocks that are alike, and {other} holds {counted(known, 'block')} in "
                    f"{name!r} where {path} holds {count}; keep nothing but blocks in one list, or {_TAKES_ANY}"
                )


def _class_text(module: nn.Module) -> str:
    held = ", ".join(type(child).__name__ for child in module.children())
    return f"{type(module).__name__}({held})" if kind_of(module) is not type(module) else type(module).__name__


def _refuse_blocks_elsewhere(request: Request, blocks: Sequence[str]) -> None:
    """Refuse a model that calls modules like its blocks outside of their list, which would vanish into E and L."""
    kind = kind_of(request.model.get_submodule(blocks[0]))
    others = [
        path
        for path, module in request.model.named_modules()
        if holds_modules(module) and kind_of(module) == kind and not owners([path], blocks)
        and calls_of(request.sequence, path)
    ]  # fmt: skip
    if others:
        raise InfeasibleError(
            f"Megatron-LM lays out blocks of one list, and this model calls {len(others)} more like the {len(blocks)} "
            f"from {blocks[0]} to {blocks[-1]}: {', '.join(others)}; put all of them in that list, or {_TAKES_ANY}"
        )


def layout_text(stages: Sequence[Sequence[str]]) -> str:
    """The stages as Megatron's layout string, for letters of each.

    >>> layout_text(["Ettttt", "tttt", "ttL"])
    'Et*5|t*4|ttL'
    """
    return NEXT_STAGE.join(
        "".join(
            letter * len(run) if len(run := list(group)) <= _PLAIN else f"{letter}*{len(run)}"
            for letter, group in groupby(stage)
        )
        for stage in stages
    )


def _make(request: Request) -> Made:
    plan, units = request.plan, request.units
    assert units is not None
    blocks = {units.paths[position] for position in _blocks(units)}
    letters = ["".join(BLOCK for path in stage if path in blocks) for stage in request.unit_paths]
    letters[0] = EMBEDDING + letters[0]
    letters[-1] += LOSS
    arguments = {
        "--pipeline-model-parallel-size": str(plan.ranks),
        "--pipeline-model-parallel-layout": layout_text(letters),
        "--num-layers": str(len(blocks)),
        "--micro-batch-size": str(request.micro_batch_size),
        "--global-batch-size": str(plan.batch_size),
    }
    if request.recomputes:
        arguments |= {
            "--recompute-granularity": "full",
            "--recompute-method": "uniform",
            "--recompute-num-layers": "1",
        }
    flags = [] if _ties_embedding(request) else ["--untie-embeddings-and-output-weights"]
    recipe = recipe_of(plan.sample.precision)
    if recipe is not None:
        flags += ["--bf16"] if recipe.casts_at_end else ["--bf16", "--accumulate-allreduce-grads-in-fp32"]
    if plan.shard_optimizer:
        flags.append("--use-distributed-optimizer")
    words = [word for pair in arguments.items() for word in pair] + flags
    notes = (
        f"{counted(plan.ranks * plan.replicas, 'process')} with tensor and context parallelism of 1; "
        f"Megatron-LM makes R = {plan.replicas} of them.",
        "Megatron-LM builds its own model, without operations and hooks of this one: times and memory are predicted "
        "for this one's blocks.",
    )
    return Made(words, " ".join(map(shlex.quote, words)) + "\n", notes=notes)


TARGET = Target(
    name="megatron-lm",
    engine="Megatron-LM",
    make=_make,
    schedules=schedules_of("megatron-lm"),
    unit_paths=block_paths,
    between="a transformer's blocks",
    borders=_borders,
    tensors_between=1,
    recompute=Recompute.BLOCKS,
    adds_tied=True,
    averages_replicas=True,
    shards_optimizer=True,
    precisions=("bf16-mixed", "bf16-grads"),
    check=_check,
)
