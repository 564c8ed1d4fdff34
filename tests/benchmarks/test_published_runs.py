"""Steps of published runs with pipelines against what is predicted from data sheets, row by row.

python -m pytest -q -s -m benchmark tests/benchmarks/test_published_runs.py

Each row of `tests/data/published_pipeline_runs.csv` from vTrain is planned with the cuts, micro-batches and replicas as
published; equal models share one trace and one profile. What the source does otherwise than a plan of ours, as its runs
without pipeline show (`vtrain_without_pipeline.csv`, of which none is judged), is simulated so: nothing is recomputed,
the queue of the device is empty where a module begins, and M may be smaller than K. First with the constants of the
package; then with five figures fitted to these runs.
"""

import csv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import least_squares
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn import functional

from planner import Plan, plan_from_profile
from planner.plan.actions import make_schedule
from planner.plan.simulator import Durations, simulate
from profiler import Cluster, LayerSequence, Profile, profile, trace
from profiler.record import OptimizerCost
from profiler.run.inputs import fake_runner, micro_batch
from profiler.timing import estimate
from profiler.timing.accelerator_kernels import AcceleratorKernels
from profiler.timing.counted_work import LayerWork, work_of_layers
from profiler.timing.roofline import Rates, estimated_optimizer, seconds_of
from tests.models.amoebanet import AmoebaNet
from tests.models.megatron_gpt import VOCABULARY, MegatronGPT, token_loss

DATA = Path(__file__).parent.parent / "data"
DEVICE, LINK, BETWEEN = "A100-80GB", "nvlink3", "4xhdr"  # vTrain: 800 Gbit/s a host
PLAIN_WITHIN, CALIBRATED_WITHIN, RANK_CORRELATION = 0.12, 0.06, 0.95
FULL_MATRIX, FULL_MEMORY = 312e12, 2039e9  # as printed


@dataclass(frozen=True)
class Run:
    """A published run; `stages` is 1 for those without pipeline."""

    layers: int
    width: int
    heads: int
    length: int
    size: int
    count: int
    replicas: int
    stages: int
    step_s: float

    @property
    def model(self) -> tuple[int, int, int, int]:
        return self.layers, self.width, self.heads, self.length


def rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def with_pipeline() -> list[Run]:
    return [
        Run(
            **_shape(row),
            size=int(row["micro_batch_size"]),
            count=int(float(row["micro_batches"])),
            replicas=int(row["dp"]),
            stages=int(row["pp"]),
            step_s=float(row["step_s_reported"]),
        )
        for row in rows("published_pipeline_runs.csv")
        if row["source_key"] == "vtrain"
    ]


def without_pipeline() -> list[Run]:
    found = []
    for row in rows("vtrain_without_pipeline.csv"):
        size, replicas = int(row["micro_batch_size"]), int(row["dp"])
        count = int(row["global_batch"]) // size // replicas
        step_s = float(row["step_s"])
        found.append(Run(**_shape(row), size=size, count=count, replicas=replicas, stages=1, step_s=step_s))
    return found


def _shape(row: dict[str, str]) -> dict[str, int]:
    names = {"layers": "layers", "width": "hidden", "heads": "heads", "length": "seq_len"}
    return {name: int(row[key]) for name, key in names.items()}


@cache
def traced(layers: int, width: int, heads: int, length: int) -> tuple[LayerSequence, torch.Tensor]:
    with torch.device("meta"):
        model = MegatronGPT(layers, width=width, heads=heads, length=length)
        ids = torch.zeros(8, length, dtype=torch.int64)
    return trace(model, ids, progress=False, precision="bf16-grads"), ids


def profiled(model: tuple[int, int, int, int], sizes: Sequence[int]) -> Profile:
    """The profile of a model whose modules do not hide each other: the queue is empty where one begins."""
    sequence, ids = traced(*model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "seconds_of", partial(seconds_by_module, blocks_of(sequence)))
        return profile(
            sequence, Cluster.of(f"2x{DEVICE}", link=LINK), sample=ids, micro_batch_sizes=sizes, loss_fn=token_loss,
            target=ids, progress=False,
        )  # fmt: skip


def blocks_of(sequence: LayerSequence) -> list[str]:
    """The block of each layer; "" where it is in none."""
    return [
        next((".".join(path.split(".")[:2]) for path in layer.module_paths if path.startswith("blocks.")), "")
        for layer in sequence.layers
    ]


def seconds_by_module(
    blocks: Sequence[str], work: Sequence[LayerWork], base: Rates
) -> list[tuple[float, float, float]]:
    """What `seconds_of` says of the layers of each block by itself, and of those before and behind all blocks."""
    parts = groupby(zip(blocks, work, strict=True), key=itemgetter(0))
    return [times for _, part in parts for times in seconds_of([layer for _, layer in part], base)]


def roomy(cluster: Cluster) -> Cluster:
    """The cluster with memory for any stage: the sources recompute block by block, and print no peaks."""
    devices = tuple(device.model_copy(update={"memory_bytes": 10**13}) for device in cluster.devices)
    return cluster.model_copy(update={"devices": devices})


def planned(found: Profile, run: Run) -> Plan:
    """With the cuts as published, and as many micro-batches, at least one for each stage."""
    count = max(run.count, run.stages)
    return plan_from_profile(
        found, roomy(Cluster.of(f"{run.stages * run.replicas}x{DEVICE}", link=LINK, between=BETWEEN)),
        batch_size=run.size * count * run.replicas, stages=run.stages, micro_batches=count, micro_batches_per_stage=1,
        replicas=run.replicas, recompute="always", schedule="1f1b",
        cut_at=[f"blocks.{stage * run.layers // run.stages}" for stage in range(1, run.stages)],
    )  # fmt: skip


def predicted_s(found: Profile, plan: Plan, run: Run) -> float:
    """Seconds of the plan's step with the source's M, and nothing recomputed."""
    times = [stage.times_at(run.size) for stage in plan.stages]

    def each(values: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        return tuple((value,) * run.count for value in values)

    costs = [cost for cost in found.costs if cost.micro_batch_size == run.size]
    backward = [sum(costs[layer].backward_s for layer in range(s.first_layer, s.stop_layer)) for s in plan.stages]
    durations = Durations(
        forward_s=each([time.forward_s for time in times]),
        recompute_s=each([0.0] * run.stages),
        backward_s=each(backward),
        send_forward_s=each([time.send_forward_s for time in times]),
        send_backward_s=each([time.send_backward_s for time in times]),
    )
    order = make_schedule("1f1b", stages=run.stages, micro_batches=run.count, recompute=(False,) * run.stages)
    return simulate(order, durations).makespan_s + max(stage.all_reduce_s + stage.optimizer_s for stage in plan.stages)


@contextmanager
def rates(
    matrix: float, memory: float, dispatch_s: float, unaligned: float, stepping: float, patch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Profiles priced with other shares of what is printed."""
    known = Rates.of

    def changed(kind: str) -> Rates:
        return replace(
            known(kind), bfloat16_flops_per_s=matrix * FULL_MATRIX, memory_bytes_per_s=memory * FULL_MEMORY,
            dispatch_s=dispatch_s, unaligned=unaligned,
        )  # fmt: skip

    def stepped(name: str, kind: str, parameters: Any, base: Rates, **more: Any) -> OptimizerCost:
        base = replace(base, memory_bytes_per_s=stepping * FULL_MEMORY)
        return estimated_optimizer(name, kind, parameters, base, **more)

    with patch.context() as within:
        within.setattr(Rates, "of", changed)
        within.setattr(estimate, "estimated_optimizer", stepped)
        yield


def fitted() -> tuple[float, float, float, float, float]:
    """What `rates` takes, by the runs without pipeline on one host."""
    runs = [run for run in without_pipeline() if run.length == 1024]
    work = {(run.width, run.size): _work(run.width, run.heads, run.size) for run in runs}
    truth = np.array([run.step_s for run in runs])

    def predicted(logarithms: Any) -> Any:
        matrix, memory, dispatch_s, unaligned, stepping = np.exp(logarithms)
        base = replace(
            Rates.of(DEVICE), bfloat16_flops_per_s=matrix * FULL_MATRIX, memory_bytes_per_s=memory * FULL_MEMORY,
            dispatch_s=dispatch_s, unaligned=unaligned,
        )  # fmt: skip
        seconds = {key: _of_a_block_and_others(*parts, base) for key, parts in work.items()}
        found = []
        for run in runs:
            block_s, other_s = seconds[run.width, run.size]
            parameters = 12 * run.layers * run.width**2 + (VOCABULARY + run.length) * run.width
            moved = parameters * (4 * 4 + 2 * 8 + 6 + 6) / (stepping * FULL_MEMORY)  # Adam, master weights, casts
            ring = 2 * (run.replicas - 1) / run.replicas * 2 * parameters / (0.8 * 300e9)  # in bfloat16
            found.append(run.count * (run.layers * block_s + other_s) + moved + ring)
        return np.array(found)

    bounds = np.log([0.2, 0.2, 1e-6, 0.1, 0.2]), np.log([0.9, 1.0, 2e-4, 1.0, 1.0])

    def residuals(logarithms: Any) -> Any:
        return np.log(predicted(logarithms) / truth)

    best = least_squares(residuals, np.log([0.6, 0.7, 4e-5, 0.4, 0.7]), bounds=bounds, diff_step=[1e-3])
    error = np.abs(predicted(best.x) / truth - 1)
    matrix, memory, dispatch_s, unaligned, stepping = (float(value) for value in np.exp(best.x))
    print(
        f"\nfitted to {len(runs)} runs without pipeline: {matrix:.3f} of the matrix rate, {memory:.3f} of the "
        f"bandwidth, {dispatch_s * 1e6:.1f} us an operation, unaligned products at {unaligned:.3f}, "
        f"{stepping:.3f} of the bandwidth in the optimizer; "
        f"mean error there {error.mean():.1%}, worst {error.max():.1%}"
    )
    return matrix, memory, dispatch_s, unaligned, stepping


def _work(width: int, heads: int, size: int) -> tuple[list[LayerWork], list[str]]:
    """Of a model of three blocks, and the block of each layer."""
    sequence, ids = traced(3, width, heads, 1024)
    place = torch.device("cpu")
    inputs = micro_batch(sequence, ids, size, place)
    target = torch.zeros(size, 1024, dtype=torch.int64)
    with (
        fake_runner(sequence, inputs, loss_fn=token_loss, target=target, has_loss=True, device=place) as runner,
        AcceleratorKernels(),
    ):
        return work_of_layers(sequence, runner, size), blocks_of(sequence)


def _of_a_block_and_others(work: list[LayerWork], blocks: list[str], base: Rates) -> tuple[float, float]:
    """Seconds of a block in the middle, and of all that is in none."""
    times = list(zip(blocks, seconds_by_module(blocks, work, base), strict=True))
    block_s = sum(forward_s + backward_s for block, (forward_s, backward_s, _) in times if block == "blocks.1")
    return block_s, sum(forward_s + backward_s for block, (forward_s, backward_s, _) in times if not block)


def judged(title: str) -> tuple[float, float]:
    """Prints what is predicted; the mean error, and the least rank correlation within a model."""
    runs = with_pipeline()
    sizes: dict[tuple[int, int, int, int], set[int]] = defaultdict(set)
    for run in runs:
        sizes[run.model].add(run.size)
    profiles = {model: profiled(model, sorted(found)) for model, found in sizes.items()}
    errors: dict[Any, list[float]] = defaultdict(list)
    pairs: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for run in runs:
        found = profiles[run.model]
        step_s = predicted_s(found, planned(found, run), run)
        error = step_s / run.step_s - 1
        key = (run.width, run.size) if run.length == 1024 else ("several hosts", run.width)
        errors[key].append(error)
        errors["all"].append(error)
        pairs[run.model].append((step_s, run.step_s))
    print(f"\n{title}\n\n| width, micro-batch | runs | mean error | mean of signed | least | most |")
    print("|---|---|---|---|---|---|")
    for key, found_errors in sorted(errors.items(), key=str):
        values = np.array(found_errors)
        name = key if isinstance(key, str) else ", ".join(map(str, key))
        print(
            f"| {name} | {len(values)} | {np.abs(values).mean():.1%} | {values.mean():+.1%} | {values.min():+.1%} | "
            f"{values.max():+.1%} |"
        )
    ranks = [spearmanr(np.array(both)).statistic for both in pairs.values() if len(both) > 3]
    print(f"\nleast rank correlation within a model: {min(ranks):.3f}", flush=True)
    return float(np.abs(errors["all"]).mean()), float(min(ranks))


def amoebanet(sizes: Sequence[int]) -> Profile:
    with torch.device("meta"):
        model, images = AmoebaNet(18, 256), torch.zeros(4, 3, 224, 224)
    return profile(
        trace(model, images, keep_together=[f"cells.{cell}" for cell in range(len(model.cells))], progress=False),
        Cluster.of("8xP40-24GB", link="pcie3"), sample=images,
        batch_size=max(sizes) * 32, micro_batch_sizes=sizes, loss_fn=functional.cross_entropy,
        target=torch.zeros(4, dtype=torch.int64), optimizer="SGD", progress=False,
    )  # fmt: skip


class Residual(nn.Module):
    """What ends a block: its input, made as small and as deep as its output, is added."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        fits = inner == outer and stride == 1
        self.downsample = (
            nn.Identity()
            if fits
            else nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
        )

    def forward(self, x: Tensor, identity: Tensor) -> Tensor:
        return x + self.downsample(identity)


class Bottleneck(nn.Module):
    """A block of ResNet-101 (arXiv 1512.03385, figure 5), in the eleven layers of torchgpipe's benchmarks."""

    LAYERS = ("", "conv1", "bn1", "relu1", "conv2", "bn2", "relu2", "conv3", "bn3", "residual", "relu3")

    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.residual = Residual(inner, 4 * width, stride)
        self.relu1, self.relu2, self.relu3 = (nn.ReLU() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        found = self.relu1(self.bn1(self.conv1(x)))
        found = self.relu2(self.bn2(self.conv2(found)))
        return self.relu3(self.residual(self.bn3(self.conv3(found)), x))


RESNET_STEM, RESNET_BLOCKS = 4, (3, 4, 23, 3)


def resnet_cuts(row: dict[str, str]) -> list[str]:
    """The modules that the published stages of ResNet-101 begin with, of its 370 layers."""
    cuts = []
    for place in published_cuts(row):
        block, layer = divmod(place - RESNET_STEM, len(Bottleneck.LAYERS))
        cuts.append(f"{RESNET_STEM + block}.{Bottleneck.LAYERS[layer]}".removesuffix("."))
    return cuts


def resnet101(row: dict[str, str]) -> Profile:
    """With layers that begin where the published stages do."""
    blocks: list[nn.Module] = []
    inner = 64
    for group, count in enumerate(RESNET_BLOCKS):
        for place in range(count):
            blocks.append(Bottleneck(inner, 64 << group, 2 if group and not place else 1))
            inner = 256 << group
    size = round(float(row["micro_batch_size"]))
    with torch.device("meta"):
        stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)
        model, images = nn.Sequential(*stem, *blocks, *end).to("meta"), torch.zeros(4, 3, 224, 224)
    return profile(
        trace(model, images, cut_at=resnet_cuts(row), progress=False),
        Cluster.of("8xP40-24GB", link="pcie3"), sample=images, batch_size=size * int(row["micro_batches"]),
        micro_batch_sizes=[size], loss_fn=functional.cross_entropy, target=torch.zeros(4, dtype=torch.int64),
        optimizer="SGD", progress=False,
    )  # fmt: skip


class Convolved(nn.Module):
    """A 3x3 convolution with what follows it in torchgpipe's U-Net, in its four layers."""

    LAYERS = ("convolution", "dropout", "norm", "relu")

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inner, outer, 3, padding=1, bias=False)
        self.dropout, self.norm, self.relu = nn.Dropout2d(0.1), nn.InstanceNorm2d(outer), nn.LeakyReLU(0.01)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.norm(self.dropout(self.convolution(x))))


class Joined(nn.Module):
    """Both of what comes from below and what skipped it."""

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        return torch.cat((x, skipped), dim=1)


UNET_LEVELS, UNET_CONVOLUTIONS, UNET_WIDTH = 5, 5, 64


class PublishedUNet(nn.Module):
    """Encoders of some convolutions and a pooling, as many below, decoders that double, join and convolve."""

    def __init__(self) -> None:
        super().__init__()

        def convolved(inner: int, middle: int, outer: int) -> nn.Sequential:
            widths = [inner, *[middle] * (UNET_CONVOLUTIONS - 1), outer]
            return nn.Sequential(*(Convolved(*both) for both in pairwise(widths)))

        widths = [UNET_WIDTH << level for level in range(UNET_LEVELS + 1)]
        ends = [width // 2 for width in widths[:-1]]
        both = zip([3, *widths], widths[:-1], strict=False)
        self.down = nn.ModuleList(convolved(inner, width, width) for inner, width in both)
        self.pools = nn.ModuleList(nn.MaxPool2d(2) for _ in ends)
        self.bottom = convolved(widths[-2], widths[-1], widths[-2])
        self.rises = nn.ModuleList(nn.Upsample(scale_factor=2) for _ in ends)
        self.joins = nn.ModuleList(Joined() for _ in ends)
        self.up = nn.ModuleList(convolved(4 * end, end, end) for end in reversed(ends))
        self.head = nn.Conv2d(ends[0], 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level, pool in zip(self.down, self.pools, strict=True):
            skips.append(level(x))
            x = pool(skips[-1])
        x = self.bottom(x)
        for rise, join, level in zip(self.rises, self.joins, self.up, strict=True):
            x = level(join(rise(x), skips.pop()))
        return self.head(x)


def unet_layers() -> list[str]:
    """The modules of the published layers; what is put aside by one of its own is put aside by the pooling here."""

    def convolved(path: str) -> list[str]:
        return [f"{path}.{place}.{layer}" for place in range(UNET_CONVOLUTIONS) for layer in Convolved.LAYERS]

    levels = range(UNET_LEVELS)
    down = [path for level in levels for path in (*convolved(f"down.{level}"), *[f"pools.{level}"] * 2)]
    up = [path for level in levels for path in (f"rises.{level}", f"joins.{level}", *convolved(f"up.{level}"))]
    return [*down, *convolved("bottom"), *up, "head"]


def unet_cuts(row: dict[str, str]) -> list[str]:
    """The modules that the published stages of the U-Net begin with, of its 241 layers."""
    return [unet_layers()[place] for place in published_cuts(row)]


def unet(row: dict[str, str]) -> Profile:
    """With layers that begin where the published stages do."""
    size = round(float(row["micro_batch_size"]))
    with torch.device("meta"):
        model, images = PublishedUNet(), torch.zeros(4, 3, 192, 192)
    return profile(
        trace(model, images, cut_at=unet_cuts(row), progress=False),
        Cluster.of("8xP40-24GB", link="pcie3"), sample=images, batch_size=size * int(row["micro_batches"]),
        micro_batch_sizes=[size], loss_fn=functional.binary_cross_entropy_with_logits,
        target=torch.zeros(4, 1, 192, 192), optimizer="SGD", progress=False,
    )  # fmt: skip


def first_cells(row: dict[str, str]) -> list[str]:
    """Of AmoebaNet-D the cells that published stages begin with: the first layer is the stem."""
    return [f"cells.{place - 1}" for place in published_cuts(row)]


def published_cuts(row: dict[str, str]) -> list[int]:
    """How many of the published model's layers are before each stage but the first."""
    return list(accumulate(int(part) for part in row["balance"].split(",")))[:-1]


def torchgpipe_s(found: Profile, row: dict[str, str], cuts: Sequence[str]) -> float:
    """Seconds of a step with these cuts: recompute before each backward pass, at times not of the last.

    What skips stages is sent from its own stage, as torchgpipe does, and taken to be there in time.
    """
    stages, size, count = len(cuts) + 1, round(float(row["micro_batch_size"])), int(row["micro_batches"])
    plan = plan_from_profile(
        found, roomy(Cluster.of(f"{stages}xP40-24GB", link="pcie3")),
        batch_size=size * max(count, stages), stages=stages, micro_batches=max(count, stages),
        micro_batches_per_stage=1, recompute="always", schedule="gpipe", cut_at=cuts, skips="direct",
    )  # fmt: skip
    times = [stage.times_at(size) for stage in plan.stages]
    again = row["recompute"] == "always"

    def each(values: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        return tuple((value,) * count for value in values)

    more = [time.recompute_s if again else 0.0 for time in times]
    durations = Durations(
        forward_s=each([time.forward_s for time in times]),
        recompute_s=each([0.0 if again else time.recompute_s for time in times]),
        backward_s=each([time.backward_s + more_s for time, more_s in zip(times, more, strict=True)]),
        send_forward_s=each([time.send_forward_s for time in times]),
        send_backward_s=each([time.send_backward_s for time in times]),
    )
    order = make_schedule("gpipe", stages=stages, micro_batches=count, recompute=(not again,) * stages)
    return simulate(order, durations).makespan_s + max(stage.optimizer_s for stage in plan.stages)


@pytest.mark.benchmark
def test_torchgpipe_rows() -> None:
    """The nine of AmoebaNet-D, three of ResNet-101, and three of U-Net."""
    every = rows("published_pipeline_runs.csv")
    kept = [row for row in every if row["model"].startswith("AmoebaNet")]
    found = amoebanet(sorted({int(float(row["micro_batch_size"])) for row in kept}))
    judge_torchgpipe([(row, torchgpipe_s(found, row, first_cells(row))) for row in kept])
    kept = [row for row in every if row["model"].startswith("ResNet")]
    judge_torchgpipe([(row, torchgpipe_s(resnet101(row), row, resnet_cuts(row))) for row in kept])
    kept = [row for row in every if row["model"].startswith("U-Net")]
    assert all(len(unet_layers()) == sum(map(int, row["balance"].split(","))) for row in kept)
    judge_torchgpipe([(row, torchgpipe_s(unet(row), row, unet_cuts(row))) for row in kept])


def judge_torchgpipe(predicted: Sequence[tuple[dict[str, str], float]]) -> None:
    pairs = []
    print("\n| K | M | micro-batch | published | predicted | error |\n|---|---|---|---|---|---|")
    for row, step_s in predicted:
        truth_s = float(row["step_s_derived"])
        pairs.append((step_s, truth_s))
        print(
            f"| {row['pp']} | {row['micro_batches']} | {row['micro_batch_size']} | {truth_s:.2f} s | {step_s:.2f} s | "
            f"{step_s / truth_s - 1:+.0%} |"
        )
    errors = np.array([step_s / truth_s - 1 for step_s, truth_s in pairs])
    print(f"mean error {np.abs(errors).mean():.1%}, rank correlation {spearmanr(np.array(pairs)).statistic:.2f}")


@pytest.mark.benchmark
def test_published_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = judged("constants of the package")
    with rates(*fitted(), monkeypatch):
        calibrated = judged("calibrated on runs without pipeline")
    assert min(plain[1], calibrated[1]) >= RANK_CORRELATION
    assert plain[0] <= PLAIN_WITHIN
    print(f"calibrated: {calibrated[0]:.1%}, where {CALIBRATED_WITHIN:.0%} is the aim")
