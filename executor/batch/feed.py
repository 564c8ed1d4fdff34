"""Where the data of a call come from: every rank, or rank 0 alone, which hands them to those that read them.

    rank 0                          rank 1 (middle)             rank 2 (last stage)
    step(x, target=y)               step()                      step()
      what the batch looks like ---->---------------------------->
      mask (all stages read it) ---->---------------------------->
      y    (the loss reads it)  --------------------------------->
    0F0 0SEND_F0 ...

Each process gets in one go what its stages read, of the samples of its replica, before its first action; what stage 0
alone reads does not travel. Rank 0 sends from the caller's own memory and computes meanwhile; a copy is made only of
what is not contiguous, or not on the CPU, and one for all that read it. Data travel over gloo, from CPU to CPU.

`Feed.batches` lets all ranks go through a loader together that rank 0 alone reads. The others get stand-ins: tensors
without data on the meta device, with which a loop may do as with any other (`executor.batch.stand_in`). Given those, a
rank brings no data.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from executor.batch.calls import Batch, BatchForm, Call, Calls, Part
from executor.batch.stand_in import StandIn
from executor.batch.words import Words
from executor.layout import Layout
from executor.run.message import MessageForm, TensorSpec
from executor.run.micro_batch import shapes_of
from executor.watch.agreement import BATCH, CALL, CONTENT, DATA, TARGET, Brings, Given
from executor.watch.contents import digest_of_data
from executor.watch.position import Phase
from executor.watch.watch import Watch
from profiler.errors import ArgumentError
from profiler.machine.backend import HOST
from profiler.machine.channel import Pending, end_at, finish
from profiler.sample_spec import TensorLeaf
from profiler.text import raised_text
from profiler.tracing.sample import torch_dtype

_PIECES_TAG = 64  # after those of the words
_OF_LOADER, _OF_CALL = 0, 1  # subjects of words
_END = object()


@dataclass(frozen=True, slots=True)
class _DescribedTensor:
    """A tensor in the description of a tree, by what it looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _DescribedTensor:
        """For a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def tensor(self) -> Tensor:
        """A tensor that looks like it and has no data."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class Feed:
    """Understands what a call is given, wherever it comes from.

    Args:
        calls: of this process.
        layout: of this process.
        watch: of this process.
        group: process group for tensors on the CPU; None for the default one.
    """

    def __init__(self, calls: Calls, layout: Layout, watch: Watch, group: dist.ProcessGroup | None) -> None:
        self._calls = calls
        self._layout = layout
        self._watch = watch
        self._group = group
        self._under_way: list[tuple[Pending, list[Tensor]]] = []
        self._expected: tuple[bytes, BatchForm, Part, MessageForm] | None = None  # as rank 0 last described a batch
        if not layout.alone:
            self._of_loader = Words(_OF_LOADER, layout, group)
            self._of_call = Words(_OF_CALL, layout, group)

    def given(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Given:
        """What the ranks must have in common before they exchange a message of a call, or its size would be wrong."""
        if self._layout.alone:
            return {CALL: kind}
        inputs, targets = [*_leaves(args), *_leaves(kwargs)], _leaves(target)
        brings = _brings(inputs, targets)
        if brings is not Brings.ALL:
            return {CALL: kind, DATA: brings}
        given = {CALL: kind, DATA: brings, BATCH: shapes_of(inputs), TARGET: shapes_of(targets)}
        if self._watch.from_first(kind) is None:
            given |= zip(CONTENT, (digest_of_data(inputs), digest_of_data(targets)), strict=True)
        return given

    def call(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, *, training: bool) -> Call:
        """This process's micro-batches of a call, inside of it.

        Raises:
            ArgumentError: the arguments differ from what the model was traced with, or there are none.
        """
        calls, layout = self._calls, self._layout
        from_first = not layout.alone and self._watch.from_first(kind)
        if from_first and layout.process > 0:
            self._watch.log.phase(Phase.HANDING_OUT)
            form, part = self._receive()
            self._watch.log.phase(Phase.PREPARATION)
            return calls.cut(form, part)
        if layout.alone:
            _refuse_no_data(kind, [*_leaves(args), *_leaves(kwargs)])
        batch = calls.understood(args, kwargs, target, training=training, may_lack=kind == "predict")
        if from_first:
            self._hand_out(batch)
        elif not layout.alone:
            self._watch.note_contents([args, kwargs, target])
        return calls.cut(batch.form, calls.part(batch, layout.process))

    def end(self) -> None:
        """Wait until what this rank hands out has left; the caller may change its tensors then."""
        while self._under_way:
            finish(self._under_way.pop()[0])
        if not self._layout.alone:
            self._of_call.finish()

    def batches(self, loader: Iterable[Any] | None) -> Iterator[Any]:
        """Each batch of rank 0's loader; stand-ins on the others."""
        number = 0
        batches: Iterator[Any] = iter(())
        while True:
            # The ranks compare what they do at the first batch; the words themselves keep them together from there on,
            # unless some have gone on to another call.
            with self._watch.call(Phase.READING, {CALL: "batches"}, settled=number > 0):
                if self._layout.process > 0:
                    batch = self._hear_of_batch()
                else:
                    if number == 0:
                        batches = _iterator_of(loader)
                    batch = next(batches, _END)
                    self._tell_of_batch(batch)
            if batch is _END:
                return
            yield batch
            number += 1

    def _tell_of_batch(self, batch: Any) -> None:
        if self._layout.alone:
            return
        self._watch.log.phase(Phase.HANDING_OUT)
        self._of_loader.tell(b"" if batch is _END else _pickled(_described(batch)))
        if batch is _END:
            self._of_loader.finish()

    def _hear_of_batch(self) -> Any:
        self._watch.log.phase(Phase.HANDING_OUT)
        text = self._of_loader.hear()
        return pytree.tree_map_only(Tensor, _movable, _with_stand_ins(pickle.loads(text))) if text else _END

    def _hand_out(self, batch: Batch) -> None:
        """Begin to send all others what they read of a batch; on rank 0."""
        self._of_call.tell(_pickled((batch.form, _described(batch.target))))
        copies: dict[tuple[Any, ...], Tensor] = {}
        for process in range(1, self._layout.processes):
            tensors = [_sendable(tensor, copies) for tensor in _tensors_of(self._calls.part(batch, process))]
            pieces = _message_of(tensors).pack(tensors)
            self._under_way.append((end_at(process, self._group).send(pieces, _PIECES_TAG), pieces))

    def _receive(self) -> tuple[BatchForm, Part]:
        """What this process reads of rank 0's batch; on all others."""
        text = self._of_call.hear()
        if self._expected is None or self._expected[0] is not text:
            self._watch.log.phase(Phase.PREPARATION)
            form, part = self.understood(text)
            self._expected = text, form, part, _message_of(_tensors_of(part))
            self._watch.log.phase(Phase.HANDING_OUT)
        _, form, part, message = self._expected
        pieces = message.buffers()
        finish(end_at(0, self._group).receive(pieces, _PIECES_TAG))
        received = iter(message.unpack(pieces))
        inputs = {name: next(received) for name in part.inputs}
        return form, Part(inputs, pytree.tree_map_only(Tensor, lambda _: next(received), part.target))

    def understood(self, text: bytes) -> tuple[BatchForm, Part]:
        """What rank 0 says of a batch, and what this process reads of it, without data: another shape is traced."""
        form, target = pickle.loads(text)
        whole = Batch(form, _inputs_like(form, self._calls.batch_dims(form)), _with_stand_ins(target))
        return form, self._calls.part(whole, self._layout.process)


def _leaves(tree: Any) -> list[Any]:
    """`pytree.tree_leaves`, which takes ten times as long for one tensor, or a plain tuple of them."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) is tuple and all(isinstance(leaf, Tensor) for leaf in tree):
        return list(tree)
    return [] if type(tree) is dict and not tree else pytree.tree_leaves(tree)


def _brings(inputs: Sequence[Any], targets: Sequence[Any]) -> Brings:
    """What a call was given; a stand-in says that this rank has no data, whatever it was computed together with."""
    tensors = [leaf for leaf in inputs if isinstance(leaf, Tensor)]
    aims = [leaf for leaf in targets if isinstance(leaf, Tensor)]
    if any(tensor.is_meta for tensor in (*tensors, *aims)):
        return Brings.NOTHING
    if not tensors:
        return Brings.TARGET_ALONE if aims else Brings.NOTHING
    return Brings.ALL


def _refuse_no_data(kind: str, leaves: Sequence[Any]) -> None:
    """Refuse a call without tensors, in a process that nobody else gives them."""
    if _brings(leaves, []) is Brings.ALL:
        return
    others = list(dict.fromkeys(type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor | None)))
    if others:
        raise ArgumentError(
            f"{kind} was given {', '.join(others)} and no tensor; pass what the model is called with, made by "
            "torch.as_tensor where need be"
        )
    raise ArgumentError(f"{kind} was given no data; pass what the model is called with")


def _iterator_of(loader: Iterable[Any] | None) -> Iterator[Any]:
    if loader is None:
        raise ArgumentError("rank 0 was given no loader, and it alone reads one; pass its loader to batches on rank 0")
    return iter(loader)


def _described(tree: Any) -> Any:
    """A tree with descriptions in the place of tensors; it travels as a whole."""
    return pytree.tree_map_only(Tensor, _DescribedTensor.of, tree)


def _with_stand_ins(described: Any) -> Any:
    """The tree that was described, with tensors without data."""
    return pytree.tree_map_only(_DescribedTensor, _DescribedTensor.tensor, described)


def _movable(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(StandIn)


def _pickled(described: Any) -> bytes:
    try:
        return bytes(cloudpickle.dumps(described))
    except Exception as problem:
        raise ArgumentError(
            f"the batch holds what cannot be sent to the other ranks ({raised_text(problem)}); let it "
            "consist of tensors, numbers and strings"
        ) from problem


def _inputs_like(form: BatchForm, dims: Mapping[str, int | None]) -> dict[str, Tensor]:
    """All inputs of the model for such a batch, without data."""
    leaves = (leaf for leaf in form.spec.leaves if isinstance(leaf, TensorLeaf))
    inputs = {}
    for (name, dim), leaf in zip(dims.items(), leaves, strict=True):
        shape = tuple(form.batch_size if position == dim else extent for position, extent in enumerate(leaf.shape))
        inputs[name] = _DescribedTensor(shape, torch_dtype(leaf.dtype)).tensor()
    return inputs


def _tensors_of(part: Part) -> list[Tensor]:
    """What of a part travels, in the order in which it does."""
    return [*part.inputs.values(), *(leaf for leaf in pytree.tree_leaves(part.target) if isinstance(leaf, Tensor))]


def _message_of(like: Sequence[Tensor]) -> MessageForm:
    return MessageForm([TensorSpec(tuple(t.shape), tuple(range(t.dim())), t.dtype) for t in like], HOST)


def _sendable(tensor: Tensor, copies: dict[tuple[Any, ...], Tensor]) -> Tensor:
    """The tensor as it can be sent: itself, or the one copy of it for all that read it."""
    if tensor.device == HOST and tensor.is_contiguous():
        return tensor.detach()
    key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    if key not in copies:
        copies[key] = tensor.detach().to(HOST).contiguous()
    return copies[key]
