"""How long tracing takes, and how finely it cuts deep models: `make bench`."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from profiler import trace
from tests.coverage.fidelity import eager_difference, is_single, largest_share
from tests.coverage.model_list import MODELS, Entry
from tests.coverage.test_coverage import ALIKE, CLOSE, HERE, check_faithful, part_of, traced

SECONDS_AT_MOST = 30
GIB_AT_MOST = 2
LAYERS_AT_MOST = 2000
LINEAR_WITHIN = 0.2
BLOCKS = (20, 40, 80)
LISTED_SECONDS_AT_MOST = 15  # for each model of the list
LARGEST_SHARE = 1 / 16  # of all FLOPs in one layer, in models of at least 8 blocks

# Each trace runs in a fresh process on one thread, on the meta device.

PROGRAM = """
import sys, time, warnings
warnings.simplefilter("ignore")
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from profiler import trace
from tests.peak_resident import peak_resident_bytes
torch.set_num_threads(1)
config = LlamaConfig(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=int(sys.argv[1]), num_attention_heads=64,
    num_key_value_heads=8, vocab_size=32000, max_position_embeddings=4096,
)
with torch.device("meta"):
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    trace(torch.nn.Linear(2, 2), torch.zeros(2, 2))  # what the first trace in a process loads
    ids = torch.zeros(4, 4096, dtype=torch.int64)
before = peak_resident_bytes()
start = time.perf_counter()
sequence = trace(model, {"input_ids": ids, "labels": ids, "use_cache": False})
seconds = time.perf_counter() - start
grown = (peak_resident_bytes() - before) / 2**30
parameters = sum(parameter.numel() for parameter in model.parameters())
print(seconds, grown, len(sequence), len({layer.signature for layer in sequence.layers}), parameters)
"""


@pytest.mark.benchmark
def test_llama_of_70b_parameters() -> None:
    figures = {}
    print("\n| blocks | parameters | trace | memory | layers | distinct |\n|---:|---:|---:|---:|---:|---:|")
    for blocks in BLOCKS:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(blocks)], capture_output=True, text=True, check=True, timeout=600
        )
        seconds, gib, layers, distinct, parameters = map(float, done.stdout.split()[-5:])
        figures[blocks] = seconds, gib, layers, distinct
        print(
            f"| {blocks} | {parameters / 1e9:.1f} G | {seconds:.1f} s | {gib:.2f} GiB | {layers:.0f} | {distinct:.0f} |"
        )
    seconds, gib, layers, _ = figures[80]
    assert seconds < SECONDS_AT_MOST
    assert gib < GIB_AT_MOST
    assert layers <= LAYERS_AT_MOST
    assert len({distinct for *_, distinct in figures.values()}) == 1 or figures[80][3] <= figures[20][3]
    for fewer, more in ((20, 40), (40, 80)):
        assert figures[more][0] / figures[fewer][0] <= more / fewer * (1 + LINEAR_WITHIN)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Times are those of one core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.benchmark
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.name)
def test_models_of_the_list_trace_fast(entry: Entry) -> None:
    case = entry.build()
    start = time.perf_counter()
    trace(case.model, case.sample)
    seconds = time.perf_counter() - start
    print(f"\n{entry.name}: {seconds:.1f} s")
    assert seconds < LISTED_SECONDS_AT_MOST


@pytest.mark.benchmark
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("entry", [entry for entry in MODELS if entry.blocks], ids=lambda entry: entry.name)
def test_deep_models_are_cut_finely_and_alike(entry: Entry) -> None:
    """In a deeper model a block is a smaller share of the work, and is cut less: fewer kinds of layers are fine."""
    shallow, deep = (trace(case.model, case.sample) for case in (entry.build(blocks=4), entry.build(blocks=8)))
    kinds = [len({layer.signature for layer in sequence.layers}) for sequence in (shallow, deep)]
    share, layer = largest_share(deep)
    single = ", one operation" if is_single(layer) else ""
    print(f"\n{entry.name}: {len(deep)} layers, {kinds[1]} kinds ({kinds[0]} of 4 blocks), at most {share:.1%}{single}")
    assert share <= LARGEST_SHARE or is_single(layer)
    assert kinds[1] <= kinds[0]


@pytest.mark.benchmark
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ALIKE)
def test_models_like_others_are_faithful(name: str) -> None:
    """The others are in tests/coverage/test_coverage.py."""
    check_faithful(name)
    if name == "AmoebaNet-D":  # in float64, where batch normalization over one sample amplifies nothing
        model = traced(name)
        assert all(eager_difference(model.sequence, part_of(model.case, size)) <= CLOSE for size in (1, 3))


@pytest.mark.benchmark
def test_no_operation_is_only_in_models_that_are_like_others() -> None:
    """Else `make test` would not see what the others see."""
    seen = {operation for name in HERE for operation in traced(name).sequence.operations}
    assert {name: new for name in ALIKE if (new := {*traced(name).sequence.operations} - seen)} == {}
