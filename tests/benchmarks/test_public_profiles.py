"""Our plans of public profiles beside those of published planners, and beside an exact search; writes the table.

OMP_NUM_THREADS=1 python -m pytest tests/benchmarks/test_public_profiles.py -m benchmark -s
"""

import datetime
import importlib.metadata
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

import pytest

from profiler.device import Link
from tests.benchmarks.public_profiles import (
    CROSSINGS,
    FREE,
    LINK,
    MICRO_BATCHES_PER_STAGE,
    MODELS,
    Layer,
    cuts_of,
    load_layers,
    our_plan,
    searched_step_s,
    step_s,
)
from tests.benchmarks.published_balancers import BALANCERS
from tests.coverage.table import machine

ROUNDING = 1e-9
STAGES = (2, 4, 8)
SEARCHED_LAYERS = {2: 1000, 4: 1000, 8: 80}
"""By K, the most layers for which the exact search takes minutes at most."""

PAGE = Path(__file__).with_name("public_profiles.md")
HEAD = """\
# Public profiles: our plans beside those of published planners

`{command}`
{date}: {machine}; Python {python}, torchgpipe {torchgpipe}.

Predicted, not measured: five profiles of PipeDream (`tests/data/public_profiles`), one mini-batch of the profile being
one micro-batch; up to K equal devices without memory limit, M = 4K, every stage recomputes, all plans evaluated by
`planner.plan.simulator`. "crossing" is how many tensors may cross a cut, L the number of layers that this leaves,
"used" the stages of our plan; where it is less than K, more stages would not be faster. Columns of planners are step
times divided by ours. Other planners do not know the link. "search" is an exact search of its own (`searched_step_s`),
relative to ours; "-" where it would take too long. A crossing that allows the same cuts as the one above it is left
out. `tests/benchmarks/published_balancers.py` says what each planner does.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One model, crossing, K and link."""

    model: str
    crossing: int | None
    layers: int
    K: int
    used: int
    ours_s: float
    ratios: dict[str, float]
    searched: float | None


def distinct_layers(model: str) -> Iterator[tuple[int | None, tuple[Layer, ...]]]:
    seen: set[int] = set()
    for crossing in CROSSINGS:
        layers = load_layers(model, crossing)
        if len(layers) not in seen:
            yield crossing, layers
        seen.add(len(layers))


def row(model: str, crossing: int | None, layers: tuple[Layer, ...], K: int, link: Link) -> Row:
    count = K * MICRO_BATCHES_PER_STAGE
    plan = our_plan(layers, K, link)
    ours_s = step_s(layers, cuts_of(plan), count, link)
    assert plan.prediction.gap == 0
    assert ours_s == pytest.approx(plan.prediction.step_s, rel=ROUNDING)
    searched = searched_step_s(layers, K, count, link) / ours_s if len(layers) <= SEARCHED_LAYERS[K] else None
    return Row(
        model=model,
        crossing=crossing,
        layers=len(layers),
        K=K,
        used=plan.K,
        ours_s=ours_s,
        ratios={
            name: step_s(layers, balancer(layers, K), count, link) / ours_s for name, balancer in BALANCERS.items()
        },
        searched=searched,
    )


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def crossing_text(crossing: int | None) -> str:
    return "any" if crossing is None else str(crossing)


def case_table(rows: list[Row]) -> str:
    return markdown(
        ["model", "crossing", "L", "K", "used", "ours, ms", *BALANCERS, "search"],
        [
            [
                entry.model,
                crossing_text(entry.crossing),
                *map(str, (entry.layers, entry.K, entry.used)),
                f"{entry.ours_s * 1e3:.1f}",
                *(f"{ratio:.3f}" for ratio in entry.ratios.values()),
                "-" if entry.searched is None else f"{entry.searched:.3f}",
            ]
            for entry in rows
        ],
    )


def summary_table(rows: list[Row]) -> str:
    """Geometric mean, maximum and cases above 1.05 of each planner: of all cases, and where 1 tensor crosses."""
    single = [entry for entry in rows if entry.crossing == 1]

    def cells(chosen: list[Row], name: str) -> list[str]:
        ratios = [entry.ratios[name] for entry in chosen]
        above = sum(ratio > 1.05 for ratio in ratios)
        return [f"{geometric_mean(ratios):.3f}", f"{max(ratios):.3f}", f"{above} of {len(ratios)}"]

    head = [f"{what}{where}" for where in ("", ", 1 tensor") for what in ("geo-mean", "max", "> 5 %")]
    return markdown(
        ["planner", *head],
        [[name, *(cell for chosen in (rows, single) for cell in cells(chosen, name))] for name in BALANCERS],
    )


def crossing_table(link: Link) -> str:
    """Speed-up of our plans over one device that recomputes, too, by crossing; crossings in columns."""

    def speed_up(model: str, crossing: int | None, K: int) -> str:
        layers, count = load_layers(model, crossing), K * MICRO_BATCHES_PER_STAGE
        alone_s = step_s(layers, (0, len(layers)), count, link)
        return f"{alone_s / our_plan(layers, K, link).prediction.step_s:.2f}"

    return markdown(
        ["model", "K", *(f"crossing {crossing_text(crossing)}" for crossing in CROSSINGS)],
        [
            [model, str(K), *(speed_up(model, crossing, K) for crossing in CROSSINGS)]
            for model in MODELS
            for K in STAGES
        ],
    )


def page(rows: dict[str, list[Row]], links: dict[str, Link]) -> str:
    parts = [
        HEAD.format(
            command=(__doc__ or "").splitlines()[-1].strip(),
            date=datetime.datetime.now(datetime.UTC).date(),
            machine=machine(),
            python=platform.python_version(),
            torchgpipe=importlib.metadata.version("torchgpipe"),
        ),
        *(
            f"## Summary: {text}\n\nStep time divided by ours.\n\n{summary_table(entries)}\n"
            for text, entries in rows.items()
        ),
        *(
            f"## Where one may cut: {text}\n\nPredicted speed-up over one device that recomputes, too.\n\n"
            f"{crossing_table(link)}\n"
            for text, link in links.items()
        ),
        *(f"## All cases: {text}\n\n{case_table(entries)}\n" for text, entries in rows.items()),
    ]
    return "\n".join(parts)


@pytest.mark.benchmark
def test_no_published_planner_is_faster_than_ours() -> None:
    links = {"no communication": FREE, "12 GB/s, 10 us": LINK}
    rows = {
        text: [
            row(model, crossing, layers, K, link)
            for model in MODELS
            for crossing, layers in distinct_layers(model)
            for K in STAGES
        ]
        for text, link in links.items()
    }
    text = page(rows, links)
    print(f"\n{text}")
    for entry in (entry for entries in rows.values() for entry in entries):
        assert entry.searched is None or entry.searched == pytest.approx(1.0, rel=ROUNDING), entry
        for name, ratio in entry.ratios.items():
            assert ratio >= 1 - ROUNDING, (name, entry)
    PAGE.write_text(text, encoding="utf-8")
