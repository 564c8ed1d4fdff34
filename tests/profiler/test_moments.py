"""Moments of micro-batches come to those of the mini-batch, of many normalizations of any size and type at once."""

from functools import reduce

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from profiler.moments import Moments


@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(2, 9), min_size=1, max_size=4),
    layers=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 3), st.sampled_from([torch.float32, torch.float64])),
        min_size=1,
        max_size=5,
    ),
)
@settings(deadline=None)
def test_micro_batches_come_to_the_mini_batch(
    seed: int, sizes: list[int], layers: list[tuple[int, int, torch.dtype]]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = [  # of each normalization (samples, channels, extent)
        torch.randn(sum(sizes), channels, extent, generator=generator, dtype=torch.float64).to(dtype)
        for channels, extent, dtype in layers
    ]
    parts = [value.split(sizes) for value in values]
    of_batches = [[part[number] for part in parts] for number in range(len(sizes))]
    seen = [
        Moments.of(
            [part.mean(dim=(0, 2)) for part in row],
            [part.var(dim=(0, 2)) for part in row],
            [float(part.numel() // part.shape[1]) for part in row],
        )
        for row in of_batches
    ]
    whole = reduce(Moments.then, seen)
    mean, variance = whole.each()
    if len(sizes) == 1:
        assert all(torch.equal(one, part.mean(dim=(0, 2))) for one, part in zip(mean, of_batches[0], strict=True))
        assert all(torch.equal(one, part.var(dim=(0, 2))) for one, part in zip(variance, of_batches[0], strict=True))
    elsewhere = seen[0].unpacked(whole.packed()).each()
    assert all(map(torch.equal, elsewhere[0], mean))
    assert all(map(torch.equal, elsewhere[1], variance))
    for value, found_mean, found_variance in zip(values, mean, variance, strict=True):
        assert found_mean.dtype == value.dtype
        torch.testing.assert_close(found_mean, value.mean(dim=(0, 2)), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found_variance, value.var(dim=(0, 2)), rtol=1e-5, atol=1e-5)


@given(seed=st.integers(0, 2**32 - 1), widths=st.lists(st.integers(1, 40), min_size=2, max_size=6))
@settings(deadline=None)
def test_what_stands_beside_a_normalization_does_not_change_it(seed: int, widths: list[int]) -> None:
    """A stage has other normalizations than a whole model; the sums are equal in every bit."""
    generator = torch.Generator().manual_seed(seed)
    means, variances = (
        [[torch.rand(width, generator=generator) for width in widths] for _batch in range(3)] for _which in range(2)
    )
    counts = [[float(3 + number + 2 * position) for position in range(len(widths))] for number in range(3)]

    def whole(own: slice) -> tuple[list[Tensor], list[Tensor]]:
        rows = zip(means, variances, counts, strict=True)
        seen = (Moments.of(mean[own], variance[own], count[own]) for mean, variance, count in rows)
        return reduce(Moments.then, seen).each()

    together = whole(slice(None))
    for position in range(len(widths)):
        alone = whole(slice(position, position + 1))
        assert all(torch.equal(one[0], many[position]) for one, many in zip(alone, together, strict=True))
