"""Models of many equal blocks, and models larger than the device.

make bench
"""

import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest
import torch
from gpt import GPT, Config, next_token_loss

from profiler import LayerSequence, Profile, profile, trace

BLOCKS = (12, 48)
TURNS = 2
TIMES_AS_LONG = 1.3
REPOSITORY = Path(__file__).parents[2]

# In a process of its own, whose resident memory holds nothing else (the profiler of torch that sees tensors takes much
# itself, so a second process is asked for its size). The model: 20 blocks of 50 MB, in one case no two alike.
LARGER_THAN_THE_DEVICE = """
import sys, time
from contextlib import nullcontext
import torch
from torch import nn
from gpt import GPT, Config
from profiler import Device, profile, trace
from tests.models.tracked import allocations
from tests.peak_resident import peak_resident_bytes
from itertools import accumulate

class Unlike(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(1024, 6000 + 16 * block) for block in range(blocks))
        self.narrow = nn.ModuleList(nn.Linear(6000 + 16 * block, 1024) for block in range(blocks))
    def forward(self, x):
        for wide, narrow in zip(self.wide, self.narrow):
            x = x + narrow(torch.relu(wide(x)))
        return x

with torch.device("meta"):
    if sys.argv[1] == "equal":
        model = GPT(Config(vocabulary=256, context=64, width=1024, heads=8, blocks=20))
        sample = torch.zeros(4, 64, dtype=torch.int64)
    else:
        model, sample = Unlike(20), torch.empty(4, 64, 1024)
whole = sum(parameter.nbytes for parameter in model.parameters())
device = Device(name="cpu", kind="cpu", memory_bytes=whole // 4, threads=1)
sequence = trace(model, sample)
before, begun, record = peak_resident_bytes(), time.perf_counter(), [0]
with allocations() if sys.argv[2] == "tensors" else nullcontext(record) as record:
    profile(sequence, [device], micro_batch_sizes=[1, 2, 4], time_budget_s=0.0, progress=False, cache=False)
seconds, most, grown = time.perf_counter() - begun, max(accumulate(record)), peak_resident_bytes() - before
found = f"tensors at most {most / 1e6:.0f} MB" if most else f"the process grew by {grown / 1e6:.0f} MB, {seconds:.0f} s"
print(f"{sys.argv[1]} blocks: parameters {whole / 1e6:.0f} MB, limit {whole / 4e6:.0f} MB; while profiling {found}")
assert (most or grown) <= whole // 4
"""


@pytest.mark.benchmark
@pytest.mark.parametrize("what", ["tensors", "process"])
@pytest.mark.parametrize("blocks", ["equal", "unlike"])
def test_peak_memory_while_profiling_a_model_of_four_times_the_limit(blocks: str, what: str) -> None:
    path = f"{REPOSITORY}:{REPOSITORY / 'notebooks/demo'}"
    command = [sys.executable, "-c", LARGER_THAN_THE_DEVICE, blocks, what]
    done = subprocess.run(command, cwd=REPOSITORY, env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0


def _gpt(blocks: int) -> tuple[LayerSequence, torch.Tensor]:
    ids = torch.randint(256, (16, 128), generator=torch.Generator().manual_seed(0))
    return trace(GPT(Config(vocabulary=256, context=128, width=256, blocks=blocks)), ids), ids


def _profiled(sequence: LayerSequence, ids: torch.Tensor) -> tuple[Profile, float]:
    begun = time.perf_counter()
    found = profile(sequence, 1, sample=ids, loss_fn=next_token_loss, target=ids, progress=False, cache=False)
    return found, time.perf_counter() - begun


@pytest.mark.benchmark
def test_many_equal_blocks_take_hardly_longer_than_some() -> None:
    models = {blocks: _gpt(blocks) for blocks in BLOCKS}
    seconds: dict[int, list[float]] = {blocks: [] for blocks in BLOCKS}
    totals: dict[int, list[float]] = {blocks: [] for blocks in BLOCKS}
    for _ in range(TURNS):
        for blocks, (sequence, ids) in models.items():
            found, took_s = _profiled(sequence, ids)
            seconds[blocks].append(took_s)
            largest = max(cost.micro_batch_size for cost in found.costs)
            per_block = [c.forward_s + c.backward_s for c in found.costs if c.micro_batch_size == largest]
            totals[blocks].append(sum(per_block[2:-2]) / blocks)
    few, many = (median(seconds[blocks]) for blocks in BLOCKS)
    print(
        f"\nprofiling GPTs of {BLOCKS} blocks: {few:.1f} s and {many:.1f} s, {many / few:.2f} times as long; in turns"
    )
    for blocks in BLOCKS:
        print(f"{blocks} blocks: {[f'{took:.1f}' for took in seconds[blocks]]} s", end="; ")
        print(f"a block is said to take {median(totals[blocks]) * 1e3:.2f} ms")
    assert many <= TIMES_AS_LONG * few
