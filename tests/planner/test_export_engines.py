"""Exports read and run by the engines themselves, where they are installed.

`torch` is. The others come with `make engines`, into a folder of their own: transformers would use accelerate in all
tests.
"""

import multiprocessing
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner import Plan
from planner.export.torch_pipelining import TorchPipeline
from tests.planner.exported import Case, case

STEPS = 2


def trained_by_torch(known: Case, plan: Plan) -> tuple[float, dict[str, Tensor]]:
    """Loss of the last step, and gradients added up over all, of one process for each rank."""
    pipe = plan.export("torch.distributed.pipelining", known.model).value
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        ranks = [
            context.Process(target=_rank, args=(rank, meeting, pipe, known, results)) for rank in range(plan.ranks)
        ]
        for process in ranks:
            process.start()
        found = []
        for _ in ranks:
            found.append(results.get())
            if found[-1][2]:  # the others would wait for it
                for process in ranks:
                    process.kill()
                pytest.fail(found[-1][2])
        for process in ranks:
            process.join()
    gradients: dict[str, Tensor] = {}
    for _, own, _ in found:
        for name, gradient in own.items():
            gradients[name] = torch.from_numpy(gradient)
    return sum(loss for loss, _, _ in found), gradients


def _rank(rank: int, meeting: str, pipe: TorchPipeline, known: Case, results: Any) -> None:
    torch.set_num_threads(1)  # the others of the process that this is a fork of are not here
    try:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=pipe.plan.ranks)
        stages = pipe.stages(rank, device="cpu")
        schedule = pipe.schedule(stages, known.loss_fn)
        losses: list[Tensor] = []
        for _ in range(STEPS):
            given = pipe.inputs(*known.inputs) if any(stage.is_first for stage in stages) else ()
            last = any(stage.is_last for stage in stages)
            schedule.step(*given, target=known.target if last else None, losses=losses)
        own = {
            name: parameter.grad.numpy()
            for stage in stages
            for name, parameter in stage.submod.named_parameters()
            if parameter.grad is not None
        }
        results.put((sum(float(loss.detach()) for loss in losses), own, ""))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as problem:
        results.put((0.0, {}, f"rank {rank}: {type(problem).__name__}: {problem}"))


def compared_with_torch(name: str, **settings: Any) -> None:
    known = case(name)
    trains_alike(known, known.plan(micro_batches=4, **settings))


def trains_alike(known: Case, plan: Plan) -> None:
    expected_loss, expected = known.gradients()
    loss, found = trained_by_torch(known, plan)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    torch.testing.assert_close(found, {name: STEPS * gradient for name, gradient in expected.items()})


def test_torchs_engine_trains_the_model_by_the_plan() -> None:
    """A skip past a stage, an input for the last stage, recompute, a dictionary: all that its stages cannot have."""
    compared_with_torch("skipping", stages=2, schedule="1f1b", recompute="always")


def test_torchs_engine_has_chunks_in_a_v_and_results_that_their_stage_has_saved() -> None:
    """It detaches results in place: one that a layer of the stage had saved ended the step, with zb-h1, too."""
    compared_with_torch("decoder", stages=6, schedule="zb-v", chunks=2, recompute="never")


def test_torchtitan_takes_the_fragment() -> None:
    """Its split and the model's own forward give the model again; every option is a field of its configuration."""
    split = pytest.importorskip("torchtitan.distributed.pipeline_parallel")
    configs = pytest.importorskip("torchtitan.config.configs")
    known = case("decoder")
    made = known.plan(stages=2, schedule="1f1b").export("torchtitan", known.model)
    tables = tomllib.loads(made.text)
    parallelism = configs.ParallelismConfig(**tables["parallelism"])
    configs.TrainingConfig(**tables["training"])
    parts = [split._split_module(known.model, names) for names in parallelism.module_fqns_per_model_part]
    (x,) = known.inputs
    for part in parts:
        x = part(x)
    torch.testing.assert_close(x, known.model(*known.inputs))
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert len(names) == len([*known.model.parameters()])


@pytest.mark.filterwarnings("ignore")  # of missing kernels
@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (3, 1), (4, 2)])
def test_megatron_takes_the_layout(stages: int, chunks: int) -> None:
    layout = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    known = case("decoder")
    plan = known.plan(stages=stages, chunks=chunks, schedule="interleaved" if chunks > 1 else "1f1b")
    made = plan.export("megatron-lm", known.model)
    options = dict(zip(made.value[::2], made.value[1::2], strict=False))
    text = options["--pipeline-model-parallel-layout"]
    parsed = layout.PipelineParallelLayerLayout(text, int(options["--pipeline-model-parallel-size"]))
    parsed.validate_layer_layout(num_layers=int(options["--num-layers"]), mtp_num_layers=None)
    assert parsed.virtual_pipeline_model_parallel_size == chunks
    counts = [len(stage_blocks(made.plan, known, index)) for index in range(stages)]
    assert [
        parsed.get_num_layers_to_build(vp_stage=index // plan.ranks, pp_rank=index % plan.ranks)
        if chunks == 1
        else parsed.layout[index % plan.ranks][index // plan.ranks].count(layout.LayerType.decoder)
        for index in range(stages)
    ] == counts


def stage_blocks(plan: Plan, known: Case, index: int) -> set[str]:
    """Blocks that a stage's layers belong to."""
    stage = plan.stages[index]
    layers = known.sequence.layers[stage.first_layer : stage.stop_layer]
    paths = (path.split(".") for layer in layers for path in layer.module_paths)
    return {path[1] for path in paths if path[0] == "layers"}


@pytest.mark.filterwarnings("ignore")
def test_deepspeed_takes_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class that the export writes, without a cluster: its base is asked for the bounds that it sets."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # it leaves this behind
    pipe = pytest.importorskip("deepspeed.runtime.pipe.module")
    known = case("decoder")
    plan = known.plan(stages=3, schedule="1f1b")
    made = plan.export("deepspeed", known.model)
    names: dict[str, Any] = {"layers": list(made.value["layers"]), "loss_fn": None}
    source = made.text.partition("module = ")[0].replace("from deepspeed.pipe import PipelineModule", "")
    exec(source, {"PipelineModule": pipe.PipelineModule}, names)
    planned = names["PlannedModule"]
    assert planned._partition_layers is not pipe.PipelineModule._partition_layers
    held = []
    for stage in range(3):
        module = planned.__new__(planned)
        nn.Module.__init__(module)
        module.global_rank = stage
        module._topo = type("Topology", (), {"get_coord": lambda self, rank: type("At", (), {"pipe": rank})})()
        module._partition_layers()
        held.append(made.value["layers"][module._local_start : module._local_stop])
    assert [path for paths in held for path in paths] == made.value["layers"]
    assert [{path.split(".")[1] for path in paths if "." in path} for paths in held] == [
        stage_blocks(made.plan, known, stage) for stage in range(3)
    ]


@pytest.mark.filterwarnings("ignore")
def test_accelerate_takes_the_device_map(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    modeling = pytest.importorskip("accelerate.utils.modeling")
    known = case("decoder")
    made = known.plan(stages=2).export("huggingface", known.model)
    device_map = dict.fromkeys(made.value["device_map"], "cpu")
    modeling.check_device_map(known.model, made.value["device_map"])
    expected = known.model(*known.inputs)
    torch.testing.assert_close(accelerate.dispatch_model(known.model, device_map)(*known.inputs), expected)
    accelerate.hooks.remove_hook_from_submodules(known.model)


@pytest.mark.filterwarnings("ignore")
def test_accelerates_split_points_are_torchs() -> None:
    """`prepare_pippy` hands them to torch's tracer, which makes the stages that the device map says."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    known = case("decoder")
    made = known.plan(stages=3).export("huggingface", known.model)
    spec = dict.fromkeys(made.value["split_points"], SplitPoint.BEGINNING)
    pipe = pipeline(known.model, mb_args=(known.inputs[0][:2],), split_spec=spec)
    assert pipe.num_stages == 3
    device_of = made.value["device_map"]
    held = [{name.rpartition(".")[0] for name, _ in pipe.get_stage_module(k).named_parameters()} for k in range(3)]
    for stage, modules in enumerate(held):
        devices = {device_of[path] for module in modules for path in device_of if f"{module}.".startswith(f"{path}.")}
        assert devices == {made.plan.stages[stage].device.name}
