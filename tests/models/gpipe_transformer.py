"""The Transformer of GPipe's tables (Huang et al., arXiv 1811.06965, section 4.2 and table 1), in plain PyTorch.

Token ids -> embedding -> L blocks of attention and feed-forward -> logits, with weights of embedding and head apart.
The paper counts L (4 d^2 + 4 d + 2 d h + h + d + 4 d) + 2 v d parameters, d = 2048 wide, h = 8192 hidden, v = 32,000
tokens: 282.2 M for L = 3, 83.9 B for L = 1663. So does this.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and feed-forward, each behind a normalization and with a skip."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.expansion = nn.Linear(width, hidden)
        self.contraction = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.contraction(functional.relu(self.expansion(self.norm_2(x))))


class GPipeTransformer(nn.Module):
    """Token ids (batch, length) -> logits (batch, length, vocabulary).

    Args:
        layers: L.
        width: d_model.
        hidden: of the feed-forward parts.
        heads: of attention.
        vocabulary: tokens.
    """

    def __init__(
        self, layers: int, *, width: int = 2048, hidden: int = 8192, heads: int = 32, vocabulary: int = 32_000
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, hidden, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean cross entropy."""
    return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def on_meta(layers: int) -> GPipeTransformer:
    with torch.device("meta"):
        return GPipeTransformer(layers)
