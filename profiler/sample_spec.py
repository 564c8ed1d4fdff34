"""What a model is traced with, as data: enough to trace the same graph again without the sample. Torch-free."""

from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from profiler import sample_tree
from profiler.quantities import MOST_LAYERS, Extent, Samples
from profiler.value import Value

FrontEnd = Literal["export", "static export", "symbolic_trace", "children"]
FRONT_ENDS: tuple[FrontEnd, ...] = ("export", "static export", "symbolic_trace", "children")  # in order, see front_ends


MOST_DIMS = 64  # of a tensor, as torch has it
LEAST_STAGES = 4
"""Layers are always fine enough for that many stages: with fewer, what is recomputed is chosen by layers too, and plans
for 1 to 4 devices share layers, measurements and random numbers [chosen]."""


class TensorLeaf(Value):
    """A tensor in the sample.

    Attributes:
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
    """Anything else in the sample; the graph is specialized to it."""

    kind: Literal["constant"] = "constant"
    value: bool | int | float | str | None


class SampleSpec(Value):
    """The sample's structure and leaves, and the settings that the traced graph depends on.

    Attributes:
        batch_size: extent of every batch dimension in the sample.
        tree: structure of `(args, kwargs)` as text, see `profiler.sample_tree`.
        leaves: in flattening order.
        autocast: dtype in which autocast lets the model compute, such as `"bfloat16"`; None for none.
        keep_together: paths of modules that no cut may part.
        stages: K that layers are fine enough for, see `profiler.tracing.cuts`. Files leave `LEAST_STAGES` out, as those
            from before there was a choice.
        front_end: what traced the model; None before it is traced.
        called_as_is: paths of modules that could not be traced, and whose forward pass is called as it is.
    """

    batch_size: Samples
    tree: str
    leaves: tuple[TensorLeaf | ConstantLeaf, ...]
    autocast: Literal["bfloat16", "float16"] | None = None
    keep_together: tuple[str, ...] = ()
    stages: int = Field(default=LEAST_STAGES, ge=LEAST_STAGES, le=MOST_LAYERS)
    front_end: FrontEnd | None = None
    called_as_is: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.front_end is not None:  # a model was traced with it
            self._check_tree()
        for leaf in self.leaves:
            if isinstance(leaf, TensorLeaf) and leaf.extent not in (None, self.batch_size):
                raise ValueError(f"a tensor of shape {leaf.shape} has another batch than {self.batch_size} samples")
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

    @model_serializer(mode="wrap")
    def _without_least_stages(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        return {name: value for name, value in fields.items() if name != "stages" or value != LEAST_STAGES}

    @property
    def only_micro_batch_size(self) -> int | None:
        """The one size that micro-batches must have, where the model could only be traced with static shapes."""
        return self.batch_size if self.front_end == "static export" else None
