"""Train a T5 from a configuration with random weights, in mixed precision."""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration

from executor import Pipeline, launch
from executor.checkpoint import load_checkpoint, save_checkpoint
from planner import autoplan


def make_model():
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "num_decoder_layers": 2, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4}
    config = T5Config(vocab_size=64, decoder_start_token_id=0, dropout_rate=0.0, use_cache=False, **sizes)
    return T5ForConditionalGeneration(config)


def make_loaders():
    """Texts and the same texts backward; a quarter of the labels does not count."""
    texts = torch.randint(1, 64, (48, 12), generator=torch.Generator().manual_seed(0))
    labels = texts.flip(1)
    labels[:, 9:] = -100
    pairs = zip(texts, labels, strict=True)
    rows = [{"input_ids": text, "attention_mask": text > 0, "labels": label} for text, label in pairs]
    return DataLoader(rows[:32], batch_size=8), DataLoader(rows[32:], batch_size=8)


def train(plan, folder):
    pipe = Pipeline(make_model(), plan)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    training, held_out = make_loaders()
    if folder.exists():
        load_checkpoint(folder, pipe, optimizer)
    losses = []
    for batch in pipe.batches(training):
        loss = pipe.step(**batch)
        losses.append(loss.item())
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    save_checkpoint(folder, pipe, optimizer)
    held_out_losses = []
    for batch in pipe.batches(held_out):
        held_out_losses.append(pipe.evaluate(**batch).item())
    return losses, sum(held_out_losses) / len(held_out_losses)


if __name__ == "__main__":
    batch = next(iter(make_loaders()[0]))
    plan = autoplan(make_model(), batch, devices=2, stages=2, autocast=torch.bfloat16)
    print(launch(train, plan, [Path(sys.argv[1])])[-1])
