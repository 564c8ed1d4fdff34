"""Every model of the list, traced: the same in every bit however it is cut, and what the eager model computes."""

import dataclasses
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.coverage.fidelity import Traced, eager_difference, is_single, largest_share, measure, run
from tests.coverage.model_list import BY_NAME, MODELS, Case
from tests.models.amoebanet import AmoebaNet

CLOSE = 1e-5  # relative difference from the eager model
LARGEST_SHARE = 1 / 16  # of all FLOPs, that one layer of a model with at least 8 blocks holds

# Models that do no operation which none of the others does, and in no other way: tests/benchmarks/test_tracing.py.
ALIKE = (
    *("llama", "qwen2", "qwen3", "gemma2", "phi3", "opt", "gpt_neox", "roberta", "albert", "bart"),
    *("segformer", "AmoebaNet-D"),
)
HERE = [name for name in BY_NAME if name not in ALIKE]
# Models of at least 8 blocks, encoder and decoder together; all others so deep are in tests/benchmarks/test_tracing.py.
DEEP = {"gpt2": 8}
# Models whose blocks differ, or are in two places. Of all others one block is enough: most of a test is its trace, and
# `make coverage` traces them with two.
PAIRS = ("gemma2", "t5", "mixtral", "deberta-v2", "GNMT")
DROPPED = ("gpt2", "bert", "bart", "beit", "GNMT", "nn.Transformer", "GPT with tied weights")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The order of additions depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def in_float64(case: Case) -> Case:
    """Batch normalization over a handful of values amplifies rounding; in float64 only mistakes are left to see."""
    sample = pytree.tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, case.sample)
    return dataclasses.replace(case, model=case.model.double(), sample=sample)


def part_of(case: Case, size: int) -> Case:
    """The same model with the first samples of the batch."""
    sample, target = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf[:size], (case.sample, case.target))
    return dataclasses.replace(case, sample=sample, target=target)


@cache
def traced(name: str, blocks: int | None = None) -> Traced:
    """A model of the list; all tests of it share one trace, which takes far longer than they do."""
    blocks = blocks or DEEP.get(name, 2 if name in PAIRS else 1)
    case = BY_NAME[name].build(blocks=blocks, dropout=0.2 if name in DROPPED else 0.0)
    return Traced.of(in_float64(case) if name in ("AmoebaNet-D", "resnet") else case)


@pytest.mark.parametrize("name", HERE)
def test_every_model_is_faithful(name: str) -> None:
    check_faithful(name)


def check_faithful(name: str) -> None:
    """With one stream of random numbers the layers draw the same as the model; keyed by layer, no cut changes them."""
    found = measure(traced(name))
    assert found.difference <= CLOSE
    assert found.layers > 1
    assert found.narrowest_bytes > 0
    assert found.bitwise
    assert found.changed == ()


@pytest.mark.parametrize("name", ["mixtral", "t5", "bert", "resnet", "GNMT", "nn.Transformer"])
def test_layers_traced_at_batch_4_run_at_1_and_3(name: str) -> None:
    model = traced(name)
    assert all(eager_difference(model.sequence, part_of(model.case, size)) <= CLOSE for size in (1, 3))


@pytest.mark.parametrize("name", [name for name in DROPPED if name in HERE])
def test_random_numbers_are_keyed_by_layer(name: str) -> None:
    """Otherwise it would say nothing that no cut changes what dropout draws."""
    model = traced(name)
    assert any(layer.draws for layer in model.sequence.layers)
    torch.manual_seed(1)
    unkeyed = run(model.sequence, model.case, seeded=False)
    assert not torch.equal(run(model.sequence, model.case).loss, unkeyed.loss)


@pytest.mark.parametrize("name", DEEP)
def test_no_layer_holds_much_of_a_deep_model(name: str) -> None:
    share, layer = largest_share(traced(name).sequence)
    assert share <= LARGEST_SHARE or is_single(layer)


def test_depth_adds_no_new_kind_of_layer() -> None:
    """Fewer kinds are fine: in a deeper model a block is a smaller share of the work, and is cut less."""
    deep, less = ({layer.signature for layer in model.sequence.layers} for model in (traced("gpt2"), traced("gpt2", 2)))
    assert len(deep) <= len(less)


@pytest.mark.parametrize(("normal_cells", "filters", "millions"), [(18, 256, 122.5), (36, 544, 1055.8)])
def test_amoebanet_has_as_many_parameters_as_gpipes(normal_cells: int, filters: int, millions: float) -> None:
    with torch.device("meta"):
        model: nn.Module = AmoebaNet(normal_cells, filters)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == millions


def test_the_list_is_complete() -> None:
    own = [entry for entry in MODELS if entry.family.startswith("own")]
    assert (len(MODELS) - len(own), len(own)) == (23, 8)
    assert len(BY_NAME) == len(MODELS)
