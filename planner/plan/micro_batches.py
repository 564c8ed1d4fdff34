"""How the samples of one replica are cut into M micro-batches: nearly equal, the larger ones first."""

from dataclasses import dataclass

from planner.plan.schedules import ONE_CHUNK, SCHEDULES, Ring, ScheduleName


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """M micro-batches whose sizes differ by at most one sample, as `torch.tensor_split` makes them.

        >>> MicroBatches(batch_size=10, count=4).sizes
        (3, 3, 2, 2)

    Attributes:
        batch_size: samples of one replica's share of the mini-batch.
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
        many, larger = divmod(self.batch_size, self.count)
        return (many + 1,) * larger + (many,) * (self.count - larger)

    @property
    def number_largest(self) -> int:
        """How many micro-batches have the larger size: all of them when the sizes are equal."""
        return self.batch_size % self.count or self.count

    def in_flight(self, schedule: ScheduleName, number: int, ring: Ring = ONE_CHUNK) -> tuple[int, int]:
        """Most micro-batches under way at once, as (of the larger size, of the smaller size).

        Args:
            schedule: says how many there are; the large ones come first.
            number: of the stage, 1 for the last.
            ring: ranks, and chunks of each.
        """
        many = SCHEDULES[schedule].most_in_flight(number, self.count, ring)
        large = min(many, self.number_largest)
        return large, many - large
