"""The public names: where they come from, and what importing them costs."""

import importlib
import pkgutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Python = Callable[..., subprocess.CompletedProcess[str]]

PACKAGES = ("profiler", "planner", "executor")
SLOW = ("torch", "scipy", "pandas", "networkx", "matplotlib", "numpy")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_there(package: str) -> None:
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in dir(module)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        module.nonsense  # noqa: B018


@pytest.mark.parametrize("package", PACKAGES)
def test_the_table_of_names_is_the_public_list(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module._HOME) == sorted(module.__all__)
    for name, home in module._HOME.items():
        assert getattr(importlib.import_module(home), name) is getattr(module, name)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_has_the_name_of_something_public(package: str) -> None:
    """Importing `package.x` sets the attribute `x` of the package to the module, and hides a function `x` for good."""
    module = importlib.import_module(package)
    modules = {entry.name for entry in pkgutil.iter_modules(module.__path__)}
    assert modules.isdisjoint(module.__all__)


def test_importing_the_packages_loads_nothing_slow(python: Python) -> None:
    code = f"import sys, profiler, planner, executor; print([name for name in {SLOW} if name in sys.modules])"
    assert python("-c", code).stdout.strip() == "[]"


def test_what_a_training_script_imports_leaves_the_search_where_it_is(python: Python) -> None:
    """Each worker of `launch` imports the script anew, and holds whatever that loads."""
    slow = ("numba", *SLOW[1:-1])
    code = "from planner import Plan, autoplan\nfrom executor import Pipeline, launch\nimport sys\n"
    code += f"print([name for name in {slow} if name in sys.modules])"
    assert python("-c", code).stdout.strip() == "[]"


def test_a_folder_that_hides_one_of_ours_is_named(python: Python, tmp_path: Path) -> None:
    intruder = tmp_path / "profiler" / "__init__.py"
    intruder.parent.mkdir()
    intruder.write_text("")
    result = python("-c", "from planner import Plan")
    assert result.returncode == 1
    message = result.stderr.splitlines()[-1]
    assert message.startswith("ImportError: gpipe-autoplan found another package 'profiler'")
    for part in (str(intruder), "fresh virtual environment", "python -P"):
        assert part in message
    cured = python("-P", "-c", "from planner import Plan; print(Plan.__name__)")
    assert cured.stdout == "Plan\n", cured.stderr


def test_a_folder_without_init_does_not_hide_ours(python: Python, tmp_path: Path) -> None:
    """Python prefers a real package further down the path to a namespace package."""
    (tmp_path / "profiler").mkdir()
    result = python("-c", "from planner import Plan")
    assert result.returncode == 0, result.stderr


def test_another_distribution_that_hides_one_of_ours_is_named(python: Python, tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "executor").mkdir(parents=True)
    (site / "executor" / "__init__.py").write_text("__version__ = '23.2'\n")
    info = site / "executor_tool-23.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: executor-tool\nVersion: 23.2\n")
    (info / "RECORD").write_text("executor/__init__.py,,\n")
    result = python("-c", f"import sys; sys.path.insert(0, {str(site)!r}); import planner")
    message = result.stderr.splitlines()[-1]
    assert message.startswith("ImportError: gpipe-autoplan found another package 'executor'")
    assert "of the distribution 'executor-tool'" in message


def test_another_package_written_over_ours_is_named(python: Python, tmp_path: Path) -> None:
    """pip installs two distributions with the same package into each other without a word."""
    home = Path(importlib.import_module("planner").__file__ or "").parent
    (tmp_path / "planner").mkdir()
    (tmp_path / "planner" / "__init__.py").write_text((home / "__init__.py").read_text())
    for name in ("profiler", "executor"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text('"""Something else."""\n')
    result = python("-c", "import planner")
    assert "found another package 'profiler'" in result.stderr.splitlines()[-1]


def test_a_missing_sibling_is_named(python: Python, tmp_path: Path) -> None:
    home = Path(importlib.import_module("planner").__file__ or "").parent
    (tmp_path / "planner").mkdir()
    (tmp_path / "planner" / "__init__.py").write_text((home / "__init__.py").read_text())
    code = "import sys; sys.path[1:] = [entry for entry in sys.path if 'site-packages' not in entry and "
    code += f"entry != {str(home.parent)!r}]; import planner"
    result = python("-c", code)
    assert "no package 'profiler' next to" in result.stderr.splitlines()[-1]


def test_a_folder_named_coverage_is_not_taken_for_the_package(python: Python, tmp_path: Path) -> None:
    (tmp_path / "coverage").mkdir()  # where reports of a coverage run lie
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from planner import plan_from_profile; import coverage"
    assert python("-c", code).returncode == 0
