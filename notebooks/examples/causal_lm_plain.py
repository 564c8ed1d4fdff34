"""Train a causal language model of transformers, from a configuration with random weights."""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

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


def train(folder):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
    training, held_out = make_loaders()
    if (folder / "state.pt").exists():
        state = torch.load(folder / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    losses = []
    for number, ids in enumerate(training, 1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        (loss / ACCUMULATE).backward()
        losses.append(loss.item())
        if number % ACCUMULATE == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "state.pt")
    model.eval()
    right = 0
    for ids in held_out:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=ids).logits
        right += (logits[:, :-1].argmax(-1) == ids[:, 1:]).sum().item()
    return losses, right


if __name__ == "__main__":
    print(train(Path(sys.argv[1])))
