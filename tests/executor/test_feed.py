"""Only rank 0 needs to have the data: they come to where they are read, and training is that of one process."""

import copy
import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from executor import Pipeline, launch
from executor.batch import feed
from executor.batch.calls import BatchForm, inputs_read
from executor.batch.feed import Feed
from executor.batch.stand_in import StandIn
from executor.run.stage_runner import StageLayers
from planner import ArgumentError, ExecutionError, Plan
from profiler import LayerSequence, trace
from profiler.machine import channel
from profiler.tracing.sample import describe_sample

TOKENS, WIDTH = 6, 9


class Masked(nn.Module):
    """Keywords, one of them nested: ids with the batch as dimension 1, a mask that all stages read, a scale for all."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, ids: Tensor, extra: dict[str, Any]) -> dict[str, Tensor]:
        x = self.embedding(ids.transpose(0, 1)) * extra["scale"]
        for block in self.blocks:
            x = torch.where(extra["mask"].unsqueeze(-1), torch.tanh(block(x)), x)
        return {"logits": self.head(x.mean(1)), "mask": extra["mask"]}


def loss_of(output: dict[str, Tensor], target: dict[str, Any]) -> Tensor:
    loss = functional.cross_entropy(output["logits"], target["labels"], label_smoothing=target["smoothing"])
    return loss * target["weight"] + output["logits"].square().mean(1).mul(target["wanted"][:, 0]).mean()


def batch_of(samples: int, tokens: int = TOKENS) -> tuple[dict[str, Any], dict[str, Any]]:
    numbers = torch.Generator().manual_seed(samples)
    inputs = {
        "ids": torch.randint(20, (tokens, samples), generator=numbers),
        "extra": {
            "mask": torch.rand(samples, tokens, generator=numbers) > 0.4,
            "scale": torch.rand(WIDTH, generator=numbers),
        },
    }
    target = {
        "labels": torch.randint(5, (samples,), generator=numbers),
        "wanted": torch.rand(3, samples, generator=numbers).bfloat16().t(),  # not contiguous
        "weight": torch.tensor(0.7),
        "smoothing": 0.1,
    }
    return inputs, target


def sequence_of(model: nn.Module) -> LayerSequence:
    return trace(model, batch_of(8)[0], batch_dims={"ids": 1})


@cache
def traced(_: str = "") -> LayerSequence:
    return sequence_of(made()[0])


# Uneven ones, others than planned, and back; each number of tokens is traced for training and for evaluation.
SHAPES = {"nothing": [(8, TOKENS), (5, TOKENS), (3, 4), (8, TOKENS)], "loader": [(8, TOKENS), (5, TOKENS)]}
AS_PLANNED = {"nothing": [(8, TOKENS), (5, TOKENS), (8, TOKENS)]}


@cache
def made() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model of all pipelines of a process, which share its trace, and how it begins."""
    torch.manual_seed(0)
    model = Masked()
    return model, copy.deepcopy(model.state_dict())


def trained(plan: Plan, way: str, shapes: list[tuple[int, int]]) -> dict[str, Any]:
    """What comes of some steps, evaluations and predictions."""
    model, start = made()
    model.load_state_dict(start)
    pipe = Pipeline(model, plan, loss_fn=loss_of)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    found: dict[str, Any] = {"losses": [], "predicted": []}
    batches: Any = [batch_of(*shape) for shape in shapes]
    if way == "loader":
        batches = pipe.batches(batches if pipe.rank == 0 else None)
    for inputs, target in batches:
        nothing = way == "nothing" and pipe.rank > 0
        given, aim = ({}, None) if nothing else (inputs, target)
        found["losses"] += [pipe.step(**given, target=aim).item(), pipe.evaluate(**given, target=aim).item()]
        found["predicted"].append(pipe.predict(**given))
        optimizer.step()
        optimizer.zero_grad()
    found["weights"] = {name: value.clone() for name, value in pipe.state_dict().items()}
    return found


def trained_in_all_ways(plan: Plan, shapes: dict[str, list[tuple[int, int]]]) -> list[dict[str, Any]]:
    return [trained(plan, way, shapes[way]) for way in shapes]


@pytest.mark.parametrize(
    ("cuts", "settings", "shapes"),
    [
        ((2, 6), {}, SHAPES),
        ((5,), {"replicas": 2, "schedule": "1f1b"}, AS_PLANNED),
        ((3, 5, 8), {"ranks": [0, 1, 0, 1]}, AS_PLANNED),
    ],
)
def test_rank_0_alone_has_the_data(
    cuts: tuple[int, ...],
    settings: dict[str, Any],
    shapes: dict[str, list[tuple[int, int]]],
    plan_for: Callable[..., Plan],
    inherited: Callable[..., LayerSequence],
) -> None:
    """Keywords, nests, integers, masks, other dimensions, uneven and other batches than planned; in every bit."""
    replicas = settings.get("replicas", 1)
    plan = plan_for(inherited(traced), cuts, batch_size=8, micro_batches=4 // replicas, **settings)
    by_one = trained_in_all_ways(plan, shapes)
    for rank, parts in enumerate(launch(trained_in_all_ways, plan, (shapes,))):
        for part, alone in zip(parts, by_one, strict=True):
            assert part["losses"] == alone["losses"]
            assert all(torch.equal(value, alone["weights"][name]) for name, value in part["weights"].items())
            for found, whole in zip(part["predicted"], alone["predicted"], strict=True):
                assert (found is None) == (rank not in plan_ranks_of_last(plan))
                if found is not None:
                    for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(whole), strict=True):
                        assert torch.equal(one, other.tensor_split(replicas)[rank // plan.ranks])


def plan_ranks_of_last(plan: Plan) -> list[int]:
    return [replica * plan.ranks + plan.stages[-1].rank for replica in range(plan.replicas)]


def test_what_a_stage_is_sent_is_what_it_reads(plan_for: Callable[..., Plan]) -> None:
    """Rank 0 works out what the others read; they must find the same."""
    sequence = sequence_of(Masked())
    read = []
    for cut in range(1, len(sequence)):
        for first, stop in ((0, cut), (cut, len(sequence))):
            parameters = {
                (layer, name): sequence.parameters[name]
                for layer in range(first, stop)
                for name in sequence.layers[layer].parameters
            }
            assert set(StageLayers(sequence, first, stop, (), parameters).inputs) == inputs_read(sequence, first, stop)
            read.append(inputs_read(sequence, first, stop))
    assert len(set(read)) > 1


def sent(plan: Plan) -> tuple[dict[int, int], int]:
    """Bytes that rank 0 sends to each process for a step, and how many of its tensors were copied to be sent."""
    bytes_to: dict[int, int] = {}
    copied: set[int] = set()
    end_at = channel.end_at

    def counting(process: int, group: Any) -> Any:
        class Counted:
            def send(self, pieces: list[Tensor], tag: int) -> Any:
                bytes_to[process] = sum(piece.nbytes for piece in pieces)
                copied.update({piece.data_ptr() for piece in pieces} - memory)
                return end_at(process, group).send(pieces, tag)

        return Counted()

    torch.manual_seed(0)
    pipe = Pipeline(Masked(), plan, loss_fn=loss_of)
    inputs, target = batch_of(4096)
    memory = {leaf.data_ptr() for leaf in pytree.tree_leaves([inputs, target]) if isinstance(leaf, Tensor)}
    if pipe.rank == 0:
        pytest.MonkeyPatch().setattr(feed, "end_at", counting)
        pipe.step(**inputs, target=target)
    else:
        pipe.step()
    return bytes_to, len(copied)


def test_only_what_a_stage_reads_travels_to_it(plan_for: Callable[..., Plan]) -> None:
    bytes_to, copied = launch(sent, plan_for(sequence_of(Masked()), [2, 6], batch_size=4096, micro_batches=4))[0]
    mask, labels, wanted = 4096 * TOKENS, 4096 * 8, 4096 * 3 * 2
    assert bytes_to[1] == mask
    assert 0 <= bytes_to[2] - (mask + labels + wanted + 4) < 64  # small ones share a piece, each aligned
    assert copied == 1  # that piece: neither the mask nor anything else is kept twice


def test_what_is_not_contiguous_is_copied_once_for_all_that_read_it() -> None:
    """Gloo sends contiguous memory alone."""
    copies: dict[tuple[Any, ...], Tensor] = {}
    whole = torch.arange(6.0, requires_grad=True).reshape(2, 3)
    sent = feed._sendable(whole, copies)
    assert (sent.data_ptr(), sent.requires_grad, len(copies)) == (whole.data_ptr(), False, 0)
    turned = [feed._sendable(whole.t(), copies) for _ in range(2)]
    assert turned[0] is turned[1] and turned[0].is_contiguous() and not turned[0].requires_grad
    assert torch.equal(turned[0], whole.t())


def test_a_batch_that_others_have_is_expected_with_its_own_size() -> None:
    """Not with that of the batch that the description of its arguments was made from."""
    spec = describe_sample(batch_of(8)[0], {"ids": 1})
    given = feed._inputs_like(BatchForm(spec, batch_size=5, training=True), {"mask": 0, "scale": None, "ids": 1})
    shapes = {name: (tuple(value.shape), value.dtype, value.is_meta) for name, value in given.items()}
    assert shapes == {
        "ids": ((TOKENS, 5), torch.int64, True),
        "mask": ((5, TOKENS), torch.bool, True),
        "scale": ((WIDTH,), torch.float32, True),
    }


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


X = torch.linspace(-1, 1, 32).reshape(8, 4)
Y = torch.zeros(8, 2)


def failing(how: str) -> Iterator[tuple[Tensor, Tensor]]:
    yield X, Y
    yield X, Y
    if how == "raises":
        raise ValueError("a broken file")
    os.kill(os.getpid(), signal.SIGKILL)


def fed(plan: Plan, how: str) -> int:
    pipe = Pipeline(Two(), plan, loss_fn=functional.mse_loss)
    if how == "no loader":
        return len(list(pipe.batches(None)))
    if how in ("raises", "dies"):
        for x, y in pipe.batches(failing(how) if pipe.rank == 0 else None):
            pipe.step(x, target=y)
    elif how == "stops":
        for _ in range(2 if pipe.rank == 0 else 3):
            pipe.step(*([X] if pipe.rank == 0 else []), target=Y if pipe.rank == 0 else None)
    else:
        epochs = [(X, Y)] * 3, iter([(X, [Y, "text", 7])])
        numbers = [sum(1 for _ in pipe.batches(epoch if pipe.rank == 0 else None)) for epoch in epochs]
        for x, (y, *others) in pipe.batches([(X, [Y, "text", 7])] if pipe.rank == 0 else None):
            assert others == ["text", 7]
            assert (x.is_meta, y.is_meta) == (pipe.rank > 0,) * 2
            pipe.step(x.to("cpu")[:4] * torch.ones(1), target=y.cpu()[:4])
        return numbers[0] * 10 + numbers[1]
    return 0


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("raises", r"rank 0 of 2 failed: step 2, reading the next batch: ValueError: a broken file"),
        ("dies", r"rank 0 of 2 failed: step 2, reading the next batch: its process was killed by SIGKILL"),
        ("stops", r"rank 0 of 2 failed: it ended after 4 of the pipeline's calls .* rank 1 makes a call more: step 2"),
    ],
)
def test_rank_0_failing_its_part_ends_all(how: str, error: str, plan_for: Callable[..., Plan]) -> None:
    with pytest.raises(ExecutionError, match=error):
        launch(fed, plan_for(trace(Two(), X), [1], batch_size=8, micro_batches=4), (how,))


def phases_of_understanding(plan: Plan) -> set[str]:
    """Where this rank says it is while it finds out what it reads of three batches, two of another shape or mode."""
    pipe = Pipeline(Two(), plan, loss_fn=functional.mse_loss)
    understood, calls, phases = Feed.understood, pipe._feed, set[str]()

    def noting(text: bytes) -> Any:
        phases.add(pipe.watch.log.position.phase.name)
        return understood(calls, text)

    calls.understood = noting  # type: ignore[method-assign]
    for call, samples in ((pipe.step, 8), (pipe.step, 5), (pipe.evaluate, 8)):
        call(*([X[:samples]] if pipe.rank == 0 else []), target=Y[:samples] if pipe.rank == 0 else None)
    return phases


def test_ranks_that_are_told_of_a_batch_may_take_their_time_to_trace_it(plan_for: Callable[..., Plan]) -> None:
    """For another shape or mode the model is traced anew: in 26 s the others took the rank for one that waits."""
    plan = plan_for(trace(Two(), X), [1], batch_size=8, micro_batches=4)
    assert launch(phases_of_understanding, plan) == [set(), {"PREPARATION"}]


def test_all_go_through_a_loader_together(plan_for: Callable[..., Plan]) -> None:
    plan = plan_for(trace(Two(), X), [1], batch_size=8, micro_batches=4)
    assert launch(fed, plan, ("epochs",)) == [31, 31]
    assert fed(plan, "epochs") == 31
    with pytest.raises(ExecutionError, match="step 2, reading the next batch: ValueError: a broken file"):
        fed(plan, "raises")
    with pytest.raises(ArgumentError, match="rank 0 was given no loader, and it alone reads one"):
        fed(plan, "no loader")


def test_a_lone_process_without_data_is_told_so(plan_for: Callable[..., Plan]) -> None:
    pipe = Pipeline(Two(), plan_for(trace(Two(), X), [1], batch_size=8, micro_batches=4), loss_fn=functional.mse_loss)
    for call in (pipe.step, pipe.evaluate, pipe.predict, lambda: pipe.step(X.to("meta"), target=Y)):
        with pytest.raises(ArgumentError, match="was given no data; pass what the model is called with"):
            call()


def test_a_loop_moves_and_changes_its_batches_on_all_ranks() -> None:
    """As training loops do: `x.to(device)` ended every rank but 0 with "Cannot copy out of meta tensor; no data!"."""
    x, batches = torch.empty(8, 4, device="meta").as_subclass(StandIn), torch.arange(8)
    for same in (x.to("cpu"), x.to(torch.device("cuda", 0), non_blocking=True), x.to(device="cpu"), x.cpu(), x.cuda()):
        assert (same.shape, same.dtype, same.is_meta) == ((8, 4), torch.float32, True)
    assert x.to("cuda", torch.float64).dtype == x.to(torch.ones(1).double()).dtype == torch.float64
    masked = torch.where(torch.rand(8, 4) < 0.1, torch.zeros_like(x, device="cpu"), x)[batches.flip(0)]
    for same in (masked, x.pin_memory(), nn.Linear(4, 4)(x), torch.cat([x[:4], torch.ones(4, 4)])):
        assert isinstance(same, StandIn) and (same.shape, same.is_meta) == ((8, 4), True)
    for needs_values in (x[0, 0].item, x.tolist, x[0, 0].__bool__, x.numpy):
        with pytest.raises(ArgumentError, match=r"failed on a stand-in for rank 0's batch .* or on rank 0"):
            needs_values()
