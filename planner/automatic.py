"""`autoplan`: from a model to a plan in one call; trace, profile and plan in a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner.keywords import SettingKeywords, takes_settings
from planner.plan.plan import Plan
from planner.rules import rules_of, with_chunks_for_cuts
from planner.settings import Settings
from profiler.cache import CacheSetting
from profiler.device import Cluster
from profiler.errors import ArgumentError, InfeasibleError
from profiler.machine.local import Devices, local_devices
from profiler.measured_sizes import MICRO_BATCHES_PER_STAGE, measured_sizes
from profiler.observe.untouched import untouched
from profiler.precision import precision_named, refuse_with_autocast
from profiler.quantities import check_seconds
from profiler.run.loss import LossFunction
from profiler.text import counted
from profiler.timing.optimizers import OptimizerChoice
from profiler.tracing.sample import BatchDims, describe_sample
from profiler.tracing.sequence import LayerSequence
from profiler.tracing.tracing import check_model, trace

if TYPE_CHECKING:
    from typing import Unpack


@takes_settings
def autoplan(
    model: nn.Module,
    sample: Any,
    devices: Devices = None,
    *,
    batch_size: int | None = None,
    loss_fn: LossFunction | None = None,
    target: Any = None,
    optimizer: OptimizerChoice = "AdamW",
    batch_dims: BatchDims | None = None,
    autocast: torch.dtype | None = None,
    precision: str | None = None,
    threads: int = 1,
    time_budget_s: float = 60.0,
    progress: bool = True,
    cache: CacheSetting = None,
    **settings: Unpack[SettingKeywords],
) -> Plan:
    """Plan pipeline-parallel training of a model on the devices at hand.

        plan = autoplan(model, x, devices=4, loss_fn=cross_entropy, target=y)
        plan.save("plan.json")

    For devices that are not here nothing is measured:

    >>> from profiler import Cluster
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> plan = autoplan(model, torch.zeros(8, 8), Cluster.of("2xA100-40GB"), stages=2, micro_batches=8)
    >>> plan.K, plan.M, plan.schedule
    (2, 8, 'zb')

    Arguments are checked before anything is measured.

    Args:
        model: any module; it is not changed.
        sample: what the model is called with, a mini-batch or a few samples of one: a tensor, a tuple of positional
            or a dict of keyword arguments.
        devices: how many, or which (names, `torch.device`s, `Device`s, a `Cluster`), in pipeline order; None for
            all CUDA devices, or else 2 CPU workers. The plan may use fewer.
        batch_size: samples of a mini-batch; the sample's by default.
        loss_fn: `loss_fn(output, target)`, measured with the last layer; None if the model returns its loss.
        target: what `loss_fn` compares the sample's output with.
        optimizer: whose time and memory count: name of a class in `torch.optim`, or what builds an optimizer of
            parameters, such as `functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)`.
        batch_dims: where the batch dimension is not the first, see `profiler.trace`.
        autocast: dtype of an autocast region around the model and its loss, `torch.bfloat16` or `torch.float16`.
        precision: recipe of mixed precision: `"bf16-mixed"` computes with bfloat16 parameters, and has main gradients,
            master weights and the optimizer's state in float32; `"bf16-grads"` the same with gradients added up in
            bfloat16; `"fp16-mixed"` with float16, and a scaler at each step; `"bf16"`, `"fp32"`: all in that type. See
            `profiler.precision`. By default in the types that the model has.
        threads: torch threads of a CPU worker.
        time_budget_s: seconds that measuring may take; with fewer the figures are noisier.
        progress: show on a terminal what is done and how long it will take.
        cache: folder of earlier measurements; None for the user's cache folder, False for none. See `profiler.cache`.
        settings: see `planner.keywords.SettingKeywords`.

    Raises:
        ArgumentError: an argument is out of range.
        NotTraceableError: the model cannot be traced.
        InfeasibleError: no plan satisfies batch size and memory; the message says what would help.
    """
    # Only here: a process that trains by a plan runs the same script, and these take it 100 MiB [measured].
    from planner.from_profile import plan_from_profile
    from profiler.measure import check_loss, profile

    check_model(model)
    check_seconds("time_budget_s", time_budget_s, positive=False)
    refuse_with_autocast(precision_named(precision), autocast)
    cluster = local_devices(devices, threads=threads)
    given = describe_sample(sample, batch_dims).batch_size
    samples = given if batch_size is None else batch_size
    asked = Settings.of(cluster, samples, settings)
    check_loss(loss_fn, target)
    _check_names(sample, loss_fn)
    _check_rows(target, given)
    with untouched(model):
        sequence = trace(
            model,
            sample,
            batch_dims=batch_dims,
            autocast=autocast,
            precision=precision,
            keep_together=asked.keep_together,
            cut_at=asked.cut_at,
            stages=asked.most_stages,
            progress=progress,
        )
        # Whoever misspelt a module hears of it before anything is measured.
        begun = sequence.sample.cut_at
        asked = with_chunks_for_cuts(sequence.layers, asked, begun)
        rules_of(sequence.layers, asked, begun)
        _check_only_size(sequence, asked)
        measured = profile(
            sequence,
            cluster,
            sample=sample,
            batch_size=samples,
            micro_batch_sizes=_sizes(asked, cluster, sequence.sample.only_micro_batch_size),
            loss_fn=loss_fn,
            target=target,
            optimizer=optimizer,
            time_budget_s=time_budget_s,
            threads=threads,
            progress=progress,
            cache=cache,
        )
    return plan_from_profile(measured, cluster, batch_size=samples, progress=progress, **settings)


def _sizes(asked: Settings, cluster: Cluster, only: int | None) -> tuple[int, ...] | None:
    """Micro-batch sizes to measure where settings ask for larger ones than are measured by default; else None."""
    if asked.micro_batch_sizes is not None:
        largest = max(asked.micro_batch_sizes)
    else:
        count = asked.micro_batches or min(asked.micro_batches_per_stage, MICRO_BATCHES_PER_STAGE)
        largest = -(-asked.batch_size // (count * (asked.replicas or 1)))
    usual = measured_sizes(asked.batch_size, None, cluster)
    return None if only is not None or largest <= usual[-1] else (*usual, largest)


def _check_only_size(sequence: LayerSequence, asked: Settings) -> None:
    """A model whose graph is for one size of micro-batches alone is given samples of a size that a batch is cut into.

    Raises:
        InfeasibleError: no number of micro-batches that may be has this size.
    """
    only = sequence.sample.only_micro_batch_size
    if only is None:
        return
    share = asked.batch_size // (asked.replicas or 1)
    least = asked.micro_batches or asked.micro_batches_per_stage * (asked.ranks or 1)
    count, left = divmod(share, only)
    if not left and count >= least and asked.micro_batches in (None, count):
        return
    size = max(size for size in range(1, max(1, share // least) + 1) if share % size == 0)
    also = "" if asked.micro_batches in (None, share // size) else f", micro_batches={share // size}"
    why = "; ".join(dict.fromkeys(sequence.refusals.values()))
    raise InfeasibleError(
        f"the model could be traced for micro-batches of {counted(only, 'sample')} alone, as many as the sample has, "
        f"and a batch of {counted(share, 'sample')} is cut into at least {least} of equal size; pass a sample (and a "
        f"target) of {size}{also}, and batch_size={asked.batch_size}{f'. No other size, because {why}' if why else ''}"
    )


def _check_names(sample: Any, loss_fn: Any) -> None:
    """A model that no `Pipeline.step` could be called with is noticed before it is planned, and not when it trains.

    Raises:
        ArgumentError: it takes an argument by the name of what the loss function compares with.
    """
    if loss_fn is not None and isinstance(sample, dict) and "target" in sample:
        raise ArgumentError(
            "the sample gives the model an argument 'target' by keyword, and Pipeline.step takes what the loss "
            "function compares with by this name; give the model's arguments by position, as a tuple"
        )


def _check_rows(target: Any, samples: int) -> None:
    """A target of other samples than those of `sample` is noticed before the model is traced.

    Raises:
        ArgumentError: with both numbers.
    """
    for leaf in pytree.tree_leaves(target):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] != samples:
            raise ArgumentError(
                f"the target holds {counted(leaf.shape[0], 'sample')}, the sample {samples}; give the target of the "
                "same samples"
            )
