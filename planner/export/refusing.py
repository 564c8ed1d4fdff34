"""Plans that an engine would train wrongly, or not at all: refused with the reason and what to do."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator

from torch import nn

from planner.export.target import Request, Target
from planner.plan.plan import Plan
from profiler.errors import InfeasibleError
from profiler.precision import RECIPES
from profiler.tracing.sequence import LayerSequence

OURS = "train with executor.Pipeline"


def refuse_what_goes_wrong(plan: Plan, sequence: LayerSequence, target: Target) -> None:
    """Refuse a plan that the target's engine cannot run, or would train another model by.

    Raises:
        InfeasibleError: naming all reasons.
    """
    reasons = list(_reasons(plan, sequence, target))
    if reasons:
        raise InfeasibleError(f"{target.name} cannot run this plan: {'; and '.join(reasons)}")


def _reasons(plan: Plan, sequence: LayerSequence, target: Target) -> Iterator[str]:
    if plan.schedule not in target.schedules:
        able = " or ".join(repr(name) for name in target.schedules)
        yield f"{target.engine} has no schedule {plan.schedule!r}; plan with schedule {able}"
    precision = plan.sample.precision
    if precision is not None and precision not in target.precisions:
        yield (
            f"{target.engine} is not told precision={precision!r} with a plan, and would train in the model's own "
            f"types; plan without precision for a model in the types that you set there, or {OURS}"
        )
    autocast = plan.sample.autocast
    if autocast is not None and not target.autocasts:
        told = [f"precision={name!r}" for name in target.precisions if RECIPES[name].computes == autocast]
        plain = "without autocast for a model in the types that you set there"
        instead = f"with {' or '.join(told)} in place of autocast" if told else plain
        yield (
            f"{target.engine} is not told autocast=torch.{autocast} with a plan, and would compute in the model's own "
            f"types; plan {instead}, or {OURS}"
        )
    if plan.shard_optimizer and not target.shards_optimizer:
        yield (
            f"{target.engine} keeps all of the optimizer's state in each of {plan.replicas} replicas, and the plan "
            f"counts with a share; plan with shard_optimizer=False, or {OURS}"
        )
    if len({*plan.micro_batch_sizes}) > 1 and target.has_micro_batches:
        least, most = min(plan.micro_batch_sizes), max(plan.micro_batch_sizes)
        yield (
            f"its micro-batches hold {least} and {most} samples, and {target.engine} weights them alike and expects "
            f"one shape; plan with micro_batches that divide the {plan.batch_size // plan.replicas} of a replica"
        )
    if plan.replicas > 1 and not target.averages_replicas:
        yield (
            f"{target.engine} runs one pipeline and averages no gradients, and R = {plan.replicas}; plan with "
            f"replicas=1, or {OURS}"
        )
    hosts = plan.processes_by_host
    if target.one_process and len(hosts) > 1:
        yield (
            f"{target.engine} runs in one process, and the plan is for devices of {len(hosts)} hosts; plan for the "
            f"devices of one, or {OURS}"
        )
    if target.has_micro_batches:
        yield from _state_reasons(sequence, target)
    if not target.adds_tied:
        yield from _tied_reasons(plan, sequence, target)


def _state_reasons(sequence: LayerSequence, target: Target) -> Iterator[str]:
    """Of what a forward pass writes."""
    moved = [entry.running_mean for layer in sequence.layers for entry in layer.statistics]
    if moved and not target.defers_statistics:
        yield (
            f"{target.engine} moves running statistics with each micro-batch, and GPipe once a mini-batch, so "
            f"{_first(moved)} would be another for each M; replace batch normalization (by GroupNorm, say), or {OURS}"
        )
    written = [name for layer in sequence.layers for name, _ in layer.written_buffers]
    if written:
        yield (
            f"the forward pass writes the buffer {_first(written)}, and {target.engine} may run it once more, for "
            f"shapes or to recompute; {OURS}"
        )


def _tied_reasons(plan: Plan, sequence: LayerSequence, target: Target) -> Iterator[str]:
    for name, layers in apart(plan, sequence).items():
        ranks = ", ".join(map(str, layers))
        original = " and ".join(sequence.aliases.get(name, (name,)))
        yield (
            f"{original} is one parameter that ranks {ranks} use, and {target.engine} does not add up its gradients; "
            f"untie it (tie_word_embeddings=False in a transformers configuration) and plan again, or {OURS}"
        )


def apart(plan: Plan, sequence: LayerSequence) -> dict[str, list[int]]:
    """Parameters that layers of several ranks read, and these ranks."""
    stops = [stage.stop_layer for stage in plan.stages]
    found = {}
    for name, layers in sequence.tied.items():
        ranks = sorted({plan.stages[bisect_right(stops, layer)].rank for layer in layers})
        if len(ranks) > 1:
            found[name] = ranks
    return found


def refuse_other_calls(request: Request, engine: str, paths: Iterable[str]) -> None:
    """Refuse a model that calls one of these modules more than once, or one that has parameters not at all.

    Raises:
        InfeasibleError: naming the module by all its names, and its calls.
    """
    names: dict[nn.Module, list[str]] = defaultdict(list)
    for name, module in request.model.named_modules(remove_duplicate=False):
        names[module].append(name)
    sequence = request.sequence
    read = {
        alias for name in sequence.names_read(range(len(sequence))) for alias in sequence.aliases.get(name, (name,))
    }
    for module in map(request.model.get_submodule, paths):
        calls = sum(calls_of(sequence, name) for name in names[module])
        held = [f"{name}.{own}" for name in names[module] for own, _ in module.named_parameters()]
        if calls > 1 or (not calls and held and read.isdisjoint(held)):
            known = " and ".join(map(repr, names[module])) + ", one module," * (len(names[module]) > 1)
            raise InfeasibleError(
                f"this model calls {known} {f'{calls} times' if calls else 'never'}, and {engine} counts on one call "
                f"of each module; {'give each call a module of its own' if calls else 'take it out'} and plan again, "
                f"or {OURS}"
            )


def calls_of(sequence: LayerSequence, name: str) -> int:
    """Of a module, or of what it holds where it is called past itself, as its `forward` is and what is compiled."""
    inside = [times for path, times in sequence.calls.items() if path.startswith(f"{name}.")]
    return max(sequence.calls.get(name, 0), min(inside, default=0))


def _first(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
