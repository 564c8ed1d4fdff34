"""The peak of what a stage holds: from the allocator's own books on CUDA, from torch's profiler on CPU.

The CPU allocator keeps no books, but reports every allocation to a profiler that asks. That costs time: watch the
memory of a step, and time another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(slots=True)
class Peak:
    """Bytes of tensors at the worst moment; 0 before the end of the watched step."""

    peak_bytes: int = 0


@contextmanager
def peak_of(held: Sequence[Tensor], device: torch.device) -> Iterator[Peak]:
    """Watch the memory of what runs inside.

    Args:
        held: what the stages hold before: parameters, buffers, gradients. (On CUDA the allocator knows.)
        device: whose memory is watched.
    """
    found = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        found.peak_bytes = torch.cuda.max_memory_allocated(device)
        return
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in held)}
    with torch.autograd.profiler.profile(profile_memory=True) as watched:
        yield found
    results = watched.kineto_results
    assert results is not None, "the profiler has run"
    changes = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    found.peak_bytes = sum(storages.values()) + max(accumulate((change for _, change in changes), initial=0))
