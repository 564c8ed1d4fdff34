"""Ranks in processes of their own, which talk through NCCL; one card is enough.

NCCL refuses two ranks of one host on one card. Each rank says that it is a host of its own (`NCCL_HOSTID`), so messages
go through sockets: slower than any link between cards, with the same calls and the same order on the card's streams.
"""

import os
import random
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from executor import Pipeline, launch
from executor.checkpoint import load_checkpoint, save_checkpoint
from planner import ExecutionError, Plan
from profiler import LayerSequence, trace
from tests.benchmarks.stage_models import BATCH, build
from tests.executor.conftest import _plan as plan_for
from tests.executor.random_orders import orders_for
from tests.gpu.on_a_card import NAME, Trained, equal_in_every_run, on_card, trained, unlike

M = 4
STEPS = 2
SETTINGS: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b", "recompute": True},
    "past others": {"schedule": "1f1b", "skips": True},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
    "zb": {"schedule": "zb"},
    "zb-v": {"schedule": "zb-v", "chunks": 2},
}


@pytest.fixture(autouse=True)
def sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between ranks that count as hosts."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def on_a_host_of_its_own() -> None:
    os.environ["NCCL_HOSTID"] = f"host-{dist.get_rank()}"


def plans_of(sequence: LayerSequence, ranks: int = 2) -> dict[str, Plan]:
    found = {}
    for name, settings in SETTINGS.items():
        chunks = settings.get("chunks", 1)
        stages = ranks * chunks
        cuts = [len(sequence) * part // stages for part in range(1, stages)]
        orders = orders_for(settings["schedule"], stages, M, random.Random(0), chunks)
        found[name] = on_card(plan_for(sequence, cuts, batch_size=BATCH, micro_batches=M, orders=orders, **settings))
    return found


def train_all(_: Plan, name: str, plans: dict[str, Plan]) -> dict[str, Trained]:
    on_a_host_of_its_own()
    with equal_in_every_run():
        return {key: trained(build(name), plan, STEPS) for key, plan in plans.items()}


@pytest.mark.parametrize(("name", "ranks"), [("GPT", 2), ("U-Net", 3), ("LSTM (GNMT)", 3)])
def test_ranks_train_as_one_process(name: str, ranks: int) -> None:
    model = build(name)
    plans = plans_of(trace(model.model, model.sample), ranks)
    parts = launch(train_all, plans["1f1b"], (name, plans))
    with equal_in_every_run():
        for key, plan in plans.items():
            whole = trained(build(name), plan, STEPS)
            assert [unlike(part[key], whole) for part in parts] == [[] for _ in range(ranks)], key
            assert {what for part in parts for what in part[key].held} == set(whole.held), key


def test_replicas_train_as_one_process() -> None:
    model = build("GPT")
    sequence = trace(model.model, model.sample)
    plans = {
        str(shard): on_card(
            plan_for(sequence, batch_size=BATCH, micro_batches=M, schedule="1f1b", replicas=2, shard_optimizer=shard)
        )
        for shard in (False, True)
    }
    parts = launch(train_all, plans["False"], ("GPT", plans))
    with equal_in_every_run():
        whole = trained(build("GPT"), plans["False"], STEPS)
    for key in plans:
        for found in (part[key] for part in parts):
            assert found.losses == whole.losses, key
            weights = {what: held for what, held in found.held.items() if what.startswith("weight")}
            assert [what for what, held in weights.items() if not torch.equal(held, whole.held[what])] == [], key


def bytes_of_communicators(_: Plan) -> list[int]:
    """Of a card that ranks share, after each of some groups has carried a message."""
    on_a_host_of_its_own()
    device = torch.device(NAME)
    torch.cuda.set_device(device)
    message = torch.zeros(2**22, device=device)
    found = []
    for _group in range(4):
        group = dist.new_group([0, 1])
        (dist.send if dist.get_rank() else dist.recv)(message, 1 - dist.get_rank(), group=group)
        torch.cuda.synchronize()
        time.sleep(1.0)  # the other rank's share of it is there, too
        found.append(torch.cuda.mem_get_info()[0])
    return found


def test_what_communicators_hold() -> None:
    model = build("GPT")
    plan = plans_of(trace(model.model, model.sample))["1f1b"]
    for free in launch(bytes_of_communicators, plan):
        print(f"\nof two ranks' communicator: {[before - after for before, after in pairwise(free)]}")


def save_after_two(plan: Plan, path: Path) -> list[float]:
    on_a_host_of_its_own()
    model = build("GPT")
    with equal_in_every_run():
        pipe = Pipeline(model.model, plan, loss_fn=model.loss_fn)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
        losses = []
        for step in range(4):
            if step == 2:
                save_checkpoint(path, pipe, optimizer)
            optimizer.zero_grad()
            losses.append(pipe.step(model.sample, target=model.target).item())
            optimizer.step()
    return losses[2:]


def go_on(plan: Plan, path: Path) -> list[float]:
    model = build("GPT")
    with equal_in_every_run():
        pipe = Pipeline(model.model, plan, loss_fn=model.loss_fn)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
        load_checkpoint(path, pipe, optimizer)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(pipe.step(model.sample, target=model.target).item())
            optimizer.step()
    return losses


def test_a_checkpoint_of_two_ranks_goes_on_in_one_process(tmp_path: Path) -> None:
    model = build("GPT")
    sequence = trace(model.model, model.sample)
    expected = launch(save_after_two, plans_of(sequence)["1f1b"], (tmp_path / "saved",))
    assert expected[0] == expected[1]
    whole = on_card(plan_for(sequence, batch_size=BATCH, micro_batches=M, schedule="1f1b"))
    assert go_on(whole, tmp_path / "saved") == expected[0]


def fail_in_the_third_step(plan: Plan, how: str) -> None:
    on_a_host_of_its_own()
    model = build("GPT")
    calls = 0

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 2 * M + 2:
            if how == "raises":
                raise ValueError("no loss today")
            if how == "dies":
                os._exit(7)
            time.sleep(1000)
        assert model.loss_fn is not None
        loss: Tensor = model.loss_fn(output, target)
        return loss

    pipe = Pipeline(model.model, plan, loss_fn=loss_fn, compare_first_step=False)
    for _ in range(5):
        pipe.step(model.sample, target=model.target)


@pytest.mark.parametrize(("how", "says"), [("raises", "no loss today"), ("dies", "rank 1"), ("hangs", "rank 1")])
def test_all_end_where_one_fails(how: str, says: str) -> None:
    model = build("GPT")
    plan = plans_of(trace(model.model, model.sample))["1f1b"]
    begun_s = time.monotonic()
    with pytest.raises(ExecutionError, match=says) as caught:
        launch(fail_in_the_third_step, plan, (how,), timeout_s=15.0)
    print(f"\n{how}: {time.monotonic() - begun_s:.0f} s, {caught.value}")
