"""What cannot be traced ends with one error that says where, what and what to do."""

import traceback

import pytest
import torch
from torch import Tensor, nn

from profiler import NotTraceableError, trace
from tests.coverage.fidelity import by_one, eager_difference
from tests.coverage.model_list import VOCABULARY, hugging_face, translated


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x * 2
        return x


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_branch_on_data() -> None:
    model = Wrapper(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), Gate())))
    with pytest.raises(NotTraceableError) as caught:
        trace(model, by_one("export", torch.randn(2, 4)))
    message = str(caught.value)
    line = Gate.forward.__code__.co_firstlineno + 1
    assert "module 'inner.1.1'" in message
    assert "keep_together=['inner.1.1']" in message
    assert f'{__file__}:{line} "if x.sum() > 0:"' in message
    assert "branches on the values of a tensor" in message
    assert "\n" not in message


class Shared(nn.Module):
    """Holds one module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.gate = Gate()

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.second(self.first(x)))


def test_a_branch_beside_shared_modules() -> None:
    with pytest.raises(NotTraceableError, match=r"module 'gate', .*test_refusals\.py:\d+ \"if x\.sum\(\) > 0"):
        trace(Shared(), by_one("export", torch.randn(2, 4)))


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.vmap(torch.sin)(x))


def test_a_function_transform() -> None:
    with pytest.raises(NotTraceableError, match=r"test_refusals\.py:\d+ .*vmap.*transforms functions"):
        trace(Mapped(), torch.randn(2, 4))


class Clamped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data.clamp_(-1, 1)
        return self.linear(x)


def test_a_parameter_written_past_autograd() -> None:
    with pytest.raises(NotTraceableError, match=r"test_refusals\.py:\d+ .*writes the parameter 'linear.weight'"):
        trace(Clamped(), torch.randn(2, 4))


class Box:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Boxing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Box:
        return Box(self.linear(x))


def test_an_output_of_an_unknown_kind() -> None:
    with pytest.raises(NotTraceableError, match=r"test_refusals\.py:\d+ .*it returns a \S*Box, .*use_cache=False"):
        trace(Boxing(), torch.randn(2, 4))


def test_a_refusal_shows_its_cause() -> None:
    with pytest.raises(NotTraceableError) as caught:
        trace(Wrapper(nn.Sequential(nn.Linear(4, 4), Gate())), by_one("export", torch.randn(2, 4)))
    assert caught.value.__cause__ is not None
    assert "if x.sum() > 0" in "".join(traceback.format_exception(caught.value))


def test_layer_drop() -> None:
    """Transformers' m2m_100 with layer drop in both of its parts was refused, with the setting that turns it off."""
    torch.manual_seed(0)
    case = hugging_face(
        "M2M100ForConditionalGeneration",
        "M2M100Config",
        translated(),
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
        encoder_layerdrop=0.5,
        decoder_layerdrop=0.3,
    )
    case.model.train()
    sequence = trace(case.model, case.sample)
    assert len(sequence.sample.chances) == 2
    assert all(eager_difference(sequence, case, seed) <= 1e-5 for seed in range(4))
