"""What of a model a process holds: the parameters and buffers of its stages, on their devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from executor.layout import Layout
from executor.state.tied import TiedParameter, accumulator_of, users_of
from planner.plan.plan import Plan
from profiler.machine.backend import HOST
from profiler.run.main_gradients import adding_to, round_to
from profiler.run.recurrent_weights import lay_together
from profiler.tracing.computing_model import adding_dtype, main_dtype
from profiler.tracing.sequence import LayerSequence


@dataclass(frozen=True)
class Placement:
    """The tensors of one process.

    Attributes:
        parameters: by (name, device): on the CPU the model's own parameters, elsewhere copies; under a recipe of mixed
            precision master weights, where a parameter has one.
        buffers: per local stage: name -> buffer on the stage's device; the model's own where that is the CPU and no
            recipe of mixed precision casts it.
        read_by: per local stage: (layer, name) -> the tensor that the layer reads; it collects its gradient, or
            hands it to the master weight's.
        rounded: what layers compute with in place of master weights, with these.
        cast: what collects gradients in another type than the optimizer reads, with the master weights.
        tied: tied parameters with a using layer in this process.
    """

    parameters: Mapping[tuple[str, torch.device], nn.Parameter]
    buffers: Mapping[int, dict[str, Tensor]]
    read_by: Mapping[int, dict[tuple[int, str], Tensor]]
    tied: tuple[TiedParameter, ...]
    rounded: tuple[tuple[Tensor, nn.Parameter], ...] = ()
    cast: tuple[tuple[Tensor, nn.Parameter], ...] = ()

    def follow(self) -> None:
        """Let layers compute with the parameters as they are now: with master weights, and with other memory.

        `parameter.data = ...`, `to_empty` and `vector_to_parameters` give a parameter that. What layers read of a tied
        one is on the old.
        """
        for parameter in self.tied:
            for accumulator in parameter.accumulators:
                copy = next(copy for copy in parameter.copies if copy.device == accumulator.device)
                if copy.data_ptr() != accumulator.data_ptr():
                    accumulator.data = copy.data
        round_to([computing for computing, _ in self.rounded], [master for _, master in self.rounded])

    @contextmanager
    def adding_up(self) -> Iterator[None]:
        """Gradients are within as they are added up, before and after it as the optimizer reads them.

        What came from the one is the other in every bit again. One after the other is cast, so that only one of them
        exists twice.
        """
        _cast_gradients([(master, collector) for collector, master in self.cast])
        try:
            yield
        finally:
            _cast_gradients(self.cast)

    def collectors(self) -> list[Tensor]:
        """What has each parameter's gradient while it is added up."""
        of_master = {id(master): collector for collector, master in self.cast}
        return [of_master.get(id(parameter), parameter) for parameter in self.parameters.values()]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Each parameter once, by original name, in the model's order; a tied one from its first stage."""
        named: dict[str, nn.Parameter] = {}
        for (name, _), parameter in self.parameters.items():
            named.setdefault(name, parameter)
        return named


def _cast_gradients(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give the second of each pair the gradient of the first, in its own type."""
    for given, to in pairs:
        to.grad = None if given.grad is None else given.grad.to(to.dtype)
        given.grad = None


Materialize = Callable[[Mapping[str, Collection[torch.device]]], Mapping[tuple[str, torch.device], Tensor]]


def place(
    sequence: LayerSequence,
    plan: Plan,
    layout: Layout,
    devices: Mapping[int, torch.device],
    materialize: Materialize,
    originals: Mapping[str, nn.Parameter],
) -> Placement:
    """Place a process's stages of a plan.

    Args:
        sequence: the model's layers.
        plan: the plan.
        layout: says which stages this process runs.
        devices: of each of these stages.
        materialize: makes tensors on devices for names of tensors that lie on the meta device.
        originals: the user's parameters by name; master weights are these where they have the type of such.
    """
    held = {name: _trained(sequence, name, originals.get(name, own)) for name, own in sequence.parameters.items()}
    layers_of = {stage: range(plan.stages[stage].first_layer, plan.stages[stage].stop_layer) for stage in layout.stages}
    ordered = _where_read(sequence, layers_of, devices)
    needed = {stage: buffer_names(sequence, layers) for stage, layers in layers_of.items()}
    bare = _without_memory(
        [(name, device, held[name]) for name, device in ordered]
        + [(name, devices[stage], sequence.buffers[name]) for stage, names in needed.items() for name in names]
    )
    made = materialize(bare) if bare else {}
    parameters = {(name, device): _parameter(held[name], device, made.get((name, device))) for name, device in ordered}
    computing = {
        (name, device): _computing(sequence.parameters[name], device)
        for (name, device), parameter in parameters.items()
        if parameter.dtype != sequence.parameters[name].dtype
    }
    _lay_together(sequence, layers_of, devices, {**parameters, **computing})
    collectors = {
        (name, device): _collector(sequence, name, parameter, computing.get((name, device)))
        for (name, device), parameter in parameters.items()
    }
    collecting = {
        stage: {
            (layer, name): _collecting(sequence, name, collectors[name, devices[stage]])
            for layer in layers
            for name in sequence.layers[layer].parameters
        }
        for stage, layers in layers_of.items()
    }
    return Placement(
        parameters=parameters,
        buffers={stage: _buffers(sequence, names, devices[stage], made) for stage, names in needed.items()},
        read_by={stage: _read(sequence, own, devices[stage], computing) for stage, own in collecting.items()},
        tied=_tied(sequence, plan, layout, collectors, collecting),
        rounded=tuple((tensor, parameters[key]) for key, tensor in computing.items()),
        cast=tuple((own, parameters[key]) for key, own in collectors.items() if own is not parameters[key]),
    )


def _lay_together(
    sequence: LayerSequence,
    layers_of: Mapping[int, range],
    devices: Mapping[int, torch.device],
    read: Mapping[tuple[str, torch.device], Tensor],
) -> None:
    """On each device the weights of recurrent networks, of tensors that were made for it."""
    for device in {*devices.values()}:
        layers = {layer for stage, own in layers_of.items() if devices[stage] == device for layer in own}
        made = {
            name: tensor
            for (name, there), tensor in read.items()
            if there == device and sequence.parameters[name].device != device
        }
        lay_together([sequence.layers[layer] for layer in layers], made)


def _where_read(
    sequence: LayerSequence, layers_of: Mapping[int, range], devices: Mapping[int, torch.device]
) -> list[tuple[str, torch.device]]:
    """Each parameter with each device whose layers read it, in the order of parameters and then of stages."""
    used = {
        (name, devices[stage])
        for stage, layers in layers_of.items()
        for layer in layers
        for name in sequence.layers[layer].parameters
    }
    each = ((name, device) for name in sequence.parameters for device in devices.values())
    return [*dict.fromkeys(key for key in each if key in used)]


def _buffers(
    sequence: LayerSequence,
    names: Collection[str],
    device: torch.device,
    made: Mapping[tuple[str, torch.device], Tensor],
) -> dict[str, Tensor]:
    """Those of a stage, on its device."""
    return {
        name: made.get((name, device), buffer).to(device, buffer.dtype)
        for name, buffer in sequence.buffers.items()
        if name in names
    }


def _read(
    sequence: LayerSequence,
    collecting: Mapping[tuple[int, str], Tensor],
    device: torch.device,
    computing: Mapping[tuple[str, torch.device], Tensor],
) -> dict[tuple[int, str], Tensor]:
    """What a stage's layers read for their parameters, from what collects the gradients of these."""
    return {
        (layer, name): adding_to(tensor, computing[name, device])
        if tensor.dtype != sequence.parameters[name].dtype
        else tensor
        for (layer, name), tensor in collecting.items()
    }


def _without_memory(tensors: Sequence[tuple[str, torch.device, Tensor]]) -> dict[str, set[torch.device]]:
    """Names of tensors that lie on the meta device, with the devices that need them."""
    found: dict[str, set[torch.device]] = {}
    for name, device, tensor in tensors:
        if tensor.is_meta:
            found.setdefault(name, set()).add(device)
    return found


def _collecting(sequence: LayerSequence, name: str, collector: Tensor) -> Tensor:
    """What collects a parameter's gradient in one layer: of a tied one each layer has its own."""
    return accumulator_of(collector) if name in sequence.tied else collector


def _trained(sequence: LayerSequence, name: str, original: nn.Parameter) -> nn.Parameter:
    """What is trained for a parameter that layers compute with: itself, or its master weight."""
    computing = sequence.parameters[name]
    dtype = main_dtype(sequence.sample.precision, computing)
    if dtype == computing.dtype:
        return computing
    if original.dtype == dtype:
        return original
    return nn.Parameter(original.detach().to(dtype), requires_grad=original.requires_grad)


def _computing(parameter: nn.Parameter, device: torch.device) -> Tensor:
    """What layers compute with in place of a master weight: the traced parameter, or one like it on the device."""
    if parameter.device == device:
        return parameter.detach()
    return torch.empty_like(parameter, device=device, requires_grad=False)


def _collector(sequence: LayerSequence, name: str, parameter: nn.Parameter, computing: Tensor | None) -> Tensor:
    """What has a parameter's gradient while it is added up: itself, or a leaf of what layers compute with."""
    if computing is None or adding_dtype(sequence.sample.precision, sequence.parameters[name]) == parameter.dtype:
        return parameter
    return computing.detach().requires_grad_(parameter.requires_grad)


def of_no_layer(model: nn.Module, sequence: LayerSequence, materialize: Materialize) -> dict[str, Tensor]:
    """Parameters and buffers of the model's state that no layer reads; the first stage holds them."""
    read = {*sequence.parameters, *sequence.buffers}
    used = {alias for name in read for alias in sequence.aliases.get(name, ())}
    whole: dict[str, Any] = model.state_dict(keep_vars=True)
    unread = {name: held for name, held in whole.items() if name not in used and isinstance(held, Tensor)}
    bare = {name: [HOST] for name, held in unread.items() if held.is_meta}
    made = materialize(bare) if bare else {}
    return {name: made.get((name, HOST), held) for name, held in unread.items()}


def _parameter(parameter: nn.Parameter, device: torch.device, made: Tensor | None) -> nn.Parameter:
    """The parameter on a device: the model's own if it lies there, `made` if it lies nowhere, else a copy."""
    if parameter.device == device:
        return parameter
    value = parameter.detach().to(device) if made is None else made.to(parameter.dtype)
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


def buffer_names(sequence: LayerSequence, layers: range) -> set[str]:
    """All buffers that the layers, their statistics or a prelude may read."""
    names = sequence.names_read(layers) | set(sequence.prelude_of(sorted(sequence.prelude_names)).buffers)
    return names & sequence.buffers.keys()


def _tied(
    sequence: LayerSequence,
    plan: Plan,
    layout: Layout,
    collectors: Mapping[tuple[str, torch.device], Tensor],
    read_by: Mapping[int, Mapping[tuple[int, str], Tensor]],
) -> tuple[TiedParameter, ...]:
    """Tied parameters of this process."""
    process_of = {
        layer: layout.process_of[index]
        for index, stage in enumerate(plan.stages)
        for layer in range(stage.first_layer, stage.stop_layer)
    }
    own = {key: tensor for stage in read_by.values() for key, tensor in stage.items()}
    return tuple(
        TiedParameter(
            name=name,
            number=number,
            copies=tuple(own for (held, _), own in collectors.items() if held == name),
            accumulators=tuple(own[layer, name] for layer in sorted(layers) if (layer, name) in own),
            users=users_of(layers, process_of),
        )
        for number, (name, layers) in enumerate(sequence.tied.items())
        if any((layer, name) in own for layer in layers)
    )
