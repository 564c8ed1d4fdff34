"""What only a CUDA device can show: the same plan, several stages on one card.

    pytest tests/gpu -s

Everything under this folder is skipped where there is no CUDA device.
"""

import pytest
import torch
from gpt import GPT, Config, next_token_loss

from executor import Pipeline
from planner import Plan, autoplan
from planner.units import bytes_text

CONFIG = Config(context=256, width=512, heads=8, blocks=6, dropout=0.0)
BATCH_SIZE = 32


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def batch() -> torch.Tensor:
    return torch.randint(256, (BATCH_SIZE, CONFIG.context), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two stages on one card, from a model on the CPU."""
    ids = batch()
    return autoplan(
        make_model(),
        ids,
        ["cuda:0", "cuda:0"],
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
        other = gradients.get(name, plain.head.weight.grad)
        assert parameter.grad is not None
        assert other is not None
        assert (parameter.grad - other).norm() <= 1e-3 * other.norm(), name


def test_memory_is_not_above_the_prediction(plan: Plan) -> None:
    ids = batch()
    pipe = Pipeline(make_model(), plan, loss_fn=next_token_loss)
    optimizer = torch.optim.AdamW(pipe.parameters())
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        pipe.step(ids, target=ids)
        optimizer.step()
        optimizer.zero_grad()
    measured = torch.cuda.max_memory_allocated()
    predicted = sum(stage.memory.total - stage.memory.reserve for stage in plan.stages)
    print(f"\nallocated {bytes_text(measured)}, predicted for both stages {bytes_text(predicted)}")
    assert measured <= predicted


def test_times_are_near_the_prediction(plan: Plan) -> None:
    ids = batch()
    pipe = Pipeline(make_model(), plan, loss_fn=next_token_loss)
    for _ in range(5):
        pipe.step(ids, target=ids)
    for index, stage in enumerate(plan.stages):
        for kind, predicted in (("F", stage.times[0].forward_s), ("B", stage.times[0].backward_s)):
            measured = [
                timed.duration_s
                for timed in pipe.last_step_actions()
                if timed.action.stage == index and timed.action.kind == kind
            ]
            print(f"\nstage {index} {kind}: {sum(measured) / len(measured):.6f} s measured, {predicted:.6f} predicted")
            assert measured
