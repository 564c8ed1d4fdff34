"""`torch.nn.Transformer` as a translator (Vaswani et al., "Attention Is All You Need", arXiv 1706.03762)."""

import math

import torch
from torch import Tensor, nn


def sinusoids(length: int, width: int) -> Tensor:
    """Position codes (length, width) of section 3.5."""
    positions = torch.arange(length).unsqueeze(1)
    frequencies = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    return torch.stack((torch.sin(positions * frequencies), torch.cos(positions * frequencies)), dim=-1).flatten(1)


class Translator(nn.Module):
    """Source ids (batch, source) and target ids (batch, target) -> logits (batch, target, vocabulary).

    Embeddings and head share one weight (section 3.4). Padding in the source, token 0, is masked.

    Args:
        vocabulary: number of different tokens, in both languages.
        width: size of a token's vector.
        heads: attention heads.
        layers: of the encoder, and of the decoder.
        dropout: as in section 5.4.
        longest: sequence.
    """

    positions: Tensor

    def __init__(
        self,
        vocabulary: int = 256,
        width: int = 512,
        heads: int = 8,
        layers: int = 6,
        dropout: float = 0.1,
        longest: int = 512,
    ) -> None:
        super().__init__()
        self.scale = math.sqrt(width)
        self.embedding = nn.Embedding(vocabulary, width)
        self.register_buffer("positions", sinusoids(longest, width), persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.transformer = nn.Transformer(width, heads, layers, layers, 4 * width, dropout, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def embed(self, ids: Tensor) -> Tensor:
        return self.dropout(self.embedding(ids) * self.scale + self.positions[: ids.shape[1]])

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        padding = source == 0
        later = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).triu(1)
        decoded = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=later,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return self.head(decoded)
