"""What the demo trains: model, data and sizes, for the pipeline and for the plain process that checks it."""

from __future__ import annotations

from itertools import islice

import torch
from gpt import GPT, Config
from text import batches, train_and_held_out
from torch import Tensor

CONFIG = Config(context=64, width=192, heads=6, blocks=4)
BATCH_SIZE = 32
VALIDATION_BATCHES = 4


def make_model() -> GPT:
    """The model with its initial weights, the same in every process."""
    torch.manual_seed(0)
    return GPT(CONFIG)


def validation_batches() -> list[tuple[Tensor, Tensor]]:
    """A fixed part of the held-out text."""
    return list(islice(batches(train_and_held_out()[1], BATCH_SIZE, CONFIG.context, seed=1), VALIDATION_BATCHES))
