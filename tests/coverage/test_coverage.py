"""Every model of the list, traced: the same in every bit however it is cut, and what the eager model computes."""

import dataclasses
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from profiler import LayerSequence, trace
from tests.coverage.fidelity import difference, eager, is_single, largest_share, measure, run, same_bits, some_cuts
from tests.coverage.model_list import BY_NAME, MODELS, Case, Entry
from tests.models.amoebanet import AmoebaNet

CLOSE = 1e-5  # relative difference from the eager model
LARGEST_SHARE = 1 / 16  # of all FLOPs, that one layer of a model with at least 8 blocks holds


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The order of additions depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.name)
def test_every_model_is_faithful(entry: Entry) -> None:
    found = measure(entry.build())
    assert found.difference <= CLOSE
    assert found.layers > 1
    assert found.narrowest_bytes > 0
    assert found.bitwise
    assert found.changed == ()


def in_float64(case: Case) -> Case:
    """Batch normalization over a handful of values amplifies rounding; in float64 only mistakes are left to see."""
    sample = pytree.tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, case.sample)
    return dataclasses.replace(case, model=case.model.double(), sample=sample)


def part_of(case: Case, size: int) -> Case:
    """The same model with the first samples of the batch."""
    sample, target = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf[:size], (case.sample, case.target))
    return dataclasses.replace(case, sample=sample, target=target)


@pytest.mark.parametrize("name", ["mixtral", "t5", "bert", "AmoebaNet-D", "GNMT", "nn.Transformer"])
def test_layers_traced_at_batch_4_run_at_1_and_3(name: str) -> None:
    case = BY_NAME[name].build()
    if name == "AmoebaNet-D":
        case = in_float64(case)
    sequence = trace(case.model, case.sample)
    for size in (1, 3):
        part = part_of(case, size)
        found = run(sequence, part, [len(sequence) // 2])
        assert difference(found, eager(sequence, part)) <= CLOSE


@pytest.mark.parametrize("name", ["gpt2", "bert", "bart", "beit", "GNMT", "nn.Transformer", "GPT with tied weights"])
def test_dropout_is_the_eager_models(name: str) -> None:
    """With one stream of random numbers the layers draw the same as the model; keyed by layer, no cut changes them."""
    case = BY_NAME[name].build(dropout=0.2)
    sequence = trace(case.model, case.sample)
    assert any(layer.draws_random for layer in sequence.layers)
    torch.manual_seed(1)
    expected = eager(sequence, case)
    torch.manual_seed(1)
    assert difference(run(sequence, case, seeded=False), expected) <= CLOSE
    whole = run(sequence, case)
    assert not torch.equal(whole.loss, expected.loss)
    assert all(same_bits(run(sequence, case, cuts), whole) for cuts in some_cuts(sequence))


@cache
def traced(name: str, blocks: int) -> LayerSequence:
    """A model of the list with that many blocks."""
    case = BY_NAME[name].build(blocks=blocks)
    return trace(case.model, case.sample)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mamba", "t5", "vit", "GNMT"])
def test_no_layer_holds_much_of_a_deep_model(name: str) -> None:
    share, layer = largest_share(traced(name, 8))
    assert share <= LARGEST_SHARE or is_single(layer)


def test_no_layer_holds_much_of_amoebanet() -> None:
    share, _ = largest_share(trace(AmoebaNet(9, 16, 5), torch.randn(4, 3, 64, 64)))
    assert share <= LARGEST_SHARE


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_depth_adds_no_new_kind_of_layer(name: str) -> None:
    """Fewer kinds are fine: in a deeper model a block is a smaller share of the work, and is cut less."""

    def signatures(blocks: int) -> set[str]:
        return {layer.signature for layer in traced(name, blocks).layers}

    assert len(signatures(8)) <= len(signatures(4))


@pytest.mark.parametrize(("normal_cells", "filters", "millions"), [(18, 256, 122.5), (36, 544, 1055.8)])
def test_amoebanet_has_as_many_parameters_as_gpipes(normal_cells: int, filters: int, millions: float) -> None:
    with torch.device("meta"):
        model: nn.Module = AmoebaNet(normal_cells, filters)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == millions


def test_the_list_is_complete() -> None:
    own = [entry for entry in MODELS if entry.family.startswith("own")]
    assert (len(MODELS) - len(own), len(own)) == (23, 8)
    assert len(BY_NAME) == len(MODELS)
