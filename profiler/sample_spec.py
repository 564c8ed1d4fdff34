"""What a model is traced with, as data: enough to trace the same graph again without the sample. Torch-free."""

from typing import Literal

from pydantic import Field

from profiler.value import Value

FrontEnd = Literal["export", "static export", "symbolic_trace", "children"]
FRONT_ENDS: tuple[FrontEnd, ...] = ("export", "static export", "symbolic_trace", "children")  # in order, see front_ends


class TensorLeaf(Value):
    """A tensor in the sample.

    Attributes:
        dtype: torch name without the prefix, `"float32"`.
        batch_dim: dimension that grows with the batch; None for a tensor that every micro-batch gets whole.
    """

    kind: Literal["tensor"] = "tensor"
    shape: tuple[int, ...]
    dtype: str
    batch_dim: int | None = Field(ge=0)


class ConstantLeaf(Value):
    """Anything else in the sample; the graph is specialized to it."""

    kind: Literal["constant"] = "constant"
    value: bool | int | float | str | None


class SampleSpec(Value):
    """The sample's structure and leaves, and the settings that the traced graph depends on.

    Attributes:
        batch_size: extent of every batch dimension in the sample.
        tree: `torch.utils._pytree` structure of `(args, kwargs)`, in torch's own JSON form.
        leaves: in flattening order.
        autocast: dtype in which autocast lets the model compute, such as `"bfloat16"`; None for none.
        keep_together: paths of modules that no cut may part.
        front_end: what traced the model; None before it is traced.
        called_as_is: paths of modules that could not be traced, and whose forward pass is called as it is.
    """

    batch_size: int = Field(gt=0)
    tree: str
    leaves: tuple[TensorLeaf | ConstantLeaf, ...]
    autocast: str | None = None
    keep_together: tuple[str, ...] = ()
    front_end: FrontEnd | None = None
    called_as_is: tuple[str, ...] = ()

    @property
    def only_micro_batch_size(self) -> int | None:
        """The one size that micro-batches must have, where the model could only be traced with static shapes."""
        return self.batch_size if self.front_end == "static export" else None
