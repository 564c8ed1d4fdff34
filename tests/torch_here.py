"""What torch can do on this processor."""

import pytest
import torch
from torch import nn


def _has_lstm_in_bfloat16() -> bool:
    """OneDNN has none for x86 processors without AVX-512; torch then raises an error, in any model."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(4, 4)(torch.ones(2, 1, 4))
    except RuntimeError:
        return False
    return True


HAS_LSTM_IN_BFLOAT16 = _has_lstm_in_bfloat16()
needs_lstm_in_bfloat16 = pytest.mark.skipif(
    not HAS_LSTM_IN_BFLOAT16, reason="torch has no LSTM in bfloat16 for this processor"
)
