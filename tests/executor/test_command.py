"""The command `autoplan`. What `planner` and `launch` do is replaced here where its result is not the point."""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import click
import pytest
import torch
from click.testing import CliRunner, Result

import planner
from executor import command
from executor.commands import running
from executor.commands.options import FloatType, Size
from planner import automatic
from planner.cost.layer_costs import fingerprint_of
from planner.keywords import SettingKeywords
from planner.plan.plan import Plan
from planner.plan.prediction import Prediction
from planner.plan.stage import Stage, StageMemory, StageTimes
from profiler.device import Cluster, Device
from profiler.errors import ArgumentError, ExecutionError, InfeasibleError, NotTraceableError
from profiler.machine.local import local_devices
from profiler.record import Profile
from profiler.sample_spec import SampleSpec, TensorLeaf

MODEL_FILE = """
import os
from pathlib import Path

import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x)))

class Picking(Net):
    def forward(self, x):
        x = super().forward(x)
        return x * x[x > 0].mean()

def build():
    return Net(), torch.randn(8, 8)

def build_with_loss():
    return Net(), torch.randn(8, 8), nn.functional.mse_loss, torch.randn(8, 8)

def build_picking():
    return Picking(), torch.randn(8, 8)

def build_wrong():
    return Net()

def train(plan):
    Path(f"rank-{os.environ['RANK']}").write_text(f"{plan.K} stages")

not_callable = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a file `shop_model.py`; what the command adds to the import system is taken back."""
    (tmp_path / "shop_model.py").write_text(MODEL_FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("shop_model", "shop", "shop.ranking", "broken"):
        sys.modules.pop(name, None)


def autoplan(*arguments: str) -> Result:
    return CliRunner().invoke(command.main, arguments)


def a_plan(device: str = "cpu") -> Plan:
    times = StageTimes(
        micro_batch_size=1, forward_s=0.001, recompute_s=0, backward_s=0.002, send_forward_s=0, send_backward_s=0
    )
    memory = StageMemory(
        parameters=4, gradients=4, optimizer=8, activations=16, transient=1, receive_buffers=0, reserve=0
    )
    stage = Stage(
        first_layer=0,
        stop_layer=1,
        module_paths=("inner", "outer"),
        devices=(Device(name=device, kind=device, memory_bytes=1000),),
        rank=0,
        parameters=("inner.weight",),
        parameter_count=1,
        times=(times,),
        optimizer_s=0.0001,
        memory=memory,
    )
    prediction = Prediction(
        step_s=0.0061,
        optimizer_s=0.0001,
        bubble=0,
        samples_per_s=2 / 0.0061,
        lower_bound_s=0.0061,
        gap=0,
        one_device_s=0.0061,
    )
    leaf = TensorLeaf(shape=(2, 8), dtype="float32", batch_dim=0)
    return Plan(
        model_fingerprint="model",
        profile_fingerprint="profile",
        sample=SampleSpec(batch_size=2, tree="tree", leaves=(leaf,)),
        batch_size=2,
        micro_batch_sizes=(1, 1),
        optimizer="AdamW",
        stages=(stage,),
        prediction=prediction,
    )


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `autoplan plan` calls the planner with."""
    seen: dict[str, Any] = {}

    def find(model: Any, sample: Any, devices: Any, **settings: Any) -> Plan:
        seen.update(settings, model=model, sample=sample, devices=devices)
        return a_plan()

    monkeypatch.setitem(planner.__dict__, "autoplan", find)
    return seen


def test_plan_passes_on_what_it_is_told(folder: Path, planned: dict[str, Any]) -> None:
    options = (
        "--devices cpu,cpu,cpu --batch-size 64 --stages 2 --micro-batches 8 --memory-limit 8GiB --recompute always"
    )
    result = autoplan("plan", "shop_model.py:build_with_loss", "-o", "a/plan.json", *options.split())
    assert result.exit_code == 0, result.output
    assert Plan.load("a/plan.json") == a_plan()
    assert result.stdout == f"{a_plan()}\n"
    assert planned["model"].__class__.__name__ == "Net"
    assert planned["loss_fn"].__name__ == "mse_loss"
    assert planned["sample"].shape == planned["target"].shape == (8, 8)
    assert planned["devices"] == local_devices(["cpu"] * 3)
    told = {
        "batch_size": 64,
        "stages": 2,
        "micro_batches": 8,
        "memory_limit": 8 * 2**30,
        "recompute": "always",
        "optimizer": "AdamW",
    }
    assert {name: planned[name] for name in told} == told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--memory-limit 8GiB,none,1GB", {"memory_limit": [8 * 2**30, None, 10**9]}),
        ("--memory-limit cuda:0=8GiB,cuda:1=4KB", {"memory_limit": {"cuda:0": 8 * 2**30, "cuda:1": 4000}}),
        ("--pin model.head=1 --pin model.body=cuda:0", {"pinned": {"model.head": 1, "model.body": "cuda:0"}}),
        ("--micro-batch-sizes 4,8", {"micro_batch_sizes": [4, 8]}),
        ("--batch-dim 0=1 --batch-dim mask=none --batch-dim x=-1", {"batch_dims": {0: 1, "mask": None, "x": -1}}),
        ("--max-stages 3 --micro-batches-per-stage 2", {"max_stages": 3, "micro_batches_per_stage": 2}),
        ("--skips direct", {"skips": "direct"}),
        ("--cut-at a.b --cut-at c", {"cut_at": ("a.b", "c")}),
        ("--keep-together a.b --keep-together c", {"keep_together": ("a.b", "c")}),
        (
            "--schedule auto --replicas auto --time-limit 2.5",
            {"schedule": "auto", "replicas": "auto", "time_limit_s": 2.5},
        ),
        ("--autocast bf16 --threads 3", {"autocast": torch.bfloat16, "threads": 3}),
        ("--schedule interleaved --chunks auto", {"schedule": "interleaved", "chunks": "auto"}),
        ("--schedule interleaved --chunks 2", {"schedule": "interleaved", "chunks": 2}),
        ("--devices 2xT4 --link pcie4", {"devices": Cluster.of("2xT4:pcie4")}),
        ("--devices 2x2xT4 --between ndr", {"devices": Cluster.of("2x2xT4", between="ndr")}),
    ],
)
def test_every_setting_can_be_given(folder: Path, planned: dict[str, Any], options: str, told: dict[str, Any]) -> None:
    result = autoplan("plan", "shop_model.py:build", *options.split())
    assert result.exit_code == 0, result.output
    assert {name: planned[name] for name in told} == told


def test_no_setting_lacks_an_option(folder: Path, planned: dict[str, Any]) -> None:
    assert autoplan("plan", "shop_model.py:build").exit_code == 0
    keywords = set(inspect.signature(automatic.autoplan).parameters) - {"settings", "progress"}
    assert keywords | set(SettingKeywords.__annotations__) == set(planned)


def test_plan_without_options_leaves_the_choice_to_the_planner(folder: Path, planned: dict[str, Any]) -> None:
    assert autoplan("plan", "shop_model.py:build").exit_code == 0
    left = ("batch_size", "stages", "micro_batches", "memory_limit", "loss_fn", "target")
    assert [planned[name] for name in left] == [None] * len(left)
    assert planned["devices"] == local_devices()


def test_plan_prints_json(folder: Path, planned: dict[str, Any]) -> None:
    result = autoplan("plan", "shop_model.py:build", "--devices", "cpu, cpu", "--json")
    assert planned["devices"] == local_devices(["cpu", "cpu"])
    assert result.stdout == a_plan().to_json()


def test_plan_takes_a_module(folder: Path, planned: dict[str, Any]) -> None:
    (folder / "shop").mkdir()
    (folder / "shop" / "ranking.py").write_text(MODEL_FILE)
    result = autoplan("plan", "shop.ranking:build")
    assert result.exit_code == 0, result.output
    assert type(planned["model"]).__module__ == "shop.ranking"


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ("shop_model.py", "write it as"),
        ("shop_model.py:", "write it as"),
        ("gone.py:build", "there is no file gone.py"),
        ("no.such.module:build", "there is no module no.such.module"),
        ("shop_model.py:nothing", "has no function nothing"),
        ("shop_model.py:not_callable", "has no function not_callable"),
        ("json.py:build", "the name json is taken by"),
        ("shop_model.py:build_wrong", "returned a Net; expected (model, sample)"),
    ],
)
def test_a_model_that_is_not_there_is_a_usage_error(
    folder: Path, planned: dict[str, Any], model: str, complaint: str
) -> None:
    (folder / "json.py").write_text("")
    result = autoplan("plan", model)
    assert result.exit_code == 2
    assert complaint in " ".join(result.stderr.split())


def test_a_failing_import_of_the_model_file_shows_its_own_error(folder: Path, planned: dict[str, Any]) -> None:
    (folder / "broken.py").write_text("import no_such_package_here")
    result = autoplan("plan", "broken.py:build")
    assert result.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'no_such_package_here'"
    assert result.stderr.count("File ") == 1
    assert result.exit_code == 1


def test_an_error_of_the_users_function_shows_their_frames_and_nothing_for_the_terminal_to_obey(
    folder: Path, planned: dict[str, Any]
) -> None:
    (folder / "broken_build.py").write_text("def build():\n    raise RuntimeError('\\x1b[31mred')\n")
    result = autoplan("plan", "broken_build.py:build")
    file, line, error = result.stderr.splitlines()[1:]
    assert file.endswith('broken_build.py", line 2, in build')
    assert line.strip() == r"raise RuntimeError('\x1b[31mred')"
    assert error == r"RuntimeError: \x1b[31mred"
    assert result.exit_code == 1


def test_an_error_of_the_loss_function_shows_its_own_frames(folder: Path) -> None:
    """It was told as an argument that cannot mean anything, without its line."""
    (folder / "broken.py").write_text(
        "from shop_model import *\ndef loss(output, target):\n    raise KeyError('gone')\n"
        "def build():\n    return Net(), torch.zeros(8, 8), loss, torch.zeros(8, 8)\n"
    )
    result = autoplan("plan", "broken.py:build", "--devices", "2xA100-40GB")
    said, _, *frames, error = result.stderr.splitlines()
    assert said.startswith("autoplan: error: loss_fn(output, target) raised KeyError: ")
    assert error == "KeyError: 'gone'"
    assert [line.strip() for line in frames if "File" in line] == [f'File "{folder}/broken.py", line 3, in loss']
    assert (result.exit_code, result.stdout) == (1, "")


def test_an_error_of_the_model_shows_its_own_frames(folder: Path) -> None:
    """It was told as a model that cannot be traced, with what to do about tracing, and ended with 4."""
    (folder / "broken_model.py").write_text(
        "from shop_model import *\n"
        "class Part(torch.nn.Module):\n    def forward(self, x):\n        return x @ torch.zeros(9, 8)\n"
        "class Whole(Net):\n    def __init__(self):\n        super().__init__()\n        self.part = Part()\n"
        "    def forward(self, x):\n        return self.part(super().forward(x))\n"
        "def build():\n    return Whole(), torch.zeros(8, 8), None, None\n"
        "def build_meta():\n    return Whole().to('meta'), torch.zeros(8, 8, device='meta'), None, None\n"
    )
    for build in ("build", "build_meta"):
        result = autoplan("trace", f"broken_model.py:{build}")
        said, _, *frames, error = result.stderr.splitlines()
        assert said.startswith("autoplan: error: the model itself fails on the sample: in module 'part', ")
        assert error.startswith("RuntimeError: ")
        places = [line.rpartition(", line ")[2] for line in frames if "File" in line]
        assert places == ["10, in forward", "4, in forward"]
        assert (result.exit_code, result.stdout) == (1, "")


def test_what_is_no_model_is_told_before_anything_else(folder: Path) -> None:
    """It ended with an AttributeError and our traceback."""
    (folder / "broken.py").write_text("import torch\ndef build():\n    return torch.zeros(3), torch.zeros(8, 8)\n")
    result = autoplan("plan", "broken.py:build")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "autoplan: error: the model is a Tensor; pass a torch.nn.Module\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--stages 3", "--stages is 3, and there are 2 devices"),
        ("--micro-batches 9", "--micro-batches is 9, but the batch has 8 samples"),
        ("--batch-size 3", "or set --micro-batches-per-stage 3 or less"),
        ("--stages 2 --max-stages 1", "--stages is 2 and --max-stages is 1; leave one of them out"),
        ("--optimizer Adamm", "--optimizer Adamm; choose one of torch.optim"),
        ("--chunks 2", '--schedule is "auto" and chooses the chunks, too; leave --chunks 2 out'),
        ("--link nvlink4", "--link is 'nvlink4', and links between devices of this machine are measured"),
        ("--devices cpu,cpu --between ndr", "--between is 'ndr', and links between devices of this machine"),
        ("--devices 2xT4 --link wire", "no data sheet of a link 'wire'"),
    ],
)
def test_errors_speak_of_options(folder: Path, options: str, said: str) -> None:
    """They spoke of Python's keywords, such as micro_batches_per_stage."""
    result = autoplan("plan", "shop_model.py:build", *options.split())
    assert said in result.stderr
    assert result.exit_code in (2, 3)


@pytest.mark.parametrize(
    "options",
    [
        ("--devices", "0"),
        ("--devices", "-1"),
        ("--devices", "cpu;cpu"),
        ("--devices", "cpu,warp:0"),
        ("--devices", "cuda:99"),
        ("--memory-limit", "much"),
        ("--memory-limit", "8GiB,much"),
        ("--memory-limit", "cuda:0=much"),
        ("--pin", "model.head"),
        ("--pin", "=1"),
        ("--micro-batch-sizes", "4;8"),
        ("--batch-dim", "x=last"),
        ("--autocast", "int8"),
        ("--recompute", "perhaps"),
        ("--skips", "both"),
        ("--timeline", "timeline.txt"),
    ],
)
def test_an_option_that_means_nothing_is_a_usage_error(
    folder: Path, planned: dict[str, Any], options: tuple[str, str]
) -> None:
    result = autoplan("plan", "shop_model.py:build", *options)
    assert result.exit_code == 2
    assert options[0].strip("-") in result.stderr or options[1].rpartition(",")[2] in result.stderr
    assert planned == {}


@pytest.mark.parametrize("text", ["adamw", "ADAMW", "AdamW"])
def test_an_optimizer_as_people_write_it(folder: Path, planned: dict[str, Any], text: str) -> None:
    autoplan("plan", "shop_model.py:build", "--optimizer", text)
    assert planned["optimizer"] == "AdamW"


@pytest.mark.parametrize(
    ("text", "name"),
    [("bf16", "bfloat16"), ("BF16", "bfloat16"), ("half", "float16"), ("float32", "float32"), ("FP32", "float32")],
)
def test_a_type_as_people_write_it(text: str, name: str) -> None:
    """--dtype took torch's names alone."""
    assert FloatType("bfloat16", "float16", "float32").convert(text, None, None) == name
    if name != "float32":
        assert FloatType().convert(text, None, None) == name


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("8GiB", 8 * 2**30), ("500MB", 500_000_000), ("1.5 kb", 1500), ("4096", 4096), ("12B", 12), ("2TiB", 2 * 2**40)],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert Size().convert(text, None, None) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "8Gi B", "3i", "-1GB", "1e9", "8EiB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is no size"):
        Size().convert(text, None, None)


@pytest.mark.parametrize(
    ("error", "code"),
    [(InfeasibleError, 3), (NotTraceableError, 4), (ArgumentError, 2), (ExecutionError, 1)],
)
def test_our_errors_end_in_one_line_and_their_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], code: int
) -> None:
    def fail(*_: Any, **__: Any) -> Plan:
        raise error("stage 1 overflows")

    monkeypatch.setitem(planner.__dict__, "autoplan", fail)
    result = autoplan("plan", "shop_model.py:build")
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", "autoplan: error: stage 1 overflows\n")


def test_other_errors_keep_their_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Plan:
        raise RuntimeError("a bug")

    monkeypatch.setitem(planner.__dict__, "autoplan", fail)
    result = autoplan("plan", "shop_model.py:build")
    assert isinstance(result.exception, RuntimeError)
    assert result.exit_code == 1


def test_show_prints_the_report_and_json(folder: Path) -> None:
    a_plan().save("plan.json")
    assert autoplan("show", "plan.json").stdout == f"{a_plan()}\n"
    assert autoplan("show", "plan.json", "--json").stdout == a_plan().to_json()


def test_show_writes_the_timeline_and_the_trace(folder: Path) -> None:
    a_plan().save("plan.json")
    result = autoplan("show", "plan.json", "--timeline", "timeline.png", "--trace", "trace.json")
    assert result.exit_code == 0, result.output
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "trace.json").read_text())


@pytest.mark.parametrize("subcommand", [("show",), ("run", "shop_model.py:train")])
@pytest.mark.parametrize("text", ["", '{"schema_version": 1', '{"schema_version": 2}', "\xff"])
def test_a_damaged_plan_file_is_refused(folder: Path, subcommand: tuple[str, ...], text: str) -> None:
    (folder / "plan.json").write_text(text, encoding="latin-1")
    result = autoplan(subcommand[0], "plan.json", *subcommand[1:])
    assert result.exit_code == 5
    assert result.stderr.startswith("autoplan: error: ")
    assert "plan.json" in result.stderr


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What `autoplan run` calls `launch` with."""
    calls: list[tuple[Any, ...]] = []
    stand_in = SimpleNamespace(launch=lambda *arguments: calls.append(arguments))
    monkeypatch.setitem(sys.modules, "executor.launching", cast("ModuleType", stand_in))
    return calls


def test_run_launches_the_function(folder: Path, launched: list[tuple[Any, ...]]) -> None:
    a_plan().save("plan.json")
    result = autoplan("run", "plan.json", "shop_model.py:train")
    assert result.exit_code == 0, result.output
    ((function, plan),) = launched
    assert (function.__module__, function.__name__, plan) == ("shop_model", "train", a_plan())


def test_dry_run_launches_nothing(folder: Path, launched: list[tuple[Any, ...]]) -> None:
    a_plan().save("plan.json")
    result = autoplan("run", "plan.json", "shop_model.py:train", "--dry-run")
    assert (result.exit_code, result.stdout) == (0, "plan.json: sound; 1 stage on cpu\n")
    shown = autoplan("run", "plan.json", "shop_model.py:train", "--dry-run", "--json").stdout
    assert json.loads(shown) == {"file": "plan.json", "K": 1, "M": 2, "R": 1, "devices": ["cpu"]}
    assert autoplan("run", "plan.json", "shop_model.py:train", "--json").exit_code == 2
    assert autoplan("run", "plan.json", "shop_model.py:gone", "--dry-run").exit_code == 2
    assert launched == []


@pytest.mark.parametrize(("positions", "order"), [(((2, 3), (0, 1)), "cdab"), ((), "acbd")])
def test_dry_run_lists_devices_by_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, positions: Any, order: str
) -> None:
    monkeypatch.setattr(running, "_check_devices", lambda *_: None)
    plan = Plan.load(Path(__file__).parents[1] / "data" / "formats" / "plan-2-placed.json")
    stages = [
        stage.model_copy(update={"devices": tuple(stage.device.model_copy(update={"name": name}) for name in names)})
        for stage, names in zip(plan.stages, ("ab", "cd"), strict=True)
    ]
    plan.model_copy(
        update={"stages": tuple(stages), "positions": positions, "devices_per_host": 2 if positions else None}
    ).save("plan.json")
    shown = autoplan("run", "plan.json", "shop_model.py:train", "--dry-run", "--json").stdout
    assert "".join(json.loads(shown)["devices"]) == order


def test_run_refuses_a_plan_for_devices_that_are_not_here(folder: Path) -> None:
    a_plan("cuda:99").save("plan.json")
    result = autoplan("run", "plan.json", "shop_model.py:train", "--dry-run")
    assert result.exit_code == 5
    assert "plan.json: stage 0 cannot run here: device 'cuda:99' is not on this machine" in result.stderr
    assert "pass a count" not in result.stderr  # `run` takes no devices


def test_run_is_told_at_once_of_a_function_that_takes_no_plan(folder: Path, launched: list[tuple[Any, ...]]) -> None:
    """It was called in each process, and these ended with a TypeError."""
    a_plan().save("plan.json")
    result = autoplan("run", "plan.json", "shop_model.py:build")
    assert result.exit_code == 2
    assert "shop_model.py:build is called with the plan, and that does not fit: too many" in result.stderr
    assert launched == []


@pytest.mark.parametrize("arguments", [["plan", "gone.py:build"], ["trace", "--hf", "gone.json"], ["plan", "gone"]])
def test_what_is_not_there_is_noticed_before_torch_is_loaded(
    python: Callable[..., subprocess.CompletedProcess[str]], arguments: list[str]
) -> None:
    """It took 2.4 s of a processor to say that there is no such file."""
    code = f"import sys\nfrom executor.command import main\ntry:\n    main({arguments})\n"
    code += "except SystemExit as ended:\n    print(ended.code, 'torch' in sys.modules)"
    assert python("-c", code).stdout == "2 False\n"


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["show", "--help"], ["run", "--help"]])
def test_every_help_has_two_examples(arguments: list[str]) -> None:
    lines = [line.strip() for line in autoplan(*arguments).stdout.splitlines()]
    examples = lines[lines.index("Examples:") + 1 :]
    assert all(example.startswith("autoplan ") for example in examples[:2])


def test_version() -> None:
    assert autoplan("--version").stdout == f"autoplan, version {version('gpipe-autoplan')}\n"


@pytest.mark.parametrize(
    ("arguments", "beyond"),
    [
        (["--help"], ("pydantic", "rich", "tqdm", "importlib.metadata")),
        (["plan", "--help"], ("pydantic", "rich", "tqdm", "importlib.metadata")),
        (["--version"], ("pydantic",)),
        (["show", "plan.json"], ("rich", "tqdm")),
        (["show", "plan.json", "--json"], ()),
    ],
)
def test_help_and_show_load_nothing_slow(
    tmp_path: Path,
    python: Callable[..., subprocess.CompletedProcess[str]],
    arguments: list[str],
    beyond: tuple[str, ...],
) -> None:
    """Pydantic alone takes a quarter of a second of wall time here, twice as long as all else of `--help`."""
    a_plan().save(tmp_path / "plan.json")
    code = (
        "import atexit, sys; from executor.command import main; "
        f"slow = {('torch', 'scipy', 'pandas', 'networkx', 'matplotlib', 'numpy', *beyond)}; "
        "atexit.register(lambda: print([name for name in slow if name in sys.modules], file=sys.stderr)); "
        f"main({arguments})"
    )
    result = python("-c", code)
    assert result.returncode == 0
    assert result.stdout
    assert result.stderr == "[]\n"


def installed_command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command as a shell finds it."""
    command_file = Path(sys.executable).with_name("autoplan")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(command_file), *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_plan_show_and_run_in_a_row(folder: Path) -> None:
    """Nothing replaced: a model is measured, planned and its function called in every process.

    What a shell starts shows the plan here, and plans in the next test: the command's own process takes 3 s to begin.
    """
    options = ["--devices", "cpu,cpu", "--stages", "2", "--micro-batches", "8", "--time-budget", "0", "-o", "plan.json"]
    options += ["--save-profile", "profile.json"]
    made = autoplan("plan", "shop_model.py:build_with_loss", *options)
    assert made.exit_code == 0, made.output
    assert Plan.load(folder / "plan.json").K == 2
    assert fingerprint_of(Profile.load(folder / "profile.json")) == Plan.load(folder / "plan.json").profile_fingerprint
    assert installed_command("show", "plan.json", cwd=folder).stdout == made.stdout
    ran = autoplan("run", "plan.json", "shop_model.py:train")
    assert ran.exit_code == 0, ran.output
    assert {file.name: file.read_text() for file in folder.glob("rank-*")} == {
        "rank-0": "2 stages",
        "rank-1": "2 stages",
    }


def test_a_model_whose_shapes_depend_on_data_exits_with_4(folder: Path) -> None:
    result = installed_command("plan", "shop_model.py:build_picking", "--devices", "cpu,cpu", cwd=folder)
    assert result.returncode == 4
    assert result.stderr.count("autoplan: error: ") == 1
    assert "Traceback" not in result.stderr
