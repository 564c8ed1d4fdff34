"""What is pasted for each engine, read back, of random models and plans: the plan's cuts, M, chunks and recompute."""

import ast
import re
import shlex
import tomllib
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from planner.export import export as exporting
from planner.export.target import Export
from planner.export.units import owners
from profiler.errors import InfeasibleError
from tests.planner.exported import BATCH, Case, priced
from tests.planner.test_export import megatron_stages

WIDTH, WORDS = 8, 8
CHOICES: tuple[dict[str, Any], ...] = (
    {"schedule": "gpipe", "stages": 2},
    {"schedule": "gpipe", "stages": 3},
    {"schedule": "1f1b", "stages": 2, "micro_batches": 2},
    {"schedule": "1f1b", "stages": 3},
    {"schedule": "1f1b", "stages": 2, "replicas": 2, "micro_batches": 2},
    {"schedule": "1f1b", "stages": 2, "replicas": 2, "shard_optimizer": True, "micro_batches": 2},
    {"schedule": "interleaved", "chunks": 2, "stages": 4, "micro_batches": 4},
    {"schedule": "zb-h1", "stages": 2},
    {"schedule": "zb-v", "chunks": 2, "stages": 4},
)


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(torch.relu(self.first(self.norm(x))))


class Transformer(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class InDict(nn.Module):
    """As nanoGPT has it: the list of blocks, and what is next to it, in one dict."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        parts = {"embed": nn.Embedding(WORDS, WIDTH), "blocks": nn.ModuleList(blocks), "norm": nn.LayerNorm(WIDTH)}
        self.transformer, self.head = nn.ModuleDict(parts), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.transformer["embed"](ids)
        for block in cast("nn.ModuleList", self.transformer["blocks"]):
            x = block(x)
        return self.head(self.transformer["norm"](x))


def in_line(blocks: Sequence[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))


Kind = Callable[[Sequence[nn.Module]], nn.Module]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def random_case(random: Random, kind: Kind) -> Case:
    blocks = [Block(random.choice([8, 32, 128])) for _ in range(random.randint(3, 6))]
    model = kind(blocks)
    ids = torch.randint(WORDS, (BATCH, 3))
    return priced(model, (ids,), ids, loss_of)


# What each text says, by quantity; `modules` are those of each stage.


def of_torchgpipe(made: Export, model: nn.Module) -> dict[str, Any]:
    (call,) = [node for node in ast.walk(ast.parse(made.text)) if isinstance(node, ast.Call)]
    said = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    assert made.module is not None
    said_of = {"M": said["chunks"], "stages": len(said["balance"]), "devices": said["devices"]}
    if made.module is not model:  # children are the stages, and recompute by themselves
        return said_of
    children = iter(name for name, _ in model.named_children())
    modules = [[next(children) for _ in range(count)] for count in said["balance"]]
    return said_of | {"modules": modules, "recomputes": said["checkpoint"] != "never"}


def of_torchtitan(made: Export, model: nn.Module) -> dict[str, Any]:
    said = tomllib.loads(made.text)
    pipeline = said["parallelism"]
    found = {
        "ranks": pipeline["pipeline_parallel_degree"],
        "replicas": pipeline["data_parallel_replicate_degree"],
        "modules": pipeline["module_fqns_per_model_part"],
        "M": said["training"]["local_batch_size"] // pipeline["pipeline_parallel_microbatch_size"],
        "batch": said["training"]["global_batch_size"],
        "recomputes": said["activation_checkpoint"]["mode"] == "full",
    }
    if "pipeline_parallel_schedule_csv" in pipeline:
        rows = [line.split(",") for line in made.files[pipeline["pipeline_parallel_schedule_csv"]].splitlines()]
        stages = [{int(match[1]) for cell in row if (match := re.match(r"(\d+)F", cell))} for row in rows]
        found["stages of ranks"] = stages
    return found


def of_megatron(made: Export, model: nn.Module) -> dict[str, Any]:
    words = shlex.split(made.text)
    said = dict(pairwise(words))
    blocks = iter(path for path, module in model.named_modules() if isinstance(module, Block))
    stages = megatron_stages(said["--pipeline-model-parallel-layout"])
    batch, size = int(said["--global-batch-size"]), int(said["--micro-batch-size"])
    return {
        "ranks": int(said["--pipeline-model-parallel-size"]),
        "stages": len(stages),
        "blocks": [[next(blocks) for _ in range(stage.count("t"))] for stage in stages],
        "samples of a replica": batch // made.plan.replicas,
        "M": batch // made.plan.replicas // size,
        "batch": batch,
        "recomputes": said.get("--recompute-granularity") == "full",
        "shards": "--use-distributed-optimizer" in words,
    }


def of_deepspeed(made: Export, model: nn.Module) -> dict[str, Any]:
    parts = ast.literal_eval(re.findall(r"self\.parts = (.*)", made.text)[0])
    layers = re.findall(r"# layers: (.*)", made.text)[0].split(", ")
    config = ast.literal_eval(re.findall(r"# configuration: (.*)", made.text)[0])
    micro_batches, size = config["gradient_accumulation_steps"], config["train_micro_batch_size_per_gpu"]
    return {
        "stages": int(re.findall(r"num_stages=(\d+)", made.text)[0]),
        "modules": [layers[first:stop] for first, stop in pairwise(parts)],
        "M": micro_batches,
        "batch": config["train_batch_size"],
        "replicas": config["train_batch_size"] // micro_batches // size,
        "recomputes": re.findall(r"activation_checkpoint_interval=(\d+)", made.text) == ["1"],
        "shards": "zero_optimization" in config,
    }


def of_hugging_face(made: Export, model: nn.Module) -> dict[str, Any]:
    said = dict(line.split(" = ", 1) for line in made.text.splitlines())
    device_map, points = ast.literal_eval(said["device_map"]), ast.literal_eval(said["split_points"])
    modules: list[list[str]] = [[]]
    for path in device_map:
        if path in points:
            modules.append([])
        modules[-1].append(path)
    devices = [sorted({device_map[path] for path in paths}) for paths in modules]
    return {"modules": modules, "M": int(said["num_chunks"]), "devices": [one for (one,) in devices]}


READERS = {
    "torchgpipe": of_torchgpipe,
    "torchtitan": of_torchtitan,
    "megatron-lm": of_megatron,
    "deepspeed": of_deepspeed,
    "huggingface": of_hugging_face,
}


def planned(made: Export, model: nn.Module, said: dict[str, Any]) -> dict[str, Any]:
    """The same quantities of the plan; modules as those that were said, by the parameters of each stage."""
    plan = made.plan
    paths = [path for part in said.get("modules", said.get("blocks", ())) for path in part]
    parts = [[path for path in paths if path in owners(stage.parameters, paths)] for stage in plan.stages]
    return {
        "M": plan.M,
        "stages": plan.K,
        "ranks": plan.ranks,
        "replicas": plan.replicas,
        "batch": plan.batch_size,
        "samples of a replica": plan.M * plan.micro_batch_sizes[0],
        "devices": [stage.device.name for stage in plan.stages],
        "modules": parts,
        "blocks": parts,
        "recomputes": any(stage.recompute for stage in plan.stages),
        "shards": plan.shard_optimizer,
        "stages of ranks": [{k for k, one in enumerate(plan.stages) if one.rank == rank} for rank in range(plan.ranks)],
    }


@pytest.mark.parametrize("kind", [in_line, Transformer, InDict])
def test_texts_say_what_the_plan_says(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(kind.__name__)
    known = random_case(random, kind)
    monkeypatch.setattr(exporting, "traced_as_planned", lambda model, plan: known.sequence)
    read = set()
    for choice in random.sample(CHOICES, 5):
        plan = known.plan(**choice, recompute=random.choice(("never", "always")))
        for target, reader in READERS.items():
            try:
                made = plan.export(target, known.model)
            except InfeasibleError as refused:
                assert re.search(r"has no schedule|R = 2|optimizer's state", str(refused)), refused
                continue
            said = reader(made, known.model)
            wanted = planned(made, known.model, said)
            assert said == {name: wanted[name] for name in said}, (target, made.plan.schedule)
            read.add(target)
    assert {"torchtitan", "huggingface"} <= read
