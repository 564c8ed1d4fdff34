"""Times from data sheets' arithmetic against measured ones, after fitting the rates to this CPU.

    make bench

Each model is predicted with rates that were fitted to the other models, so nothing was fitted to what is judged. All
are profiled for a second or two in turns, and layers are judged by the median over turns.
"""

import time
from collections.abc import Callable
from statistics import median

import pytest
import torch
from gpt import GPT, Config
from scipy.stats import spearmanr
from torch import Tensor, nn

from profiler import Cluster, Device, LayerSequence, Profile, profile, trace
from profiler.record import LayerCost
from profiler.run.inputs import fake_runner, micro_batch
from profiler.timing.counted_work import LayerWork, work_of_layers
from profiler.timing.rate_fit import fitted_rates
from profiler.timing.roofline import Rates, seconds_of
from tests.models.densenet import DenseNet
from tests.models.transformer import Translator
from tests.models.unet import UNet

CPU = Cluster(devices=(Device(name="cpu", kind="cpu", memory_bytes=2**34, threads=1),))
SIZES = (1, 2, 4)  # between 1 and a larger size the profiler adds 2
TURNS = 3
BUDGET_S = 3.0
START = Rates(5e10, 5e10, 5e10, 5e10, 3e10, 1e10, 1e-5)  # of the order of one CPU core
RANK_CORRELATION = 0.9
TOTAL_WITHIN = 0.25
SECONDS_FOR_LLAMA = 60.0


def images(extent: int) -> Tensor:
    return torch.randn(4, 3, extent, extent)


def ids(length: int) -> Tensor:
    return torch.randint(1, 256, (4, length))


MODELS: dict[str, Callable[[], tuple[nn.Module, object]]] = {
    "GPT": lambda: (GPT(Config(vocabulary=256, context=128, width=256, blocks=4)), ids(128)),
    "DenseNet": lambda: (DenseNet(growth=16, blocks=(4, 4, 4), num_classes=10), images(64)),
    "U-Net": lambda: (UNet(depth=3, channels=16), images(64)),
    "nn.Transformer": lambda: (Translator(256, width=256, heads=4, layers=3, dropout=0.1), (ids(64), ids(48))),
}


def work_at(sequence: LayerSequence, sample: object, size: int) -> list[LayerWork]:
    place = torch.device("cpu")
    inputs = micro_batch(sequence, sample, size, place)
    with fake_runner(sequence, inputs, loss_fn=None, target=None, has_loss=False, device=place) as runner:
        return work_of_layers(sequence, runner, size)


def middle(turns: list[Profile]) -> list[LayerCost]:
    """The costs with the median times of several profiles."""
    return [
        same[0].model_copy(
            update={name: median(getattr(cost, name) for cost in same) for name in ("forward_s", "backward_s")}
        )
        for same in zip(*(turn.costs for turn in turns), strict=True)
    ]


@pytest.mark.benchmark
def test_times_from_counted_work() -> None:
    torch.manual_seed(0)
    turns: dict[str, list[Profile]] = {name: [] for name in MODELS}
    samples, sequences = {}, {}
    for name, build in MODELS.items():
        model, samples[name] = build()
        sequences[name] = trace(model, samples[name])
    for _ in range(TURNS):
        for name, sequence in sequences.items():
            turns[name].append(
                profile(
                    sequence, CPU, sample=samples[name], micro_batch_sizes=SIZES, time_budget_s=BUDGET_S, progress=False
                )
            )
    measured = {name: middle(profiles) for name, profiles in turns.items()}
    work = {name: {size: work_at(sequences[name], samples[name], size) for size in SIZES} for name in MODELS}
    print("\n| model | layers | rank correlation | predicted / measured total | stated error |\n|---|---|---|---|---|")
    found = []
    for name in MODELS:
        rates, error = fitted_rates([(work[other], measured[other]) for other in MODELS if other != name], START)
        pairs = [
            (
                sum(seconds_of([work[name][cost.micro_batch_size][cost.layer]], rates)[0][:2]),
                cost.forward_s + cost.backward_s,
            )
            for cost in measured[name]
        ]
        predicted, truth = zip(*pairs, strict=True)
        correlation = spearmanr(predicted, truth).statistic
        total = sum(predicted) / sum(truth)
        found.append((correlation, total, error))
        print(f"| {name} | {len(sequences[name])} | {correlation:.3f} | {total:.2f} | {error:.2f} |")
    print(f"rates fitted without the last model: {rates}")
    for correlation, total, error in found:
        assert correlation >= RANK_CORRELATION
        assert abs(total - 1) <= min(TOTAL_WITHIN, error)


@pytest.mark.benchmark
def test_a_model_that_fits_no_device_here() -> None:
    """Llama of 70 B parameters, from the meta device to the profile of a cluster of H100s."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=4096,
        use_cache=False,
    )
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config)
        model.to(torch.bfloat16)
        ids = torch.zeros(4, 4096, dtype=torch.int64)
    begun = time.perf_counter()
    sequence = trace(model, {"input_ids": ids, "labels": ids})
    traced = time.perf_counter()
    found = profile(sequence, Cluster.of("64xH100-80GB", link="nvlink4"), batch_size=1024, progress=False)
    profiled = time.perf_counter()
    parameters = sum(parameter.elements for parameter in found.parameters)
    unpriced = ", ".join(
        f"{entry.operation} {entry.share_of_bytes:.0%}" for entry in found.estimates[0].without_formula[:6]
    )
    print(
        f"\nLlama of {parameters / 1e9:.1f} B parameters, {len(sequence)} layers: traced in {traced - begun:.1f} s, "
        f"profiled for 64 H100 at {len({cost.micro_batch_size for cost in found.costs})} micro-batch sizes in "
        f"{profiled - traced:.1f} s; without a FLOP formula, by share of bytes: {unpriced}"
    )
    assert profiled - begun < SECONDS_FOR_LLAMA
