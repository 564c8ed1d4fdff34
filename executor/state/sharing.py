"""The optimizer's state, shared out over the replicas: each steps a part of the parameters (ZeRO, stage 1).

Every replica holds all parameters of its stages, and after a step of the optimizer they are equal again:

    replica 0   sum of gradients of a, b  -- optimizer.step() -->  a b | c d   <- c d
    replica 1   sum of gradients of c, d  -- optimizer.step() -->  a b | c d   <- a b

A parameter that another replica steps has no gradient after `Pipeline.step`, so any optimizer leaves it alone, and has
no state for it. Rajbhandari et al., ZeRO, SC 2020. Who steps what follows from the plan alone (`planner.plan.shares`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.layout import Layout
from executor.state.pieces import Buffers, fill, give_to_all, places, rounds
from executor.state.placement import Placement
from planner.plan.plan import Plan
from planner.plan.shares import owners_of
from profiler.tracing.sequence import LayerSequence


def owners(sequence: LayerSequence, plan: Plan, layout: Layout, placement: Placement) -> dict[str, int]:
    """The replica that steps each parameter of this process that is trained; empty where each steps all.

    Each stage is shared out by itself, as it was planned; a parameter that several of them read goes with the first.

    Args:
        sequence: the model's layers.
        plan: the plan.
        layout: of this process.
        placement: of this process.
    """
    if not plan.shard_optimizer or layout.alone:
        return {}
    found: dict[str, int] = {}
    named = placement.named_parameters()
    for stage in layout.stages:
        layers = sequence.layers[plan.stages[stage].first_layer : plan.stages[stage].stop_layer]
        read = dict.fromkeys(name for layer in layers for name in layer.parameters)
        trained = [name for name in read if named[name].requires_grad]
        of_stage = owners_of([named[name].nbytes for name in trained], plan.replicas)
        found = {**dict(zip(trained, of_stage, strict=True)), **found}
    return found


class Shares:
    """What the replicas' processes of the same stages step for each other.

    Args:
        parameters: of this process, each with the replica that steps it.
        layout: of this process.
        group: of its peers.
    """

    def __init__(
        self, parameters: Iterable[tuple[nn.Parameter, int]], layout: Layout, group: dist.ProcessGroup | None
    ) -> None:
        self._replica = layout.replica
        self._group = group
        self._of_replica: list[list[nn.Parameter]] = [[] for _ in range(layout.replicas)]
        for parameter, owner in parameters:
            self._of_replica[owner].append(parameter)

    def forget_state_of_others(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop what an optimizer keeps of parameters that other replicas step; Adagrad makes it for all at once."""
        for replica, parameters in enumerate(self._of_replica):
            for parameter in parameters if replica != self._replica else ():
                optimizer.state.pop(parameter, None)

    @torch.no_grad()
    def exchange(self) -> None:
        """Give the peers what was stepped here, and take over what they stepped; all of them call it."""
        buffers = Buffers()
        for given in rounds(self._of_replica):
            self._exchange(given, buffers)

    def _exchange(self, given: Sequence[Sequence[Tensor]], buffers: Buffers) -> None:
        """One round of tensors of one type, as long as the longest."""
        elements = max(sum(tensor.numel() for tensor in owned) for owned in given)
        like = next(tensor for owned in given for tensor in owned)
        going, coming = (take(elements * len(given), like) for take in (buffers.going, buffers.coming))
        fill(going, given[self._replica])
        give_to_all(going, coming, len(given), self._group)
        for replica, (part, owned) in enumerate(zip(coming.split(elements), given, strict=True)):
            if replica != self._replica:
                for place, tensor in zip(places(part, owned), owned, strict=True):
                    tensor.copy_(place)
