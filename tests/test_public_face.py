"""What a user sees of the public names: help that says everything, and types that a checker can use."""

import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

from executor import Pipeline
from planner import autoplan, plan_from_profile
from planner.keywords import SettingKeywords

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("function", [autoplan, plan_from_profile], ids=lambda one: one.__name__)
def test_help_tells_every_keyword(function: object) -> None:
    text = pydoc.plain(pydoc.render_doc(function))
    told = set(re.findall(r"^ +(\w+): ", text, re.MULTILINE))
    named = {name for name in inspect.signature(function).parameters if name != "settings"}  # type: ignore[arg-type]
    assert named | set(SettingKeywords.__annotations__) <= told
    assert "SettingKeywords`" not in text


def test_help_tells_every_method_of_a_pipeline() -> None:
    arguments = set(inspect.signature(Pipeline).parameters)
    assert arguments <= set(re.findall(r"^ +(\w+): ", inspect.getdoc(Pipeline) or "", re.MULTILINE))
    for name, method in inspect.getmembers(Pipeline, inspect.isfunction):
        if name.startswith("_"):
            continue
        text = inspect.getdoc(method) or ""
        taken = [one for one in inspect.signature(method).parameters if one != "self"]
        silent = [one for one in taken if one not in text]
        assert text and not silent, (name, silent)


def test_a_users_script_passes_mypy(tmp_path: Path) -> None:
    """As strict as mypy is; marked lines are errors, and a mark on a line without one is an error, too."""
    script = tmp_path / "typed_script.py"
    script.write_text((ROOT / "tests" / "typed_script.py").read_text(encoding="utf-8"))
    settings = ["--strict", "--cache-dir", str(ROOT / ".mypy_cache"), "--config-file", ""]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *settings, str(script)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "Success: no issues found in 1 source file\n"), done.stdout
