"""What a model is traced with, as data: enough to trace the same graph again without the sample. Torch-free."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import not_
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from profiler import sample_tree
from profiler.field_types import Extent, Samples
from profiler.precision import RECIPES, AutocastName
from profiler.quantities import LEAST_STAGES, MOST_LAYERS, shown
from profiler.text import counted
from profiler.value import Value


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """What makes a graph of a model.

    Attributes:
        module: where its function is; imported on first use, so that reading a plan never waits for torch.
        function: a `profiler.tracing.front_ends.GraphMaker`.
        any_size: whether its graphs serve micro-batches of every size, not only the sample's.
        asks: whether it can be given answers to questions about the values of tensors, see `profiler.conditions`.
    """

    module: str
    function: str
    any_size: bool = True
    asks: bool = False


FRONT_ENDS: Mapping[str, FrontEnd] = {
    "export": FrontEnd("profiler.tracing.front_ends", "export", asks=True),
    "static export": FrontEnd("profiler.tracing.front_ends", "static_export", any_size=False, asks=True),
    "symbolic_trace": FrontEnd("profiler.tracing.front_ends", "symbolic_trace"),
    "children": FrontEnd("profiler.tracing.front_ends", "children"),
}
"""By name, in the order in which they are tried."""
MOST_DIMS = 64  # of a tensor, as torch has it


class TensorLeaf(Value):
    """A tensor in the sample.

    Attributes:
        kind: tells it from a `ConstantLeaf`.
        shape: extents of its dimensions.
        dtype: torch name without the prefix, `"float32"`.
        batch_dim: dimension that grows with the batch; None for a tensor that every micro-batch gets whole.
    """

    kind: Literal["tensor"] = "tensor"
    shape: tuple[Extent, ...] = Field(max_length=MOST_DIMS)
    dtype: str
    batch_dim: int | None = Field(ge=0, lt=MOST_DIMS)

    @model_validator(mode="after")
    def _has_the_dimension(self) -> Self:
        if self.batch_dim is not None and self.batch_dim >= len(self.shape):
            raise ValueError(f"batch_dim is {self.batch_dim}, and the shape {self.shape} has {len(self.shape)}")
        return self

    @property
    def extent(self) -> int | None:
        """Of its batch dimension, if it has one."""
        return None if self.batch_dim is None else self.shape[self.batch_dim]


class ConstantLeaf(Value):
    """Anything else in the sample; the graph is specialized to it.

    Attributes:
        kind: tells it from a `TensorLeaf`.
        value: the same in every call.
    """

    kind: Literal["constant"] = "constant"
    value: bool | int | float | str | None


MOST_TOLD = 2  # of a list in one line


def _first_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_TOLD} more" if len(names) > MOST_TOLD else ""
    return ", ".join(names[:MOST_TOLD]) + more


def code_of(line: str) -> str:
    """The code in `file:line "code"`."""
    return line.partition('"')[2].removesuffix('"')


class Decision(Value):
    """What the forward pass made of a tensor's value while it was traced, and what every micro-batch must make of it.

    Attributes:
        module: path of the module whose code it is; "" for the model itself.
        line: `file:line "code"`, the file without its folder.
        answer: a bool of a condition, else the number that the value had.
    """

    module: str
    line: str
    answer: bool | int | float

    @property
    def code(self) -> str:
        """Of the line, without its number, which a change further up moves."""
        return code_of(self.line)

    def __str__(self) -> str:
        """Where it was made."""
        return f"module {self.module!r}, {self.line}" if self.module else f"the model, {self.line}"


class SampleSpec(Value):
    """The sample's structure and leaves, and the settings that the traced graph depends on.

    Attributes:
        batch_size: extent of every batch dimension in the sample.
        tree: structure of `(args, kwargs)` as text, see `profiler.sample_tree`.
        leaves: in flattening order.
        autocast: dtype in which autocast lets the model compute, such as `"bfloat16"`; None for none.
        precision: name of the recipe of mixed precision, see `profiler.precision`. Files leave it out where there is
            none.
        keep_together: paths of modules that no cut may part.
        cut_at: paths of modules before which a layer begins. Files leave it out where there are none.
        stages: K that layers are fine enough for, see `profiler.tracing.cuts`. Files leave `LEAST_STAGES` out, as those
            from before there was a choice.
        front_end: what traced the model, a key of `FRONT_ENDS`; None before it is traced.
        called_as_is: paths of modules, and names of functions (`package.module:function`), that could not be traced
            and are called as they are.
        called_share: of the model's FLOPs, in those.
        decisions: on values of tensors, in the order in which the forward pass makes them.
        chances: conditions that random numbers decide, such as layer drop, with their usual answers. Files leave them
            out where there are none.
    """

    batch_size: Samples
    tree: str
    leaves: tuple[TensorLeaf | ConstantLeaf, ...]
    autocast: AutocastName | None = None
    precision: str | None = Field(default=None, exclude_if=not_)
    keep_together: tuple[str, ...] = ()
    cut_at: tuple[str, ...] = Field(default=(), exclude_if=not_)
    stages: int = Field(
        default=LEAST_STAGES, ge=LEAST_STAGES, le=MOST_LAYERS, exclude_if=lambda stages: stages == LEAST_STAGES
    )
    front_end: str | None = None
    called_as_is: tuple[str, ...] = ()
    called_share: float = Field(default=0.0, ge=0, le=1)
    decisions: tuple[Decision, ...] = ()
    chances: tuple[Decision, ...] = Field(default=(), exclude_if=not_)

    @field_validator("front_end")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        if name is not None and name not in FRONT_ENDS:
            raise ValueError(f"front end {shown(name)} is none of {', '.join(FRONT_ENDS)}")
        return name

    @field_validator("precision")
    @classmethod
    def _recipe(cls, name: str | None) -> str | None:
        if name is not None and name not in RECIPES:
            raise ValueError(f"precision {shown(name)} is none of {', '.join(RECIPES)}")
        return name

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.front_end is not None:  # a model was traced with it
            self._check_tree()
        for leaf in self.leaves:
            if isinstance(leaf, TensorLeaf) and leaf.extent not in (None, self.batch_size):
                raise ValueError(
                    f"a tensor of shape {leaf.shape} has another batch than {counted(self.batch_size, 'sample')}"
                )
        return self

    def _check_tree(self) -> None:
        structure = sample_tree.loads(self.tree)
        if not (isinstance(structure, tuple) and [type(part) for part in structure] == [tuple, dict]):
            raise ValueError("tree is no pair of positional and keyword arguments")
        if not all(isinstance(name, str) for name in structure[1]):
            raise ValueError("tree has a keyword argument whose name is a number")
        if sample_tree.leaf_count(structure) != len(self.leaves):
            raise ValueError(
                f"tree has {sample_tree.leaf_count(structure)} leaves, and {len(self.leaves)} are given; plan again"
            )

    @property
    def tokens(self) -> int | None:
        """Of one sample, if it is text: its tensors hold whole numbers or masks alone, and the first has two dims."""
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, TensorLeaf) and leaf.batch_dim is not None]
        if not all(leaf.dtype == "bool" or "int" in leaf.dtype for leaf in tensors):
            return None
        sequences = [
            leaf.shape[1 - leaf.batch_dim] for leaf in tensors if len(leaf.shape) == 2 and leaf.batch_dim in (0, 1)
        ]
        return sequences[0] if sequences and sequences[0] > 0 else None

    @property
    def means(self) -> str:
        """What traced the model, which branches are checked, and what is called as it is, in one line."""
        size = self.only_micro_batch_size
        told = [f"by {self.front_end}" + (f" for micro-batches of {size}" if size else "")]
        if self.decisions:
            lines = list(dict.fromkeys(decision.line.partition(' "')[0] for decision in self.decisions))
            told.append(f"{counted(len(self.decisions), 'condition')} checked in each micro-batch ({_first_of(lines)})")
        if self.chances:
            lines = list(dict.fromkeys(chance.line.partition(' "')[0] for chance in self.chances))
            told.append(f"both ways of what random numbers decide ({_first_of(lines)})")
        if self.called_as_is:
            told.append(f"called as it is: {_first_of(self.called_as_is)} ({self.called_share:.0%} of the FLOPs)")
        return "; ".join(told)

    @property
    def only_micro_batch_size(self) -> int | None:
        """The one size that micro-batches must have, where the model could only be traced with static shapes."""
        return None if self.front_end is None or FRONT_ENDS[self.front_end].any_size else self.batch_size
