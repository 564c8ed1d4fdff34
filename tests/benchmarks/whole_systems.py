"""The scripts of test_whole_systems.py: one training loop, plain and under each system, as a user would write them.

What they share is in here, too: the model, the batches, and a loop that watches. A script is run as it stands; lines
are counted by comparing it with the plain one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Final

import torch
from gpt import GPT, Config, next_token_loss
from torch import Tensor, nn

from tests.peak_resident import peak_resident_bytes

STEPS: Final = 14
UNTIMED: Final = 3
MODEL, SAMPLES = os.environ.get("SUBJECT", "tied,32").split(",")
BATCH: Final = int(SAMPLES)
CONFIG: Final = Config(context=64, width=192, heads=6, blocks=6, dropout=0.0)
loss_fn = next_token_loss


def _resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


IMPORTED_BYTES: Final = _resident_bytes()
"""What the process holds before there is a model."""


def make_model() -> GPT:
    """The same at each call; "tied" as GPT is, "untied" with a head of its own."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT(CONFIG)
    if MODEL == "untied":
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Of bytes."""
    numbers = torch.Generator().manual_seed(0)
    while True:
        ids = torch.randint(CONFIG.vocabulary, (BATCH, CONFIG.context + 1), generator=numbers)
        yield ids[:, :-1], ids[:, 1:]


def watched(named: Mapping[str, nn.Parameter]) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches for some steps; notes the gradients after the first, the seconds of the later, and the peak memory."""
    source, seconds = batches(), []
    for number in range(STEPS):
        batch = next(source)
        begun_s = time.perf_counter()
        yield batch
        seconds.append(time.perf_counter() - begun_s)
        if number == 0:
            gradients = {name: one.grad.clone() for name, one in named.items() if one.grad is not None}
    folder = Path(os.environ["FOUND"])
    torch.save(gradients, folder / f"{os.getpid()}.pt")
    peak_bytes = peak_resident_bytes()
    found = {"step_s": median(seconds[UNTIMED:]), "peak_bytes": peak_bytes, "imported_bytes": IMPORTED_BYTES}
    (folder / f"{os.getpid()}.json").write_text(json.dumps(found))


PLAIN = """
import torch
from tests.benchmarks.whole_systems import BATCH, loss_fn, make_model, watched

model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for x, y in watched(dict(model.named_parameters())):
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
"""

OURS = """
import torch
from executor import Pipeline, launch
from planner import autoplan
from tests.benchmarks.whole_systems import BATCH, batches, loss_fn, make_model, watched

def train(plan):
    model = make_model()
    pipe = Pipeline(model, plan, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4)
    for x, y in watched(dict(pipe.named_parameters())):
        optimizer.zero_grad()
        loss = pipe.step(x, target=y)
        optimizer.step()

x, y = next(batches())
plan = autoplan(make_model(), x, ["cpu", "cpu"], batch_size=BATCH, loss_fn=loss_fn, target=y, stages=2, micro_batches=8)
launch(train, plan)
"""

UNCOMPARED = OURS.replace("loss_fn=loss_fn)\n    opt", "loss_fn=loss_fn, compare_first_step=False)\n    opt")

TORCHGPIPE = """
import torch
from torch import nn
from torchgpipe import GPipe
from torchgpipe.balance import balance_by_time
from tests.benchmarks.whole_systems import BATCH, batches, loss_fn, make_model, watched

class Embedding(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.token_embedding, self.position_embedding = model.token_embedding, model.position_embedding
        self.dropout = model.dropout
    def forward(self, ids):
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.dropout(self.token_embedding(ids) + self.position_embedding(positions))

model = make_model()
layers = nn.Sequential(Embedding(model), *model.blocks, model.norm, model.head)
balance = balance_by_time(2, layers, next(batches())[0], device="cpu")
pipe = GPipe(layers, balance, devices=["cpu", "cpu"], chunks=8, checkpoint="never")
optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4)
for x, y in watched(dict(model.named_parameters())):
    optimizer.zero_grad()
    loss = loss_fn(pipe(x), y)
    loss.backward()
    optimizer.step()
"""

TORCH = """
import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
from tests.benchmarks.whole_systems import BATCH, batches, loss_fn, make_model, watched

dist.init_process_group("gloo")
rank = dist.get_rank()
model = make_model()
x, y = next(batches())
pipe = pipeline(model, mb_args=(x[: BATCH // 8],), split_spec={"blocks.3": SplitPoint.BEGINNING})
stage = pipe.build_stage(rank, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-4)
for x, y in watched(dict(stage.submod.named_parameters())):
    optimizer.zero_grad()
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y, losses=[])
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""

SCRIPTS: Final = {
    "plain PyTorch, one process": PLAIN,
    "ours, K = 2": OURS,
    "ours, the first step not compared with the model": UNCOMPARED,
    "torchgpipe 0.0.7, two CPU partitions of one process": TORCHGPIPE,
    "torch.distributed.pipelining, cut by hand": TORCH,
}
UNDER_TORCHRUN: Final = (TORCH,)
