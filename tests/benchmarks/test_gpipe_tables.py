"""The tables of GPipe's paper (Huang et al., arXiv 1811.06965 v5) beside what the planner says of the same models.

    make bench

The models are traced on the meta device, the paper's accelerators come from data sheets (`Cluster.of`), the optimizer
is RMSProp with 12 bytes a parameter as in the paper. Assumptions, here and there unlike the paper's:

- all tensors are float32, and no compiler fuses operations: TPUs keep activations in bfloat16 and XLA fuses
  normalization, activation and dropout into the operations before, so that the paper's activations are smaller;
- 600 MB of each accelerator are taken by the process (`profiler.timing.estimate.CONTEXT_BYTES`);
- a mini-batch of 128 sequences on 128 accelerators, where the paper's has 32: ours has at least K micro-batches;
- one mini-batch for all cells of a row; the paper changed it from cell to cell to fit memory;
- Transformers of more than 13 blocks are the traced one with its block repeated (equal layers cost the same).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from planner import InfeasibleError, Plan, plan_from_profile
from planner.plan.actions import make_schedule
from planner.plan.simulator import Durations, simulate
from profiler import Cluster, Profile, profile, trace
from profiler.device import Link
from profiler.record import LayerInfo, ParameterInfo
from tests.models.amoebanet import AmoebaNet
from tests.models.gpipe_transformer import on_meta, token_loss

PAPER = json.loads((Path(__file__).parent.parent / "data" / "gpipe_paper_tables.json").read_text())
GIB = 2**30
IMAGES, TOKENS = 128, 32  # mini-batches of table 1
TRACED_BLOCKS = 13
MOST_BLOCKS = 500  # larger models are planned for the paper's accelerators alone: that no fewer do is clear
EXPLAINED = 0.1  # larger deviations have a reason in `REASONS`
REASONS = (
    "AmoebaNet-D at M = 32: the paper reaches 62, 50 and 53 % of K M / (M + K - 1), with stages balanced by FLOPs; our "
    "cuts are the best ones for the predicted times, so we predict more.",
    "M = 1: stages without micro-batches work one after another, so more of them cannot be faster; the paper's cells "
    "are (up to 1.38), since more accelerators had room for a larger mini-batch.",
    "M = 4: the paper's Transformer exceeds K M / (M + K - 1) (up to 165 % of it), since its M = 1 base ran with a "
    "smaller mini-batch that fits; AmoebaNet-D falls short of it as at M = 32.",
    "Activations: float32 and no fusion, so we predict more than XLA keeps on a TPU.",
)


@dataclass(frozen=True)
class Model:
    """A model of the tables: how it is built, what trains it."""

    build: Callable[[], torch.nn.Module]
    sample: torch.Tensor
    target: torch.Tensor
    loss_fn: Any


def amoebanet(cells: int, filters: int) -> Model:
    def build() -> torch.nn.Module:
        with torch.device("meta"):
            return AmoebaNet(cells, filters)

    return Model(build, torch.empty(4, 3, 224, 224), torch.zeros(4, dtype=torch.int64), functional.cross_entropy)


def transformer(blocks: int) -> Model:
    ids = torch.zeros(4, 1024, dtype=torch.int64)
    return Model(lambda: on_meta(blocks), ids, ids, token_loss)


def profiled(model: Model, devices: str, link: str | Link, batch_size: int, sizes: tuple[int, ...]) -> Profile:
    sequence = trace(model.build(), model.sample, progress=False)
    return profile(
        sequence,
        Cluster.of(devices, link=link),
        sample=model.sample,
        batch_size=batch_size,
        micro_batch_sizes=sizes,
        loss_fn=model.loss_fn,
        target=model.target,
        optimizer="RMSprop",
        progress=False,
    )


def repeated(short: Profile, blocks: int, traced: int) -> Profile:
    """The profile of a model with that many equal blocks, from one with `traced` of them."""
    middle = f"blocks.{traced // 2}"
    inner = [layer.index for layer in short.layers if any(p.startswith(middle + ".") for p in layer.module_paths)]
    own = [index for index in inner if short.layers[index].module_paths[0].startswith(middle)]
    first, stop = own[0], own[-1] + 1
    extra = blocks - traced
    order = [
        *range(stop),
        *(index for _ in range(extra) for index in range(first, stop)),
        *range(stop, len(short.layers)),
    ]
    sizes = {parameter.name: parameter for parameter in short.parameters}
    layers: list[LayerInfo] = []
    parameters: dict[str, ParameterInfo] = {}
    for position, index in enumerate(order):
        layer = short.layers[index]
        is_copy = stop <= position < stop + extra * (stop - first)
        suffix = f"#{(position - stop) // (stop - first)}" if is_copy else ""
        names = tuple(name + suffix for name in layer.parameters)
        layers.append(layer.model_copy(update={"index": position, "parameters": names}))
        for name, original in zip(names, layer.parameters, strict=True):
            parameters[name] = sizes[original].model_copy(update={"name": name})
    by_layer: dict[int, list[Any]] = {}
    for cost in short.costs:
        by_layer.setdefault(cost.layer, []).append(cost)
    costs = tuple(
        cost.model_copy(
            update={"layer": position, "in_stage": None} if hasattr(cost, "in_stage") else {"layer": position}
        )
        for position, index in enumerate(order)
        for cost in by_layer[index]
    )
    return short.model_copy(update={"layers": tuple(layers), "parameters": tuple(parameters.values()), "costs": costs})


def memory_on(measured: Profile, devices: str, link: str, batch_size: int, **settings: Any) -> str:
    """Model / activation memory of all accelerators in GiB; in brackets where one of them has less than it needs."""
    cluster = Cluster.of(devices, link=link)
    count = len(cluster.devices)
    if count > len(measured.layers):
        return "more accelerators than layers"
    for cell, memory_bytes in (("{:.1f} / {:.1f}", cluster.devices[0].memory_bytes), ("({:.1f} / {:.1f})", 10**15)):
        try:
            plan = plan_from_profile(
                measured, with_memory(cluster, memory_bytes), batch_size=batch_size, stages=count, schedule="gpipe",
                **settings,
            )  # fmt: skip
        except InfeasibleError:
            continue
        memory = [stage.memory for stage in plan.stages]
        model = sum(entry.parameters + entry.gradients + entry.optimizer for entry in memory)
        return cell.format(model / GIB, sum(entry.activations + entry.transient for entry in memory) / GIB)
    raise AssertionError


def with_memory(cluster: Cluster, memory_bytes: int) -> Cluster:
    devices = tuple(device.model_copy(update={"memory_bytes": memory_bytes}) for device in cluster.devices)
    return cluster.model_copy(update={"devices": devices})


def print_table_1(title: str, rows: dict[str, list[str]], columns: list[str], paper: dict[str, str]) -> None:
    print(f"\n{title}: model / activation memory of all accelerators in GiB, in brackets where it does not fit\n")
    print("| model | paper: largest on | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 2) + "|")
    for name, cells in rows.items():
        print(f"| {name} | {paper[name]} | " + " | ".join(cells) + " |")


def assert_fits_where_the_paper_says(rows: dict[str, list[str]]) -> None:
    """With recompute each model fits the accelerators that it is the paper's largest one for."""
    for place, cells in enumerate(rows.values()):
        if place:  # the first is the largest without GPipe, where float32 needs more than the paper
            assert not cells[place].startswith("(")


COLUMNS_A = {"1, no GPipe": ("1xTPUv2", "never"), "1": ("1xTPUv2", "always"), "2": ("2xTPUv2", "always"),
             "4": ("4xTPUv2", "always"), "8": ("8xTPUv2", "always")}  # fmt: skip
COLUMNS_T = {"1, no GPipe": ("1xTPUv3", "never"), "1": ("1xTPUv3", "always"), "8": ("8xTPUv3", "always"),
             "32": ("32xTPUv3", "always"), "128": ("128xTPUv3", "always")}  # fmt: skip


def paper_columns(table: dict[str, Any], model: str) -> list[tuple[Any, ...]]:
    """Model, column, parameters, model memory and activation memory of each column of table 1."""
    names = (model, "columns", "parameters", "model_memory_GB", "peak_activation_GB")
    return list(zip(*(table[name] for name in names), strict=True))


def settings_of(column: str, recompute: str, batch_size: int) -> dict[str, Any]:
    if column == "1, no GPipe":
        return {"recompute": "never", "micro_batches": 1, "micro_batches_per_stage": 1}
    return {"recompute": recompute, "micro_batches": batch_size, "micro_batches_per_stage": 1}


@pytest.mark.benchmark
def test_table_1_amoebanet() -> None:
    table = PAPER["table_1_amoebanet_d"]
    rows, paper = {}, {}
    for (cells, filters), column, parameters, model_gb, activation_gb in paper_columns(table, "L_D"):
        measured = profiled(amoebanet(cells, filters), "8xTPUv2", "tpuv2", IMAGES, (1, IMAGES))
        counted = sum(parameter.elements for parameter in measured.parameters)
        name = f"AmoebaNet-D ({cells}, {filters}), {counted / 1e6:.0f} M"
        assert counted == pytest.approx(parameters, rel=0.03)
        paper[name] = f"{column} ({model_gb} / {activation_gb})"
        rows[name] = [
            memory_on(measured, devices, "tpuv2", IMAGES, **settings_of(key, recompute, IMAGES))
            for key, (devices, recompute) in COLUMNS_A.items()
        ]
        print(name, rows[name], flush=True)
    print_table_1("Table 1, TPUv2 of 8 GB", rows, list(COLUMNS_A), paper)
    assert_fits_where_the_paper_says(rows)


@cache
def short_transformer(devices: str, link: str, sizes: tuple[int, ...]) -> Profile:
    return profiled(transformer(TRACED_BLOCKS), devices, link, TOKENS, sizes)


@pytest.mark.benchmark
def test_table_1_transformer() -> None:
    table = PAPER["table_1_transformer"]
    short = short_transformer("8xTPUv3", "tpuv3", (1, TOKENS))
    rows, paper = {}, {}
    for blocks, column, parameters, model_gb, activation_gb in paper_columns(table, "L"):
        measured = (
            profiled(transformer(blocks), "8xTPUv3", "tpuv3", TOKENS, (1, TOKENS))
            if blocks < TRACED_BLOCKS
            else repeated(short, blocks, TRACED_BLOCKS)
        )
        counted = sum(parameter.elements for parameter in measured.parameters)
        assert counted == pytest.approx(parameters, rel=0.005)
        name = f"Transformer-{blocks}, {counted / 1e9:.2f} B"
        paper[name] = f"{column} ({model_gb} / {activation_gb})"
        rows[name] = [
            memory_on(measured, devices, "tpuv3", batch_size, **settings_of(key, recompute, batch_size))
            if blocks <= MOST_BLOCKS or key == column.removeprefix("Pipeline-")
            else "-"
            for key, (devices, recompute) in COLUMNS_T.items()
            for batch_size in [max(TOKENS, len(Cluster.of(devices, link="tpuv3").devices))]
        ]
        print(name, rows[name], flush=True)
    print_table_1("Table 1, TPUv3 of 16 GB", rows, list(COLUMNS_T), paper)
    assert_fits_where_the_paper_says(rows)


def step_s(measured: Profile, plan: Plan, micro_batches: int, batch_size: int, link: Link) -> float:
    """Seconds of a step with the plan's cuts and any M, where all is recomputed within its backward pass.

    So the paper's figures must be: with recompute ahead of time, or none for the last micro-batch, its base of M = 1
    would take 3 / 4 of the time and none of its M = 32 cells could be reached.
    """
    size = batch_size // micro_batches
    kind = plan.stages[0].device.kind
    costs = [cost for cost in measured.costs if cost.micro_batch_size == size and cost.device_kind == kind]
    parts = [costs[stage.first_layer : stage.stop_layer] for stage in plan.stages]
    last = [part[-1] for part in parts]

    def each(values: list[float]) -> tuple[tuple[float, ...], ...]:
        return tuple((value,) * micro_batches for value in values)

    gradients = [0.0, *(link.transfer_s(cost.output_gradient_bytes) for cost in last[:-1])]
    durations = Durations(
        forward_s=each([sum(cost.forward_s for cost in part) for part in parts]),
        recompute_s=each([0.0 for _ in parts]),
        backward_s=each([sum(cost.recompute_s + cost.backward_s for cost in part) for part in parts]),
        send_forward_s=each([link.transfer_s(cost.output_bytes) for cost in last]),
        send_backward_s=each(gradients),
    )
    schedule = make_schedule("gpipe", stages=plan.K, micro_batches=micro_batches, recompute=(False,) * plan.K)
    return simulate(schedule, durations).makespan_s


def throughput(
    measured: Profile, device: str, link: Link, batch_size: int, numbers: tuple[int, ...]
) -> dict[int, list[float]]:
    """By M the throughput for K = 2, 4, 8, relative to K = 2 with the smallest M; memory disregarded."""
    seconds: dict[int, list[float]] = {number: [] for number in numbers}
    for stages in PAPER["table_2_normalized_throughput"]["K"]:
        huge = with_memory(Cluster.of(f"{stages}x{device}", link=link), 10**15)
        plan = plan_from_profile(
            measured, huge, batch_size=batch_size, stages=stages, micro_batches=32, micro_batches_per_stage=1,
            recompute="always", schedule="gpipe",
        )  # fmt: skip
        for number in numbers:
            seconds[number].append(step_s(measured, plan, number, batch_size, link))
    base = seconds[numbers[0]][0]
    return {number: [base / value for value in row] for number, row in seconds.items()}


def print_throughput(name: str, ours: dict[int, list[float]], paper: dict[str, list[float]]) -> None:
    for number, row in ours.items():
        cells = " | ".join(
            f"{value:.2f} ({theirs}, {value / theirs - 1:+.0%})"
            for value, theirs in zip(row, paper[str(number)], strict=True)
        )
        print(f"| {name} | {number} | {cells} |")


@pytest.mark.benchmark
def test_tables_2_and_3() -> None:
    """Throughput over K and M, ours (the paper's, deviation)."""
    print("\n| model | M | K = 2 | K = 4 | K = 8 |\n|---|---|---|---|---|")
    link = Link.of("tpuv2")
    sizes = (4, 32, 128)
    images = profiled(amoebanet(18, 256), "8xTPUv2", link, IMAGES, sizes)
    ours = throughput(images, "TPUv2", link, IMAGES, (1, 4, 32))
    print_throughput("AmoebaNet-D (18, 256)", ours, PAPER["table_2_normalized_throughput"]["amoebanet_d_18_256"])
    assert ours[32][2] > ours[32][1] > ours[32][0] > 1.0

    link = Link.of("tpuv3")
    short = short_transformer("8xTPUv3", "tpuv3", (1, 8, TOKENS))
    words = throughput(repeated(short, 48, TRACED_BLOCKS), "TPUv3", link, TOKENS, (1, 4, 32))
    print_throughput("Transformer-48", words, PAPER["table_2_normalized_throughput"]["transformer_48"])
    for value, theirs in zip(words[32], PAPER["table_2_normalized_throughput"]["transformer_48"]["32"], strict=True):
        assert value == pytest.approx(theirs, rel=EXPLAINED)

    host = Link.of("pcie3")  # device to host to device: twice over the same bus
    slow = Link(latency_s=2 * host.latency_s, bytes_per_s=host.bytes_per_s / 2)
    table = PAPER["table_3_no_fast_link"]
    print("\n| table 3, P100 without NVLink | M | K = 2 | K = 4 | K = 8 |\n|---|---|---|---|---|")
    small = profiled(amoebanet(18, 128), "8xP100", slow, IMAGES, (4,))
    found = throughput(small, "P100", slow, IMAGES, (32,))
    print_throughput("AmoebaNet-D (18, 128)", found, {"32": table["amoebanet_d_18_128"]})
    short = short_transformer("8xP100", "pcie3", (1,))
    found = throughput(repeated(short, 24, TRACED_BLOCKS), "P100", slow, TOKENS, (32,))
    print_throughput("Transformer-24", found, {"32": table["transformer_24"]})
    for value, theirs in zip(found[32], table["transformer_24"], strict=True):
        assert value == pytest.approx(theirs, rel=EXPLAINED)
    print("\n" + "\n".join(f"- {reason}" for reason in REASONS))


@pytest.mark.benchmark
def test_efficiency_over_m() -> None:
    """Share of perfect speed-up, K = 2 to 16, for M = K to 16 K: the bubble is small from M >= 4 K on."""
    batch_size = 256
    sizes = tuple(sorted({batch_size // m for m in (2, 4, 8, 16, 32, 64, 128, 256)}))
    sequence = trace(on_meta(TRACED_BLOCKS), torch.zeros(2, 1024, dtype=torch.int64))
    measured = profile(
        sequence, Cluster.of("16xTPUv3", link="tpuv3"), batch_size=batch_size, micro_batch_sizes=sizes,
        optimizer="RMSprop", progress=False,
    )  # fmt: skip
    measured = repeated(measured, 64, TRACED_BLOCKS)
    link = Link.of("tpuv3")
    print("\n| K | " + " | ".join(f"M = {factor} K" for factor in (1, 2, 4, 8, 16)) + " |\n|---|---|---|---|---|---|")
    for stages in (2, 4, 8, 16):
        huge = with_memory(Cluster.of(f"{stages}xTPUv3", link=link), 10**15)
        row = []
        for factor in (1, 2, 4, 8, 16):
            plan = plan_from_profile(
                measured, huge, batch_size=batch_size, stages=stages, micro_batches=factor * stages,
                micro_batches_per_stage=1, schedule="gpipe",
            )  # fmt: skip
            times = [stage.times[0] for stage in plan.stages]
            work = sum(time.forward_s + time.backward_s for time in times) * factor * stages
            row.append(work / (stages * (plan.prediction.step_s - plan.prediction.optimizer_s)))
        print(f"| {stages} | " + " | ".join(f"{share:.1%}" for share in row) + " |")
        assert row == sorted(row)
        for factor, share in zip((1, 2, 4, 8, 16), row, strict=True):
            bound = factor * stages / (factor * stages + stages - 1)
            assert 0.9 * bound < share <= bound
