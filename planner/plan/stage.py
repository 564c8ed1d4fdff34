"""A stage of a plan, and the skips past it: its layers and devices, what it recomputes, its times and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, TypeVar

from pydantic import Field, model_validator

from profiler.device import Device
from profiler.field_types import Index, PredictedBytes, PredictedSeconds, Samples, Share
from profiler.quantities import shown
from profiler.value import Value


class Segment(Value):
    """Layers `first` to `stop - 1`, as a unit of recompute: of these layers a forward pass keeps only what enters.

    The backward phase recomputes a segment just before its backward pass, so one segment's activations are there at a
    time. The last segment of a stage is the first that goes back: it is recomputed by an action of its own, R, before
    the gradient of the stage's outputs arrives, and not at all where that backward pass follows the forward pass
    directly. The others are recomputed inside B.

    Attributes:
        first: index of its first layer.
        stop: index after its last layer.
    """

    first: Index
    stop: Index

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if self.stop <= self.first:
            raise ValueError(f"segment [{self.first}, {self.stop}) is empty")
        return self


class StageTimes(Value):
    """Predicted seconds of one stage for one micro-batch of a given size.

    Attributes:
        micro_batch_size: samples.
        forward_s: forward pass, action F, without copies of messages.
        recompute_s: recomputing the last recomputed segment, action R; 0 when all is kept.
        backward_s: backward pass, action B, with the recompute of all other segments.
        send_forward_s: sending the stage's outputs to the next stage; 0 for the last.
        send_backward_s: sending the gradients of the stage's inputs to the stage before; 0 for the first.
        weight_s: the part of the backward pass that is action W where the schedule splits it, and the rest is action I;
            0 for a schedule that does not.
    """

    micro_batch_size: Samples
    forward_s: PredictedSeconds
    recompute_s: PredictedSeconds
    backward_s: PredictedSeconds
    send_forward_s: PredictedSeconds
    send_backward_s: PredictedSeconds
    weight_s: PredictedSeconds = 0.0

    @model_validator(mode="after")
    def _part_of_backward(self) -> Self:
        if self.weight_s > self.backward_s:
            raise ValueError(f"weight_s is {self.weight_s}, and is a part of backward_s, which is {self.backward_s}")
        return self


class _Sends(Value):
    """What sends messages.

    Attributes:
        copied: shares of a message's seconds, of outputs as of gradients, in which its sender and its receiver copy it
            and do not compute; together less than 1.
    """

    copied: tuple[Share, Share] = Field(default=(0.0, 0.0), exclude_if=lambda shares: not any(shares))

    @model_validator(mode="after")
    def _is_under_way(self) -> Self:
        if sum(self.copied) >= 1:
            raise ValueError(f"copied is {list(self.copied)}; both shares together are less than 1")
        return self


class SkipTimes(Value):
    """Predicted seconds of a skip's messages for one micro-batch of a given size.

    Attributes:
        micro_batch_size: samples.
        send_forward_s: of the values.
        send_backward_s: of their gradients.
    """

    micro_batch_size: Samples
    send_forward_s: PredictedSeconds
    send_backward_s: PredictedSeconds


class Skip(_Sends):
    """Values that one stage sends to a later one past the stages between, which do not read them.

    Values that no skip names are relayed: every stage between passes them on to its neighbour. One that several stages
    read goes from each of these to the next, so its gradient is summed from the last reader to the first either way.

    Attributes:
        sender: stage that computes the values, or is the last before the receiver that reads them.
        receiver: the next stage that reads them.
        values: their names.
        times: one entry for each distinct micro-batch size of the plan.
        copied: shares of a message's seconds in which its sender and its receiver copy it and do not compute, together
            less than 1. Files leave it out where neither does.
    """

    sender: Index
    receiver: Index
    values: tuple[str, ...] = Field(min_length=1)
    times: tuple[SkipTimes, ...] = Field(min_length=1)

    @property
    def ends(self) -> tuple[int, int]:
        """Sender and receiver."""
        return self.sender, self.receiver

    def passes_by(self, stage: int) -> bool:
        """Whether the values go past that stage."""
        return self.sender < stage < self.receiver

    def times_at(self, micro_batch_size: int) -> SkipTimes:
        """The predicted times for a micro-batch of that size (KeyError for a size that the plan has not)."""
        return _entry_at(self.times, micro_batch_size)


_Times = TypeVar("_Times", StageTimes, SkipTimes)


def _entry_at(times: Sequence[_Times], micro_batch_size: int) -> _Times:
    for entry in times:
        if entry.micro_batch_size == micro_batch_size:
            return entry
    raise KeyError(micro_batch_size)


def has_times_for(times: Sequence[StageTimes] | Sequence[SkipTimes], micro_batch_sizes: Sequence[int]) -> bool:
    """Whether there is one entry for each of these sizes."""
    sizes = [entry.micro_batch_size for entry in times]
    return sorted(sizes) == sorted(set(micro_batch_sizes))


def sizes_listed(times: Sequence[StageTimes] | Sequence[SkipTimes]) -> str:
    """The sizes that they are for, in a message."""
    return shown(sorted(entry.micro_batch_size for entry in times))


class StageMemory(Value):
    """Predicted peak bytes of one stage on its device, by class.

    Attributes:
        parameters: parameters and buffers.
        gradients: of trainable parameters.
        optimizer: state of the optimizer.
        activations: what all micro-batches in flight keep for the backward pass, stage inputs included.
        deferred: what micro-batches keep until the gradients of their parameters are made, where these have a pass of
            their own. It counts with the activations for the moment at which both together need most.
        transient: the largest moment on top of that (one recomputed micro-batch, temporaries).
        receive_buffers: messages under way: outputs and gradients, and with 1F1B inputs.
        reserve: fixed cost of the process and its allocator.
    """

    parameters: PredictedBytes
    gradients: PredictedBytes
    optimizer: PredictedBytes
    activations: PredictedBytes
    deferred: PredictedBytes = 0
    transient: PredictedBytes
    receive_buffers: PredictedBytes
    reserve: PredictedBytes

    @property
    def total(self) -> int:
        """Sum of all classes, to be compared with `Device.memory_bytes`."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.activations
            + self.deferred
            + self.transient
            + self.receive_buffers
            + self.reserve
        )


class Stage(_Sends):
    """A contiguous run of layers on one device.

    Attributes:
        first_layer: index of its first layer.
        stop_layer: index after its last layer.
        module_paths: first and last module path, for people.
        devices: where it runs in each of the R replicas, equal but for their names.
        rank: the process of each replica that runs it; which one of them all that is, `Plan.processes` says.
        parameters: names of its parameters (a tied parameter is named by every stage that uses it).
        parameter_count: elements of those parameters.
        recompute: segments that are recomputed in the backward phase, ascending and disjoint; the whole stage is
            `(first_layer, stop_layer)`, as GPipe does it.
        times: one entry for each distinct micro-batch size of the plan.
        all_reduce_s: predicted seconds of averaging its gradients over the replicas; 0 for one replica.
        optimizer_s: predicted seconds of the optimizer step.
        memory: predicted peak bytes.
        copied: of messages between the stage and the next one, in both directions, the shares of their seconds in which
            sender and receiver copy them and do not compute, together less than 1. Files leave it out where neither
            does.
    """

    first_layer: Index
    stop_layer: Index
    module_paths: tuple[str, str]
    devices: tuple[Device, ...] = Field(min_length=1)
    rank: Index
    parameters: tuple[str, ...]
    parameter_count: PredictedBytes
    recompute: tuple[Segment, ...] = ()
    times: tuple[StageTimes, ...] = Field(min_length=1)
    all_reduce_s: PredictedSeconds = 0.0
    optimizer_s: PredictedSeconds
    memory: StageMemory

    @property
    def device(self) -> Device:
        """Where it runs in the first replica."""
        return self.devices[0]

    def times_at(self, micro_batch_size: int) -> StageTimes:
        """The predicted times for a micro-batch of that size (KeyError for a size that the plan has not)."""
        return _entry_at(self.times, micro_batch_size)
