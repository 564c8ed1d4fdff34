"""The last line of defence: before the first step its first micro-batch runs through the model as it is, too.

Tracing refuses what it knows to be lost in a graph. What nobody thought of shows here, in the one process that has all
data: the layers' loss and gradients must be the model's, and the model's own must be the same when it is called twice.
That takes as long as three micro-batches in one process; where
it would take much more, or does not fit, it is left out, and `Pipeline.first_step` says why.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from executor.batch.calls import WholeMicroBatch
from planner.plan.plan import Plan
from planner.plan.units import bytes_text
from profiler.errors import UnfaithfulTraceError
from profiler.machine.backend import backend_of
from profiler.run.against_eager import Trial
from profiler.run.loss import LossFunction
from profiler.torch_private import has_backward_hooks
from profiler.tracing.sequence import LayerSequence

MOST_FLOPS = 5e11  # of the comparison, where the model does not lie where it trains: seconds of a CPU [chosen]
_BOTH_RAISE = "not compared with the model as it is: both raise"
_NOT_THE_STEP = ", which the step does not"
_PASSES = 9  # forward and backward, of the model twice and of its layers, in forward passes


def compared(
    model: nn.Module, modes: Sequence[bool], plan: Plan, batch: WholeMicroBatch, loss_fn: LossFunction | None
) -> str:
    """Compare layers and model on a micro-batch, if that costs little; says what came of it.

    Args:
        model: the model as the user has it.
        modes: of each of its modules whether it was in training mode when it was traced.
        plan: says how much memory there is.
        batch: the micro-batch.
        loss_fn: None if the model computes its loss itself.

    Raises:
        UnfaithfulTraceError: they differ.
    """
    reason = _reason_against(model, plan, batch)
    if reason is not None:
        return f"not compared with the model as it is: {reason}"
    device = batch.sequence.device
    inputs = {name: tensor.to(device) for name, tensor in batch.inputs.items()}
    target = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), batch.target)
    try:
        trial = Trial(model, modes, batch.sequence, inputs, target, loss_fn)
        found = trial.compare()
        _refuse_counting(trial, plan)
    except UnfaithfulTraceError:
        raise
    except Exception as problem:  # the step meets it as well, and says where
        return f"{_BOTH_RAISE} {type(problem).__name__}"
    return f"as the model computes it; the largest difference is {found.relative:.1e}, of {found.where}"


def is_settled(said: str) -> bool:
    """Whether that came of a comparison; else what both raised is the step's to raise, and the next one is compared."""
    return not said.startswith(_BOTH_RAISE)


def after_the_step(said: str) -> str:
    """The same once the step went well: what both raised was then an error of the comparison's."""
    return said if is_settled(said) else said + _NOT_THE_STEP


def _refuse_counting(trial: Trial, plan: Plan) -> None:
    """Refuse a loss function that counts its calls where a recomputed segment calls it twice."""
    last = plan.stages[-1]
    if trial.loss_fn is None or not any(segment.stop == last.stop_layer for segment in last.recompute):
        return
    changed = trial.changed_by_the_loss()
    if changed:
        raise UnfaithfulTraceError(
            f"loss_fn changes {changed!r} in each call, and the plan has it called again where the last stage is "
            "recomputed; count steps outside of loss_fn, or plan with recompute='never'"
        )


def _reason_against(model: nn.Module, plan: Plan, batch: WholeMicroBatch) -> str | None:
    held = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in held):
        return "it is on the meta device"
    if len({tensor.device for tensor in held}) > 1:
        return "it lies on several devices"
    if any(has_backward_hooks(parameter) for parameter in model.parameters()):
        return "its parameters have hooks"
    if batch.size == 1 and batch.sequence.sample.only_micro_batch_size is None:
        return "the batch has one sample only"
    return _cost_against(plan, batch)


def _cost_against(plan: Plan, batch: WholeMicroBatch) -> str | None:
    """Memory where the model trains; time where it does not lie there."""
    sequence: LayerSequence = batch.sequence
    first = plan.stages[0].device
    if backend_of(sequence.device).type != backend_of(first.name).type:
        flops = _PASSES * sum(layer.flops for layer in sequence.layers) * batch.size / sequence.sample.batch_size
        return None if flops <= MOST_FLOPS else f"on {sequence.device} that would take {flops:.0e} operations"
    needed = sum(stage.memory.total for stage in plan.stages)
    if needed <= first.memory_bytes:
        return None
    return f"its stages need {bytes_text(needed)} in all, and {first.name} has {bytes_text(first.memory_bytes)}"
