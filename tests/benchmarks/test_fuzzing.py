"""Ten thousand hostile plans, and profiles and command lines: an error from our tree or a sound value, and soon.

    make bench

Every input is tried in this process. A plan that is accepted is shown, explained and drawn, a profile planned by.
"""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.fuzzing.mutations import command_lines, documents
from tests.fuzzing.subjects import good_plans, good_profile, workplace
from tests.fuzzing.trial import Outcome, command_line, options_of_commands, plan_file, profile_file, tried

PLANS, PROFILES, LINES = 10_000, 3000, 3000
SEED = 20_000


@pytest.mark.benchmark
def test_hostile_plans(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plans = good_plans()
    texts = chain(
        *(documents(plan.to_json(), SEED + number, PLANS // len(plans) + 1) for number, plan in enumerate(plans))
    )
    _report("plan.json", [(text, tried(lambda: plan_file(path))) for text in _written(texts, path)])


@pytest.mark.benchmark
def test_hostile_profiles(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    texts = documents(good_profile().to_json(), SEED, PROFILES)
    _report("profile JSON", [(text, tried(lambda: profile_file(path))) for text in _written(texts, path)])


@pytest.mark.benchmark
def test_hostile_command_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workplace(tmp_path, monkeypatch)
    lines = command_lines(options_of_commands(), SEED, LINES)
    _report("command line", [(line, tried(partial(command_line, line))) for line in lines])


def _written(texts: Iterable[bytes], path: Path) -> Iterable[bytes]:
    for text in texts:
        path.write_bytes(text)
        yield text


def _report(what: str, outcomes: list[tuple[Any, Outcome]]) -> None:
    """Rows of fuzzing.md."""
    counts = Counter(outcome.what for _, outcome in outcomes)
    seconds = [outcome.seconds for _, outcome in outcomes]
    ends = ", ".join(f"{end} {count}" for end, count in counts.most_common())
    wrong = [(given, outcome.wrong) for given, outcome in outcomes if outcome.wrong]
    print(f"\n| {what} | {len(outcomes)} | {len(wrong)} | {ends} | {median(seconds):.4f} | {max(seconds):.2f} |")
    assert not wrong, "\n\n".join(f"{given!r:.1500}\n{problem}" for given, problem in wrong[:20])
