"""The layers against the model itself: one micro-batch through both, with the same random numbers.

A graph holds what a model does with tensors. What it keeps in other places (a counter in a helper, a list, a module of
Python) is a constant of the graph, and a graph cannot know. So both are run on real data, and what differs by more than
rounding is told, with the first layer in which the forward passes part.

How far rounding alone may carry a model depends on the model: where the difference is not obviously rounding, the
model's parameters are moved by the last bit of what it computes in, and what that changes is the measure. A model with
autocast regions of its own computes in lower precision there and nowhere else, and casts alike in both runs: what
remains may be what a last bit of that precision changes, and not many times as much.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from profiler.errors import UnfaithfulTraceError
from profiler.observe.ambient import as_in_training
from profiler.observe.drawn_from import drawn_from
from profiler.observe.elsewhere import generators_reached, lasting_spots, put_spots_back, spots_of_function
from profiler.observe.random_states import drawing_on, generators_in, generators_of, preserved, seeded, state_of
from profiler.observe.type_checkers import checkers_of, first_items_checked
from profiler.observe.untouched import untouched
from profiler.run.layouts import write_in_place
from profiler.run.loss import LossFunction, copy_of, loss_of, model_output
from profiler.run.parting import Seen, first_unseen
from profiler.run.stage_function import StageFunction
from profiler.sample_spec import TensorLeaf
from profiler.text import raised_text
from profiler.torch_private import NormBase
from profiler.tracing.export import autocasting
from profiler.tracing.regions import autocast_dtypes
from profiler.tracing.sample import arguments_of, torch_dtype
from profiler.tracing.sequence import LayerSequence

# A gradient that is zero but for rounding (of a key's bias, say) has no scale of its own: differences are relative to
# its own largest magnitude, or to this share of the largest of any parameter's if that is more.
SMALLEST_SCALE = 1e-4
ROUNDING = 1e-4  # up to here a difference is rounding in float32 [535 models of the survey: all but 3 below 1e-5]
TIMES_ROUNDING = 30.0  # a difference may be so many times what a last bit of the parameters changes [chosen]
_SEED = 20181116  # of both runs


@dataclass(frozen=True)
class Outcome:
    """What one forward and backward pass yields.

    Attributes:
        loss: a scalar.
        gradients: by the name of the parameter; only of parameters that got one.
    """

    loss: Tensor
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """How far two outcomes are from each other.

    Attributes:
        relative: the largest of loss and gradients, relative to their scale.
        where: "the loss", or the name of the parameter whose gradient it is.
    """

    relative: float
    where: str


@dataclass(frozen=True)
class Trial:
    """A model, its layers, and a micro-batch to run both on, where the model lies.

    Attributes:
        model: the model as the user has it.
        modes: of each of its modules whether it was in training mode when it was traced.
        sequence: its layers.
        inputs: the model's inputs by name.
        target: what the loss is computed with.
        loss_fn: None if the model computes its loss itself.
    """

    model: nn.Module
    modes: Sequence[bool]
    sequence: LayerSequence
    inputs: Mapping[str, Tensor]
    target: Any
    loss_fn: LossFunction | None

    def compare(self) -> Difference:
        """How far the layers are from the model; it is left as it was, its gradients included.

        Raises:
            UnfaithfulTraceError: further than rounding explains, and the message names the first layer where they part;
                or the model raises an error where the layers do not.
            Exception: both do.
        """
        with as_in_training():
            try:
                with self._undisturbed():
                    expected = self._eager()
                    itself = worst(differences(self._eager(), expected))
            except UnfaithfulTraceError:
                raise
            except Exception as problem:
                with self._undisturbed():
                    self._layers()  # what both raise is the step's to tell
                raise UnfaithfulTraceError(
                    f"for the first micro-batch the model raises {raised_text(problem)}; its layers do not; {_CURE}"
                ) from problem
            if itself.relative > ROUNDING and worst(differences(self._eager_later(), expected)).relative > ROUNDING:
                raise UnfaithfulTraceError(
                    "called twice with the same data and the same random numbers, the model gives another result, by "
                    f"{itself.relative:.1e} of {itself.where}: it keeps something between forward or backward passes "
                    "outside of its buffers, or draws random numbers of its own, which layers cannot; let it be a "
                    f"buffer, or {_ANYWAY}"
                )
            with self._undisturbed():
                found = differences(self._layers(), expected)
            if worst(found).relative <= ROUNDING:
                return worst(found)
            rounding = self._rounding(expected)
            explained = {where: max(ROUNDING, TIMES_ROUNDING * relative) for where, relative in rounding.items()}
            lower = max(self._dtypes_of_regions(), key=_last_bit, default=None)
            if lower is not None:
                for where, relative in self._rounding(expected, at_least=_last_bit(lower)).items():
                    rounding[where] = max(relative, rounding[where])
                    explained[where] = max(relative, explained[where])
            beyond = {where: relative for where, relative in found.items() if relative > explained.get(where, ROUNDING)}
            if not beyond:
                return worst(found)
            most = worst(beyond)
            raise UnfaithfulTraceError(
                f"for the first micro-batch the layers differ from the model by {most.relative:.1e} of {most.where}, "
                f"where rounding explains {rounding.get(most.where, 0.0):.1e}; {self._place()}; {_CURE}"
            )

    def _eager_later(self) -> Outcome:
        """By calling the model once more, with all that another call has left, in its buffers too.

        A cache may lie in a buffer and be known to be there by an attribute.
        """
        with self._undisturbed(), self._afresh():
            self._eager(buffers_stay=True)
            return self._eager(buffers_stay=True)

    def _eager(
        self, watch: contextlib.AbstractContextManager[object] | None = None, *, buffers_stay: bool = False
    ) -> Outcome:
        """By calling the model itself."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        names |= {id(parameter): name for name, parameter in self.sequence.parameters.items()}
        with self._afresh(buffers_stay=buffers_stay):
            loss = self._called(watch)
            versions = self._versions()
            if loss.requires_grad:
                loss.backward()
            self._refuse_written(versions)
            gradients = {names[id(p)]: _dense(p.grad) for p in self.model.parameters() if p.grad is not None}
            return Outcome(loss.detach(), gradients)

    def changed_by_the_loss(self) -> str:
        """A name of what the loss function keeps from call to call; "" if it keeps nothing that is seen."""
        with self._undisturbed(), self._afresh():
            begin, versions = spots_of_function(self.loss_fn), self._versions_of_loss()
            with seeded(drawn_from(self.loss_fn).generators, 0):  # which a step seeds, too
                self._called()
            changed = lasting_spots(begin, spots_of_function(self.loss_fn))
            written = [name for name, version in self._versions_of_loss().items() if versions.get(name) != version]
        return next(iter((*(spot.name.lstrip(".") for spot in changed), *written)), "")

    def _versions_of_loss(self) -> dict[str, int]:
        loss = self.loss_fn
        return {name: held._version for name, held in loss.named_buffers()} if isinstance(loss, nn.Module) else {}

    def _versions(self) -> dict[str, int]:
        """How often each buffer has been written, those apart that torch's checkpoints write again."""
        return {
            f"{path}.{name}" if path else name: buffer._version
            for path, module in self.model.named_modules()
            if not isinstance(module, NormBase)
            for name, buffer in module.named_buffers(recurse=False)
        }

    def _refuse_written(self, before: Mapping[str, int]) -> None:
        now = self._versions()
        written = [name for name, version in before.items() if now.get(name, version) != version]
        if written:
            raise UnfaithfulTraceError(
                f"the model's backward pass writes its buffer {written[0]!r}, which micro-batches in a pipeline would "
                f"read in another order; write it in the forward pass, or {_ANYWAY}"
            )

    def _called(self, watch: contextlib.AbstractContextManager[object] | None = None) -> Tensor:
        """The loss, of which the model's own code is watched."""
        spec, device = self.sequence.sample, self.sequence.device
        tensors = iter([self.inputs[name].clone() for name in self.sequence.inputs])
        leaves = [next(tensors) if isinstance(leaf, TensorLeaf) else leaf.value for leaf in spec.leaves]
        call = arguments_of(spec, leaves)
        with autocasting(spec, device):
            with watch or contextlib.nullcontext(), first_items_checked(checkers_of(self.model)):
                output = self.model(*call.args, **call.kwargs)
            return loss_of(output, copy_of(self.target), self.loss_fn)

    def _layers(self) -> Outcome:
        """By the layers, all in one."""
        sequence, copies = self.sequence, self._copies()
        with self._afresh():
            whole = StageFunction(sequence, 0, len(sequence), copies, device=sequence.device)
            with drawing_on():
                values = whole.forward({}, self.inputs, sequence.buffers).values
            with whole.autocasting():
                loss = loss_of(model_output(sequence, values), copy_of(self.target), self.loss_fn)
            if loss.requires_grad:
                loss.backward()
        gradients: dict[str, Tensor] = {}
        for (_, name), copy in copies.items():
            if copy.grad is not None:
                gradient = _dense(copy.grad)
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        return Outcome(loss.detach(), gradients)

    def _copies(self) -> dict[tuple[int, str], Tensor]:
        """A leaf for each layer and parameter, sharing its memory."""
        return {
            (layer.index, name): parameter.detach().requires_grad_(parameter.requires_grad)
            for layer in self.sequence.layers
            for name in layer.parameters
            for parameter in (self.sequence.parameters[name],)
        }

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Within, the model is in the modes that it was traced in; afterwards all of Python's is as it was."""
        device = self.sequence.device
        with contextlib.ExitStack() as stack:
            stack.enter_context(preserved([device]))
            for module in self._modules:
                stack.enter_context(untouched(module))
            for module, mode in zip(self.model.modules(), self.modes, strict=True):
                module.training = mode
            yield

    @contextlib.contextmanager
    def _afresh(self, *, buffers_stay: bool = False) -> Iterator[None]:
        """Within, gradients are empty and random numbers begin alike; afterwards those and buffers are as before.

        Args:
            buffers_stay: as the block leaves them.
        """
        device = self.sequence.device
        parameters = [parameter for module in self._modules for parameter in module.parameters()]
        gradients = [parameter.grad for parameter in parameters]
        parts = [part for module in self._modules for part in module.modules()]
        buffers = [
            (part, name, buffer, buffer.clone()) for part in parts for name, buffer in part.named_buffers(recurse=False)
        ]
        known = {id(buffer) for _, _, buffer, _ in buffers}
        constants = [(held, held.clone()) for held in self.sequence.buffers.values() if id(held) not in known]
        if buffers_stay:
            buffers, constants = [], []
        own = generators_in(value for part in parts for value in vars(part).values())
        own += tuple(generator for module in self._modules for generator in generators_reached(module))
        own += drawn_from(self.loss_fn).generators
        restore = [state_of(generator) for generator in own]
        loss_spots = spots_of_function(self.loss_fn)  # a step calls it once for each micro-batch
        for parameter in parameters:
            parameter.grad = None
        for generator in generators_of(device):
            generator.manual_seed(_SEED)
        random.seed(_SEED)
        np.random.seed(_SEED)
        try:
            yield
        finally:
            put_spots_back(loss_spots, spots_of_function(self.loss_fn))
            for put_back in filter(None, restore):
                put_back()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            with torch.no_grad():
                for part, name, buffer, kept in buffers:
                    write_in_place(buffer, kept)
                    setattr(part, name, buffer)  # some models put another tensor in its place
                for constant, kept in constants:
                    write_in_place(constant, kept)

    @property
    def _modules(self) -> list[nn.Module]:
        """The model, and what the loss function is or belongs to."""
        owner = getattr(self.loss_fn, "__self__", self.loss_fn)
        return [self.model, owner] if isinstance(owner, nn.Module) else [self.model]

    def _dtypes_of_regions(self) -> set[torch.dtype]:
        """In which autocast regions of the model's own let it compute."""
        kind = self.sequence.device.type
        roots = (getattr(layer.function, "__self__", None) for layer in self.sequence.layers)
        return {dtype for root in roots if isinstance(root, fx.GraphModule) for dtype in autocast_dtypes(root, kind)}

    def _rounding(self, expected: Outcome, at_least: float = 0.0) -> dict[str, float]:
        """What the model itself changes by when each of its parameters moves by a last bit, as `differences` has it.

        Args:
            expected: without.
            at_least: the last bit, if that of what the parameters are computed in is finer.
        """
        autocast = self.sequence.sample.autocast
        parameters = [parameter for parameter in self.model.parameters() if parameter.is_floating_point()]
        kept = [parameter.data for parameter in parameters]
        largest: dict[str, float] = {}
        try:
            for seed in range(2):
                chance = torch.Generator(self.sequence.device).manual_seed(seed)
                for parameter, before in zip(parameters, kept, strict=True):
                    last_bit = max(at_least, _last_bit(torch_dtype(autocast) if autocast else parameter.dtype))
                    signs = torch.randint(0, 2, before.shape, generator=chance, device=before.device) * 2 - 1
                    parameter.data = before * (1 + last_bit * signs).to(before.dtype)
                with self._undisturbed():
                    moved = differences(self._eager(), expected)
                largest = {where: max(relative, largest.get(where, 0.0)) for where, relative in moved.items()}
        finally:
            for parameter, before in zip(parameters, kept, strict=True):
                parameter.data = before
        return largest

    def _place(self) -> str:
        """Where the forward passes part, in words."""
        seen = Seen()
        with self._undisturbed():
            self._eager(watch=seen)
        with self._undisturbed(), self._afresh(), drawing_on(), torch.no_grad():
            layer = first_unseen(self.sequence, self._copies(), self.inputs, seen)
        if layer is None:
            return "their forward passes agree, the backward passes do not"
        modules = " to ".join(dict.fromkeys(path or "the model" for path in _ends(layer.module_paths)))
        return f"they part in layer {layer.index}, {modules or layer.name}" + (
            f" ({layer.source})" if layer.source else ""
        )


def _last_bit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


_ANYWAY = "train the layers as they are: Pipeline(..., compare_first_step=False)"
_CURE = f"name the module in keep_together=[...], which calls it as it is, or {_ANYWAY}"


def _ends(paths: Sequence[str]) -> tuple[str, ...]:
    return (paths[0], paths[-1]) if paths else ()


def differences(found: Outcome, expected: Outcome) -> dict[str, float]:
    """How far loss and gradients are apart, each relative to its scale; no gradient counts as one with zeros."""
    names = found.gradients.keys() | expected.gradients.keys()
    scales = {name: _magnitude(gradient) for name, gradient in expected.gradients.items()}
    floor = SMALLEST_SCALE * max(scales.values(), default=0.0)
    apart = {"the loss": _apart(found.loss, expected.loss) / max(_magnitude(expected.loss), _TINY)}
    for name in sorted(names):
        gap = _apart(found.gradients.get(name), expected.gradients.get(name))
        apart[f"the gradient of {name}"] = gap / max(scales.get(name, 0.0), floor, _TINY)
    return apart


def worst(apart: Mapping[str, float]) -> Difference:
    """The largest of some differences."""
    where = max(apart, key=apart.__getitem__)
    return Difference(apart[where], where)


_TINY = torch.finfo(torch.float32).tiny


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _magnitude(tensor: Tensor) -> float:
    finite = tensor.detach().nan_to_num(0.0, 0.0, 0.0).abs()
    return float(finite.max()) if finite.numel() else 0.0


def _apart(one: Tensor | None, other: Tensor | None) -> float:
    """Largest difference of two tensors, of which one may be missing; infinite if only one of two is not finite."""
    if one is None or other is None:
        present = one if other is None else other
        return 0.0 if present is None else _magnitude(present)
    same = (one == other) | (one.isnan() & other.isnan())
    gap = (one.detach() - other.detach()).abs().masked_fill(same, 0.0)
    return float(gap.nan_to_num(float("inf")).max()) if gap.numel() else 0.0
