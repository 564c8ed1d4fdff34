"""How a mini-batch is cut into M micro-batches: nearly equal, the larger ones first, as `torch.tensor_split` does."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """M micro-batches whose sizes differ by at most one sample.

        >>> MicroBatches(batch_size=10, count=4).sizes
        (3, 3, 2, 2)

    Attributes:
        batch_size: samples of the mini-batch.
        count: M, from 1 to `batch_size`.
    """

    batch_size: int
    count: int

    @property
    def largest(self) -> int:
        """Samples of the first micro-batch."""
        return -(-self.batch_size // self.count)

    @property
    def smallest(self) -> int:
        """Samples of the last micro-batch."""
        return self.batch_size // self.count

    @property
    def equal(self) -> bool:
        """Whether all micro-batches have one size."""
        return self.batch_size % self.count == 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each micro-batch in order."""
        many, extra = divmod(self.batch_size, self.count)
        return (many + 1,) * extra + (many,) * (self.count - extra)

    @property
    def number_largest(self) -> int:
        """How many micro-batches have the larger size: all of them when the sizes are equal."""
        return self.batch_size % self.count or self.count
