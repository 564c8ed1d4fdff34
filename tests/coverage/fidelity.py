"""How faithful a traced model is: against itself under other cuts, and against the eager model."""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from profiler import LayerSequence, trace
from profiler.observe.random_states import drawing_on
from profiler.run.loss import loss_of, model_output
from profiler.run.stage_function import KeptPass, StageFunction, leaves_of, roots_of, run_backward
from profiler.sample_spec import SampleSpec
from profiler.tracing.sample import call_arguments, describe_sample, tensor_leaves
from profiler.tracing.sequence import Layer
from tests.coverage.model_list import Case
from tests.snapshot import differences, snapshot

RANDOM_CUTS = 3

# A gradient that is zero but for rounding (of a key's bias, say) has no scale of its own: differences are relative to
# its own largest magnitude, or to this share of the largest of any parameter's if that is more.
SMALLEST_SCALE = 1e-4

# Operations that count as work. A layer with one of them cannot be cut further.
HEAVY = (
    "linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "einsum", "convolution", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention", "lstm", "gru",
    "grouped_mm", "_grouped_mm",
)  # fmt: skip


def by_one(front_end: str, sample: Any, keep_together: Sequence[str] = ()) -> SampleSpec:
    """Has a model traced by one front end, without the sample's values, so that it tells what it refuses."""
    return describe_sample(sample).model_copy(update={"front_end": front_end, "keep_together": tuple(keep_together)})


@dataclass(frozen=True)
class Run:
    """What one forward and backward pass yields.

    Attributes:
        outputs: tensors of the model's output.
        loss: the scalar that was minimized.
        gradients: by the name of the parameter; only of parameters that got one.
        buffers: new values of written buffers, and statistics of batch normalizations, by name.
    """

    outputs: tuple[Tensor, ...]
    loss: Tensor
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True)
class Fidelity:
    """One row of the table.

    Attributes:
        front_end: what traced it.
        trace_s: time of `trace`.
        layers: number of layers.
        distinct: number of distinct layers.
        narrowest_bytes: smallest sum of values between two layers, at the sample's batch size.
        widest_bytes: the largest.
        largest_share: part of all FLOPs that the layer with the most holds.
        is_single: whether that layer has only one operation that computes much.
        bitwise: whether outputs, loss, gradients and buffers are equal in every bit for every cut that was tried.
        difference: from the eager model, relative: the largest of loss and gradients.
        changed: what tracing changed in the model.
    """

    front_end: str
    trace_s: float
    layers: int
    distinct: int
    narrowest_bytes: int
    widest_bytes: int
    largest_share: float
    is_single: bool
    bitwise: bool
    difference: float
    changed: tuple[str, ...]


@dataclass(frozen=True)
class Traced:
    """A model and what tracing made of it.

    Attributes:
        case: the model and its batch.
        sequence: its layers.
        trace_s: time of `trace`.
        changed: what tracing changed in the model.
    """

    case: Case
    sequence: LayerSequence
    trace_s: float
    changed: tuple[str, ...]

    @classmethod
    def of(cls, case: Case) -> Self:
        """Trace it, and look whether it is left as it was."""
        before = snapshot(case.model)
        start = time.perf_counter()
        sequence = trace(case.model, case.sample)
        trace_s = time.perf_counter() - start
        return cls(case, sequence, trace_s, tuple(differences(before, snapshot(case.model))))


def measure(traced: Traced) -> Fidelity:
    """Cut a model in several ways and compare; its random numbers are those of the eager model, or keyed by draw."""
    case, sequence = traced.case, traced.sequence
    whole = run(sequence, case)
    crossing = [sum(value.size_bytes(sequence.sample.batch_size) for value in b) for b in sequence.boundaries[1:-1]]
    share, layer = largest_share(sequence)
    return Fidelity(
        front_end=sequence.sample.front_end or "",
        trace_s=traced.trace_s,
        layers=len(sequence),
        distinct=len({layer.signature for layer in sequence.layers}),
        narrowest_bytes=min(crossing, default=0),
        widest_bytes=max(crossing, default=0),
        largest_share=share,
        is_single=is_single(layer),
        bitwise=all(same_bits(run(sequence, case, cuts), whole) for cuts in some_cuts(sequence)),
        difference=eager_difference(sequence, case),
        changed=traced.changed,
    )


def eager_difference(sequence: LayerSequence, case: Case, seed: int = 1) -> float:
    """How far the layers are from the eager model where both draw from the same stream of random numbers."""
    _begin_stream(seed)
    expected = eager(sequence, case)
    _begin_stream(seed)
    with drawing_on():
        return difference(run(sequence, case, seeded=False), expected)


def _begin_stream(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def some_cuts(sequence: LayerSequence) -> list[list[int]]:
    """Every layer on its own, and a few random cuts into two to four stages."""
    chance = random.Random(0)
    positions = range(1, len(sequence))
    drawn = [sorted(chance.sample(positions, min(chance.randint(1, 3), len(positions)))) for _ in range(RANDOM_CUTS)]
    return [list(positions), *drawn]


def largest_share(sequence: LayerSequence) -> tuple[float, Layer]:
    """The layer with the most FLOPs, and its part of all."""
    layer = max(sequence.layers, key=lambda each: each.flops)
    return layer.flops / sum(each.flops for each in sequence.layers), layer


def is_single(layer: Layer) -> bool:
    """Whether the layer has at most one operation that computes much."""
    return sum(name.removeprefix("aten.").split(".")[0] in HEAVY for name in layer.operations) <= 1


def run(sequence: LayerSequence, case: Case, cuts: Sequence[int] = (), *, seeded: bool = True) -> Run:
    """Forward and backward through the stages that `cuts` make, each behind detached values.

    Args:
        sequence: the traced model.
        case: the batch.
        cuts: layers at which stages start, without the first.
        seeded: draw random numbers keyed by draw; otherwise from torch's generator as it is, as the model does.
    """
    copies = {
        (layer.index, name): sequence.parameters[name].detach().requires_grad_(sequence.parameters[name].requires_grad)
        for layer in sequence.layers
        for name in layer.parameters
    }
    inputs = dict(zip(sequence.inputs, tensor_leaves(case.sample, sequence.sample), strict=True))
    current = dict(sequence.buffers)
    values: Mapping[str, Tensor] = {}
    passes: list[KeptPass] = []
    written: dict[str, Tensor] = {}
    for bounds in pairwise([0, *cuts, len(sequence)]):
        stage = StageFunction(sequence, *bounds, copies)
        leaves = leaves_of(values, stage.entering)
        results = stage.forward(leaves, inputs, current, seed=ByNumber() if seeded else None)
        values = results.values
        passes.append(KeptPass(leaves, roots_of(values)))
        written.update(results.buffers)
        for entry, *moved in results.statistics:
            written.update(zip((entry.mean, entry.variance, entry.count), moved, strict=True))
    ends = {name: value.detach().requires_grad_(value.requires_grad) for name, value in values.items()}
    output = model_output(sequence, ends)
    loss = loss_of(output, case.target, case.loss_fn)
    loss.backward()
    gradients: Mapping[str, Tensor | None] = {name: end.grad for name, end in ends.items()}
    for passed in reversed(passes):
        gradients = run_backward(passed, {name: g for name, g in gradients.items() if g is not None})
    summed: dict[str, Tensor] = {}
    for (_, name), copy in sorted(copies.items()):
        if copy.grad is not None:
            summed[name] = summed[name] + copy.grad if name in summed else copy.grad
    return Run(_tensors(output), loss.detach(), summed, written)


class ByNumber:
    """Seeds torch's generator by the number of a draw."""

    def __call__(self, draw: int) -> None:
        """In the forward pass."""
        torch.manual_seed(1000 + draw)

    def in_backward(self, draw: int, part: int, others: Sequence[object]) -> None:
        """In the backward pass."""
        torch.manual_seed(100_000 + 100 * draw + part)


def _tensors(output: Any) -> tuple[Tensor, ...]:
    return tuple(leaf.detach() for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))


def eager(sequence: LayerSequence, case: Case) -> Run:
    """The same by calling the model itself; it is left as it was."""
    before = [
        (module, name, value, value.clone())
        for module in case.model.modules()
        for name, value in module.named_buffers(recurse=False)
    ]
    args, kwargs = call_arguments(case.sample)
    output = case.model(*args, **kwargs)
    loss = loss_of(output, case.target, case.loss_fn)
    loss.backward()
    names = names_of_parameters(sequence, case.model)
    gradients = {names[id(p)]: p.grad for p in case.model.parameters() if p.grad is not None}
    case.model.zero_grad()
    with torch.no_grad():
        for module, name, value, copy in before:
            value.copy_(copy)
            setattr(module, name, value)  # some models put another tensor in its place
    return Run(_tensors(output), loss.detach(), gradients, {})


def names_of_parameters(sequence: LayerSequence, model: nn.Module) -> dict[int, str]:
    """Identity of each parameter of the model -> the name that the sequence has for it, else the model's."""
    return {id(p): name for name, p in (*model.named_parameters(), *sequence.parameters.items())}


def same_bits(one: Run, other: Run) -> bool:
    """Whether two runs are equal in every bit."""
    pairs = [(one.loss, other.loss), *zip(one.outputs, other.outputs, strict=True)]
    for left, right in ((one.gradients, other.gradients), (one.buffers, other.buffers)):
        if left.keys() != right.keys():
            return False
        pairs += [(left[name], right[name]) for name in left]
    return all(torch.equal(*pair) for pair in pairs)


def difference(found: Run, expected: Run) -> float:
    """Largest relative difference of loss and gradients; infinite if other parameters have a gradient."""
    if found.gradients.keys() != expected.gradients.keys():
        return float("inf")
    gradients = {name: gradient for name, gradient in expected.gradients.items() if gradient.numel()}
    floor = SMALLEST_SCALE * max(float(gradient.abs().max()) for gradient in gradients.values())
    pairs = [(found.loss, expected.loss), *((found.gradients[name], want) for name, want in gradients.items())]
    return max(float((got - want).abs().max()) / max(float(want.abs().max()), floor) for got, want in pairs)
