"""A small GPT: bytes in, logits for the next byte out."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """Size of a model.

    Attributes:
        vocabulary: number of different tokens.
        context: longest sequence that the model sees.
        width: size of a token's vector.
        heads: attention heads in a block; `width` is a multiple.
        blocks: how many blocks follow each other.
        dropout: probability with which an activation is dropped in training.
    """

    vocabulary: int = 256
    context: int = 128
    width: int = 256
    heads: int = 4
    blocks: int = 6
    dropout: float = 0.1


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)
        self.projection_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Let each position read the positions up to itself: (batch, time, width) -> the same shape."""
        batch, time, width = x.shape
        query, key, value = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        mixed = mixed.transpose(1, 2).reshape(batch, time, width)
        return self.projection_dropout(self.projection(mixed))


class MLP(nn.Module):
    """Two linear maps with a GELU between them, at each position on its own."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.expansion = nn.Linear(config.width, 4 * config.width)
        self.activation = nn.GELU()
        self.projection = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> the same shape."""
        return self.dropout(self.projection(self.activation(self.expansion(x))))


class Block(nn.Module):
    """Attention and MLP, each after a LayerNorm and with a residual connection around it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A decoder-only transformer whose output head shares the token embedding's weights.

    Initialized as GPT-2: normal with standard deviation 0.02, the projections that end on the residual stream scaled
    down by the square root of their number.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.token_embedding.weight
        self._initialize()

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, parameter in self.named_parameters():
            if name.endswith("projection.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.blocks))

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (batch, time) -> logits of the token that follows each, (batch, time, vocabulary)."""
        time = ids.shape[1]
        positions = torch.arange(time, device=ids.device)
        x = self.dropout(self.token_embedding(ids) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(
        self, ids: Tensor, count: int, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Continue sequences; call it in evaluation mode.

        Args:
            ids: where to start, (batch, time) with at least one token each.
            count: tokens to add.
            temperature: below 1 likely tokens become likelier; 0 always takes the likeliest.
            generator: source of random numbers.

        Returns:
            (batch, time + count), beginning with `ids`.
        """
        for _ in range(count):
            logits = self(ids[:, -self.config.context :])[:, -1]
            if temperature == 0:
                following = logits.argmax(dim=-1, keepdim=True)
            else:
                probabilities = functional.softmax(logits / temperature, dim=-1)
                following = torch.multinomial(probabilities, 1, generator=generator)
            ids = torch.cat((ids, following), dim=1)
        return ids


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, in nats per token.

    Args:
        logits: (batch, time, vocabulary).
        targets: (batch, time), the token that follows each position.
    """
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
