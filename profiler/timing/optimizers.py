"""What an optimizer step costs: time measured on tensors shaped like the model's parameters, state from a fake step."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import isclose
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.cache import digest_of_work
from profiler.device import Device
from profiler.errors import ArgumentError
from profiler.machine.local import torch_device
from profiler.record import OptimizerCost
from profiler.run.main_gradients import round_to
from profiler.text import counted
from profiler.timing.repeats import computing_with, time_call
from profiler.torch_private import storage_of

COPIED_BYTES_AT_MOST = 64 * 2**20  # enough to leave any cache, little enough to be measured in a second
COPIED_SHARE = 1 / 16  # of a device's memory at most: gradients, state and temporaries are several times as large
SAME_STATE = (
    1e-9  # relative difference of a parameter's state from its share of all, at most, where one ratio is enough
)
UNUSABLE = ("Optimizer", "LBFGS", "SparseAdam")  # the base; needs a closure; needs sparse gradients


def optimizer_names() -> list[str]:
    """Names of the optimizers in `torch.optim` that a plan can assume."""
    found = inspect.getmembers(torch.optim, inspect.isclass)
    return sorted(name for name, kind in found if issubclass(kind, torch.optim.Optimizer) and name not in UNUSABLE)


OptimizerChoice: TypeAlias = str | Callable[[list[Tensor]], torch.optim.Optimizer]
"""The name of a class in `torch.optim`, for its default settings; or what builds an optimizer of parameters."""


class BuiltOptimizer(str):
    """The name of an optimizer with settings, such as `"SGD(momentum=0.9)"`, that knows how to build it.

    Attributes:
        build: from parameters.
    """

    __slots__ = ("build",)
    build: Callable[[list[Tensor]], torch.optim.Optimizer]


def named_optimizer(optimizer: OptimizerChoice) -> str:
    """The name by which profile and plan know an optimizer.

        >>> import functools
        >>> named_optimizer(functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9))
        'SGD(momentum=0.9)'

    The learning rate is left out: it changes neither time nor memory.

    Raises:
        ArgumentError: it is no name of a usable optimizer and builds none.
    """
    if isinstance(optimizer, str) or not callable(optimizer):
        check_optimizer(optimizer)
        return optimizer
    given: list[Tensor] = [torch.zeros(2, 2, requires_grad=True)]
    try:
        built = optimizer(given)
    except Exception as problem:  # whatever a user's function raises
        raise ArgumentError(f"optimizer={optimizer!r} builds no optimizer of a list of tensors: {problem}") from problem
    if not isinstance(built, torch.optim.Optimizer):
        raise ArgumentError(f"optimizer={optimizer!r} builds a {type(built).__name__}; return a torch.optim.Optimizer")
    _check_steps_all(built, given)
    kind = type(built)
    if kind.__module__.split(".")[0] == "torch":
        check_optimizer(kind.__name__)
        name = kind.__name__
    else:
        name = f"{kind.__name__}-{digest_of_work(kind)[:8]}"  # what was measured of other code is not found
    usual = inspect.signature(kind).parameters
    settings = [
        f"{key}={value!r}"
        for key, value in built.param_groups[0].items()
        if key in usual and key not in ("params", "lr") and value != usual[key].default
    ]
    named = BuiltOptimizer(f"{name}({', '.join(settings)})" if settings else name)
    named.build = optimizer
    return named


def _build(name: str, parameters: list[Tensor]) -> torch.optim.Optimizer:
    build = name.build if isinstance(name, BuiltOptimizer) else getattr(torch.optim, name)
    optimizer: torch.optim.Optimizer = build(parameters)
    if isinstance(name, BuiltOptimizer):
        _check_steps_all(optimizer, parameters)
    return optimizer


def _check_steps_all(optimizer: torch.optim.Optimizer, given: Sequence[Tensor]) -> None:
    """Refuse an optimizer of other tensors, which measuring would step, or of some, of which state would be lacking."""
    stepped = {id(one) for group in optimizer.param_groups for one in group["params"]}
    others, kept = stepped - {*map(id, given)}, stepped & {*map(id, given)}
    if others or len(kept) < len({*map(id, given)}):
        raise ArgumentError(
            f"optimizer= builds a {type(optimizer).__name__} that steps {len(kept)} of {counted(len(given), 'tensor')} "
            f"that it is given and {counted(len(others), 'other')}; let it step those that it is given, and no others"
        )


def check_optimizer(name: str) -> None:
    """Refuse what is not the name of a usable optimizer.

    Raises:
        ArgumentError: with the names that are.
    """
    if name not in optimizer_names():
        raise ArgumentError(f"optimizer={name!r}; choose one of torch.optim: {', '.join(optimizer_names())}")


def optimizer_cost(
    name: str,
    parameters: Iterable[Tensor],
    device: Device,
    *,
    budget_s: float = 2.0,
    computing: torch.dtype | None = None,
    adding: torch.dtype | None = None,
) -> OptimizerCost:
    """Measure `step()` and `zero_grad()` of an optimizer; its state is that of `cost_with_state`.

    Args:
        name: what `named_optimizer` gave, or of a class in `torch.optim` for its default settings.
        parameters: what it steps; only shape, dtype and `requires_grad` matter. Copies are made of as many as
            `COPIED_BYTES_AT_MOST` and `COPIED_SHARE` allow.
        device: where the step runs.
        budget_s: seconds that measuring may take.
        computing: the type that layers compute with, to which master weights are rounded once a step; None where
            there are none. The few parameters that are never cast count like others.
        adding: the type from which gradients are cast for the step; None where they need not be.

    Raises:
        ArgumentError: there is no such optimizer, or it cannot train these parameters.
    """
    if not isinstance(name, BuiltOptimizer):
        check_optimizer(name)
    place = torch_device(device)
    trained = [parameter for parameter in parameters if parameter.requires_grad and parameter.numel()]
    if not trained:
        return OptimizerCost(name=str(name), device_kind=device.kind, seconds_per_byte=0.0, state_bytes_per_byte=0.0)
    states = state_bytes(name, trained)
    copies = _copies(trained, place, min(COPIED_BYTES_AT_MOST, int(COPIED_SHARE * device.memory_bytes)))
    gradients = [torch.full_like(copy, 1e-3, dtype=adding, requires_grad=False) for copy in copies]
    optimizer = _build(name, copies)
    masters = copies if computing is not None else []
    rounded = [torch.empty_like(master, dtype=computing, requires_grad=False) for master in masters]

    def give_gradients() -> None:
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.grad = gradient.to(copy.dtype)

    def step() -> None:
        if adding is not None:
            give_gradients()
        optimizer.step()
        optimizer.zero_grad()
        round_to(rounded, masters)

    with computing_with(device.threads):
        timing = time_call(step, place, prepare=give_gradients, budget_s=budget_s)
    seconds_per_byte = timing.median_s / sum(copy.nbytes for copy in copies)
    return cost_with_state(name, device.kind, seconds_per_byte, trained, states)


def cost_with_state(
    name: str, kind: str, seconds_per_byte: float, parameters: Sequence[Tensor], states: Sequence[int]
) -> OptimizerCost:
    """What a step costs, with the state of each parameter where one ratio does not say it.

    Args:
        name: of the optimizer.
        kind: of device.
        seconds_per_byte: of the parameters.
        parameters: that it steps, which have elements.
        states: bytes of the state of each.
    """
    ratio = sum(states) / sum(parameter.nbytes for parameter in parameters)
    alike = all(
        isclose(state, ratio * parameter.nbytes, rel_tol=SAME_STATE)
        for parameter, state in zip(parameters, states, strict=True)
        if parameter.dim()  # of a scalar the state is as little known as a step counter
    )
    return OptimizerCost(
        name=str(name),
        device_kind=kind,
        seconds_per_byte=seconds_per_byte,
        state_bytes_per_byte=ratio,
        state_bytes=() if alike else tuple(states),
    )


def state_bytes(name: str, parameters: Sequence[Tensor]) -> list[int]:
    """Bytes of the optimizer's own state of each parameter after a step, on tensors that have shapes and no data.

    Scalars such as a step counter are left out. Of memory that several share, each has the part that it looks at; what
    is no parameter's own is spread over all of them.

    Args:
        name: as for `optimizer_cost`.
        parameters: only shape and dtype matter.

    Raises:
        ArgumentError: the optimizer cannot train these parameters.
    """
    try:
        try:
            optimizer, stepped = _stepped(name, parameters, "meta")
        except RuntimeError:  # fused ones want a device that computes
            with FakeTensorMode():
                optimizer, stepped = _stepped(name, parameters)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise ArgumentError(f"optimizer={name!r} cannot train this model: {problem}") from problem
    numbers = {id(parameter): number for number, parameter in enumerate(stepped)}
    every = range(len(stepped))
    kept: dict[object, list[tuple[range, Tensor]]] = defaultdict(list)  # by storage: whose each tensor is, and it
    for owner, state in optimizer.state.items():
        number = numbers.get(id(owner))
        for leaf in pytree.tree_leaves(state):
            if isinstance(leaf, Tensor) and leaf.dim():
                kept[storage_of(leaf)].append((every if number is None else range(number, number + 1), leaf))
    found = [0] * len(stepped)
    for tensors in kept.values():
        storage_bytes = tensors[0][1].untyped_storage().nbytes()
        viewed_bytes = sum(leaf.nbytes for _, leaf in tensors)
        for owners, leaf in tensors:
            owned_bytes = sum(parameters[number].nbytes for number in owners)
            for number in owners if viewed_bytes else ():
                part = storage_bytes * leaf.nbytes * parameters[number].nbytes
                found[number] += -(-part // (viewed_bytes * owned_bytes))
    return found


def _stepped(
    name: str, parameters: Sequence[Tensor], device: str | None = None
) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    """An optimizer of tensors shaped like these, after a step, and these."""
    trained = [torch.empty(one.shape, dtype=one.dtype, device=device, requires_grad=True) for one in parameters]
    for tensor in trained:
        tensor.grad = torch.empty_like(tensor, requires_grad=False)
    optimizer = _build(name, trained)
    with _AnyNumber():  # type: ignore[no-untyped-call]
        optimizer.step()
    return optimizer, trained


class _AnyNumber(TorchDispatchMode):
    """Answers what number a tensor without data holds: Adafactor scales by one, which leaves shapes as they are."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        return func(*args, **(kwargs or {}))


def _copies(parameters: Sequence[Tensor], place: torch.device, most_bytes: int) -> list[Tensor]:
    """Tensors shaped like the parameters, the last one cut in dimension 0 to stay within the limit.

    The first parameter is copied at least by one row.
    """
    copies: list[Tensor] = []
    left = most_bytes
    for parameter in parameters:
        shape = list(parameter.shape)
        if shape and parameter.nbytes > left:
            rows = max(left // (parameter.nbytes // shape[0]), 0 if copies else 1)
            if not rows:
                continue
            shape[0] = rows
        copies.append(torch.full(shape, 1e-2, dtype=parameter.dtype, device=place).requires_grad_())
        left -= copies[-1].nbytes
    return copies
