"""The worked examples: each plain script, the same with a plan, and the page that shows the difference."""

import difflib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from executor.launching import launch
from planner import Plan
from profiler import trace
from tests.executor.conftest import _plan as plan_for

FOLDER = Path(__file__).parent.parent / "notebooks" / "examples"
PAGE = FOLDER.parent / "examples.md"
NAMES = ("causal_lm", "cnn", "t5")
MOST_LINES = 40
"""Lines that are added or taken away, of a script of some 60 lines."""


def changes(name: str) -> list[str]:
    """The lines that differ, as `diff -U0` has them, without its heads."""
    before, after = ((FOLDER / f"{one}.py").read_text().splitlines() for one in (f"{name}_plain", name))
    return [line for line in difflib.unified_diff(before, after, lineterm="", n=0) if line[:3] not in ("---", "+++")]


def counted(name: str) -> tuple[int, int]:
    """Lines that are taken away, and that are added; empty ones do not count."""
    lines = [line for line in changes(name) if line[1:].strip()]
    return sum(line[0] == "-" for line in lines), sum(line[0] == "+" for line in lines)


def loaded(name: str) -> ModuleType:
    """A module of that file, which processes find by its folder on the path."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_the_difference_and_counts_its_lines(name: str) -> None:
    """Renew it by `python -m tests.test_examples`."""
    text = PAGE.read_text(encoding="utf-8")
    assert "\n".join(changes(name)) in text
    less, more = counted(name)
    assert f"{less} lines less, {more} lines more" in text
    assert less + more <= MOST_LINES


def small_plan(name: str, module: ModuleType) -> Plan:
    """A plan of two stages without measuring: the script's own call of `autoplan` measures for a minute."""
    batch = next(iter(module.make_loaders()[0]))
    autocast = None if name == "cnn" else torch.bfloat16
    makers = {"causal_lm": lambda: {"input_ids": batch, "labels": batch}, "cnn": lambda: batch[0], "t5": lambda: batch}
    sample = makers[name]()
    sequence = trace(module.make_model(), sample, autocast=autocast)
    return plan_for(sequence, [len(sequence) // 2], batch_size=sequence.sample.batch_size, micro_batches=4)


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_as_the_plain_script_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs, of which the second one resumes. Batch normalization sees micro-batches, so there losses are near."""
    monkeypatch.syspath_prepend(str(FOLDER))
    plain, ours = loaded(f"{name}_plain"), loaded(name)
    monkeypatch.setitem(sys.modules, name, ours)
    plan = small_plan(name, ours)
    for _ in range(2):
        expected, expected_metric = plain.train(tmp_path)
        losses, metric = ours.train(plan, tmp_path / "checkpoints")
        off = 0.6 if name == "cnn" else 0.1
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0.0, atol=off)
        assert metric == pytest.approx(expected_metric, rel=0.1)
    assert losses[-1] < 4.6


def test_it_trains_in_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the script starts them; what one process gives, these give."""
    monkeypatch.syspath_prepend(str(FOLDER))
    ours = loaded("causal_lm")
    monkeypatch.setitem(sys.modules, "causal_lm", ours)
    plan = small_plan("causal_lm", ours)
    (losses, _), (others, right) = launch(ours.train, plan, [tmp_path / "two"])
    assert losses == others
    assert (losses, right) == ours.train(plan, tmp_path / "one")


if __name__ == "__main__":
    parts = PAGE.read_text(encoding="utf-8").partition("\n## ")[0]
    for name, title in zip(NAMES, ("A causal language model", "A network with batch normalization", "T5"), strict=True):
        less, more = counted(name)
        files = f"[plain](examples/{name}_plain.py), [with a plan](examples/{name}.py)"
        diff = "\n".join(changes(name))
        parts += f"\n## {title}\n\n{files}: {less} lines less, {more} lines more.\n\n```diff\n{diff}\n```\n"
    PAGE.write_text(parts, encoding="utf-8")
