"""From a profile to arrays: what every layer costs at any micro-batch size that the measured sizes enclose.

    model = CostModel(profile)
    costs = model.layers("cpu/1 thread", 6)      # between the measured sizes 4 and 8: the line through both
    costs.forward_s[3:7].sum()                   # seconds of layers 3 to 6 for one micro-batch of 6 samples

Ranges of layers are half open, [i, j), and matrices over them hold the range [i, j) at [i, j].
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from types import EllipsisType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from planner.cost.next_kernels import with_next_kernels
from planner.cost.recurrent_workspace import Rows, with_room
from planner.cost.stage_bytes import StageBytes
from profiler.between_sizes import on_line, whole_bytes
from profiler.errors import ArgumentError, ProfileError
from profiler.quantities import shown
from profiler.record import LayerCost, OptimizerCost, Profile
from profiler.text import counted

Floats: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]
Indices: TypeAlias = NDArray[np.intp]
Range: TypeAlias = tuple[int, int] | EllipsisType
"""Layers [i, j) as (i, j), or all ranges at once: an index of matrices that have the range [i, j) at [i, j]."""

_TIMES = ("forward_s", "recompute_s", "backward_s", "weight_s", "split_s")
_SIZES = ("kept_bytes", "transient_bytes", "output_bytes", "output_gradient_bytes", "weight_kept_bytes")
_IN_STAGE = ("held_bytes", "workspace_bytes")


@dataclass(frozen=True, slots=True, eq=False)
class LayerArrays:
    """Costs of all L layers at one micro-batch size on one kind of device; each array has shape (L,).

    Attributes:
        forward_s: as `LayerCost.forward_s`; so the other fields. Bytes are rounded up to whole ones; everything is
            float64, which holds whole numbers up to 2**53 exactly.
        held_bytes: the part of `kept_bytes` that stays until the end of the step, whether or not it is recomputed.
        workspace_bytes: what kernels may allocate inside themselves on top of `transient_bytes`.
    """

    forward_s: Floats
    recompute_s: Floats
    backward_s: Floats
    weight_s: Floats
    split_s: Floats
    kept_bytes: Floats
    transient_bytes: Floats
    output_bytes: Floats
    output_gradient_bytes: Floats
    weight_kept_bytes: Floats
    held_bytes: Floats
    workspace_bytes: Floats


@dataclass(frozen=True, eq=False)
class LayerSeconds:
    """What all L layers take for one micro-batch, by `planner.cost.time_ledger`; each array has shape (L,).

    Attributes:
        forward_s: of forward passes.
        recompute_s: of recompute, if the layer is recomputed.
        backward_s: of backward passes.
        weight_s: the part of them that can be a pass of its own.
        split_s: what that pass takes in addition.
    """

    forward_s: Floats
    recompute_s: Floats
    backward_s: Floats
    weight_s: Floats
    split_s: Floats

    def of(self, first: int, stop: int) -> tuple[float, float, float, float, float]:
        """Each of them for layers [first, stop) together; added up once."""
        if (first, stop) not in self._sums:
            forward, recompute, backward, weight, split = (
                float(seconds[first:stop].sum())
                for seconds in (self.forward_s, self.recompute_s, self.backward_s, self.weight_s, self.split_s)
            )
            self._sums[first, stop] = forward, recompute, backward, weight, split
        return self._sums[first, stop]

    @cached_property
    def _sums(self) -> dict[tuple[int, int], tuple[float, float, float, float, float]]:
        return {}


class StageStack:
    """Bytes of every stage of layers [i, j) at measured sizes; arrays of shape (kinds and sizes, L + 1, L + 1).

    Of many sizes few are asked for, so each is filled when it is.

    Args:
        costs: whose stages these are.
        rows: of each device kind and measured size the costs of all layers.
        rows_below: the same, where it stands for larger sizes that were not measured, see `with_next_kernels`.

    Attributes:
        kept: bytes that one micro-batch keeps until its backward pass.
        most: the most bytes that it has at any moment.
    """

    def __init__(self, costs: CostModel, rows: Rows, rows_below: Rows) -> None:
        self._costs = costs
        self._stacked = [*rows.values()]
        self._position = {key: number for number, key in enumerate(rows)}
        self._position_below = dict(self._position)
        for key, below in rows_below.items():
            if below is not rows[key]:
                self._position_below[key] = len(self._stacked)
                self._stacked.append(below)
        positions = len(costs.profile.layers) + 1
        self.kept, self.most = np.zeros((2, len(self._stacked), positions, positions))
        self._filled: set[int] = set()

    def around(self, device_kind: str, micro_batch_size: int) -> tuple[int, int, float]:
        """Positions of the measured sizes around one, which are filled, and where between them it lies."""
        below, above, share = self._costs.around(device_kind, micro_batch_size)
        positions = self._position_below if share else self._position
        places = positions[device_kind, below], self._position[device_kind, above]
        for place in {*places} - self._filled:
            self.kept[place], self.most[place] = _stage_bytes(self._stacked[place])
            self._filled.add(place)
        return *places, share


class CostModel:
    """What a profile says at any micro-batch size; linear between measured sizes and never beyond them.

    Attributes:
        profile: what was measured.
        seconds: what `planner.cost.time_ledger` says for a kind of device and a size, once that was asked.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.seconds: dict[tuple[str, int], LayerSeconds] = {}
        self._rows = with_room(_rows(profile))
        self._rows_below = with_next_kernels(self._rows)
        self._measured = _measured_arrays(self._rows)
        self._measured_below = _measured_arrays(self._rows_below)
        self._layers: dict[tuple[str, int], LayerArrays] = {}
        self._spreads: dict[tuple[str, int], Floats] = {}
        self._slowdowns: dict[str, float] = {}

    def measured_sizes(self, device_kind: str) -> tuple[int, ...]:
        """The micro-batch sizes measured on that kind of device, ascending.

        Raises:
            ProfileError: the profile knows nothing about that kind.
        """
        if device_kind not in self._measured:
            raise ProfileError(
                f"no layer was measured on device kind {device_kind!r}; the profile holds "
                f"{sorted(self._measured)}: profile the model on that kind, or plan for one of these"
            )
        return tuple(sorted(self._measured[device_kind]))

    def covers(self, device_kind: str, micro_batch_size: int) -> bool:
        """Whether the size lies within the measured ones."""
        sizes = self.measured_sizes(device_kind)
        return sizes[0] <= micro_batch_size <= sizes[-1]

    def layers(self, device_kind: str, micro_batch_size: int) -> LayerArrays:
        """Costs of all layers at that micro-batch size.

        Raises:
            ProfileError: the size lies outside the measured ones, or nothing was measured on that kind of device.
        """
        key = (device_kind, micro_batch_size)
        if key not in self._layers:
            self._layers[key] = self._interpolated(device_kind, micro_batch_size)
        return self._layers[key]

    def stage(self, device_kind: str, micro_batch_size: int, first: int, stop: int) -> tuple[float, float]:
        """Bytes that a stage of layers [first, stop) keeps of one micro-batch, and the most it has at any moment.

        The second leaves out the stage's inputs and received gradients. Between measured sizes both are on the line,
        which for the second, a maximum of lines, is not below.

        Raises:
            ProfileError: as for `layers`.
        """
        stack = self.stage_stack
        low, high, share = stack.around(device_kind, micro_batch_size)
        kept, most = (
            float(matrices[low, first, stop])
            if not share
            else float(whole_bytes(on_line(matrices[low, first, stop], matrices[high, first, stop], share)))
            for matrices in (stack.kept, stack.most)
        )
        return kept, most

    def most_to(self, device_kind: str, micro_batch_size: int, first: int, stop: int) -> Floats:
        """The second of `stage` for layers [first, i), of all i from `first + 1` to `stop`."""
        stack = self.stage_stack
        low, high, share = stack.around(device_kind, micro_batch_size)
        below, above = (stack.most[place, first, first + 1 : stop + 1] for place in (low, high))
        most: Floats = whole_bytes(on_line(below, above, share)) if share else below
        return most

    @cached_property
    def fingerprint(self) -> str:
        """`fingerprint_of` the profile."""
        return fingerprint_of(self.profile)

    @cached_property
    def stage_stack(self) -> StageStack:
        """What `stage` says, for all stages and the measured sizes that were asked for."""
        return StageStack(self, self._rows, self._rows_below)

    def spread(self, device_kind: str, micro_batch_size: int) -> Floats:
        """The relative spread of each layer's timings at a measured size, shape (L,)."""
        key = (device_kind, micro_batch_size)
        if key not in self._spreads:
            self._spreads[key] = np.array([cost.spread for cost in self._rows[key]])
        return self._spreads[key]

    def slowdown(self, device_kind: str) -> float:
        """By what share that kind of device was slower than usual while it was measured, at the worst."""
        if device_kind not in self._slowdowns:
            rows = self._rows_of(device_kind)
            self._slowdowns[device_kind] = max((cost.slowdown for row in rows for cost in row), default=0.0)
        return self._slowdowns[device_kind]

    def drift(self, device_kind: str) -> float:
        """By what share the usual pace of that kind of device varies between steps, at the worst."""
        return max((cost.drift for row in self._rows_of(device_kind) for cost in row), default=0.0)

    def splits_backward(self, device_kind: str) -> bool:
        """Whether gradients of parameters were measured apart on that kind of device."""
        return any(cost.weight_s for rows in self._rows_of(device_kind) for cost in rows)

    def _rows_of(self, device_kind: str) -> list[list[LayerCost]]:
        return [rows for (kind, _), rows in self._rows.items() if kind == device_kind]

    def optimizer(self, device_kind: str, name: str) -> OptimizerCost:
        """What a step of that optimizer costs on that kind of device.

        Raises:
            ProfileError: the profile does not hold it.
        """
        for entry in self.profile.optimizers:
            if entry.name == name and entry.device_kind == device_kind:
                return entry
        known = [f"{entry.name} on {entry.device_kind!r}" for entry in self.profile.optimizers]
        raise ProfileError(
            f"optimizer {name} was not measured on device kind {device_kind!r}; the profile holds "
            f"{', '.join(known)}: choose one of these, or profile again with that optimizer"
        )

    def _interpolated(self, device_kind: str, micro_batch_size: int) -> LayerArrays:
        below, above, share = self.around(device_kind, micro_batch_size)
        measured = self._measured[device_kind]
        if not share:
            return measured[below]
        return _between(self._measured_below[device_kind][below], measured[above], share)

    def around(self, device_kind: str, micro_batch_size: int) -> tuple[int, int, float]:
        """The measured sizes around one, and where between them it lies; 0 when it was measured itself."""
        sizes = self.measured_sizes(device_kind)
        if not sizes[0] <= micro_batch_size <= sizes[-1]:
            raise ProfileError(
                f"a micro-batch of {counted(micro_batch_size, 'sample')} lies outside the {sizes[0]} to "
                f"{sizes[-1]} samples "
                f"measured on {device_kind!r}, and costs are not extrapolated: profile the model at "
                f"{counted(micro_batch_size, 'sample')} too, or change the number of micro-batches"
            )
        if micro_batch_size in sizes:
            return micro_batch_size, micro_batch_size, 0.0
        below = max(size for size in sizes if size < micro_batch_size)
        above = min(size for size in sizes if size > micro_batch_size)
        return below, above, (micro_batch_size - below) / (above - below)


def check_profile(profile: Profile) -> None:
    """Refuse what is no profile.

    Raises:
        ArgumentError: saying what it is.
    """
    if not isinstance(profile, Profile):
        raise ArgumentError(f"profile is {shown(profile)}; pass a Profile, Profile.load(path) reads one from a file")


def fingerprint_of(profile: Profile) -> str:
    """What a plan says of the profile that it was made from; of one without `skips` what earlier versions said.

    Raises:
        ArgumentError: it is no profile.
    """
    check_profile(profile)
    unsaid = frozenset({"skips"} if profile.skips is None else ())
    return hashlib.sha256(profile.to_json(without=unsaid).encode()).hexdigest()


def _rows(profile: Profile) -> Rows:
    """The profile's rows by device kind and micro-batch size, in order of layers."""
    rows: Rows = {}
    for cost in sorted(profile.costs, key=lambda cost: cost.layer):
        rows.setdefault((cost.device_kind, cost.micro_batch_size), []).append(cost)
    return rows


def _stage_bytes(costs: list[LayerCost]) -> tuple[Floats, Floats]:
    """`CostModel.stage` at a measured size, for all stages; where no layer says more, by sums alone, which is fast."""
    if any(cost.in_stage is not None for cost in costs):
        entries = StageBytes.of(costs)
        kept = entries.kept()
        return kept, entries.most(kept)
    kept = range_sums(np.array([cost.kept_bytes for cost in costs], dtype=np.float64))
    then = np.triu(kept[:-1, 1:] + np.array([cost.transient_bytes for cost in costs]))
    most = np.zeros_like(kept)
    most[:-1, 1:] = np.maximum.accumulate(then, axis=1)
    return kept, most


def _measured_arrays(rows: Rows) -> dict[str, dict[int, LayerArrays]]:
    """The rows as arrays."""
    arrays: dict[str, dict[int, LayerArrays]] = {}
    for (kind, size), costs in rows.items():
        arrays.setdefault(kind, {})[size] = LayerArrays(
            **{name: np.array([getattr(cost, name) for cost in costs], dtype=np.float64) for name in _TIMES + _SIZES},
            **{
                name: np.array([getattr(cost.in_stage, name, 0) for cost in costs], dtype=np.float64)
                for name in _IN_STAGE
            },
        )
    return arrays


def _between(below: LayerArrays, above: LayerArrays, share: float) -> LayerArrays:
    """The line through two measurements; `share` is 0 at `below` and 1 at `above`."""
    line = {name: on_line(getattr(below, name), getattr(above, name), share) for name in _TIMES + _SIZES + _IN_STAGE}
    return LayerArrays(**{name: values if name in _TIMES else whole_bytes(values) for name, values in line.items()})


def prefix_sums(values: Floats) -> Floats:
    """Sums of the first 0, 1, ..., L values along the last axis, which then has the length L + 1."""
    sums = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=sums[..., 1:])
    return sums


def range_sums(values: Floats) -> Floats:
    """Sum of `values[i:j]` at [i, j], shape (L + 1, L + 1); 0 where j <= i."""
    sums = prefix_sums(values)
    return np.maximum(sums[None, :] - sums[:, None], 0.0)
