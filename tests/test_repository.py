"""The repository as a whole: what the wheel holds, and which package may import which."""

import ast
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("profiler", "planner", "executor")  # the lowest floor first

# All that the executor needs of the planner: values, what they predict and how to show them, never how they were found.
PLAN_FOLDER = "planner.plan"

# `autoplan show`, and whoever reads a plan or a profile, waits for none of these.
SLOW = ("torch", "scipy", "pandas", "networkx", "matplotlib")
FAST_MODULES = (
    "profiler.errors",
    "profiler.value",
    "profiler.device",
    "profiler.sample_spec",
    "profiler.record",
    "planner.plan.plan",
    "planner.plan.actions",
    "planner.plan.schedules",
    "planner.plan.simulator",
    "planner.plan.report",
    "planner.plan.units",
)

# Where a value shows itself: one-line delegates at the end of its class, imported when they are called.
VIEWS = {
    ("planner.plan.plan", "planner.explain"),
    ("planner.plan.plan", "planner.plan.report"),
    ("profiler.tracing.sequence", "profiler.tracing.dataflow"),
}


def source_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported_modules(tree: ast.Module) -> Iterator[str]:
    """Modules that a file imports anywhere; `from a import b` counts as `a.b`, which is as much as can be meant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import at line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_allowed(importer: str, file: str, imported: str) -> bool:
    floor = PACKAGES.index(importer)
    package = imported.partition(".")[0]
    if package not in PACKAGES or package == importer:
        return True
    if PACKAGES.index(package) > floor:
        return False
    if (importer, package) != ("executor", "planner") or file == "executor/command.py":
        return True
    return imported.startswith(f"{PLAN_FOLDER}.") or imported in {"planner", "planner.Plan"}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_never_run_upwards(package: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)} imports {imported}"
        for file in source_files(package)
        for imported in imported_modules(ast.parse(file.read_text(encoding="utf-8")))
        if not is_allowed(package, str(file.relative_to(ROOT)), imported)
    ]
    assert wrong == []


def whole_name(module: str) -> str:
    return module


def folder(module: str) -> str:
    """Of a module in a folder of a package; a module at the top of its package stands for itself."""
    return ".".join(module.split(".")[:2])


@pytest.mark.parametrize("room", [whole_name, folder])
def test_there_is_no_circle_of_imports(room: Callable[[str], str]) -> None:
    """Also none of imports inside functions or for types alone: what needs each other belongs together."""
    modules = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts): file
        for package in PACKAGES
        for file in source_files(package)
        if file.name != "__init__.py"
    }
    imports: networkx.DiGraph[str] = networkx.DiGraph()
    for name, file in modules.items():
        for imported in imported_modules(ast.parse(file.read_text(encoding="utf-8"))):
            for target in {imported, imported.rpartition(".")[0]} & modules.keys():
                imports.add_edge(name, target)
    assert set(imports.edges) >= VIEWS
    imports.remove_edges_from(VIEWS)
    rooms: networkx.DiGraph[str] = networkx.DiGraph((room(one), room(other)) for one, other in imports.edges)
    assert [sorted(circle) for circle in networkx.strongly_connected_components(rooms) if len(circle) > 1] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_each_folder_says_what_comes_in_what_goes_out_and_where_to_start(package: str) -> None:
    for folder in {file.parent for file in source_files(package)} - {ROOT / package}:
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
        assert all(word in text for word in ("In: ", "Out: ", "Start with ")), folder


def test_values_import_nothing_slow(python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Of modules that load one, the first is named."""
    code = f"import importlib, sys\nfor name in {FAST_MODULES}:\n    importlib.import_module(name)\n"
    code += f"    assert not (slow := sorted(set({SLOW}) & set(sys.modules))), (name, slow)\nprint('fine')"
    result = python("-c", code)
    assert result.stdout == "fine\n", result.stderr


def test_no_test_folder_is_a_package() -> None:
    """A `tests/planner/__init__.py` would take the place of the package `planner` in every test."""
    assert sorted((ROOT / "tests").rglob("__init__.py")) == []


def test_constraints_pin_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    pinned = {line.partition("==")[0].lower() for line in lines if "==" in line}
    assert len(pinned) == len(lines)
    assert {requirement.partition(">=")[0].lower() for requirement in wanted} <= pinned


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built with what is installed here: no download."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = folder.glob("*.whl")
    return built


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_wheel_holds_exactly_the_three_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        str(file.relative_to(ROOT))
        for package in PACKAGES
        for file in (*source_files(package), ROOT / package / "py.typed")
    }
    assert held == expected
    assert wheel.name.startswith("gpipe_autoplan-")


def test_the_wheel_works_from_another_folder(
    wheel: Path, tmp_path: Path, python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    site = tmp_path / "site"
    pip("install", "--no-deps", "--target", str(site), str(wheel))
    code = "import sys; sys.path.insert(0, sys.argv[1]); import profiler, planner, executor; from planner import Plan; "
    code += "print(*{module.__file__.rsplit('/', 2)[0] for module in (profiler, planner, executor)}, Plan.__name__)"
    result = python("-c", code, str(site))
    assert result.stdout.split() == [str(site), "Plan"], result.stderr
    assert (site / "bin" / "autoplan").is_file()
