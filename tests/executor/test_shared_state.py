"""What several ranks hold starts equal, whatever each process has drawn; and nothing else travels."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor import Pipeline, launch, pipeline
from executor.state import shared_state
from planner import ExecutionError, Plan
from profiler import trace
from profiler.machine import channel

X = torch.arange(8) % 5


class Tied(nn.Module):
    """One weight in two stages, buffers and a constant that both read, and state that no layer reads."""

    def __init__(self, on_meta: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 6)
        self.middle = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 6)
        self.scale: Tensor
        self.mask: Tensor
        self.hidden: Tensor
        self.register_buffer("scale", torch.rand(6))
        self.register_buffer("mask", torch.rand(6).expand(8, 6))
        self.register_buffer("hidden", torch.rand(3), persistent=False)
        self.register_buffer("unread", torch.rand(2))
        self.spare = nn.Parameter(torch.rand(3))
        if on_meta:  # where a tensor that is no buffer has no values
            self.register_buffer("constant", torch.rand(6))
        else:
            self.constant = torch.rand(6)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * self.scale * self.constant + self.mask[0]
        x = self.norm(torch.tanh(self.middle(x))) * self.scale * self.constant * self.hidden.sum()
        return (torch.tanh(self.last(x)) + self.mask[0]) @ self.embedding.weight.t()


def plan_of(plan_for: Callable[..., Plan], replicas: int, on_meta: bool) -> Plan:
    sequence = trace(Tied(on_meta), X)
    cut = next(layer.index for layer in sequence.layers if "middle.weight" in layer.parameters)
    return plan_for(sequence, [cut], batch_size=8, micro_batches=2, replicas=replicas)


def held_by(pipe: Pipeline) -> dict[str, Tensor]:
    """All tensors of this process by the names that the graph has for them."""
    held: dict[str, Tensor] = {name: parameter.detach() for name, parameter in pipe.named_parameters()}
    for buffers in pipe._placement.buffers.values():
        held |= buffers
    return {name: value.clone() for name, value in {**held, **pipe._unread}.items()}


def built(plan: Plan, on_meta: bool) -> dict[str, Any]:
    """What this process holds of a model that it has drawn by itself, before and after; and the bytes that it sent."""
    torch.manual_seed(dist.get_rank())
    drawn = torch.Generator().manual_seed(dist.get_rank())  # a generator that the pipeline cannot know of
    sent = 0
    start_send = channel.start_send

    def count(tensors: list[Tensor], **where: int) -> Any:
        nonlocal sent
        sent += sum(tensor.nbytes for tensor in tensors)
        return start_send(tensors, **where)

    def initialize(module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=drawn))

    pytest.MonkeyPatch().setattr(shared_state, "start_send", count)
    model = Tied(on_meta)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if on_meta:
        model = model.to("meta")
    pipe = Pipeline(model, plan, initialize=initialize if on_meta else None)
    return {"before": {} if on_meta else before, "after": held_by(pipe), "sent": sent}


@pytest.mark.parametrize(("replicas", "on_meta"), [(1, True), (2, False)])
def test_what_several_ranks_hold_starts_equal(replicas: int, on_meta: bool, plan_for: Callable[..., Plan]) -> None:
    """A tied weight was -0.11 in rank 0 and -0.43 in rank 1 and stayed so; with replicas all weights were unlike."""
    parts = launch(built, plan_of(plan_for, replicas, on_meta), (on_meta,))
    holders: dict[str, list[int]] = {}
    for rank, part in enumerate(parts):
        for name in part["after"]:
            holders.setdefault(name, []).append(rank)
    both = ["embedding.weight", "scale", "mask", "hidden", "constant"]
    assert [len(holders[name]) for name in both] == [2 * replicas] * len(both)
    alone = ["last.weight", "norm.running_mean", "unread", "spare"]
    assert [len(holders[name]) for name in alone] == [replicas] * len(alone)
    bytes_shared = 0
    for name, (first, *others) in holders.items():
        value = parts[first]["after"][name]
        assert all(torch.equal(value, parts[other]["after"][name]) for other in others), name
        if name in parts[first]["before"]:  # the first one's value counts, and the others had drawn another
            assert torch.equal(value, parts[first]["before"][name]), name
            drawn = "norm" not in name
            assert not drawn or all(not torch.equal(value, parts[other]["before"][name]) for other in others), name
        bytes_shared += value.nbytes * len(others)
    assert sum(part["sent"] for part in parts) == bytes_shared


def struck(plan: Plan, signal_number: int) -> None:
    """Rank 1 is struck where it should receive."""

    def strike(*_: Any) -> None:
        os.kill(os.getpid(), signal_number)
        time.sleep(600)

    if dist.get_rank() == 1:
        pytest.MonkeyPatch().setattr(pipeline, "share_state", strike)
    Pipeline(Tied(False), plan)


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (signal.SIGKILL, "sharing the parameters and buffers that several ranks hold: its process was killed by"),
        (
            signal.SIGSTOP,
            "it has not answered for .*last at sharing the parameters .*; rank 0 has waited .* at sharing",
        ),
    ],
)
def test_a_rank_that_fails_while_they_share_is_named(number: int, error: str, plan_for: Callable[..., Plan]) -> None:
    with pytest.raises(ExecutionError, match=f"rank 1 of 2 failed: {error}"):
        launch(struck, plan_of(plan_for, 1, False), (int(number),), timeout_s=4.0)
