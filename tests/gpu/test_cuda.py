"""What only a CUDA device can show: a plan of several stages on one card, in one process.

    pytest tests/gpu -s

Everything under this folder is skipped where there is no CUDA device.
"""

import gc
from collections import defaultdict
from statistics import median

import pytest
import torch
from gpt import GPT, Config, next_token_loss

from executor import Pipeline
from planner import Plan, autoplan
from planner.plan.units import bytes_text
from profiler import Cluster, Link, profile, trace
from profiler.machine.local import local_devices

CONFIG = Config(context=256, width=512, heads=8, blocks=6, dropout=0.0)
BATCH_SIZE = 32
WITHIN_THE_CARD = Link(latency_s=1e-5, bytes_per_s=1e12)  # no message: both stages are in this process


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def batch() -> torch.Tensor:
    return torch.randint(256, (BATCH_SIZE, CONFIG.context), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two stages that share a card, from a model on the CPU."""
    ids = batch()
    (card,) = local_devices(["cuda:0"]).devices
    half = card.model_copy(update={"memory_bytes": card.memory_bytes // 2})
    return autoplan(
        make_model(),
        ids,
        Cluster(devices=(half, half), link=WITHIN_THE_CARD),
        loss_fn=next_token_loss,
        target=ids,
        stages=2,
        micro_batches=8,
        time_budget_s=20,
        progress=False,
    )


def test_two_stages_on_one_card_train_as_the_plain_model(plan: Plan) -> None:
    ids = batch()
    pipe = Pipeline(make_model(), plan, loss_fn=next_token_loss)
    loss = pipe.step(ids, target=ids)
    plain = make_model().cuda()
    expected = next_token_loss(plain(ids.cuda()), ids.cuda())
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in pipe.named_parameters():
        other = gradients.get(name, plain.head.weight.grad)  # a tied weight has either name
        assert parameter.grad is not None
        assert other is not None
        assert (parameter.grad - other).norm() <= 1e-3 * other.norm(), name


def test_memory_is_not_above_the_prediction(plan: Plan) -> None:
    ids = batch()
    gc.collect()
    before = torch.cuda.memory_allocated()
    pipe = Pipeline(make_model(), plan, loss_fn=next_token_loss)
    optimizer = torch.optim.AdamW(pipe.parameters())
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        pipe.step(ids, target=ids)
        optimizer.step()
        optimizer.zero_grad()
    measured = torch.cuda.max_memory_allocated() - before
    predicted = sum(stage.memory.total - stage.memory.reserve for stage in plan.stages)
    print(f"\nallocated {bytes_text(measured)}, predicted for both stages {bytes_text(predicted)}")
    assert measured <= predicted


def test_passes_are_timed_by_stage(plan: Plan) -> None:
    ids = batch()
    pipe = Pipeline(make_model(), plan, loss_fn=next_token_loss)
    measured = defaultdict(list)
    for _ in range(5):
        pipe.step(ids, target=ids)
    for timed in pipe.last_step_actions():
        measured[timed.action.stage, str(timed.action.kind)].append(timed.duration_s)
    for index, stage in enumerate(plan.stages):
        for kind, predicted in (("F", stage.times[0].forward_s), ("B", stage.times[0].backward_s)):
            found = median(measured[index, kind])
            print(f"\nstage {index} {kind}: {found:.6f} s measured, {predicted:.6f} predicted")
            assert found > 0


def test_a_model_larger_than_its_share_of_the_card_is_measured_within_it() -> None:
    """Layers come to the card and leave it; the model stays on the meta device."""
    with torch.device("meta"):
        model = GPT(Config(context=256, width=2048, heads=16, blocks=8))  # 1.6 GB
        ids = torch.zeros(BATCH_SIZE, 256, dtype=torch.int64)
    limit = sum(parameter.nbytes for parameter in model.parameters()) // 4
    (card,) = local_devices(["cuda:0"]).devices
    sequence = trace(model, ids)
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = profile(
        sequence,
        [card.model_copy(update={"memory_bytes": limit})],
        micro_batch_sizes=[1, 2],
        time_budget_s=0.0,
        progress=False,
    )
    most = torch.cuda.max_memory_allocated() - before
    print(f"\nlimit {bytes_text(limit)}, allocated while profiling {bytes_text(most)}")
    assert most <= limit
    assert all(cost.forward_s > 0 for cost in found.costs)
