"""The profile: what each layer costs, by micro-batch size and kind of device. Torch-free.

A `Profile` is all that the planner knows of a model. One `LayerCost` is one layer at one micro-batch size on one
kind of device; `Profile.layers` says once per layer what does not depend on either.
"""

from __future__ import annotations

import json
from operator import not_
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from profiler.arguments import fits_its_arguments
from profiler.cost_text import costs_text
from profiler.device import Link
from profiler.errors import ArgumentError, ProfileError
from profiler.field_types import (
    Bytes,
    Elements,
    Index,
    NoRate,
    PositiveExtent,
    Rate,
    RelativeError,
    RelativeSize,
    Samples,
    Seconds,
    Share,
)
from profiler.precision import recipe_of
from profiler.sample_spec import SampleSpec
from profiler.skip_value import SkipValue, merged_skips
from profiler.value import Value, read_file, write_atomically
from profiler.work import Work

if TYPE_CHECKING:
    import pandas


LayerBytes = tuple[tuple[Index, Bytes], ...]
"""Pairs (index of a layer, bytes)."""

LeafBytes = tuple[tuple[Index, Index, Index, Bytes], ...]
"""Entries (three indices of layers, bytes)."""


class ParameterInfo(Value):
    """One parameter of the model.

    Attributes:
        name: its original (fully qualified) name; a tied parameter has the name under which the graph uses it.
        size_bytes: bytes of its elements.
        trainable: whether it gets a gradient.
    """

    name: str
    elements: Elements
    size_bytes: Bytes
    trainable: bool


class LayerInfo(Value):
    """What a layer is, whatever the micro-batch size.

    Attributes:
        index: position in the sequence, from 0.
        name: module path of its first and last operation, for people.
        signature: equal for layers that do the same work on the same shapes.
        parameters: names of the parameters that it reads, in `Profile.parameters`.
        buffers_bytes: bytes of the buffers that it reads.
        module_paths: paths of the modules that its operations come from, in order of first use.
    """

    index: Index
    name: str
    signature: str
    parameters: tuple[str, ...]
    buffers_bytes: Bytes
    module_paths: tuple[str, ...]


class Workspace(Value):
    """What an LSTM's kernel keeps for its backward pass: one direction of one layer of a recurrent module.

    Attributes:
        steps: of its input.
        samples: of its input.
        entering: features of its input.
        width: features of its output.
        is_kept: whether autograd saves it; of a layer that is not trained it is there in passing.
    """

    steps: PositiveExtent
    samples: PositiveExtent
    entering: PositiveExtent
    width: PositiveExtent
    size_bytes: Bytes
    is_kept: bool


class InStage(Value):
    """What a layer needs of memory as one of the layers of a stage; `planner.cost.layer_costs` adds it up.

    Attributes:
        carried_bytes: (later layer, bytes): the part of the layer's `kept_bytes` that nothing keeps before that later
            layer. A stage that ends before it does not keep them.
        repeated_bytes: (earlier layer, bytes): the part of `kept_bytes` that the earlier layer is charged with too. A
            stage that holds both keeps them once.
        held_bytes: the part of `kept_bytes` that stays until the end of the step, such as batch statistics.
        forward_bytes: while the layer runs forward, the largest bytes in addition to what it and earlier layers keep;
            what later layers keep is not there yet.
        waiting_bytes: (earlier layer, bytes): on top of that, values of the earlier layer that are there but not kept;
            inputs of the stage are counted as such.
        prelude_bytes: (this or a later layer, bytes): on top of that, values that a stage computes before its first
            layer if it holds the layer that they wait for.
        prelude_peak_bytes: the largest bytes while they are computed.
        backward_bytes: while the layer runs backward, the largest bytes in addition to what it and earlier layers keep,
            all gradients of what is alive after it included; what later layers kept is gone.
        last_backward_bytes: the same without these gradients: those of the last layer of a stage are received.
        returning_bytes: (later layer, bytes): gradients of what is alive after the layer and that later layer reads
            next. In a stage that ends before that layer they are received.
        made_bytes: (later layer, bytes): storages that these gradients lie on, by the layer whose backward pass makes
            them (a concatenation hands back parts of what came to it), and copies where their memory layout is not the
            value's. A stage that ends before that layer has received them.
        leaf_bytes: (earlier layer, later layer, maker, bytes): gradients of the earlier layer's values, which the later
            layer reads next, on storages that a still later layer makes. A stage that begins after the first and ends
            between the others has copies of them: what comes to a leaf and is the caller's is copied.
        passing_bytes: (later layer, bytes): the part of `made_bytes` that has to do with values that the layer neither
            reads nor computes; `backward_bytes` holds it all.
        copied_bytes: (earlier layer, bytes): while the layer runs backward, copies of gradients of the earlier layer's
            values in stages that these enter.
        workspace_bytes: what kernels may allocate inside themselves on top of all that.
        workspaces: what of the layer's bytes grows by pages, and not by the line between two sizes.
    """

    carried_bytes: LayerBytes = ()
    repeated_bytes: LayerBytes = ()
    held_bytes: Bytes = 0
    forward_bytes: Bytes
    waiting_bytes: LayerBytes = ()
    prelude_bytes: LayerBytes = ()
    prelude_peak_bytes: Bytes = 0
    backward_bytes: Bytes
    last_backward_bytes: Bytes
    returning_bytes: LayerBytes = ()
    made_bytes: LayerBytes = ()
    leaf_bytes: LeafBytes = ()
    passing_bytes: LayerBytes = ()
    copied_bytes: LayerBytes = ()
    workspace_bytes: Bytes = 0
    workspaces: tuple[Workspace, ...] = ()

    def layers_named(self) -> set[int]:
        """Indices of all layers that an entry is about."""
        pairs = (
            self.carried_bytes,
            self.repeated_bytes,
            self.waiting_bytes,
            self.prelude_bytes,
            self.returning_bytes,
            self.made_bytes,
            self.passing_bytes,
            self.copied_bytes,
        )
        return {layer for entries in pairs for layer, _ in entries} | {
            layer for entry in self.leaf_bytes for layer in entry[:3]
        }


class LayerCost(Value):
    """One layer at one micro-batch size on one kind of device.

    Attributes:
        layer: index of the layer.
        micro_batch_size: samples in the micro-batch.
        device_kind: `Device.kind`.
        forward_s: median seconds of a forward pass that keeps what the backward pass needs. The last layer's times
            include the loss function.
        recompute_s: median seconds of recomputing that forward pass in the backward phase.
        backward_s: median seconds of the backward pass.
        weight_s: the part of it that makes gradients of parameters and can be a pass of its own; 0 if not measured.
        split_s: by how much all passes together take longer if it is one; this counts in that pass.
        weight_kept_bytes: what lives from the rest of the backward pass until that one.
        spread: relative spread of the timings, (third quartile - first quartile) / median of forward + backward.
        slowdown: by what share a reference took longer meanwhile than at the device's usual pace, because others used
            it or its clock fell: 0.5 for half as long again. It is divided out of the seconds.
        drift: by what share nine of ten steps are slower or faster than the device's usual pace, all layers alike, if
            nothing else uses it.
        kept_bytes: bytes created by this layer that are kept until the backward pass, in distinct storages; parameters
            and what enters the layer are not counted. Stages keep at most the sum of their layers'.
        transient_bytes: the largest bytes that tensors occupy in addition to the kept ones during the layer's forward
            or backward.
        in_stage: what a stage that holds the layer needs more exactly than these two say. None: their sum and their
            maximum.
        output_bytes: bytes of all values that cross the boundary after this layer, those that only pass by
            included; 0 after the last layer.
        output_gradient_bytes: the part of `output_bytes` that a gradient comes back for.
    """

    layer: Index
    micro_batch_size: Samples
    device_kind: str
    forward_s: Seconds
    recompute_s: Seconds
    backward_s: Seconds
    weight_s: Seconds = 0.0
    split_s: Seconds = 0.0
    weight_kept_bytes: Bytes = 0
    spread: RelativeError
    slowdown: RelativeError = 0.0
    drift: RelativeError = 0.0
    kept_bytes: Bytes
    transient_bytes: Bytes
    in_stage: InStage | None = None
    output_bytes: Bytes
    output_gradient_bytes: Bytes


class WithoutFormula(Value):
    """An operation that is priced by the bytes that it touches alone.

    Attributes:
        operation: its schema name, such as `"aten::gelu"`.
        share_of_bytes: of all bytes that the model's operations read and write.
    """

    operation: str
    share_of_bytes: Share


class Estimate(Value):
    """Where times of a kind of device come from when nothing was measured on it.

    Attributes:
        error: relative error to expect of a sum of times.
        float32_flops_per_s: rate that matrix products in float32 were priced with; so the other rates.
        bfloat16_flops_per_s: 0 in profiles of earlier versions, which priced it as the half rate.
        float64_flops_per_s: 0 where the device has no such arithmetic, and in profiles of earlier versions.
        launch_s: least seconds of an operation.
        dispatch_s: seconds in which the host asks for one, while the device works on earlier ones; 0 in profiles of
            earlier versions.
        without_formula: operations without a FLOP formula, those that touch most bytes first.
    """

    device_kind: str
    error: RelativeError
    float32_flops_per_s: Rate
    convolution_flops_per_s: Rate
    half_flops_per_s: Rate
    bfloat16_flops_per_s: NoRate = 0.0
    float64_flops_per_s: NoRate = 0.0
    memory_bytes_per_s: Rate
    launch_s: Seconds
    dispatch_s: Seconds = 0.0
    without_formula: tuple[WithoutFormula, ...] = ()


class OptimizerCost(Value):
    """What one optimizer step costs.

    Attributes:
        name: class name, such as `"AdamW"`.
        seconds_per_byte: seconds of `optimizer.step()` and `zero_grad()` per byte of trainable parameters.
        state_bytes_per_byte: bytes of optimizer state per byte of all trainable parameters (2 for Adam).
        state_bytes: bytes of the state of each of `Profile.stepped_parameters`, where one ratio does not say it:
            Adafactor keeps rows and columns of a matrix. Else files leave it out.
    """

    name: str
    device_kind: str
    seconds_per_byte: Seconds
    state_bytes_per_byte: RelativeSize
    state_bytes: tuple[Bytes, ...] = Field(default=(), exclude_if=not_)


class Profile(Value):
    """What a model costs on the devices at hand; the planner's only input.

    Attributes:
        fingerprint: of the `LayerSequence` that was measured; a plan carries it on.
        sample: what the model was called with, as the executor needs it to trace again.
        input_bytes: bytes of the model's inputs for one sample of the batch; a rank holds the whole mini-batch.
        reserve_bytes: memory of a process before any stage is loaded: a CUDA context and its allocator's reserve; on
            CPU the traced graph.
        estimates: kinds of device whose times were estimated from a data sheet, not measured.
        skips: values that may go past stages; None in profiles that do not say.
        work: what the model computes; None where no operation's FLOPs are known. Then files leave it out.
        whole: of a model that is one layer, why it cannot be cut, for people. Files leave it out of others.
    """

    file_kind: ClassVar[str] = "profile"
    schema_version: Literal[1] = 1
    fingerprint: str
    sample: SampleSpec
    parameters: tuple[ParameterInfo, ...]
    layers: tuple[LayerInfo, ...] = Field(min_length=1)
    costs: tuple[LayerCost, ...] = Field(min_length=1)
    optimizers: tuple[OptimizerCost, ...] = Field(min_length=1)
    links: tuple[Link, ...] = ()
    input_bytes: Bytes
    reserve_bytes: Bytes = 0
    estimates: tuple[Estimate, ...] = ()
    skips: tuple[SkipValue, ...] | None = None
    work: Work | None = Field(default=None, exclude_if=not_)
    whole: str = Field(default="", exclude_if=not_)

    def to_json(self, *, without: frozenset[str] = frozenset()) -> str:
        """See `Value.to_json`; the costs, nearly all of it, are written one by one, in a third of the time."""
        if "costs" in without:
            return super().to_json(without=without)
        others = super().to_json(without=without | {"costs"})
        return f'{{\n "costs": [\n{costs_text(self.costs)}\n ],{others[1:]}'

    @model_validator(mode="after")
    def _complete(self) -> Self:
        known = {parameter.name for parameter in self.parameters}
        for position, layer in enumerate(self.layers):
            if layer.index != position:
                raise ValueError(f"layer {layer.index} stands at position {position}")
            missing = set(layer.parameters) - known
            if missing:
                raise ValueError(f"layer {position} reads unknown parameters {sorted(missing)}")
        seen = [(cost.device_kind, cost.micro_batch_size, cost.layer) for cost in self.costs]
        expected = {
            (kind, size, layer)
            for kind, size in {(kind, size) for kind, size, _ in seen}
            for layer in range(len(self.layers))
        }
        if len(seen) != len(set(seen)) or set(seen) != expected:
            raise ValueError(
                f"{len(seen)} costs do not hold each of {len(self.layers)} layers once for each device kind and size"
            )
        for position, cost in enumerate(self.costs):
            beyond = max(cost.in_stage.layers_named(), default=0) if cost.in_stage else 0
            if beyond >= len(self.layers):
                raise ValueError(f"costs[{position}].in_stage names layer {beyond} of {len(self.layers)} layers")
        self._check_skips()
        for optimizer in self.optimizers:
            if optimizer.state_bytes and len(optimizer.state_bytes) != len(self.stepped_parameters):
                raise ValueError(
                    f"optimizer {optimizer.name} has state_bytes of {len(optimizer.state_bytes)} parameters, and the "
                    f"model trains {len(self.stepped_parameters)}"
                )
        return self

    @property
    def stepped_parameters(self) -> tuple[ParameterInfo, ...]:
        """What an optimizer keeps state for: the trainable parameters that have elements."""
        return tuple(parameter for parameter in self.parameters if parameter.trainable and parameter.elements)

    def _check_skips(self) -> None:
        values = self.skips or ()
        if len({value.name for value in values}) != len(values):
            raise ValueError(f"skips {[value.name for value in values]} name a value twice")
        for value in values:
            if value.users[-1] >= len(self.layers):
                raise ValueError(f"{value.name} is read by layer {value.users[-1]} of {len(self.layers)} layers")
        crossing: dict[int, list[SkipValue]] = {}  # by the layer after which they do
        for value in values:
            for layer in range(value.users[0], value.users[-1]):
                crossing.setdefault(layer, []).append(value)
        for cost in self.costs if values else ():
            needed = sum(value.bytes_at(cost.micro_batch_size) for value in crossing.get(cost.layer, ()))
            if needed > cost.output_bytes * (1 + 1e-9):
                raise ValueError(
                    f"after layer {cost.layer}, for {cost.micro_batch_size} samples, skips hold {needed:.0f} bytes "
                    f"and output_bytes is {cost.output_bytes}; change skips likewise, or set them to None"
                )

    def gradient_bytes(self, parameter: ParameterInfo) -> int:
        """Bytes of a trained parameter's gradient as it is added up."""
        recipe, size_bytes = recipe_of(self.sample.precision), parameter.size_bytes
        return size_bytes if recipe is None else recipe.gradient_bytes(parameter.elements, size_bytes)

    def main_bytes(self, parameter: ParameterInfo) -> int:
        """Bytes of what the optimizer steps for a trained parameter, and of the gradient that it reads."""
        recipe, size_bytes = recipe_of(self.sample.precision), parameter.size_bytes
        return size_bytes if recipe is None else recipe.main_bytes(parameter.elements, size_bytes)

    def to_frame(self) -> pandas.DataFrame:
        """One row a layer, micro-batch size and kind of device: the fields of `LayerCost` and the layer's name."""
        import pandas

        frame = pandas.DataFrame([cost.model_dump() for cost in self.costs])
        names = [self.layers[cost.layer].name for cost in self.costs]
        frame.insert(1, "name", names)
        return frame

    def from_frame(self, frame: pandas.DataFrame) -> Self:
        """This profile with the costs of a frame like `to_frame`'s, which may be changed or have rows left out.

        Raises:
            ArgumentError: that is no frame.
            ProfileError: a column is missing or unknown, a value means nothing, or not every layer has its row.
        """
        import pandas

        if not isinstance(frame, pandas.DataFrame):
            raise ArgumentError(f"{type(frame).__name__} is no frame; pass one like Profile.to_frame()'s")
        rows = frame.drop(columns="name", errors="ignore").to_dict("records")
        plain = [{str(key): _plain(value) for key, value in row.items()} for row in rows]
        try:
            text = json.dumps(plain, allow_nan=True)
            costs = TypeAdapter(tuple[LayerCost, ...]).validate_json(text)
            return self.model_validate({**_fields(self), "costs": costs})
        except ValidationError as problem:
            first = problem.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ProfileError(f"the frame is no profile: {place}: {first['msg']}".replace(": :", ":")) from problem
        except (TypeError, ValueError) as problem:
            raise ProfileError(f"the frame is no profile: a cell holds no number: {problem}") from problem

    def merge(self, *others: Profile) -> Self:
        """What this and other profiles of the same model say, of other sizes, devices or optimizers.

        Of what several hold, the last one's figures count.

        Raises:
            ArgumentError: that is no profile.
            ProfileError: a profile is of another model.
        """
        strange = [other for other in others if not isinstance(other, Profile)]
        if strange:
            raise ArgumentError(f"{type(strange[0]).__name__} is no profile; pass what profile() or Profile.load gave")
        profiles: tuple[Profile, ...] = (self, *others)
        for other in others:
            if (other.fingerprint, other.layers, other.parameters) != (self.fingerprint, self.layers, self.parameters):
                raise ProfileError(
                    f"profiles of different models cannot be merged: {self.fingerprint} and {other.fingerprint}; "
                    "profile the same trace"
                )
        costs = {(c.device_kind, c.micro_batch_size, c.layer): c for p in profiles for c in p.costs}
        optimizers = {(entry.name, entry.device_kind): entry for p in profiles for entry in p.optimizers}
        estimates = {entry.device_kind: entry for p in profiles for entry in p.estimates}
        merged = {
            "costs": tuple(costs.values()),
            "optimizers": tuple(optimizers.values()),
            "estimates": tuple(estimates.values()),
            "links": next((p.links for p in reversed(profiles) if p.links), ()),
            "skips": merged_skips([p.skips for p in profiles]),
            "input_bytes": max(p.input_bytes for p in profiles),
            "reserve_bytes": max(p.reserve_bytes for p in profiles),
        }
        return type(self)(**{**_fields(self), **merged})

    @fits_its_arguments
    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, atomically."""
        write_atomically(path, self.to_json())

    @classmethod
    @fits_its_arguments
    def load(cls, path: str | Path) -> Self:
        """Read a profile that `save` wrote.

        Raises:
            ArgumentError: `path` is no path.
            ProfileError: the file is missing, damaged, or of another schema.
        """
        text = read_file(path, "profile", ProfileError)
        return cls.parse_json(text, source=str(path), error=ProfileError)

    def _repr_html_(self) -> str:
        from profiler.views import profile_html

        return profile_html(self)


def _fields(profile: Profile) -> dict[str, Any]:
    return {name: getattr(profile, name) for name in Profile.model_fields}


def _plain(value: Any) -> Any:
    """A value of a frame as JSON knows it: numpy's numbers are none."""
    return value.item() if hasattr(value, "item") else value
