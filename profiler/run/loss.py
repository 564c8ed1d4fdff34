"""The scalar that training minimizes: from what the last layer returns to the model's output to its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from profiler.errors import ArgumentError
from profiler.text import raised_text
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
        ArgumentError: there is no real scalar loss.
    """
    loss: Any
    if loss_fn is not None:
        loss = _computed(output, target, loss_fn)
    elif isinstance(output, Mapping):
        loss = output.get("loss")
    else:
        loss = getattr(output, "loss", output)
    if isinstance(loss, Tensor) and loss.dim() == 0 and not loss.is_complex():
        return loss
    what = f"a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        what = f"a number of type {loss.dtype}" if loss.dim() == 0 else f"a tensor of shape {list(loss.shape)}"
    cure = "let loss_fn return the mean over the samples" if loss_fn is not None else "pass loss_fn=..."
    raise ArgumentError(f"the loss is {what}, not a real scalar; {cure}")


def copy_of(target: Any) -> Any:
    """The target for one call of a loss function, which may write it (labels that it masks)."""
    return pytree.tree_map_only(Tensor, Tensor.clone, target)


def versions_of(target: Any) -> list[int]:
    """How often each tensor of a target has been written."""
    tensors = (leaf for leaf in pytree.tree_leaves(target) if isinstance(leaf, Tensor))
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


def refuse_trained_beside(loss: Tensor, values: Iterable[Tensor]) -> None:
    """Refuse a loss that trains more than the model, where other processes would each train a copy of that.

    Args:
        loss: attached to its graph.
        values: what the model returned, on which alone it may depend.

    Raises:
        ArgumentError: it depends on a parameter by itself.
    """
    values = [value for value in values if value.requires_grad]
    known = {value.grad_fn for value in values}
    leaves = {id(value) for value in values}
    waiting, seen = [loss.grad_fn], {*known, None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        assert node is not None
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in leaves:
            raise ArgumentError(
                f"loss_fn depends on a trainable parameter of shape {list(leaf.shape)} by itself, and not through the "
                "model's output: each process would train a copy of its own, or none. Let the model own it and return "
                "the loss (loss_fn=None), or freeze it; what is to be kept small is for the optimizer's weight_decay"
            )
        waiting += [following for following, _ in node.next_functions]


def _computed(output: Any, target: Any, loss_fn: LossFunction) -> Any:
    """What the function returns; a target that was forgotten is named, and not only what came of that."""
    try:
        return loss_fn(output, target)
    except Exception as problem:
        if target is not None:
            raise
        raise ArgumentError(
            f"loss_fn(output, None) raised {raised_text(problem)}; no target was given: pass target=..."
        ) from problem
