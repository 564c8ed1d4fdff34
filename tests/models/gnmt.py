"""A translator like GNMT (Wu et al., "Google's Neural Machine Translation System", arXiv 1609.08144, section 3).

    source -> bidirectional LSTM -> LSTM -> LSTM + -> LSTM + -> encoded
                                                                  |  attention
    target -> LSTM ---------------------------------------------- * -> LSTM + -> LSTM + -> logits

"+" is a residual connection; the attention's context goes into every decoder layer above the first. The first decoder
layer, whose output asks the attention, runs over the whole target at once (teacher forcing): unlike the paper's it does
not read the previous context.
"""

import torch
from torch import Tensor, nn


class AdditiveAttention(nn.Module):
    """Bahdanau et al., arXiv 1409.0473, section 3.1: scores from a small network of query and key."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, queries: Tensor, encoded: Tensor) -> Tensor:
        """Queries (batch, target, width) over encoded (batch, source, width) -> contexts (batch, target, width)."""
        hidden = torch.tanh(self.query(queries).unsqueeze(2) + self.key(encoded).unsqueeze(1))
        return self.score(hidden).squeeze(-1).softmax(-1) @ encoded


class Encoder(nn.Module):
    """Token ids (batch, source) -> (batch, source, width)."""

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        self.bidirectional = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.narrowing = nn.LSTM(2 * width, width, batch_first=True)
        self.residual = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers - 2))

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.bidirectional(self.dropout(self.embedding(ids)))
        x, _ = self.narrowing(self.dropout(x))
        for layer in self.residual:
            x = x + layer(self.dropout(x))[0]
        return x


class Decoder(nn.Module):
    """Target ids (batch, target) and what was encoded -> logits of the following token (batch, target, vocabulary)."""

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        self.first = nn.LSTM(width, width, batch_first=True)
        self.attention = AdditiveAttention(width)
        self.residual = nn.ModuleList(nn.LSTM(2 * width, width, batch_first=True) for _ in range(layers - 1))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor, encoded: Tensor) -> Tensor:
        x, _ = self.first(self.dropout(self.embedding(ids)))
        context = self.attention(x, encoded)
        for layer in self.residual:
            x = x + layer(torch.cat((self.dropout(x), context), dim=-1))[0]
        return self.head(x)


class GNMT(nn.Module):
    """Source ids (batch, source) and target ids (batch, target) -> logits (batch, target, vocabulary).

    Args:
        vocabulary: number of different tokens, in both languages.
        width: of every LSTM.
        layers: of the encoder, at least 2, and of the decoder.
        dropout: on the input of each LSTM.
    """

    def __init__(self, vocabulary: int = 32_000, width: int = 1024, layers: int = 8, dropout: float = 0.2) -> None:
        super().__init__()
        self.encoder = Encoder(vocabulary, width, layers, dropout)
        self.decoder = Decoder(vocabulary, width, layers, dropout)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decoder(target, self.encoder(source))
