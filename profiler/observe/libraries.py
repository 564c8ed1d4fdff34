"""Which libraries of kernels torch may use, for all threads.

An export switches oneDNN and cuDNN off, for its own sake (torch's `_ignore_backend_decomps`). What runs on real data
meanwhile is to run as in training, where the libraries may even return another type: under autocast an LSTM on a CPU
computes in bfloat16 throughout if oneDNN may, and returns what it was given if not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Libraries:
    """Whether each may be used.

    Attributes:
        mkldnn: oneDNN, on CPUs.
        cudnn: on NVIDIA's GPUs.
    """

    mkldnn: bool
    cudnn: bool

    @classmethod
    def now(cls) -> Libraries:
        """At the moment."""
        return cls(bool(torch.backends.mkldnn.enabled), bool(torch.backends.cudnn.enabled))

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Within, it is so again."""
        before = Libraries.now()
        self._set()
        try:
            yield
        finally:
            before._set()

    def _set(self) -> None:
        torch.backends.mkldnn.enabled = self.mkldnn  # type: ignore[assignment]
        torch.backends.cudnn.enabled = self.cudnn
