"""A script that any launcher starts, once for each stage of each replica.

python train.py plan 2          # once, where the devices are: measures, and writes plan.json for 2 of them
python train.py                 # in each process that is started; alone it runs all stages
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor import Pipeline
from planner import Plan, autoplan

STEPS = 20


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)], nn.Linear(64, 8))


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(32, 64, generator=draw)
    return x, x[:, :8].clone()


def train(plan: Plan) -> float:
    x, y = batch()
    pipe = Pipeline(make_model(), plan, loss_fn=functional.mse_loss)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
    for _ in range(STEPS):
        loss = pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
    if pipe.rank == 0:
        print(f"loss {loss:.9g} after {STEPS} steps", flush=True)
    return float(loss)


if __name__ == "__main__":
    if sys.argv[1:2] == ["plan"]:
        x, y = batch()
        count = int(sys.argv[2])
        autoplan(make_model(), x, count, loss_fn=functional.mse_loss, target=y, stages=count).save("plan.json")
    else:
        train(Plan.load("plan.json"))
