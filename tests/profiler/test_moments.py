"""Moments of micro-batches come to those of the mini-batch, of many normalizations of any size and type at once."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler.moments import combined


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
    mean, variance = combined(
        [[part.mean(dim=(0, 2)) for part in row] for row in of_batches],
        [[part.var(dim=(0, 2)) for part in row] for row in of_batches],
        [[float(part.numel() // part.shape[1]) for part in row] for row in of_batches],
    )
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
    together = combined(means, variances, counts)
    for position in range(len(widths)):
        own = slice(position, position + 1)
        alone = combined([row[own] for row in means], [row[own] for row in variances], [row[own] for row in counts])
        assert all(torch.equal(one[0], many[position]) for one, many in zip(alone, together, strict=True))
