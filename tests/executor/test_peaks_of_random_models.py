"""No rank ever holds more than its plan says: random models, in every schedule, kept and recomputed."""

import random
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any
from unittest import mock

import pandas
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import executor.pipeline
import executor.state.pieces
from executor import Pipeline, launch
from planner import Plan, plan_from_profile
from planner.cost import ledger
from planner.plan.of_model import traced_as_planned
from planner.plan.shares import BUCKET_BYTES
from profiler import Profile, profile, trace
from profiler.machine.local import local_devices

WIDTH, WORDS, BATCH, RANKS = 64, 1000, 24, 2
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb", 1), ("zb-v", 2))
OVER, FEW_BYTES = 0.01, 2**13
SELDOM = 1 / 6  # of 72 peaks of the first three models 5 lie further under their plans than these say


class Straight(nn.Module):
    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        inner = WIDTH * chance.choice([1, 4, 8])
        self.norm, self.first, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.last(functional.gelu(self.first(self.norm(h))))


class Transposed(nn.Module):
    """Its convolutions read what lies in another order in memory."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.wide, self.back = nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding=1), nn.Conv1d(2 * WIDTH, WIDTH, 1, groups=4)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.back(functional.relu(self.wide(h.transpose(1, 2)))).transpose(1, 2)


class Attending(nn.Module):
    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.all, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        query, key, value = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in self.all(h).chunk(3, -1))
        heard = (query @ key.transpose(-1, -2)).softmax(-1) @ value
        return h + self.out(heard.transpose(1, 2).flatten(2))


class Passing(nn.Module):
    """Large for a moment, and with nothing to keep of it."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        large = h.unsqueeze(-1).expand(*h.shape, 16) + torch.arange(16.0)
        return h * self.scale + large.sum(-1) * 1e-3


class Drawn(nn.Module):
    """Blocks; values may wait from any of them for the end, and a wide one is made before the first."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        kinds = [Straight, Transposed, Attending, Passing]
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(chance.choice(kinds)(chance) for _ in range(chance.randint(6, 8)))
        self.head = nn.Linear(WIDTH, chance.choice([8, WORDS]))
        self.gathers, self.prepares = chance.random() < 0.5, chance.random() < 0.5

    def forward(self, ids: Tensor) -> Tensor:
        prepared = torch.cat([ids.unsqueeze(-1).float()] * 32, -1).cumsum(-1).mean(-1, keepdim=True)
        h, seen = self.embed(ids), []
        for block in self.blocks:
            seen.append(h)
            h = block(h)
        h = h + torch.stack(seen, -1).mean(-1) if self.gathers else h
        return self.head(h + prepared * 1e-6 if self.prepares else h)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten() % output.shape[-1])


def with_drawn_seconds(found: Profile, chance: random.Random) -> Profile:
    """Bytes as they were counted, and seconds that no load of the machine changes."""
    each = {layer.index: chance.uniform(0.5, 2.0) for layer in found.layers}
    costs = []
    for cost in found.costs:
        forward_s = each[cost.layer] * cost.micro_batch_size
        passes = dict.fromkeys(("forward_s", "recompute_s"), forward_s) | {"backward_s": 2 * forward_s, "split_s": 0.0}
        weight_s = forward_s if cost.weight_kept_bytes else 0.0
        costs.append(cost.model_copy(update={**passes, "weight_s": weight_s}))
    return found.model_copy(update={"costs": tuple(costs)})


def plans_of(found: Profile, chance: random.Random) -> list[Plan]:
    plans = []
    for (schedule, chunks), recompute in product(SCHEDULES, ("never", "always")):
        asked: Any = {"schedule": schedule, "chunks": chunks, "recompute": recompute}
        plans.append(
            plan_from_profile(
                found, local_devices(["cpu"] * RANKS), batch_size=BATCH, stages=RANKS * chunks,
                micro_batches=chance.choice([4, 6]), micro_batches_per_stage=1, **asked,
            )
        )  # fmt: skip
    return plans


def peaks_in_buckets(plan: Plan, bucket_bytes: int, model: nn.Module, ids: Tensor) -> pandas.DataFrame:
    with mock.patch.object(executor.state.pieces, "BUCKET_BYTES", bucket_bytes):
        return peaks(plan, [plan], model, ids)


def peaks(first: Plan, plans: Sequence[Plan], model: nn.Module, ids: Tensor) -> pandas.DataFrame:
    frames = []
    sequence = traced_as_planned(model, first)  # once: all have the same layers
    with mock.patch.object(executor.pipeline, "traced_as_planned", lambda model, plan: sequence):
        for number, plan in enumerate(plans):
            model.zero_grad()
            pipe = Pipeline(model, plan, loss_fn=loss_of)
            pipe.step(ids, target=ids)
            model.zero_grad()
            with pipe.watch_memory():
                pipe.step(ids, target=ids)
            frame = pipe.measured()
            frames.append(frame[frame["what"] == "peak_bytes"].assign(plan=number, schedule=plan.schedule))
    return pandas.concat(frames)


@pytest.mark.parametrize("seed", range(3))
def test_no_rank_holds_more_than_its_plan_says_nor_often_much_less(seed: int) -> None:
    """`zb` held up to 9 % more of a model with transposed convolutions."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    model, ids = Drawn(chance), torch.randint(WORDS, (BATCH, 16))
    sequence = trace(model, ids)
    found = profile(
        sequence, local_devices(["cpu"] * RANKS), sample=ids, loss_fn=loss_of, target=ids, batch_size=BATCH,
        progress=False, cache=False, time_budget_s=0,
    )  # fmt: skip
    plans = plans_of(with_drawn_seconds(found, chance), chance)
    table = launch(peaks, plans[0], (plans, model, ids))[0]
    over = table[table["ratio"] > 1 + OVER]
    assert len(table) == RANKS * len(plans)
    assert over.empty, f"\n{over.to_string()}"
    least = [1 - doubt.memory_less for plan in plans if (doubt := plan.prediction.doubt) is not None]
    outside = table[table["ratio"] < [least[number] for number in table["plan"]]]
    assert len(outside) <= SELDOM * len(table), f"\n{outside.to_string()}"


@cache
def wordy() -> tuple[nn.Module, Tensor, Profile]:
    """Most of it is an embedding, and micro-batches are small."""
    torch.manual_seed(0)
    chance = random.Random(0)
    embedding = nn.Embedding(100 * WORDS, WIDTH // 4)
    model = nn.Sequential(embedding, nn.Linear(WIDTH // 4, WIDTH), *(Straight(chance) for _ in range(3)))
    ids = torch.randint(WORDS, (4, 2))
    found = profile(
        trace(model, ids), local_devices(["cpu"] * RANKS), sample=ids, loss_fn=loss_of, target=ids, batch_size=4,
        progress=False, cache=False, time_budget_s=0,
    )  # fmt: skip
    return model, ids, with_drawn_seconds(found, chance)


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize(
    ("ranks", "schedule", "chunks", "bucket_bytes"),
    [(1, "1f1b", 1, BUCKET_BYTES), (1, "1f1b", 1, 2**20), (2, "interleaved", 2, 2**20), (2, "zb", 1, 2**20)],
)
def test_no_rank_holds_more_where_replicas_sum_gradients(
    ranks: int, schedule: Any, chunks: int, bucket_bytes: int, shard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They held up to 2.9 times as much: whole parameters of all replicas were exchanged, and no plan counted them."""
    monkeypatch.setattr(ledger, "BUCKET_BYTES", bucket_bytes)
    model, ids, found = wordy()
    plan = plan_from_profile(
        found, local_devices(["cpu"] * 2 * ranks), batch_size=4, stages=ranks * chunks, replicas=2, micro_batches=2,
        micro_batches_per_stage=1, schedule=schedule, chunks=chunks, shard_optimizer=shard,
    )  # fmt: skip
    table = launch(peaks_in_buckets, plan, (bucket_bytes, model, ids))[0]
    assert len(table) == ranks  # the most of its replicas
    over = table["measured"] - table["predicted"] > OVER * table["predicted"] + FEW_BYTES
    assert not over.any(), f"\n{table.to_string()}"
    assert table["ratio"].max() > 0.6, f"\n{table.to_string()}"
