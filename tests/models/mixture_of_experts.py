"""A transformer whose MLPs are mixtures of experts (Shazeer et al., arXiv 1701.06538; every block, as in Mixtral).

Routing is static: every expert computes every token, weighted by a gate that is zero for all but the top k. The loop
over experts is the same for all data, so it can be traced.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Mixture(nn.Module):
    """(batch, time, width) -> the same shape; also the mean square of the experts' load (section 4, a balance loss)."""

    def __init__(self, width: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x)
        best, which = scores.topk(self.chosen, dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, which, best.softmax(-1))
        mixed = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mixed = mixed + weights[..., index : index + 1] * expert(x)
        return mixed, weights.mean((0, 1)).square().mean()


class Block(nn.Module):
    """Causal attention and a mixture, each behind a LayerNorm and beside a residual connection."""

    def __init__(self, width: int, heads: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mixture_norm = nn.LayerNorm(width)
        self.mixture = Mixture(width, experts, chosen)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        attended = functional.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        mixed, balance = self.mixture(self.mixture_norm(x))
        return x + mixed, balance


class MixtureOfExperts(nn.Module):
    """Token ids (batch, time) and the tokens that follow -> a dict with `loss` and `logits`.

    Args:
        vocabulary: number of different tokens.
        width: size of a token's vector.
        heads: attention heads.
        blocks: how many blocks follow each other.
        experts: in each block.
        chosen: experts that a token listens to.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        width: int = 256,
        heads: int = 4,
        blocks: int = 6,
        experts: int = 8,
        chosen: int = 2,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, experts, chosen) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(ids)
        balances = []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        logits = self.head(self.norm(x))
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.01 * torch.stack(balances).mean()
        return {"loss": loss, "logits": logits}
