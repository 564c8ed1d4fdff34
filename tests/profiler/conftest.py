"""Small models of every kind that tracing and measuring must deal with."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from profiler import LayerSequence, trace

Case = tuple[nn.Module, Any]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.wide(x)))


class Gpt(nn.Module):
    """A head tied to the embedding."""

    def __init__(self, vocabulary: int = 40, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Cnn(nn.Module):
    """Batch normalization, a residual connection, ReLU in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.middle = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norms[0](self.first(x)))
        skip = x
        for convolution, norm in zip(self.middle, list(self.norms)[1:], strict=True):
            x = self.relu(norm(convolution(x)))
        return self.last((x + skip).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.last = nn.Linear(12, 20)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.lstm(self.embedding(ids))[0])


class Masked(nn.Module):
    """Two inputs, one of them an integer mask; the output is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.last = nn.Linear(10, 4)

    def forward(self, values: Tensor, mask: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.first(values)).masked_fill(mask.unsqueeze(-1) == 0, 0.0)
        return {"hidden": hidden, "logits": self.last(hidden).sum(1)}


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


CASES: dict[str, Callable[[], Case]] = {
    "gpt": lambda: (Gpt(), torch.randint(0, 40, (4, 12))),
    "cnn": lambda: (Cnn(), torch.randn(4, 3, 6, 6)),
    "lstm": lambda: (Recurrent(), torch.randint(0, 20, (4, 7))),
    "masked": lambda: (Masked(), (torch.randn(4, 5, 6), torch.randint(0, 2, (4, 5)))),
    "keywords": lambda: (Masked(), {"mask": torch.randint(0, 2, (4, 5)), "values": torch.randn(4, 5, 6)}),
    "dropout": lambda: (Dropped(), torch.randn(4, 8)),
}


@pytest.fixture
def make_case() -> Callable[[str], Case]:
    """A model and its sample by the name of its kind."""

    def make(name: str) -> Case:
        torch.manual_seed(0)
        return CASES[name]()

    return make


@cache
def _traced(name: str) -> tuple[nn.Module, Any, LayerSequence]:
    torch.manual_seed(0)
    model, sample = CASES[name]()
    return model, sample, trace(model, sample)


@pytest.fixture(scope="session")
def traced_case() -> Callable[[str], tuple[nn.Module, Any, LayerSequence]]:
    """A model, its sample and its layers by the name of its kind: the same for all tests, since tracing is slow."""
    return _traced


@pytest.fixture(params=CASES)
def each_traced(request: pytest.FixtureRequest) -> tuple[nn.Module, Any, LayerSequence]:
    """The same for each kind."""
    return _traced(request.param)
