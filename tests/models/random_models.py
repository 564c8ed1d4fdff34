"""Random small models as data: what a hand would not think of, and a line of text for each that a test can hold.

    linear 0 p0; view 2 2,6; position 3 p1; unbind 4 1; add_ 5 6 | returns 7,4 | loss 4 | frozen p1

A recipe is a list of operations. Its values may be returned in a dict, a list, a record or nested (`| as record`), and
the inputs may be among them. Values are numbered: 0 is the input `x` of shape (n, 12), 1 is `ids` (n, 3) of whole
numbers from 0 to 3, each operation appends its results. An operation is written as its name, the numbers of the values
that it reads, and then parameters (`p0`), buffers (`b0`) and extents (`2,6`). Parameters that are named twice are
tied. Everything is float64, so that a comparison with the plain model needs no tolerance for kinks and ties.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

FEATURES = 12
DRAFTED = 11  # samples while a model is made up: no other extent, so that samples never mix
IDS = 4  # different numbers in `ids`
STREAMS = 2  # of hyper-connections
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operation:
    """One line of a recipe.

    Attributes:
        name: key of `OPERATIONS`.
        reads: numbers of values.
        names: of parameters and buffers.
        extents: numbers that say how.
    """

    name: str
    reads: tuple[int, ...]
    names: tuple[str, ...] = ()
    extents: tuple[int, ...] = ()

    def __str__(self) -> str:
        extents = (",".join(map(str, self.extents)),) if self.extents else ()
        return " ".join((self.name, *map(str, self.reads), *self.names, *extents))

    @classmethod
    def parse(cls, text: str) -> Operation:
        """The operation of a text; `view 2 2,6` and `unbind 2 1,` differ from `add 2 3` by the comma."""
        name, *words = text.split()
        names = tuple(word for word in words if word[0] in "pb")
        plain = [word for word in words if word[0] not in "pb"]
        reads = READS[name]
        extents = tuple(int(part) for word in plain[reads:] for part in word.split(",") if part)
        return cls(name, tuple(int(word) for word in plain[:reads]), names, extents)


@dataclass(frozen=True)
class Recipe:
    """A model.

    Attributes:
        operations: in order.
        returns: numbers of the values that it returns.
        loss: those of them that the loss uses.
        frozen: names of parameters that are not trained.
        form: key of `FORMS`: in what they are returned.
    """

    operations: tuple[Operation, ...]
    returns: tuple[int, ...]
    loss: tuple[int, ...]
    frozen: tuple[str, ...] = ()
    form: str = "tuple"

    def __str__(self) -> str:
        numbers = [",".join(map(str, listed)) for listed in (self.returns, self.loss)]
        text = "; ".join(map(str, self.operations)) + f" | returns {numbers[0]} | loss {numbers[1]}"
        text += f" | frozen {','.join(self.frozen)}" if self.frozen else ""
        return text if self.form == "tuple" else f"{text} | as {self.form}"

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """The recipe of a text."""
        operations, *rest = text.split(" | ")
        said = dict(part.split(" ", 1) for part in rest)
        return cls(
            tuple(map(Operation.parse, operations.split("; "))),
            tuple(map(int, said["returns"].split(","))),
            tuple(map(int, said["loss"].split(","))),
            tuple(said["frozen"].split(",")) if "frozen" in said else (),
            said.get("as", "tuple"),
        )


@dataclass
class Record:
    """What a model returns, with a name for each part."""

    first: Tensor
    size: int
    rest: list[Tensor]
    missing: Tensor | None = None


pytree.register_dataclass(Record)

FORMS: dict[str, Callable[[tuple[Tensor, ...]], Any]] = {
    "tuple": lambda values: values,
    "list": list,
    "alone": lambda values: values[0],
    "dict": lambda values: {f"value {position}": value for position, value in enumerate(values)},
    "nested": lambda values: (None, {"first": values[0], "rest": [values[1:], 2.5]}),
    "record": lambda values: Record(values[0], 3, [*values[1:]]),
}


class RecipeModel(nn.Module):
    """The model of a recipe, with values that follow from names and shapes alone."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.shapes: dict[str, Shape] = {}
        with torch.no_grad():
            self.forward(*sample(DRAFTED), make=True)

    def held(self, name: str, shape: Shape, make: bool) -> Tensor:
        """A parameter or buffer; made on the first run."""
        if make and name not in self.shapes:
            self.shapes[name] = shape
            number = int(name[1:]) + (0.5 if name[0] == "b" else 0.0)
            value = torch.sin(torch.arange(prod(shape), dtype=torch.float64) * (1.3 + number) + number).reshape(shape)
            if name[0] == "b":
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value / 2, requires_grad=name not in self.recipe.frozen))
        if self.shapes[name] != shape:
            raise ValueError(f"{name} has the shape {self.shapes[name]}, and {shape} is wanted")
        found = getattr(self, name)
        assert isinstance(found, Tensor)
        return found

    def forward(self, x: Tensor, ids: Tensor, make: bool = False) -> Any:
        values = [x, ids]
        for operation in self.recipe.operations:
            self.apply_to(values, operation, make)
        return FORMS[self.recipe.form](tuple(values[number] for number in self.recipe.returns))

    def apply_to(self, values: list[Tensor], operation: Operation, make: bool) -> None:
        """Carry out one operation; appends what it returns."""

        def held(position: int, *shape: int) -> Tensor:
            return self.held(operation.names[position], shape, make)

        read = [values[number] for number in operation.reads]
        values.extend(OPERATIONS[operation.name](read, held, operation.extents))


def loss_of(recipe: Recipe) -> Callable[[Any, Tensor], Tensor]:
    """The loss of a recipe's model: the mean over samples of something without symmetries."""

    def loss_fn(returned: Any, target: Tensor) -> Tensor:
        output = tensors_in(returned)
        total = torch.zeros((), dtype=torch.float64)
        for position, number in enumerate(recipe.returns):
            if number in recipe.loss:
                each = output[position].double().flatten(1)
                weights = torch.linspace(0.5, 1.5, each.shape[1], dtype=torch.float64)
                total = total + ((each * weights).mean(1) - target - position).pow(2).mean()
        return total

    return loss_fn


def tensors_in(returned: Any) -> list[Tensor]:
    """The values of `Recipe.returns`, in their order, from what a model returns."""
    return [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]


def sample(size: int) -> tuple[Tensor, Tensor]:
    """`x` and `ids` of a mini-batch."""
    x = torch.cos(torch.arange(size * FEATURES, dtype=torch.float64) * 1.7).reshape(size, FEATURES)
    return x, (torch.arange(size * 3) * 7 // 3 % IDS).reshape(size, 3)


Held = Callable[..., Tensor]
Step = Callable[[list[Tensor], Held, Shape], Sequence[Tensor]]


def _rest(value: Tensor) -> Shape:
    """The shape of one sample."""
    return tuple(value.shape[1:])


def _write(written: Tensor, by: Tensor) -> list[Tensor]:
    written.add_(by)
    return []


def _hyper(read: list[Tensor], held: Held, extents: Shape) -> list[Tensor]:
    """A hyper-connection: streams beside each other, mixed before and after a linear layer by small parameters."""
    (value,) = read
    streams = value.unsqueeze(1).expand(-1, STREAMS, -1) if value.dim() == 2 else value
    width = streams.shape[-1]
    mixed = held(0, STREAMS, STREAMS + 1).t() @ streams
    branch, rest = mixed[:, 0], mixed[:, 1:]
    out = functional.linear(torch.tanh(branch), held(1, width, width))
    return [rest + held(2, STREAMS).view(STREAMS, 1) * out.unsqueeze(1)]


def _attention(value: Tensor) -> Tensor:
    return torch.softmax(value @ value.transpose(1, 2), -1) @ value


def _written_buffer(read: list[Tensor], held: Held, extents: Shape) -> list[Tensor]:
    """A buffer that each micro-batch moves, and which is read behind that."""
    (value,) = read
    buffer = held(0, *_rest(value))
    buffer.mul_(0.5).add_(value.detach().mean(0))
    return [value * 0.5 + buffer]


def _rows(read: list[Tensor], held: Held, extents: Shape) -> list[Tensor]:
    """All rows of all samples together, read twice: of one sample `reshape` may view what it copies of several."""
    (value,) = read
    width = value.shape[-1]
    rows = value.reshape(-1, width)
    return [(functional.linear(rows, held(0, width, width)) + torch.tanh(rows)).view(-1, *_rest(value))]


def _batch_norm(read: list[Tensor], held: Held, extents: Shape) -> list[Tensor]:
    """Over a transposed sequence: torch's kernel gives it another order in memory than its fake one says."""
    if read[0].shape[1] == 1:
        raise ValueError("one value of one sample has no deviation")
    return [functional.batch_norm(read[0].transpose(1, 2), None, None, training=True).transpose(1, 2)]


def _norm(read: list[Tensor], held: Held, extents: Shape) -> list[Tensor]:
    width = read[0].shape[-1]
    return [functional.layer_norm(read[0], (width,), held(0, width) + 1.0, held(1, width))]


OPERATIONS: dict[str, Step] = {
    # computing
    "linear": lambda r, held, e: [functional.linear(r[0], held(0, r[0].shape[-1], r[0].shape[-1]))],
    "biased": lambda r, held, e: [
        functional.linear(r[0], held(0, r[0].shape[-1], r[0].shape[-1]), held(1, r[0].shape[-1]))
    ],
    "norm": _norm,
    "batch_norm": _batch_norm,
    "log_sigmoid": lambda r, held, e: [functional.logsigmoid(r[0].transpose(1, 2))],
    "deviation": lambda r, held, e: [r[0] / (r[0].std(1, keepdim=True, correction=0) + 0.5)],
    "tanh": lambda r, held, e: [torch.tanh(r[0])],
    "relu": lambda r, held, e: [torch.relu(r[0])],
    "scale": lambda r, held, e: [r[0] * 0.7],
    "attention": lambda r, held, e: [_attention(r[0])],
    "sum": lambda r, held, e: [r[0].sum(-1, keepdim=True)],
    "cumsum": lambda r, held, e: [r[0].cumsum(-1)],
    "hyper": _hyper,
    "rows": _rows,
    # views
    "view": lambda r, held, e: [r[0].view(-1, *e)],
    "reshape": lambda r, held, e: [r[0].reshape(-1, *e)],
    "transpose": lambda r, held, e: [r[0].transpose(1, 2)],
    "unsqueeze": lambda r, held, e: [r[0].unsqueeze(1)],
    "expand": lambda r, held, e: [r[0].unsqueeze(1).expand(-1, e[0], *_rest(r[0]))],
    "select": lambda r, held, e: [r[0].select(1, e[0])],
    "last": lambda r, held, e: [r[0][..., e[0] :]],
    "chunk": lambda r, held, e: r[0].chunk(2, -1),
    "unbind": lambda r, held, e: r[0].unbind(1),
    "detach": lambda r, held, e: [r[0].detach()],
    "narrow": lambda r, held, e: [r[0].narrow(1, 0, max(1, r[0].shape[1] - 1))],
    "split": lambda r, held, e: r[0].split([1, r[0].shape[1] - 1], 1),
    "squeeze": lambda r, held, e: [r[0].squeeze(1)],
    "permute": lambda r, held, e: [r[0].permute(0, 3, 1, 2)],
    "diagonal": lambda r, held, e: [r[0].diagonal(dim1=1, dim2=2)],
    "windows": lambda r, held, e: [r[0].unfold(1, 2, 1)],
    "flatten": lambda r, held, e: [r[0].flatten(1)],
    # copies, or views where nothing is to copy
    "contiguous": lambda r, held, e: [r[0].contiguous()],
    "turned": lambda r, held, e: [r[0].transpose(1, 2).contiguous()],
    "tail": lambda r, held, e: [r[0][:, 1:].contiguous()],
    "joined": lambda r, held, e: [r[0].transpose(1, 2).reshape(r[0].shape[0], -1)],
    "clone": lambda r, held, e: [r[0].clone()],
    "flip": lambda r, held, e: [r[0].flip(1)],
    # several values, and parameters, in one addition
    "add": lambda r, held, e: [r[0] + r[1]],
    "mul": lambda r, held, e: [r[0] * r[1]],
    "cat": lambda r, held, e: [torch.cat([r[0], r[1]], -1)],
    "stack": lambda r, held, e: [torch.stack([r[0], r[1]], 1)],
    "position": lambda r, held, e: [r[0] + held(0, *_rest(r[0])).unsqueeze(0)],
    "pair": lambda r, held, e: [
        r[0] + (held(0, prod(_rest(r[0]))).view(_rest(r[0])) + held(1, prod(_rest(r[0])), 1).view(_rest(r[0])))
    ],
    "token": lambda r, held, e: [torch.cat([held(0, 1, r[0].shape[-1]).expand(r[0].shape[0], -1, -1), r[0]], 1)],
    "gain": lambda r, held, e: [r[0] * held(0, 1).view(())],
    # written in place
    "add_": lambda r, held, e: _write(r[0], r[1]),
    "mul_": lambda r, held, e: [r[0].mul_(0.9)][:0],
    "relu_": lambda r, held, e: [torch.relu_(r[0])],
    "add_gain_": lambda r, held, e: _write(r[0], held(0, 1)),
    "scan_": lambda r, held, e: _write(r[0][..., 1], r[0][..., 0] * 0.5),
    "row_": lambda r, held, e: _write(r[0][:, 1], r[0][:, 0]),
    "fill_": lambda r, held, e: [r[0][..., 0].fill_(0.5)][:0],
    "copy_": lambda r, held, e: [r[0].copy_(r[1])][:0],
    "masked_": lambda r, held, e: [r[0].masked_fill_(r[0] > 0.5, 0.25)][:0],
    "first_": lambda r, held, e: [r[0].select(1, 0).sub_(r[0].select(1, -1))][:0],
    "tanh_": lambda r, held, e: [r[0].tanh_()],
    # buffers, whole numbers, yes and no
    "buffer": lambda r, held, e: [r[0] + held(0, *_rest(r[0]))],
    "written": _written_buffer,
    "positive": lambda r, held, e: [r[0] > 0],
    "where": lambda r, held, e: [torch.where(r[0], r[1], -0.3 * r[1])],
    "largest": lambda r, held, e: [r[0].argmax(-1) % IDS],
    "embed": lambda r, held, e: [functional.embedding(r[0], held(0, IDS, 3))],
    "number": lambda r, held, e: [r[0].double()],
}
_OF_TWO = {"add", "mul", "cat", "stack", "add_", "copy_", "where"}
READS = {name: 2 if name in _OF_TWO else 1 for name in OPERATIONS}
PARAMETERS = {
    **dict.fromkeys(("linear", "position", "token", "gain", "add_gain_", "embed", "rows"), 1),
    **{"biased": 2, "norm": 2, "pair": 2, "hyper": 3},
}
WRITES = tuple(name for name in OPERATIONS if name.endswith("_"))
_WEIGHTS = {
    **dict.fromkeys(OPERATIONS, 1.0),
    **dict.fromkeys(("linear", "biased", "position", "pair", "add", "view", "unbind", "chunk"), 2.5),
}
_SHAPES = ((12,), (2, 6), (3, 4), (2, 2, 3), (6, 2), (1, 12), (12, 1))


def random_recipe(chance: random.Random, operations: int) -> Recipe:
    """A model of about so many operations that torch itself can train.

    Args:
        chance: decides everything.
        operations: how many to try.
    """
    while True:
        draft = _Draft(chance)
        for _ in range(operations):
            draft.grow()
        recipe = draft.finish()
        if recipe is not None and _trains(recipe):
            return recipe


class _Draft:
    """A recipe that grows by operations which run."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._operations: list[Operation] = []
        self._model = RecipeModel(Recipe((), (0,), (0,)))
        x, ids = sample(DRAFTED)
        self._values = [x, ids]
        self._names = 0

    def grow(self) -> None:
        """Add one more operation, if one of a few attempts runs."""
        chance = self._chance
        name = chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        for _ in range(6):
            recent = max(0, len(self._values) - 4)
            reads = [chance.randrange(recent if chance.random() < 0.7 else 0, len(self._values))]
            if READS[name] == 2:
                shape = self._values[reads[0]].shape
                alike = [number for number, value in enumerate(self._values) if value.shape == shape]
                reads.append(chance.choice(alike) if chance.random() < 0.7 else chance.randrange(len(self._values)))
            first = self._values[reads[0]]
            written = name in WRITES and (self._is_given(first) or _overlaps(first))
            if not written and max(self._values[number].numel() for number in reads) <= DRAFTED * 96:
                names, extents = tuple(self._name(name)), self._extents(name, self._values[reads[0]])
                if self._grows_by(Operation(name, tuple(reads), names, extents)):
                    return

    def _grows_by(self, operation: Operation) -> bool:
        values = list(self._values)
        try:
            with torch.no_grad():
                self._model.apply_to(values, operation, make=True)
        except (RuntimeError, ValueError, IndexError, TypeError):
            return False
        if any(value.dim() < 2 or len(value) != DRAFTED or DRAFTED in value.shape[1:] for value in values):
            return False  # mixes the samples, or could with the next operation
        if any(value.dtype == torch.float32 for value in values):
            return False  # of whole numbers; its rounding hides what a comparison is for
        self._values = values
        self._operations.append(operation)
        return True

    def _is_given(self, value: Tensor) -> bool:
        """Whether it lies in the memory of what the model's user passed."""
        return any(value.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() for v in self._values[:2])

    def _name(self, name: str) -> list[str]:
        letter = "b" if name in ("buffer", "written") else "p"
        count = 1 if letter == "b" else PARAMETERS.get(name, 0)
        known = sorted(held for held in self._model.shapes if held[0] == letter)
        names = []
        for _ in range(count):
            if known and self._chance.random() < 0.3:
                names.append(self._chance.choice(known))
            else:
                names.append(f"{letter}{self._names}")
                self._names += 1
        return names

    def _extents(self, name: str, value: Tensor) -> Shape:
        if name in ("view", "reshape"):
            fitting = [shape for shape in _SHAPES if prod(shape) == prod(value.shape[1:])]
            return self._chance.choice(fitting) if fitting else (prod(value.shape[1:]),)
        if name == "expand":
            return (self._chance.choice((1, 2, 3)),)
        if name in ("select", "last"):
            return (self._chance.choice((0, 1)),)
        return ()

    def finish(self) -> Recipe | None:
        """The recipe with a choice of what it returns; None if there is nothing to train."""
        chance = self._chance
        floats = [number for number, value in enumerate(self._values) if number > 1 and value.is_floating_point()]
        if not floats:
            return None
        returns = [
            floats[-1],
            *(chance.choice(range(len(self._values))) for _ in range(chance.choice((0, 0, 1, 2, 3)))),
        ]
        if chance.random() < 0.8:
            returns = list(dict.fromkeys(returns))
        chance.shuffle(returns)
        loss = [number for number in dict.fromkeys(returns) if number == floats[-1] or chance.random() < 0.6]
        held = sorted({name for operation in self._operations for name in operation.names if name[0] == "p"})
        frozen = tuple(name for name in held if chance.random() < 0.15)
        form = chance.choice([form for form in FORMS if form != "alone" or len(returns) == 1])
        return Recipe(tuple(self._operations), tuple(returns), tuple(loss), frozen, form)


def _overlaps(value: Tensor) -> bool:
    """Whether two elements share their memory; what a write into such a tensor leaves is undefined."""
    places = torch.arange(value.untyped_storage().nbytes()).as_strided(value.shape, value.stride())
    return places.unique().numel() < value.numel()


def _trains(recipe: Recipe) -> bool:
    """Whether torch can train it with micro-batches of one sample, too."""
    for size in (DRAFTED, 1):
        model = RecipeModel(recipe)
        x, ids = sample(size)
        try:
            outputs = model(x, ids)
            _ = [
                output.clone() for output in tensors_in(outputs)
            ]  # one of several views whose base is written nobody may use
            loss = loss_of(recipe)(outputs, torch.zeros(size, dtype=torch.float64))
            loss.backward()
        except (RuntimeError, ValueError, IndexError):  # the last two: what there is depends on the batch size
            return False
        if not bool(torch.isfinite(loss)) or abs(loss.item()) > 1e6:
            return False
    return True
