"""The repository as a whole: what the wheel holds, and which package may import which."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import networkx
import pytest

from planner.plan.schedules import SCHEDULES
from profiler.machine.backend import BACKENDS
from tests.processor_time import KEPT, slow_tests

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
    "planner.plan.stage",
    "planner.plan.actions",
    "planner.plan.schedules",
    "planner.plan.simulator",
    "planner.plan.report",
    "planner.plan.units",
)

# Kinds of device and their libraries of messages, as torch calls them.
KINDS = {"cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "privateuseone", "gloo", "nccl"}
# A file for each kind of device; and `Device.of`, which gives devices that are not here a name.
KIND_FILES = {*(f"profiler/machine/{kind}.py" for kind in BACKENDS), "profiler/device.py"}

# The one file that uses private parts of torch; at its head stands which of them other files may use, and why.
PRIVATE_PARTS = "profiler/torch_private.py"
ALLOWED_MODULES = ("torch.utils._pytree", "torch.utils._python_dispatch.", "torch._subclasses.fake_tensor.")
ALLOWED_ATTRIBUTES = {"_version", "_parameters", "_buffers", "_modules"}
NOT_TORCHS = {"_exit", "_getframe", "_replace", "_inst", "_rand", "_SimpleCData"}  # of Python and numpy
IN_ONE_FILE = {
    ("executor/run/accumulators.py", "_cdata"),  # a call more for each gradient takes 0.5 % of a step
    *(("planner/kernel/compiled.py", part) for part in ("_cache", "_cache_file", "_source_stamp")),  # numba's
}

# Where a value shows itself, or is held against itself: one-line delegates, imported when they are called.
VIEWS = {
    ("planner.plan.plan", "planner.explain"),
    ("planner.plan.plan", "planner.export.export"),
    ("planner.plan.plan", "planner.export.target"),
    ("planner.plan.plan", "planner.plan.report"),
    ("planner.plan.plan", "planner.plan.html"),
    ("planner.plan.plan", "planner.refine"),
    ("planner.plan.plan", "planner.keywords"),
    ("profiler.record", "profiler.views"),
    ("profiler.tracing.sequence", "profiler.views"),
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
    if (importer, package) != ("executor", "planner") or file.startswith("executor/commands/"):
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


def kinds_named(tree: ast.Module) -> set[str]:
    """Kinds of device that code names or asks for, not those in texts: `x.is_cuda`, `torch.cuda`, `"cuda:0"`."""
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    words = set(imported_modules(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            words.add(node.attr.removeprefix("is_"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            words.add(node.value.partition(":")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("fork_rng"):
            words |= set() if "devices=[]" in ast.unparse(node) else {"cuda"}  # whose states torch then takes
    return {part for word in words for part in word.split(".") if not word.startswith("profiler.")} & KINDS


def test_only_the_file_of_a_kind_of_device_names_it() -> None:
    """A further kind is a class and an entry, so nothing else may ask which kind a device is."""
    named = {
        str(file.relative_to(ROOT)): found
        for package in PACKAGES
        for file in source_files(package)
        if (found := kinds_named(ast.parse(file.read_text(encoding="utf-8"))))
    }
    assert named.keys() == KIND_FILES, named


@pytest.mark.parametrize(
    "code",
    [
        "leaf.is_cuda",
        "device.type == 'cuda'",
        "torch.cuda.Event()",
        "f'cuda:{index}'",
        "import torch.mps",
        "x.cpu()",
        "torch.random.fork_rng(devices)",
    ],
)
def test_a_question_for_a_kind_of_device_is_noticed(code: str) -> None:
    assert kinds_named(ast.parse(f"found = {code}" if not code.startswith("import") else code))
    assert not kinds_named(ast.parse(f'"""{code}"""'))


def schedules_named(tree: ast.Module) -> set[str]:
    """Schedules that code names, not those in texts."""
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in texts}
    return {name for name in found if isinstance(name, str)} & SCHEDULES.keys()


def test_only_the_record_of_a_schedule_names_it() -> None:
    """Four exports tested names, so that a further schedule would have been wrong there without a word."""
    named = {
        str(file.relative_to(ROOT)): found
        for package in PACKAGES
        for file in source_files(package)
        if (found := schedules_named(ast.parse(file.read_text(encoding="utf-8"))))
    }
    assert named.keys() == {"planner/plan/schedules.py"}, named


@pytest.mark.parametrize("code", ["plan.schedule == '1f1b'", "name in ('gpipe', 'zb')", "f(schedule='interleaved')"])
def test_a_schedule_that_is_named_is_noticed(code: str) -> None:
    assert schedules_named(ast.parse(code))
    assert not schedules_named(ast.parse("'gpipe'\nname = 'torchgpipe'"))


def own_names(trees: Iterable[ast.Module]) -> set[str]:
    """Names that these files define: functions, classes, variables and attributes of `self`."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            found.add(node.attr)
    return found


def private_parts(tree: ast.Module, own: set[str]) -> set[str]:
    """Private names of others that code uses; operators of torch may have names that begin like private ones."""
    found = {
        module
        for module in imported_modules(tree)
        if module.startswith("torch.") and "._" in module and not module.startswith(ALLOWED_MODULES)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr) and node.attr not in own:
            found |= set() if re.match(r"(torch\.ops\.)?aten\.", ast.unparse(node)) else {node.attr}
    return found - ALLOWED_ATTRIBUTES - NOT_TORCHS


def test_private_parts_of_torch_are_used_in_one_file() -> None:
    """Any version of torch may move them; what they are for, and what is said of them upstream, stands there."""
    trees = {
        str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8"))
        for package in PACKAGES
        for file in source_files(package)
    }
    own = own_names(trees.values())
    assert private_parts(trees.pop(PRIVATE_PARTS), own)
    used = {(name, part) for name, tree in trees.items() for part in private_parts(tree, own)}
    assert used == IN_ONE_FILE


@pytest.mark.parametrize(
    "code",
    ["import torch._dynamo", "from torch.fx._symbolic_trace import PH", "torch._C._nn.linear", "tensor._is_view()"],
)
def test_a_private_part_of_torch_is_noticed(code: str) -> None:
    assert private_parts(ast.parse(code), set())
    assert not private_parts(ast.parse("torch.ops.aten._softmax; self._own; from torch.utils import _pytree"), {"_own"})


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
    assert held == expected | {"planner/plan/plan.schema.json"}
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


def test_every_slow_test_is_there() -> None:
    """One that has another name by now would be run by `make test`."""
    listed = {name.partition("[")[0] for name in [*slow_tests(), *KEPT]}
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in {name.partition("::")[0] for name in listed}}
    gone = [name for name in listed if f"def {name.partition('::')[2]}(" not in texts[name.partition("::")[0]]]
    assert gone == []
