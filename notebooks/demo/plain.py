"""Use a checkpoint without any pipeline: load it into the plain model, check its loss, generate a text.

    python notebooks/demo/plain.py CHECKPOINT EXPECTED_LOSS

Nothing here knows of gpipe-autoplan: a checkpoint is in torch's own format under the model's own names.
"""

from __future__ import annotations

import statistics
import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp
from gpt import GPT, next_token_loss
from task import make_model, validation_batches

RELATIVE_TOLERANCE = 1e-5  # the pipeline adds up micro-batches, this process whole batches
PROMPT = "The "


def load(checkpoint: str) -> GPT:
    """The plain model with the checkpoint's weights, in evaluation mode."""
    model = make_model()
    state = {"model": model.state_dict()}
    with warnings.catch_warnings(action="ignore"):  # torch warns of its own deprecations
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    model.load_state_dict(state["model"])
    return model.eval()


def main() -> None:
    """Compare the losses and print a text."""
    checkpoint, expected = sys.argv[1], float(sys.argv[2])
    model = load(checkpoint)
    with torch.no_grad():
        loss = statistics.fmean(next_token_loss(model(x), y).item() for x, y in validation_batches())
    print(f"\nplain model from the checkpoint: validation loss {loss:.6f} nats/byte, pipeline {expected:.6f}")
    if not abs(loss - expected) <= RELATIVE_TOLERANCE * expected:
        raise SystemExit(f"the losses differ by {abs(loss - expected):.2e}, more than {RELATIVE_TOLERANCE:.0e} of it")
    prompt = torch.tensor([list(PROMPT.encode())])
    ids = model.generate(prompt, 200, temperature=0.7, generator=torch.Generator().manual_seed(0))
    print(f"generated: {bytes(ids[0].tolist()).decode(errors='replace')!r}")


if __name__ == "__main__":
    main()
