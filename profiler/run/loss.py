"""The scalar that training minimizes: from what the last layer returns to the model's output to its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from profiler.errors import ArgumentError
from profiler.tracing.sequence import LayerSequence

LossFunction = Callable[[Any, Any], Tensor]
LOSS = "loss"  # the one value that the last layer of a model leaves while it trains, if there is a loss


def model_output(sequence: LayerSequence, values: Mapping[str, Tensor]) -> Any:
    """The model's output, rebuilt from the named values that the last layer leaves."""
    leaves = [values[leaf] if isinstance(leaf, str) else leaf[0] for leaf in sequence.outputs]
    return pytree.tree_unflatten(leaves, sequence.output_tree)


def loss_of(output: Any, target: Any, loss_fn: LossFunction | None) -> Tensor:
    """The loss of one micro-batch, a mean over its samples.

    Args:
        output: what the model returned.
        target: what `loss_fn` compares it with.
        loss_fn: called as `loss_fn(output, target)`; None if the model computes its loss itself and returns it, alone
            or under the name `loss`.

    Raises:
        ArgumentError: there is no scalar loss.
    """
    loss: Any
    if loss_fn is not None:
        loss = _computed(output, target, loss_fn)
    elif isinstance(output, Mapping):
        loss = output.get("loss")
    else:
        loss = getattr(output, "loss", output)
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    cure = "let loss_fn return the mean over the samples" if loss_fn is not None else "pass loss_fn=..."
    raise ArgumentError(f"the loss is {what}, not a scalar; {cure}")


def _computed(output: Any, target: Any, loss_fn: LossFunction) -> Any:
    """What the function returns; a target that was forgotten is named, and not only what came of that."""
    try:
        return loss_fn(output, target)
    except Exception as problem:
        if target is not None:
            raise
        raise ArgumentError(
            f"loss_fn(output, None) raised {type(problem).__name__}: {problem}; no target was given: pass target=..."
        ) from problem
