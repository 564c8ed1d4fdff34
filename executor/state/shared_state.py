"""What several ranks hold starts equal: it comes from the lowest rank that holds it.

Each process builds the whole model and draws its weights by itself. Of a parameter that one rank holds its values are
what counts. One that several hold (tied across stages; all of them where there are replicas) must not begin with a
different value in each, or it would go on as that many parameters; so with buffers that several stages read. After the
construction the ranks hold, as users of `DistributedDataParallel` expect, one model. Nothing else travels:

    replica 0   rank 0  embedding --.--> rank 1  head (tied)      rank 0 -> ranks 1, 2, 3   embedding
    replica 1   rank 2  embedding <-+--> rank 3  head (tied)      rank 1 -> rank 3          the rest of stage 1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from executor.layout import Layout
from executor.state.pieces import in_buckets, places
from executor.state.placement import Placement, buffer_names
from planner.plan.plan import Plan
from profiler.machine.channel import finish, start_receive, start_send
from profiler.run.layouts import write_in_place
from profiler.tracing.sequence import LayerSequence

STATE_TAG = 1  # the first stage receives no micro-batch, to whose messages tags as low would belong


@dataclass(frozen=True, slots=True)
class _Shared:
    """Something that several processes hold.

    Attributes:
        holders: these processes, ascending; the first one's value counts.
        copies: this process's tensors of it.
    """

    holders: tuple[int, ...]
    copies: tuple[Tensor, ...]


def share_state(
    sequence: LayerSequence, plan: Plan, layout: Layout, placement: Placement, unread: Mapping[str, Tensor]
) -> None:
    """Give what several processes hold the value that it has in the first of them.

    All processes call this. Who holds what is known to all, and they go through it in one order, that of the holders:
    so both ends of a message put the same into it, and no two wait for each other.

    Args:
        sequence: the model's layers.
        plan: says which stages read what.
        layout: of this process.
        placement: of this process.
        unread: state of the model that no layer reads, in the processes of the first stage.
    """
    if layout.alone:
        return
    held = [each for each in _held(sequence, plan, layout, placement, unread) if len(each.holders) > 1 and each.copies]
    with torch.no_grad():
        for holders, group in groupby(sorted(held, key=_by_holders), key=_by_holders):
            shared = list(group)
            for piece in in_buckets([each.copies[0] for each in shared]):
                _share(piece, holders, layout.process)
            for each in shared:
                for copy in each.copies[1:]:
                    write_in_place(copy, each.copies[0])


def _by_holders(shared: _Shared) -> tuple[int, ...]:
    return shared.holders


def _held(
    sequence: LayerSequence, plan: Plan, layout: Layout, placement: Placement, unread: Mapping[str, Tensor]
) -> Iterator[_Shared]:
    """Everything that this process holds, in the model's order."""
    layers = [range(stage.first_layer, stage.stop_layer) for stage in plan.stages]
    read = [{name for layer in own for name in sequence.layers[layer].parameters} for own in layers]
    for name in sequence.parameters:
        own = tuple(copy for (held, _), copy in placement.parameters.items() if held == name)
        yield _Shared(_holders(layout, [stage for stage, names in enumerate(read) if name in names]), own)
    read = [buffer_names(sequence, own) for own in layers]
    for name, original in sequence.buffers.items():
        buffers = tuple(own[name] for own in placement.buffers.values() if name in own)
        if buffers and name not in sequence.aliases:
            buffers += (original,)  # a constant: the graphs of evaluation, traced later, read the model's own
        yield _Shared(_holders(layout, [stage for stage, names in enumerate(read) if name in names]), buffers)
    for name in sorted(unread):
        yield _Shared(_holders(layout, [0]), (unread[name],))


def _holders(layout: Layout, stages: Sequence[int]) -> tuple[int, ...]:
    """The processes of these stages in all replicas."""
    return tuple(sorted({peer for stage in stages for peer in layout.peers_of(layout.process_of[stage])}))


def _share(piece: Sequence[Tensor], holders: Sequence[int], process: int) -> None:
    """Send the tensors from the first holder to the others, as one message to each."""
    elements = sum(tensor.numel() for tensor in piece)
    if process == holders[0]:
        flat = torch.cat([tensor.reshape(-1) for tensor in piece])
        sent = [start_send([flat], to=other, tag=STATE_TAG) for other in holders[1:]]
        for pending in sent:
            finish(pending)
        return
    flat = torch.empty(elements, dtype=piece[0].dtype, device=piece[0].device)
    finish(start_receive([flat], source=holders[0], tag=STATE_TAG))
    for tensor, value in zip(piece, places(flat, piece), strict=True):
        write_in_place(tensor, value)
