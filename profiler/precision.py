"""Recipes of mixed precision: in which types a model computes, adds up gradients and is stepped. Torch-free.

A recipe is one record of `RECIPES`. What follows from it, for a parameter that is trained, with Adam:

    recipe        computes with   adds gradients   master weight   state of Adam   bytes a parameter
    fp32          float32  4      float32  4       none            float32  8      16
    bf16          bfloat16 2      bfloat16 2       none            bfloat16 4       8
    bf16-mixed    bfloat16 2      float32  4       float32  4      float32  8      18
    bf16-grads    bfloat16 2      bfloat16 2       float32  4      float32  8      16
    fp16-mixed    float16  2      float32  4       float32  4      float32  8      18

`bf16-mixed` is what Megatron-LM does with `--bf16 --accumulate-allreduce-grads-in-fp32` and DeepSpeed with
`bf16: {"enabled": true}`: layers compute with bfloat16 parameters; the gradient of each micro-batch is added to a main
gradient in float32, in the order of the micro-batches, and is then gone; sums over tied uses and over replicas, the
norm and clipping are of main gradients; the optimizer steps master weights in float32, and the next call begins by
rounding these to the parameters that layers compute with.

`bf16-grads` is what they do with `--bf16` alone, and with `data_types: {"grad_accum_dtype": "bf16"}`: gradients are
added up in bfloat16, over micro-batches, tied uses and replicas, in the same orders; replicas exchange half as many
bytes. At the end of the step, when no activation is left, each is cast to float32, since torch's optimizers step a
float32 weight by a float32 gradient; so the norm and clipping are of these. Until they are set to None the parameters
have 18 bytes, and that moment counts, too.

`fp16-mixed` is `bf16-mixed` in a type with fewer exponents, in which small gradients vanish: so each step is given a
scaler (`torch.amp.GradScaler`), whose scale is in the gradients of a step until it is asked to take it out.

Of `bf16-mixed`, Lightning uses the same name for autocast, which keeps all
parameters in float32: that is `autocast=torch.bfloat16`, 16 bytes. A recipe and autocast exclude each other.

How a model becomes one that computes so is in `profiler.tracing.computing_model`: its parameters and persistent buffers
of floating point are cast, those of a batch normalization stay as they are, and so do buffers that no state holds
(rotary tables). Its floating-point inputs are cast where they enter, and its outputs leave in float32.

What is trained, saved and given back by `state_dict()` are the master weights, under the model's own names. Parameters
that are frozen have none: they are held, and saved, in the type that computes. Without a recipe all stays in the types
that the model has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from profiler.errors import ArgumentError
from profiler.quantities import shown

FloatName: TypeAlias = Literal["float32", "bfloat16", "float16"]
"""Torch's name of a floating-point type, without the prefix."""
AutocastName: TypeAlias = Literal["bfloat16", "float16"]
"""The same of a type that autocast computes in: on a CPU it knows no other, and of float32 it casts nothing to it."""
AUTOCAST_NAMES: tuple[AutocastName, ...] = get_args(AutocastName)

BYTES: dict[FloatName, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of one element."""
CAST_ELEMENTS = 2**22
"""Of a gradient that is added to its main gradient at a time: a type's cast takes memory of its own [chosen]."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Types of one recipe.

    Attributes:
        name: as users write it.
        computes: of parameters and values in forward and backward passes.
        adds: of gradients as they are added up.
        main: of what the optimizer steps, of the gradients that it reads, and of its state.
    """

    name: str
    computes: FloatName
    adds: FloatName
    main: FloatName

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer steps other tensors than layers compute with."""
        return self.computes != self.main

    @property
    def needs_scaler(self) -> bool:
        """Whether small gradients vanish in the type that computes, unless the loss is scaled."""
        return self.computes == "float16"

    @property
    def casts_at_end(self) -> bool:
        """Whether gradients are added up in another type than the optimizer reads."""
        return self.adds != self.main

    @property
    def gradient_share(self) -> float:
        """Bytes of gradients as they are added up, for each byte that the optimizer steps."""
        return BYTES[self.adds] / BYTES[self.main]

    def gradient_bytes(self, elements: int, size_bytes: int) -> int:
        """Bytes of a trained parameter's gradient as it is added up.

        Args:
            elements: of the parameter.
            size_bytes: of the parameter that layers compute with; what was never cast is as large or larger already.
        """
        return max(size_bytes, elements * BYTES[self.adds]) if self.has_masters else size_bytes

    def main_bytes(self, elements: int, size_bytes: int) -> int:
        """Bytes of what the optimizer steps for a trained parameter, and of the gradient that it reads.

        Args:
            elements: of the parameter.
            size_bytes: as for `gradient_bytes`.
        """
        return max(size_bytes, elements * BYTES[self.main]) if self.has_masters else size_bytes


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("fp32", "float32", "float32", "float32"),
        Recipe("bf16", "bfloat16", "bfloat16", "bfloat16"),
        Recipe("bf16-mixed", "bfloat16", "float32", "float32"),
        Recipe("bf16-grads", "bfloat16", "bfloat16", "float32"),
        Recipe("fp16-mixed", "float16", "float32", "float32"),
    )
}
_ALSO_WRITTEN = {
    "float32": "fp32",
    "32": "fp32",
    "bfloat16": "bf16",
    "bf16-true": "bf16",
    "bfloat16-mixed": "bf16-mixed",
    "float16-mixed": "fp16-mixed",
    "16-mixed": "fp16-mixed",
}


def precision_named(name: str | None) -> str | None:
    """A recipe's name, from how people write it.

    >>> precision_named("BF16_mixed"), precision_named("bfloat16"), precision_named(None)
    ('bf16-mixed', 'bf16', None)

    Raises:
        ArgumentError: there is no such recipe.
    """
    if name is None:
        return None
    plain = str(name).strip().lower().replace("_", "-").removeprefix("torch.")
    found = _ALSO_WRITTEN.get(plain, plain)
    if found in RECIPES:
        return found
    if plain in ("fp16", "float16", "16", "half"):
        raise ArgumentError(
            f"precision={name!r}: an optimizer that steps float16 loses small updates; choose precision='fp16-mixed', "
            "or autocast=torch.float16, and pass step(..., scaler=...)"
        )
    raise ArgumentError(f"precision={name!r}; choose one of {', '.join(RECIPES)}, or none for the model's own types")


def recipe_of(precision: str | None) -> Recipe | None:
    """The record of a recipe by its name; None for the model's own types."""
    return None if precision is None else RECIPES[precision]


def autocast_named(dtype: object) -> AutocastName | None:
    """The name of the type that an autocast region computes in.

    >>> autocast_named("torch.bfloat16"), autocast_named(None)
    ('bfloat16', None)

    Raises:
        ArgumentError: autocast does not compute in it.
    """
    if dtype is None:
        return None
    plain = str(dtype).removeprefix("torch.")
    for name in AUTOCAST_NAMES:
        if plain == name:
            return name
    able = " or ".join(f"torch.{name}" for name in AUTOCAST_NAMES)
    raise ArgumentError(
        f"autocast is {shown(dtype)}; give {able}, or leave it out for a model that computes in its own types"
    )


def refuse_with_autocast(precision: str | None, autocast: object) -> None:
    """A recipe casts parameters once a step, an autocast region casts values at each operation: only one of them.

    Raises:
        ArgumentError: both are given.
    """
    if precision is not None and autocast is not None:
        raise ArgumentError(
            f"precision={precision!r} and autocast={autocast} exclude each other: under the first layers compute with "
            "cast parameters, under the second they cast float32 parameters in each operation; pass one of them"
        )
