"""Where in memory a batch begins decides in which order kernels add up; it changes no bit of what is trained."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline, launch
from planner import Plan
from profiler import trace
from tests.executor.conftest import _plan as plan_for

WIDTH, SAMPLES, BATCHES = 6, 6, 20


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def gradients(plan: Plan, shifts: tuple[int, ...], *, rank_0_reads: bool) -> dict[str, list[Tensor]]:
    """Of some batches that begin so many samples after the beginning of their memory."""
    pipe = Pipeline(model(), plan, loss_fn=functional.mse_loss)
    found: dict[str, list[Tensor]] = {}
    noise = torch.Generator().manual_seed(1)
    pairs = []
    for number in range(BATCHES):
        shift = shifts[number % len(shifts)]
        x, y = (torch.randn(SAMPLES, WIDTH, generator=noise) for _ in range(2))
        place = torch.empty(shift + SAMPLES, WIDTH)
        place[shift:] = x
        pairs.append((place[shift:], y))
    for x, y in pipe.batches(pairs) if rank_0_reads else pairs:
        pipe.step(x, target=y)
        for name, parameter in pipe.named_parameters():
            assert parameter.grad is not None
            found.setdefault(name, []).append(parameter.grad.clone())
            parameter.grad = None
    return found


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    sequence = trace(model(), torch.zeros(SAMPLES, WIDTH), stages=2, progress=False)
    common: dict[str, Any] = {"batch_size": SAMPLES, "micro_batches": 2}
    return [plan_for(sequence, [], **common), plan_for(sequence, [2], **common)]


@pytest.fixture(scope="module")
def of_replicas() -> Plan:
    sequence = trace(model(), torch.zeros(SAMPLES, WIDTH), progress=False)
    return plan_for(sequence, [], batch_size=SAMPLES, micro_batches=2, replicas=2)


def assert_equal(one: dict[str, list[Tensor]], other: dict[str, list[Tensor]]) -> None:
    for name, values in one.items():
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(values, other[name], strict=True)), name


def test_in_one_process(plans: list[Plan]) -> None:
    for plan in plans:
        assert_equal(gradients(plan, (1, 2, 3), rank_0_reads=False), gradients(plans[0], (0,), rank_0_reads=False))


def test_in_a_region_of_inference_mode(plans: list[Plan]) -> None:
    """A copy that is made there can be trained with, as the batch itself."""
    batches = torch.randn(WIDTH, 1 + SAMPLES).t()
    for x in (batches[1:], batches[1:].contiguous()):
        pipe = Pipeline(model(), plans[1], loss_fn=functional.mse_loss)
        expected = pipe.step(x, target=x)
        with torch.inference_mode():
            assert torch.equal(pipe.step(x, target=x), expected)


def test_data_that_rank_0_hands_out(of_replicas: Plan) -> None:
    """The second replica's part begins where nothing else does."""
    expected = gradients(of_replicas, (0, 1, 3), rank_0_reads=False)
    for found in launch(_handed_out, of_replicas):
        assert_equal(found, expected)


def _handed_out(plan: Plan) -> dict[str, list[Tensor]]:
    return gradients(plan, (0, 1, 3), rank_0_reads=True)
