"""What the model's own run on the sample reads of tensors: the answers to what a trace will ask.

It runs on the whole sample and on both of its halves. Where these disagree, so will micro-batches, and it is no use to
trace one of the ways.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from profiler.conditions.answers import SampleRun
from profiler.conditions.reading import READS, Spot, spot_of
from profiler.conditions.spelled_out import spelled_out
from profiler.errors import UserFunctionError
from profiler.machine.backend import device_of_first
from profiler.observe.source_place import place_now, place_of
from profiler.observe.standing_in import standing_in
from profiler.observe.untouched import untouched
from profiler.sample_spec import SampleSpec, TensorLeaf
from profiler.torch_private import COMPILING_FLAG, EXPORTING_FLAG
from profiler.tracing.export import autocasting, mode_of
from profiler.tracing.sample import arguments_of


class _Recording(TorchFunctionMode):
    """Notes each value that leaves a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.read: dict[Spot, list[Any]] = defaultdict(list)

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, named = spelled_out(func, args, kwargs or {}, self._number)
        result = func(*args, **named)
        if func in READS:
            found = pytree.tree_leaves(result) if isinstance(result, list) else [result]
            self.read[spot_of(place_now(self._model))].extend(found)
        return result

    def _number(self, tensor: Tensor) -> Any:
        self.read[spot_of(place_now(self._model))].append(tensor.item())
        return tensor.item()


def has_no_values(tensor: Tensor) -> bool:
    """Whether it has a shape only."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def sample_runs(model: nn.Module, spec: SampleSpec, sample: Sequence[Tensor], training: bool) -> tuple[SampleRun, ...]:
    """The runs on the whole sample, which comes first, and on its halves, as far as the model can do them.

    Args:
        model: with real parameters; it is left as it was.
        spec: of the sample.
        sample: its tensor leaves, in order.
        training: run it as it trains.

    Returns:
        Nothing if the model does not run on the whole sample.
    """
    parts = [(0, spec.batch_size)]
    if spec.batch_size > 1:
        parts += [(0, spec.batch_size // 2), (spec.batch_size // 2, spec.batch_size)]
    runs: list[SampleRun] = []
    for start, stop in parts:
        run = _run(model, spec, sample, start, stop, training)
        if run is None and not runs:
            return ()
        runs.extend([run] if run is not None else [])
    return tuple(runs)


def refuse_failing_call(model: nn.Module, spec: SampleSpec, sample: Sequence[Tensor], training: bool) -> None:
    """Refuse a model whose forward pass fails on the sample without us too: that is no matter of tracing.

    Args:
        model: that could not be traced; it is left as it was.
        spec: of the sample.
        sample: its tensor leaves, in order.
        training: run it as it trains.

    Raises:
        UserFunctionError: from the model's own error.
    """
    try:
        with warnings.catch_warnings():  # who makes errors of them has seen them, or will
            warnings.simplefilter("ignore")
            _call(model, spec, sample, 0, spec.batch_size, training)
    except (MemoryError, torch.OutOfMemoryError):  # it runs on copies of the model's own tensors
        return
    except Exception as problem:
        if _asks_for_missing_values(problem):
            return
        place = place_of(model, problem)
        told = next(iter(str(problem).strip().splitlines()), "")
        raise UserFunctionError(
            f"the model itself fails on the sample: in {place}: {type(problem).__name__}: {told}; mend the forward "
            "pass, or give it another sample"
        ) from problem


def _asks_for_missing_values(problem: Exception) -> bool:
    """Whether a tensor that has a shape only was asked for what it holds: torch says that in words alone."""
    told = str(problem).lower()
    no_kernel = isinstance(problem, NotImplementedError) and "meta" in told
    return no_kernel or "meta tensor" in told or "data-dependent" in told


def _run(
    model: nn.Module, spec: SampleSpec, sample: Sequence[Tensor], start: int, stop: int, training: bool
) -> SampleRun | None:
    recording = _Recording(model)
    try:
        _call(
            model,
            spec,
            sample,
            start,
            stop,
            training,
            EXPORTING_FLAG.replaced_by(True),
            COMPILING_FLAG.replaced_by(True),
            recording,
        )
    except Exception:  # it is only asked for answers; what is wrong with it is told by who asks
        return None
    return SampleRun(stop - start, dict(recording.read))


def _call(
    model: nn.Module,
    spec: SampleSpec,
    sample: Sequence[Tensor],
    start: int,
    stop: int,
    training: bool,
    *within: AbstractContextManager[object],
) -> None:
    """Run the model on a part of the sample, with copies of its tensors."""
    device = device_of_first((*model.parameters(), *sample))
    tensors = iter(sample)
    leaves: list[Any] = []
    for leaf in spec.leaves:
        if not isinstance(leaf, TensorLeaf):
            leaves.append(leaf.value)
            continue
        whole = next(tensors).detach()
        part = whole if leaf.batch_dim is None else whole.narrow(leaf.batch_dim, start, stop - start)
        leaves.append(part.to(device).clone())
    call = arguments_of(spec, leaves)
    copies = {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in _members(model)}
    for name, tensor in _members(model):
        copies[name].__dict__.update(tensor.__dict__)
    with (
        untouched(model),
        mode_of(model, training),
        standing_in(model, copies),
        torch.enable_grad(),
        autocasting(spec, device),
        ExitStack() as stack,
    ):
        for context in within:
            stack.enter_context(context)
        model(*call.args, **call.kwargs)


def _members(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers: the run may write either, and must not change the model's own."""
    yield from model.named_parameters()
    yield from model.named_buffers()
