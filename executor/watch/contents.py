"""Digests of what a rank is given: inputs on one rank and targets on another must be of the same samples.

Where every rank brings its own batch, the shapes agree also when the samples do not: processes that shuffle with seeds
of their own train the last stage on targets of other samples than the first stage's inputs, and nothing but the loss
shows it. So at the first call of each kind the ranks compare a digest of every byte. Of every sixteenth call each rank
looks at some elements, others each time, and keeps a running digest:

    call        16       32       48       64             samples of call 32 differ: so do all running digests after it
    rank 0      a17      b20      c99      d31
    rank 1      a17      e55      f08      a62   -------> "contents": [64, a62], with the beat of a quarter of a second

Rank 0 judges, so the error has one author. What is on another device is copied to the host without a wait and counts
as soon as it is there.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from executor.watch.failure import FirstCause
from profiler.errors import ArgumentError
from profiler.machine.backend import HOST, backend_of

WHAT_TO_DO = (
    "give rank 0 alone the data and the others none, as pipe.batches(loader) does, or give every rank the same samples "
    "in the same order: seed every process alike before a loader shuffles"
)
EVERY = 16  # calls; of every fourth, looking took 2 % of a step of 2 ms [measured]
LOOKED_AT = 64  # elements of each tensor and call
REMEMBERED = 1024  # looks; a beat tells of one at most a quarter of a second old
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def digest_of_data(tree: Any) -> str:
    """A digest of every byte of a tree's tensors, and of its other leaves."""
    found = hashlib.blake2b(digest_size=8)
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            dense = leaf.detach().to_dense() if leaf.layout is not torch.strided else leaf.detach()
            found.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
            found.update(_bytes_of(dense.to(HOST).contiguous().reshape(-1)).data)
        else:
            found.update(_of_other(leaf))
    return found.hexdigest()


class Contents:
    """The running digest of one rank, and what it has heard of the others'.

    Args:
        rank: of this process.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._calls = 0
        self._running = b""
        self._pending: deque[tuple[int, list[Tensor | bytes], list[Callable[[], bool]]]] = deque()
        self._known: OrderedDict[int, str] = OrderedDict()  # by number of the call
        self._heard: dict[int, tuple[int, str]] = {}  # by rank: the last

    def note(self, number: int, tree: Any) -> None:
        """This rank was given these data for a call."""
        self._calls += 1
        if self._calls % EVERY == 0:
            self._look(number, pytree.tree_leaves(tree))

    def _look(self, number: int, leaves: Sequence[Any]) -> None:
        parts: list[Tensor | bytes] = []
        arrived = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                parts.append(_of_other(leaf))
            elif leaf.layout is torch.strided and leaf.numel():
                some, has_arrived = backend_of(leaf.device).to_host(_some_of(leaf, self._calls // EVERY))
                parts.append(some)
                arrived.append(has_arrived)
        self._pending.append((number, parts, arrived))
        self._take_in()

    def _take_in(self) -> None:
        """What has arrived on the host becomes part of the running digest, in the order of the calls."""
        while self._pending:
            number, parts, arrived = self._pending[0]
            if not all(has_arrived() for has_arrived in arrived):
                return
            self._pending.popleft()
            raw = (_bytes_of(part).tobytes() if isinstance(part, Tensor) else part for part in parts)
            self._running = hashlib.blake2b(b"".join((self._running, *raw)), digest_size=8).digest()
            self._known[number] = self._running.hex()
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)

    def latest(self) -> tuple[int, str] | None:
        """The last call whose digest is known, and the digest, for the others to hear."""
        return next(reversed(self._known.items()), None)

    def hear(self, rank: int, number: int, digest: str) -> None:
        """Another rank tells its running digest after a call."""
        self._heard[rank] = number, digest

    def difference(self) -> FirstCause | None:
        """The error if another rank was given something else; rank 0 alone finds it."""
        if self._rank != 0:
            return None
        for rank, (number, digest) in sorted(self._heard.items()):
            if self._known.get(number, digest) != digest:
                text = (
                    f"the ranks differ in the content of the batch or the target: rank {rank} was given other values "
                    f"than rank 0, though of the same shapes; {WHAT_TO_DO}"
                )
                return FirstCause(text, ArgumentError.__name__, rank)
        return None


def _some_of(tensor: Tensor, look: int) -> Tensor:
    """Some elements of a tensor, in the order of its dimensions, whatever its layout in memory."""
    stride = -(-tensor.numel() // LOOKED_AT)  # moved on by one at each look they come by every element
    first = look % stride
    plain = tensor.detach()
    if plain.is_contiguous():
        return plain.view(-1)[first::stride].clone()  # the caller may change its tensors before all have arrived
    return plain.take(torch.arange(first, tensor.numel(), stride, device=tensor.device))


def _bytes_of(flat: Tensor) -> numpy.ndarray[Any, Any]:
    """The bits of a vector, those of what is not a number included."""
    plain = flat.resolve_conj().resolve_neg()
    bits = _BITS.get(plain.itemsize)
    return (torch.view_as_real(plain) if bits is None or plain.is_complex() else plain.view(bits)).numpy()


def _of_other(leaf: Any) -> bytes:
    """A leaf that is no tensor; of what may print its address in memory only the kind counts."""
    if leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes | numpy.generic):
        return repr(leaf).encode()
    if isinstance(leaf, numpy.ndarray) and leaf.dtype != object:
        return leaf.tobytes()
    return type(leaf).__qualname__.encode()
