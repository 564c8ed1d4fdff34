"""Train a causal language model of transformers, from a configuration with random weights."""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from executor import Pipeline, launch
from executor.checkpoint import load_checkpoint, save_checkpoint
from planner import autoplan

ACCUMULATE = 2  # mini-batches for one step of the optimizer


def make_model():
    torch.manual_seed(0)
    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 32, "vocab_size": 128}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **off))


def make_loaders():
    """Counting from random numbers on, which a model learns quickly."""
    starts = torch.randint(128, (96, 1), generator=torch.Generator().manual_seed(0))
    texts = (starts + torch.arange(32)) % 128
    return DataLoader(texts[:64], batch_size=8), DataLoader(texts[64:], batch_size=8)


def train(plan, folder):
    pipe = Pipeline(make_model(), plan)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
    training, held_out = make_loaders()
    if folder.exists():
        load_checkpoint(folder, pipe, optimizer)
    losses = []
    for number, ids in enumerate(pipe.batches(training), 1):
        loss = pipe.step(input_ids=ids, labels=ids, accumulate=ACCUMULATE)
        losses.append(loss.item())
        if number % ACCUMULATE == 0:
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    save_checkpoint(folder, pipe, optimizer)
    right = 0
    for ids in held_out:
        output = pipe.predict(input_ids=ids)
        if output is not None:
            right += (output["logits"][:, :-1].argmax(-1) == ids[:, 1:]).sum().item()
    return losses, right


if __name__ == "__main__":
    ids = next(iter(make_loaders()[0]))
    plan = autoplan(make_model(), {"input_ids": ids, "labels": ids}, devices=2, stages=2, autocast=torch.bfloat16)
    print(launch(train, plan, [Path(sys.argv[1])])[-1])
