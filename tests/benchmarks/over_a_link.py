"""What each host of `test_two_hosts` runs: measures the link, trains over it, and writes what both say of its speed."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor import Pipeline
from planner import Plan
from profiler.device import Device
from profiler.machine.links import fit_link, ping_pong

BATCH, WIDTH, STEPS = 64, 4096, 5
SIZES_BYTES = tuple(2**power for power in range(10, 22, 2))
HERE = Device(name="cpu", kind="cpu", memory_bytes=2**30, threads=1)


class Wide(nn.Module):
    """A boundary of 256 KiB for each of 4 micro-batches of 16 samples, and little work."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.linspace(0.5, 1.5, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x * self.scales[0]) * self.scales[1])


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def inputs() -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0))


def train(plan: Plan) -> tuple[Pipeline, list[float]]:
    pipe = Pipeline(Wide(), plan, loss_fn=mean)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        losses.append(pipe.step(inputs(), target=inputs()).item())
        optimizer.step()
        optimizer.zero_grad()
    return pipe, losses


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    pipe, losses = train(Plan.load(folder / "plan.json"))
    table = pipe.measured()
    sent = {row.what: row.measured for row in table.itertuples() if str(row.what).startswith("send_")}
    link = fit_link(SIZES_BYTES, [lap.transfer_s for lap in ping_pong(HERE, SIZES_BYTES, rounds=5)])
    result = {"losses": losses, "sent_s": sent, "latency_s": link.latency_s, "bytes_per_s": link.bytes_per_s}
    (folder / f"result-{dist.get_rank()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
