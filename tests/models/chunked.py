"""Models that are awkward for chunks and split backward passes, and that no other list holds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

BATCH_SIZE = 12


class TiedEverywhere(nn.Module):
    """An embedding read at both ends and, transposed, in between; one linear used by three blocks, a norm by all."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)
        self.embedding = nn.Embedding(24, 16)
        self.shared = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.own = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for number, own in enumerate(self.own):
            x = self.dropout(torch.tanh(own(self.norm(x)))) + x
            if number % 2 == 0:
                x = x + self.shared(x)
            if number == 2:
                x = x + functional.softmax(x @ self.embedding.weight.t(), -1) @ self.embedding.weight
        return functional.linear(self.norm(x), self.embedding.weight)


class Skipping(nn.Module):
    """Each of seven blocks reads all values before it; the first one goes past everything to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(7))
        self.scales = nn.Parameter(torch.ones(7))
        self.last = nn.Bilinear(12, 12, 5)

    def forward(self, x: Tensor) -> Tensor:
        values = [torch.relu(self.first(x))]
        for number, block in enumerate(self.blocks):
            values.append(torch.sigmoid(block(sum(values[1:], values[0]) / len(values))) * self.scales[number])
        return self.last(values[0], values[-1]) + values[3].mean(-1, keepdim=True)


class FrozenParts(nn.Module):
    """Frozen first blocks, of which no gradient goes on, a frozen one between, and biases alone trained at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(10, 10), nn.LayerNorm(10), nn.GELU(), nn.Dropout(0.2)) for _ in range(7)
        )
        self.head = nn.Linear(10, 5)
        for number in (0, 1, 3):
            self.blocks[number].requires_grad_(False)
        self.head.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + x
        return self.head(x)


class FrozenEnds(nn.Module):
    """Adapters between frozen halves: the last stages have gradients of inputs and none of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
        self.adapters = nn.ModuleList(nn.Sequential(nn.Linear(10, 3), nn.Tanh(), nn.Linear(3, 10)) for _ in range(2))
        self.after = nn.ModuleList(nn.Linear(10, 10) for _ in range(4))
        self.before.requires_grad_(False)
        self.after.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.before:
            x = torch.tanh(block(x))
        for block in self.adapters:
            x = x + block(x)
        for block in self.after:
            x = torch.tanh(block(x))
        return x[:, :5]


class Parametrized(nn.Module):
    """Weights that are computed: weight norm, a low-rank sum, one read transposed, and a bias that scales as well."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = parametrizations.weight_norm(nn.Linear(10, 14))
        self.conv = nn.Conv1d(1, 4, 3, padding=1, bias=False)
        self.group = nn.GroupNorm(2, 4)
        self.low = nn.Parameter(torch.randn(14, 2) / 3)
        self.high = nn.Parameter(torch.randn(2, 14) / 3)
        self.base = nn.Linear(14, 14)
        self.prelu = nn.PReLU(14)
        self.head = nn.Linear(14, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.prelu(self.normed(x))
        x = x + self.group(self.conv(x.unsqueeze(1))).mean(1)
        x = torch.tanh(functional.linear(x, self.base.weight + self.low @ self.high, self.base.bias))
        x = x * torch.exp(self.base.bias)
        return self.head(functional.linear(x, self.base.weight.t()) + x)


class Square(torch.autograd.Function):
    """A backward pass of its own, with the parameter's gradient in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.square() * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * x * weight * grad, (x.square() * grad).sum(0)


class Inseparable(nn.Module):
    """Recurrent layers, attention, batch normalization and a custom backward pass beside linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.norm = nn.BatchNorm1d(16)
        self.weight = nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.gru(torch.tanh(self.first(x)))
        x = self.attention(x, x, x, need_weights=False)[0] + x
        x = self.lstm(x)[0][:, -1]
        return self.head(Square.apply(self.norm(x), self.weight))


class Convolutions(nn.Module):
    """Grouped, transposed, dilated convolutions with batch normalization, writes in place and a long concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.dilated = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.down = nn.Conv2d(8, 8, 2, stride=2)
        self.scale = nn.Parameter(torch.ones(1, 8, 1, 1))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        first = functional.relu_(self.norms[0](self.stem(x)))
        x = functional.relu_(self.norms[1](self.depth(first)) + first)
        x = self.down(self.norms[2](self.up(functional.relu(self.norms[3](self.dilated(x)))) * self.scale))
        return self.head(torch.cat([first, x], 1).mean((2, 3)))


class Experts(nn.Module):
    """Stacked experts in one parameter, gates, an auxiliary output, whole numbers and booleans across cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 12, padding_idx=0)
        self.gate = nn.Linear(12, 4, bias=False)
        self.inner = nn.Parameter(torch.randn(4, 12, 20) / 4)
        self.outer = nn.Parameter(torch.randn(4, 20, 12) / 4)
        self.middle = nn.Linear(12, 12)
        self.head = nn.Linear(12, 24)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        mask = ids.ne(0)
        for _ in range(2):
            gates = functional.softmax(self.gate(x), -1)
            chosen = functional.one_hot(gates.argmax(-1), 4).to(gates.dtype) * gates
            each = torch.einsum("bseh,ehd->bsed", torch.relu(torch.einsum("bsd,edh->bseh", x, self.inner)), self.outer)
            x = x + torch.einsum("bsed,bse->bsd", each, chosen) * mask.unsqueeze(-1)
            x = torch.tanh(self.middle(x))
        return self.head(x)


@dataclass(frozen=True)
class Awkward:
    """A model with a batch."""

    make: Callable[[], nn.Module]
    x: Tensor
    target: Tensor

    @property
    def loss_fn(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Cross entropy of classes or of words."""
        return _loss


def _loss(found: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(found.float().flatten(0, -2), target.flatten())


def _values(*shape: int) -> Tensor:
    return torch.randn(BATCH_SIZE, *shape, generator=torch.Generator().manual_seed(1))


_IDS = torch.randint(24, (BATCH_SIZE, 6), generator=torch.Generator().manual_seed(2))
_CLASSES = torch.arange(BATCH_SIZE) % 5

AWKWARD = {
    "tied everywhere": Awkward(TiedEverywhere, _IDS, _IDS.flip(1)),
    "skipping": Awkward(Skipping, _values(10), _CLASSES),
    "frozen parts": Awkward(FrozenParts, _values(10), _CLASSES),
    "frozen ends": Awkward(FrozenEnds, _values(10), _CLASSES),
    "parametrized": Awkward(Parametrized, _values(10), _CLASSES),
    "inseparable": Awkward(Inseparable, _values(5, 4), _CLASSES),
    "convolutions": Awkward(Convolutions, _values(3, 8, 8), _CLASSES),
    "experts": Awkward(Experts, _IDS, _IDS.flip(1)),
}
