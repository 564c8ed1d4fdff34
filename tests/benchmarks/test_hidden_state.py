"""Random combinations of what hides state: `HIDDEN_SEEDS=0:300 make bench`, of which each is a model of its own."""

import os
import random
from collections import Counter

import pytest

from tests.executor.hidden_trials import GOOD, KNOWN, tried
from tests.models.hidden_state import BODIES

NAMES = sorted(BODIES.keys() - KNOWN)


def drawn(seed: int) -> list[str]:
    """Two or three of them."""
    chance = random.Random(seed)
    return chance.sample(NAMES, chance.choice((2, 2, 3)))


@pytest.mark.benchmark
def test_random_combinations() -> None:
    first, stop = map(int, os.environ.get("HIDDEN_SEEDS", "0:300").split(":"))
    counts: Counter[str] = Counter()
    wrong = []
    for seed in range(first, stop):
        found = tried(drawn(seed))
        counts[found.outcome] += 1
        if found.outcome not in GOOD:
            wrong.append(f"{seed} {drawn(seed)}: {found.outcome}: {found.why}")
    print(f"\n{stop - first} models: {', '.join(f'{kind} {count}' for kind, count in sorted(counts.items()))}")
    assert not wrong, "\n".join(wrong)
