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
`planner.plan.simulator`. Each cell has two links: {links}. "crossing" is how many tensors may cross a
cut, L the number of layers that this leaves, "used" the stages of our plan where they are fewer than K, since more
would not be faster. Columns of planners are step times divided by ours. Other planners do not know the link. An exact
search of its own (`searched_step_s`) finds our plan's time in every case but those with a star, where it would take too
long. A crossing that allows the same cuts as the one above it, or has its figures, is left out. What each planner
does: `tests/benchmarks/published_balancers.py`.
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


def case_table(rows: dict[str, list[Row]]) -> str:
    lines: dict[tuple[str, ...], list[str]] = {}  # by what they say: a line is left out that says the same
    for entries in zip(*rows.values(), strict=True):
        first = entries[0]
        used = dict.fromkeys(str(entry.used) for entry in entries)
        figures = (
            first.model,
            str(first.K) if list(used) == [str(first.K)] else f"{first.K} ({', '.join(used)})",
            ", ".join(f"{entry.ours_s * 1e3:.1f}" for entry in entries) + ("*" if first.searched is None else ""),
            *(", ".join(f"{entry.ratios[name]:.3f}" for entry in entries) for name in BALANCERS),
        )
        lines.setdefault(figures, [first.model, f"{crossing_text(first.crossing)}, {first.layers}", *figures[1:]])
    return markdown(["model", "crossing, L", "K (used)", "ours, ms", *BALANCERS], [*lines.values()])


def summary_table(rows: dict[str, list[Row]]) -> str:
    """Geometric mean, maximum and cases above 1.05 of each planner: of all cases, and where 1 tensor crosses."""

    def cells(name: str, single: bool) -> Iterator[str]:
        ratios = [[row.ratios[name] for row in all_ if row.crossing == 1 or not single] for all_ in rows.values()]
        yield ", ".join(f"{geometric_mean(each):.3f}" for each in ratios)
        yield ", ".join(f"{max(each):.3f}" for each in ratios)
        yield ", ".join(f"{sum(ratio > 1.05 for ratio in each)}" for each in ratios)

    cases = next(iter(rows.values()))
    return markdown(
        ["planner", *summary_head(len(cases), sum(row.crossing == 1 for row in cases))],
        [[name, *cells(name, single=False), *cells(name, single=True)] for name in BALANCERS],
    )


def summary_head(count: int, single: int) -> list[str]:
    return ["geo-mean", "max", f"> 5 %, of {count}", "geo-mean, 1 tensor", "max", f"> 5 %, of {single}"]


def crossing_table(links: Sequence[Link]) -> str:
    """Speed-up of our plans over one device that recomputes, too, with each link; crossings in columns."""

    def speed_up(model: str, crossing: int | None, K: int, link: Link) -> str:
        layers, count = load_layers(model, crossing), K * MICRO_BATCHES_PER_STAGE
        alone_s = step_s(layers, (0, len(layers)), count, link)
        return f"{alone_s / our_plan(layers, K, link).prediction.step_s:.2f}"

    return markdown(
        ["model", "K", *(f"crossing {crossing_text(crossing)}" for crossing in CROSSINGS)],
        [
            [
                model,
                str(K),
                *(", ".join(speed_up(model, crossing, K, link) for link in links) for crossing in CROSSINGS),
            ]
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
            links=" and ".join(links),
        ),
        f"## Summary\n\nStep time divided by ours.\n\n{summary_table(rows)}\n",
        "## Where one may cut\n\nPredicted speed-up over one device that recomputes, too.\n\n"
        f"{crossing_table(list(links.values()))}\n",
        f"## All cases\n\n{case_table(rows)}\n",
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
