"""The GPT of Megatron-LM before fused attention, in plain PyTorch, for published runs.

Token ids -> embedding -> L blocks -> logits, embedding and head tied. Scores of attention are written out, and dropped
at 10 % like every branch. One `baddbmm` scales and masks them, as Megatron's own kernels do.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 50_257  # GPT-2's; not rounded up, as vTrain's `src/config.py` has it
DROPOUT = 0.1


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        each = width // self.heads
        parts = self.query_key_value(x).view(batch, length, 3, self.heads, each).permute(2, 0, 3, 1, 4)
        query, key, value = (part.reshape(batch * self.heads, length, each) for part in parts)
        scores = torch.baddbmm(mask, query, key.transpose(1, 2), alpha=each**-0.5)
        mixed = self.dropout(scores.softmax(-1)) @ value
        return self.projection(mixed.view(batch, self.heads, length, each).transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_2 = nn.LayerNorm(width)
        self.expansion = nn.Linear(width, 4 * width)
        self.contraction = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_1(x), mask))
        return x + self.dropout(self.contraction(functional.gelu(self.expansion(self.norm_2(x)))))


class MegatronGPT(nn.Module):
    """Token ids (batch, length) -> logits (batch, length, vocabulary)."""

    def __init__(self, layers: int, *, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(length, width)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", torch.full((1, length, length), -1e4).triu(1), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.tokens(ids) + self.places.weight)
        mask = self.mask.to(x.dtype)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean cross entropy, in float32."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
