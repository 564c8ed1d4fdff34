"""Modules that an engine puts on one stage or another, and the cuts that do not part them.

    model.embed | model.blocks.0 | model.blocks.1 | ... | model.head        units, in the order in which they run
                ^                ^                ^     ^                   borders

A unit is cut if it has operations on both sides. A unit without parameters whose operations other units' lie between is
a helper that they share, such as an activation function, and can be on every stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from torch import nn

from profiler.observe.source_place import own_forward
from profiler.torch_private import calls_its_children
from profiler.tracing.sequence import LayerSequence

UnitPaths: TypeAlias = Callable[[nn.Module], tuple[str, ...]]
"""The paths of a model's units, in the order in which the model declares them."""


def child_paths(model: nn.Module) -> tuple[str, ...]:
    """The model's children: `"0"`, `"1"`, ... of an `nn.Sequential`."""
    return tuple(name for name, _ in _children(model))


def calls_each_child_once(model: nn.Module) -> bool:
    """Whether it is an `nn.Sequential` of as many modules, and calls them one after the other."""
    return calls_its_children(model) and len({*model.children()}) == len(_children(model))


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and children; one that is there under several names is under each of them."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def listed_paths(model: nn.Module) -> tuple[str, ...]:
    """The model's children, and in place of an `nn.ModuleList` or `nn.ModuleDict` what it holds: `"layers.0"`."""
    return tuple(_listed(model))


def _listed(model: nn.Module) -> Iterator[str]:
    for name, child in _children(model):
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from (f"{name}.{inner}" for inner, _ in _children(child))
        else:
            yield name


def block_paths(model: nn.Module) -> tuple[str, ...]:
    """What the model's outermost lists hold, wherever they are, and the modules next to them: `"model.layers.0"`.

    An `nn.ModuleDict` that holds an `nn.ModuleList` is a module like any other: `"transformer.h.0"` beside
    `"transformer.wte"`. In place of a group of blocks in a list are its blocks: `"stages.1.0"`.
    """
    return tuple(_blocks(model, "", is_list=False, opens=is_group))


def called_paths(model: nn.Module) -> tuple[str, ...]:
    """The same of modules that can be called: in place of one without a `forward`, such as a list, what it holds."""
    return tuple(_blocks(model, "", is_list=False, opens=lambda module: own_forward(module) is nn.Module.forward))


def _blocks(module: nn.Module, prefix: str, *, is_list: bool, opens: Callable[[nn.Module], bool]) -> Iterator[str]:
    for name, child in _children(module):
        path = f"{prefix}{name}"
        inner_list = _is_list(child)
        outermost = not is_list and (inner_list or _holds_list(child))
        if holds_modules(child) and (outermost or opens(child)):
            yield from _blocks(child, f"{path}.", is_list=is_list or inner_list, opens=opens)
        else:
            yield path


def _is_list(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleDict):
        return not any(isinstance(inner, nn.ModuleList) for inner in module.children())
    return isinstance(module, nn.ModuleList | nn.Sequential)


def is_group(module: nn.Module) -> bool:
    """Whether it is a list of modules that are alike and hold modules themselves, as blocks do and linear maps do not.

    Attention and a feed-forward network in a list, each in a wrapper of one class, are no two blocks but one.
    """
    members = [*module.children()]
    return _is_list(module) and len({*map(_structure, members)}) == 1 and holds_modules(members[0])


def holds_modules(module: nn.Module) -> bool:
    """Whether it holds any other."""
    return any(True for _ in module.children())


def _structure(module: nn.Module) -> tuple[object, ...]:
    return tuple((name, type(inner)) for name, inner in module.named_modules(remove_duplicate=False))


def kind_of(module: nn.Module) -> object:
    """What members of one kind have in common: their class, and of lists that of all that they hold."""
    return _structure(module) if _is_list(module) else type(module)


def _named_blocks(of_list: nn.Module, members: Sequence[tuple[str, nn.Module]]) -> list[str]:
    """Names of the members of a list that are blocks: all of them, as they have numbers for names.

    An `nn.Sequential` may hold a whole model, so there they are the members of the class that most are of, in a row;
    none if two classes are as frequent, or others lie between.
    """
    names = [name for name, _ in members]
    if not isinstance(of_list, nn.Sequential):
        return [name for name in names if name.replace(".", "").isdecimal()]
    classes = [type(child) for _, child in members]
    (most, count), *others = Counter(classes).most_common(2)
    first = classes.index(most)
    is_run = all(fewer < count for _, fewer in others) and classes[first : first + count] == [most] * count
    return names[first : first + count] if is_run else []


def _holds_list(module: nn.Module) -> bool:
    return any(isinstance(inner, nn.ModuleList | nn.ModuleDict | nn.Sequential) for inner in module.modules())


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a model.

    Attributes:
        paths: in the order in which they run; those that run no operation stand after the one declared before them.
        blocks: path of a list -> those of the units that are its blocks.
        before: position of a cut that parts no unit -> how many of them come before it, at least one, not all.
        layers: number of layers of the model.
    """

    paths: tuple[str, ...]
    blocks: Mapping[str, tuple[str, ...]]
    before: Mapping[int, int]
    layers: int

    def of_stages(self, stops: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """The units of each stage, for stages that end at these positions, the last at the end of the model."""
        counts = [0, *(self.before[stop] for stop in stops[:-1]), len(self.paths)]
        return tuple(self.paths[first:last] for first, last in pairwise(counts))

    def spans(self, first: int, stop: int, *, blocks_only: bool) -> list[tuple[int, int]]:
        """The layers of a stage parted at all borders inside; without those that hold no block."""
        counts = {0: 0, **self.before, self.layers: len(self.paths)}
        blocks = {path for paths in self.blocks.values() for path in paths}
        ends = {counts[first]: first, counts[stop]: stop}
        for position in sorted(self.before):
            if first < position < stop:
                ends.setdefault(self.before[position], position)
        return [
            (ends[one], ends[other])
            for one, other in pairwise(sorted(ends))
            if not blocks_only or not blocks.isdisjoint(self.paths[one:other])
        ]


def units_of(sequence: LayerSequence, model: nn.Module, unit_paths: UnitPaths) -> Units:
    """Where a model's units run, which of them are blocks, and the cuts between them."""
    paths = unit_paths(model)
    where: dict[str, list[int]] = {path: [] for path in paths}
    for layer in sequence.layers:
        for path in owners(layer.module_paths, where):
            where[path].append(layer.index)
    whole = {path: layers for path, layers in where.items() if layers and not _is_helper(sequence, path, layers)}
    order = _in_order(paths, whole)
    place = {path: number for number, path in enumerate(order)}
    before: dict[int, int] = {}
    for position in range(1, len(sequence)):
        if any(layers[0] < position <= layers[-1] for layers in whole.values()):
            continue
        count = _number_before(order, place, whole, position)
        if count and count < len(order):
            before[position] = count
    return Units(order, _blocks_of_lists(model, paths), before, len(sequence))


def _blocks_of_lists(model: nn.Module, paths: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Of each list whose blocks are units the paths of these; lists in it are one with it."""
    found = {}
    for parent in dict.fromkeys(_list_around(model, path) for path in paths):
        holder, prefix = model.get_submodule(parent), f"{parent}." if parent else ""
        members = [*_members(holder, prefix, {*paths})] if parent else _children(holder)
        blocks = tuple(f"{prefix}{name}" for name in _named_blocks(holder, members))
        if blocks and {*blocks} <= {*paths}:
            found[parent] = blocks
    return found


def _list_around(model: nn.Module, path: str) -> str:
    """Path of what holds a unit: of lists in each other the outermost, but for the model itself."""
    parent = path.rpartition(".")[0]
    while _is_list(model.get_submodule(parent)) and (above := parent.rpartition(".")[0]):
        if not _is_list(model.get_submodule(above)):
            break
        parent = above
    return parent


def _members(holder: nn.Module, prefix: str, paths: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of what a module holds; of lists in a list, which are no units, of what these hold."""
    for name, child in _children(holder):
        if _is_list(holder) and _is_list(child) and f"{prefix}{name}" not in paths:
            yield from ((f"{name}.{own}", inner) for own, inner in _members(child, f"{prefix}{name}.", paths))
        else:
            yield name, child


def owners(modules: Iterable[str], paths: Collection[str]) -> set[str]:
    """Those of these paths that the modules, parameters or buffers with these names belong to."""
    return {owner for module in modules if (owner := _owner(module, paths)) is not None}


def _owner(module: str, paths: Collection[str]) -> str | None:
    """The unit that a module belongs to."""
    while module:
        if module in paths:
            return module
        module = module.rpartition(".")[0]
    return None


def _is_helper(sequence: LayerSequence, path: str, layers: Sequence[int]) -> bool:
    """Whether the unit has no parameters, and operations of other modules between its own."""
    if layers[-1] - layers[0] + 1 == len(layers):
        return False
    names = {name for known in sequence.parameters for name in sequence.aliases.get(known, (known,))}
    return not any(name.startswith(f"{path}.") for name in names)


def _in_order(paths: Sequence[str], whole: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    """Units by their first layer; one that has none comes after the unit that is declared before it.

    What shares that layer with a block of a list, such as rotary embeddings, comes before the block.
    """
    keys: dict[str, tuple[int, int, int]] = {}
    last = -1
    for number, path in enumerate(paths):
        last = whole[path][0] if path in whole else last
        keys[path] = (last, path.rpartition(".")[2].isdecimal() if path in whole else 2, number)
    return tuple(sorted(paths, key=lambda path: keys[path]))


def _number_before(
    order: Sequence[str], place: Mapping[str, int], whole: Mapping[str, Sequence[int]], position: int
) -> int:
    """Units before a position, those without a layer of their own among them."""
    after = [place[path] for path, layers in whole.items() if layers[0] >= position]
    ran = [place[path] for path, layers in whole.items() if layers[-1] < position]
    return min(after) if after and ran else 0
