"""Whether a module that is called as it is computes the same whatever earlier calls have left in its attributes.

A reversible network keeps the state of the random generator for its backward pass, in each call anew. Calls may begin
with the attributes that the module had when it was planned, if that changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from profiler.machine.backend import HOST
from profiler.observe.python_state import attributes_of, lasting_changes, put_all_back
from profiler.observe.random_states import preserved
from profiler.observe.standing_in import standing_in
from profiler.opaque.held import Changed
from profiler.opaque.made_up import Circumstances, Entering, Numbers, RehearsedCall, backward_from, own_parameters


def independent(call: RehearsedCall, size: int, around: Circumstances, numbers: Numbers) -> bool:
    """Whether a call computes the same when it begins with what another has left: other data, other parameters."""
    begin, buffers = attributes_of(call.held.module), dict(call.held.buffers)

    def computed(tensors: int, changed: Changed, factor: float = 1.0) -> list[Tensor]:
        entering = Entering.of(call, size, around, numbers, tensors)
        own = own_parameters(call.held, factor) | {name: buffer.clone() for name, buffer in buffers.items()}
        with preserved([HOST, torch.device(around.device_type)]), around.in_force():
            torch.manual_seed(0)
            done = call.held.call(own, *entering.call, {}, may_draw=True, seed=0, changed=changed)
            own |= done.replaced
            outputs = [leaf for leaf in pytree.tree_leaves(done.result) if isinstance(leaf, Tensor)]
            with standing_in(call.held.module, own), call.held.seeded(0), call.held.as_left(done.left):
                backward_from(outputs)
        if changed is Changed.LEFT:
            buffers.update((name, own[name].detach()) for name in buffers)
        leaves = [*entering.leaves, *(own[name] for name in call.held.parameters)]
        return [*(output.detach() for output in outputs), *(x.grad for x in leaves if x.grad is not None)]

    try:
        expected = computed(1, Changed.PUT_BACK)
        computed(0, Changed.LEFT, 1.5)
        between, found = attributes_of(call.held.module), computed(1, Changed.LEFT)
        after, later = attributes_of(call.held.module), computed(1, Changed.LEFT)
        counts = lasting_changes(between, after) or lasting_changes(after, attributes_of(call.held.module))
        return not counts and _equal(expected, found) and _equal(expected, later)
    finally:
        put_all_back(begin, attributes_of(call.held.module))


def _equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
