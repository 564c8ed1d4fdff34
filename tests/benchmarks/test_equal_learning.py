"""Does a pipeline learn what the plain model learns? 300 steps of a small GPT on the demo's text, in one figure.

    OMP_NUM_THREADS=1 python -m pytest -m benchmark tests/benchmarks/test_equal_learning.py -s

K = 1 in one process, K = 2 and 3 in as many, all with M = 16 micro-batches, AdamW and clipped norms, next to the plain
model, which sees each mini-batch in one piece. Pipelines have to agree in every bit. The plain model adds up in another
order; how far rounding alone drives two runs apart is shown by the plain model trained in 16 parts. There is no
dropout, whose numbers a plain model draws otherwise. The figure goes to equal_learning.png next to this file.
"""

import os
from collections.abc import Callable
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas
import pytest
import torch
from gpt import GPT, Config, next_token_loss
from task import BATCH_SIZE, CONFIG
from text import batches, train_and_held_out
from torch import Tensor, nn

from executor import Pipeline, launch
from planner import Plan
from profiler import trace
from tests.benchmarks.kept_rows import kept
from tests.executor.conftest import _plan as plan_with

STEPS = int(os.environ.get("STEPS", "300"))
MICRO_BATCHES = 16
SMALL = Config(context=CONFIG.context, width=96, heads=3, blocks=4, dropout=0.0)
LEARNING_RATE, NORM = 1e-3, 1.0
SMOOTHED = 20  # steps
IN_PARTS = "plain model in 16 parts"
FIGURE = Path(__file__).with_name("equal_learning.png")


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(SMALL)


def data() -> list[tuple[Tensor, Tensor]]:
    return list(islice(batches(train_and_held_out()[0], BATCH_SIZE, CONFIG.context, seed=0), STEPS))


def plan_of(stages: int) -> Plan:
    sequence = trace(make_model(), data()[0][0])
    cuts = [round(len(sequence) * part / stages) for part in range(1, stages)]
    return plan_with(sequence, cuts, batch_size=BATCH_SIZE, micro_batches=MICRO_BATCHES, schedule="1f1b")


def pipelined(plan: Plan) -> list[float]:
    """The loss of each step, as every process says it."""
    torch.set_num_threads(1)
    pipe = Pipeline(make_model(), plan, loss_fn=next_token_loss, replan=None)
    step = lambda x, y: pipe.step(x, target=y)  # noqa: E731
    return learned(step, list(pipe.parameters()), pipe.clip_grad_norm_)


def plain(parts: int) -> list[float]:
    """The plain model's, with mini-batches in so many parts."""
    model = make_model()

    def step(x: Tensor, y: Tensor) -> Tensor:
        losses = []
        for inputs, target in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = next_token_loss(model(inputs), target)
            (loss / parts).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    parameters = list(model.parameters())
    return learned(step, parameters, lambda norm: nn.utils.clip_grad_norm_(parameters, norm))


def learned(
    step: Callable[[Tensor, Tensor], Tensor], parameters: list[nn.Parameter], clip: Callable[[float], Any]
) -> list[float]:
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    losses = []
    for x, y in data():
        losses.append(step(x, y).item())
        clip(NORM)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def draw(curves: pandas.DataFrame) -> None:
    """Smoothed losses, and how far each is from the plain model's."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(7, 6), sharex=True, height_ratios=(2, 1))
    for place, name in enumerate(curves):
        style = {"linewidth": 6 - 1.2 * place, "alpha": 0.9, "color": f"C{place}"}
        above.plot(curves[name].rolling(SMOOTHED).mean() / np.log(2), label=name, **style)
        if place:
            apart = (curves[name] - curves["plain model"]).abs().rolling(SMOOTHED).mean()
            below.semilogy(apart, label=name, **style)
    above.set_ylabel("training loss, bits/byte")
    below.set_ylabel("distance to the\nplain model, nats")
    below.set_xlabel("step (means over 20)")
    above.legend()
    figure.savefig(FIGURE, dpi=90, bbox_inches="tight")
    pyplot.close(figure)


@pytest.mark.benchmark
def test_a_pipeline_learns_what_the_plain_model_learns() -> None:
    torch.set_num_threads(1)
    curves = {
        name: kept(name, partial(plain, parts)) for name, parts in (("plain model", 1), (IN_PARTS, MICRO_BATCHES))
    }
    for stages in (1, 2, 3):
        parts = kept(f"K = {stages}", partial(launch, pipelined, plan_of(stages)))
        assert all(part == other for part, other in pairwise(parts)), "every process says the same loss"
        curves[f"K = {stages}"] = parts[0]
    frame = pandas.DataFrame(curves)
    apart = frame.sub(frame["plain model"], axis=0).abs()
    table = pandas.DataFrame(
        {
            "last 20 losses": frame.tail(SMOOTHED).mean(),
            "apart, first 20": apart.head(20).max(),
            "apart, all": apart.max(),
        }
    )
    print(f"\n{table.to_string(float_format='{:.3g}'.format)}")
    draw(frame)
    for stages in (2, 3):
        assert curves[f"K = {stages}"] == curves["K = 1"], "every bit"
    assert apart["K = 1"].max() <= 3 * apart[IN_PARTS].max(), "no further than rounding drives them"
