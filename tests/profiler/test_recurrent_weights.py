"""Weights of recurrent networks are laid together as torch's own modules do it: the same calls of the same function."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from profiler import trace
from profiler.run.parameter_pool import ParameterPool
from profiler.run.recurrent_weights import lay_together

STEPS, SAMPLES, FEATURES, WIDTH = 3, 4, 5, 6
NETWORKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("LSTM", {}),
    ("LSTM", {"num_layers": 2, "proj_size": 2, "bidirectional": True}),
    ("LSTM", {"num_layers": 3, "proj_size": 4, "bias": False, "batch_first": True}),
    ("GRU", {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    ("GRU", {"bias": False}),
    ("RNN", {"nonlinearity": "tanh", "num_layers": 2}),
    ("RNN", {"nonlinearity": "relu", "bias": False, "bidirectional": True}),
)
Calls = list[tuple[Any, ...]]


class Network(nn.Module):
    """A recurrent network between two layers; it may be called twice."""

    def __init__(self, kind: str, *, twice: bool = False, **about: Any) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, FEATURES)
        self.network = getattr(nn, kind)(FEATURES, WIDTH, **about)
        self.twice = twice

    def forward(self, values: Tensor) -> Tensor:
        entering = self.enter(values)
        leaving: Tensor = self.network(entering)[0] * 2
        return leaving + self.network(entering * 2)[0] if self.twice else leaving


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Of torch's function that lays weights together, where there is no device that has it."""
    found: Calls = []
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda _: True)
    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", lambda *given: found.append(given))
    monkeypatch.setattr(torch.backends.cudnn.rnn, "get_cudnn_mode", str)  # builds for CPU have no numbers of them
    monkeypatch.setattr(torch, "_use_cudnn_rnn_flatten_weight", lambda: True)
    return found


def called(calls: Calls) -> list[tuple[list[int], Any]]:
    """The weights by identity, and what else each call was given."""
    return [([id(weight) for weight in weights], rest) for weights, *rest in calls]


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize(("kind", "about"), NETWORKS)
def test_the_calls_are_those_of_the_module(
    kind: str, about: dict[str, Any], calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Network(kind, **about)
    sequence = trace(model, torch.randn(SAMPLES, STEPS, FEATURES))
    lay_together(sequence.layers, sequence.parameters)
    ours = called(calls)
    calls.clear()
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(torch.cuda, "device_of", lambda _: torch.device("cpu"))
    model.network.flatten_parameters()
    assert ours == called(calls)
    assert len(ours) == 1


def test_weights_of_several_calls_are_laid_together_once(calls: Calls) -> None:
    sequence = trace(Network("LSTM", twice=True), torch.randn(SAMPLES, STEPS, FEATURES))
    lay_together(sequence.layers, sequence.parameters)
    assert len(calls) == 1


def test_weights_of_which_one_lies_elsewhere_stay(calls: Calls) -> None:
    sequence = trace(Network("LSTM"), torch.randn(SAMPLES, STEPS, FEATURES))
    some = {name: held for name, held in sequence.parameters.items() if "bias_hh" not in name}
    lay_together(sequence.layers, some)
    assert calls == []


def test_a_host_computes_with_them_where_they_are() -> None:
    sequence = trace(Network("LSTM"), torch.randn(SAMPLES, STEPS, FEATURES))
    before = {name: held.data_ptr() for name, held in sequence.parameters.items()}
    lay_together(sequence.layers, sequence.parameters)
    assert before == {name: held.data_ptr() for name, held in sequence.parameters.items()}


@pytest.mark.parametrize("room_bytes", [None, 0, 2**30])
@pytest.mark.parametrize("twice", [False, True])
def test_a_pool_takes_no_more_than_it_says(twice: bool, room_bytes: int | None) -> None:
    """Weights of a network that two layers call are there twice, and were left out of the room once."""
    with torch.device("meta"):
        sequence = trace(Network("LSTM", twice=twice), torch.empty(SAMPLES, STEPS, FEATURES))
    pool = ParameterPool(sequence, torch.device("cpu"), room_bytes)
    for layer in sequence.layers:
        pool.hold(range(layer.index, layer.index + 1))
    tensors = [held for kept in pool._held.values() for held in kept.values()]
    storages = [tensor.untyped_storage() for held in tensors for tensor in (held, held.grad) if tensor is not None]
    taken_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    assert 0 < taken_bytes <= pool.capacity_bytes


@pytest.mark.parametrize(("room_bytes", "laid"), [(None, 1), (0, 0)])
def test_a_pool_lays_them_together_where_all_layers_fit(room_bytes: int | None, laid: int, calls: Calls) -> None:
    """Else layers take turns in one block, in which they cannot begin a memory of their own."""
    with torch.device("meta"):
        model = Network("LSTM", num_layers=2)
        sequence = trace(model, torch.empty(SAMPLES, STEPS, FEATURES))
    pool = ParameterPool(sequence, torch.device("cpu"), room_bytes)
    whole = sum(pool.bytes_of(layer.index) for layer in sequence.layers)
    for layer in sequence.layers:
        for name in layer.parameters:
            held, grad = pool[layer.index, name], pool[layer.index, name].grad
            assert held.isfinite().all()
            assert grad is not None
            assert not grad.any()
    assert len(calls) == laid
    assert pool.capacity_bytes <= whole
