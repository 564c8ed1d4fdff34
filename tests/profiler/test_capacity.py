"""What measuring takes stays below the memory of the device, also at sizes that the user asks for."""

import warnings
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from profiler import Device, LayerSequence, ProfileError, profile, trace
from tests.models.tracked import allocations

SAMPLE_BYTES = 4 * 32 * 64  # of one sample's value at each boundary


class Deep(nn.Module):
    """Layers of equal outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def selecting(output: Tensor, target: Tensor) -> Tensor:
    """A loss that fake tensors cannot follow."""
    return (output[target > 0] ** 2).sum()


class Recurrent(nn.Module):
    """Its kernels keep what fake tensors do not show."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(64, 64, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x


@cache
def traced(kind: type[nn.Module]) -> tuple[Tensor, LayerSequence]:
    """A sample and the layers of a model."""
    sample = torch.randn(4, 32, 64)
    return sample, trace(kind(), sample)


def _measured(kind: type[nn.Module], sizes: Sequence[int], memory_bytes: int, **about: Any) -> tuple[list[int], int]:
    """The sizes that the profile holds, and the most bytes that were allocated at any moment."""
    sample, sequence = traced(kind)  # type: ignore[arg-type]  # a class can be hashed
    device = Device(name="cpu", kind="cpu", memory_bytes=memory_bytes, threads=1)
    with allocations() as record, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = profile(
            sequence,
            [device],
            sample=sample,
            batch_size=4 * max(sizes),
            micro_batch_sizes=sizes,
            time_budget_s=0.0,
            progress=False,
            cache=False,
            **about,
        )
    return sorted({cost.micro_batch_size for cost in found.costs}), max(accumulate(record))


@pytest.mark.parametrize("kind", [Deep, Recurrent])
@pytest.mark.parametrize("fits", [8, 64])
def test_measuring_stays_below_the_limit(kind: type[nn.Module], fits: int) -> None:
    """The limit holds single layers at the size `fits`, not all that a model keeps, and no larger sizes."""
    per_sample = 16 if kind is Deep else 96
    limit = 2**20 + fits * per_sample * SAMPLE_BYTES
    found, most = _measured(kind, [1, fits, 8 * fits, 64 * fits], limit)
    assert found == [1, 2, fits]
    assert most <= limit


def test_where_fake_tensors_cannot_follow_small_sizes_tell() -> None:
    limit = 2**18 + 16 * 24 * SAMPLE_BYTES
    found, most = _measured(Deep, [16, 512], limit, loss_fn=selecting, target=torch.randn(4, 32, 64))
    assert found == [16]
    assert most <= limit


def test_a_single_size_that_does_not_fit_is_refused_before_it_is_run() -> None:
    limit = 2**20
    sample, sequence = traced(Deep)
    device = Device(name="cpu", kind="cpu", memory_bytes=limit, threads=1)
    with (
        allocations() as record,
        pytest.warns(UserWarning, match="micro-batches of 512 samples are left out"),
        pytest.raises(ProfileError, match="no memory for micro-batches of 512 samples"),
    ):
        profile(sequence, [device], sample=sample, batch_size=512, micro_batch_sizes=[512], progress=False, cache=False)
    assert max(accumulate(record)) <= limit
