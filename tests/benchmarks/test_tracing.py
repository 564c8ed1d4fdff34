"""How long tracing takes: `make bench`. Each trace runs in a fresh process on one thread, on the meta device."""

import subprocess
import sys

import pytest

SECONDS_AT_MOST = 30
GIB_AT_MOST = 2
LAYERS_AT_MOST = 2000
LINEAR_WITHIN = 0.2
BLOCKS = (20, 40, 80)

PROGRAM = """
import resource, sys, time, warnings
warnings.simplefilter("ignore")
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from profiler import trace
torch.set_num_threads(1)
config = LlamaConfig(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=int(sys.argv[1]), num_attention_heads=64,
    num_key_value_heads=8, vocab_size=32000, max_position_embeddings=4096,
)
with torch.device("meta"):
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    trace(torch.nn.Linear(2, 2), torch.zeros(2, 2))  # what the first trace in a process loads
    ids = torch.zeros(4, 4096, dtype=torch.int64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
sequence = trace(model, {"input_ids": ids, "labels": ids, "use_cache": False})
seconds = time.perf_counter() - start
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
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
