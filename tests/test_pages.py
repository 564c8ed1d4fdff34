"""The pages keep up with the code: their examples run, their links lead somewhere, the front page is short and true."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from planner import Plan

ROOT = Path(__file__).resolve().parent.parent
FRONT_PAGE = ROOT / "README.md"
CONTRIBUTING = ROOT / ".github" / "CONTRIBUTING.md"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.md"))
PAGES = (FRONT_PAGE, CONTRIBUTING, *NOTEBOOKS, ROOT / "tests" / "benchmarks" / "README.md")
MOST_WORDS = 900
SMALLER = {"blocks=8": "blocks=1", "batch_size=64": "batch_size=16", "torch.zeros(64,": "torch.zeros(16,"}
"""What an example is run with in place of what the page says: every line runs, in less time."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def examples(page: Path) -> str:
    """The Python of a page, as one program."""
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))


def test_the_front_page_is_short() -> None:
    assert len(FRONT_PAGE.read_text(encoding="utf-8").split()) <= MOST_WORDS


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    wrong = []
    for link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not link.startswith("https://") and not (target.exists() and (not anchor or anchor in anchors(target))):
            wrong.append(link)
    assert links or page == CONTRIBUTING
    assert wrong == []


def test_every_page_is_linked_from_the_front_page_or_from_one_that_is() -> None:
    linked, reached = [FRONT_PAGE], {FRONT_PAGE}
    while linked:
        page = linked.pop()
        for link in re.findall(r"\]\(([^)\s#]+\.md)", page.read_text(encoding="utf-8")):
            target = (page.parent / link).resolve()
            if target in PAGES and target not in reached:
                linked.append(target)
                reached.add(target)
    assert reached == set(PAGES)


def test_the_plan_on_the_front_page_is_the_one_in_the_file() -> None:
    """`autoplan show notebooks/plan.json` prints it, and draws the picture."""
    shown = [line.strip() for line in str(Plan.load(ROOT / "notebooks" / "plan.json")).splitlines()]
    text = FRONT_PAGE.read_text(encoding="utf-8").partition("## A plan\n\n")[2]
    block = [line.strip() for line in re.split(r"\n\n(?!    )", text)[0].splitlines()]
    assert len(block) > 4 + 4  # the head and four stages
    assert block == shown[: len(block)]


@pytest.mark.parametrize("page", [page for page in NOTEBOOKS if examples(page)], ids=name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = examples(page)
    for written, run in SMALLER.items():
        program = program.replace(written, run)
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    space: dict[str, Any] = {"__name__": "examples"}
    exec(compile(program, name(page), "exec"), space)


def test_contributing_names_every_folder() -> None:
    text = CONTRIBUTING.read_text(encoding="utf-8")
    for package in ("profiler", "planner", "executor"):
        tree = text.partition(f"    {package}/ ")[2]
        for folder in sorted(file.parent for file in (ROOT / package).glob("*/__init__.py")):
            assert f"      {folder.name}/ " in tree, f"{package}/{folder.name} is missing from the tree"


def test_contributing_names_files_and_attributes_that_exist() -> None:
    """`SCHEDULES` of `planner/plan/schedules.py` and the like."""
    text = CONTRIBUTING.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:profiler|planner|executor|tests)/[\w/.]*)`", text):
        assert (ROOT / path).exists(), path
    named = re.findall(r"`(\w+)` (?:of|in) `(\w[\w/]*\.py)`", text)
    assert len(named) > 3
    for attribute, path in named:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        found = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        found |= {
            target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        assert attribute in found, f"{path} has no {attribute}"
