"""For `torch.distributed.pipelining`: stages ready for `PipelineStage`, and the schedule as its CSV.

    pipe = plan.export("torch.distributed.pipelining", model).value
    stages = pipe.stages(rank)                                         # of this process, in a group of K processes
    schedule = pipe.schedule(stages, loss_fn)
    optimizer = torch.optim.AdamW(pipe.parameters(stages))

    losses = []
    schedule.step(*pipe.inputs(x), target=y, losses=losses)            # inputs in the first process, target in the last
    optimizer.step()

The loss of each micro-batch is divided by M before it goes backward, so gradients are those of the mean over the
mini-batch and add up over several steps; torch's own `scale_grads` divides those of earlier steps again.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from planner.export.stage_module import StageModule, check_outputs, examples, output_values
from planner.export.target import Made, Recompute, Request, Target
from planner.export.torch_split import splits
from planner.plan.actions import COMPUTING, Action, ActionKind
from planner.plan.plan import Plan
from planner.plan.schedules import SCHEDULES
from profiler.errors import ArgumentError
from profiler.run.loss import LossFunction, loss_of, model_output
from profiler.sample_spec import TensorLeaf
from profiler.text import counted
from profiler.torch_private import pipeline_runtime
from profiler.tracing.export import autocasting
from profiler.tracing.sample import tensor_leaves
from profiler.tracing.sequence import LayerSequence

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.pipelining import PipelineStage


@dataclass(frozen=True)
class TorchPipeline:
    """A plan as `torch.distributed.pipelining` runs it.

    Attributes:
        plan: the plan.
        sequence: the layers of the model.
        modules: one for each stage; neighbours exchange a tuple of tensors.
        csv: the passes of all ranks, as `_PipelineScheduleRuntime._load_csv(..., format="compute_only")` reads them.
    """

    plan: Plan
    sequence: LayerSequence
    modules: tuple[StageModule, ...]
    csv: str

    def stages(
        self, rank: int, *, device: torch.device | str | None = None, group: ProcessGroup | None = None
    ) -> list[PipelineStage]:
        """The stages of a rank, with the shapes that they exchange, so that torch runs nothing to learn them.

        Args:
            rank: of the process in its group.
            device: where its stages run; by default where the plan has them.
            group: of all processes of the pipeline; the default group if None.

        Raises:
            ArgumentError: the plan has no such rank.
        """
        from torch.distributed.pipelining import PipelineStage

        if not 0 <= rank < self.plan.ranks:
            raise ArgumentError(f"rank is {rank}, and the plan has ranks 0 to {self.plan.ranks - 1}")
        size, made = self.plan.micro_batch_sizes[0], []
        for index, stage in enumerate(self.plan.stages):
            if stage.rank == rank:
                there = torch.device(stage.device.name if device is None else device)
                made.append(
                    PipelineStage(
                        self.modules[index].to(there),
                        index,
                        self.plan.K,
                        there,
                        input_args=examples(self.sequence, stage.first_layer, size),
                        output_args=examples(self.sequence, stage.stop_layer, size),
                        group=group,
                    )
                )
        return made

    def schedule(self, stages: list[PipelineStage], loss_fn: LossFunction | None = None) -> Any:
        """The runtime of torch with the plan's passes; `step` trains a mini-batch.

        Args:
            stages: what `stages` returned.
            loss_fn: `loss_fn(output, target)` returns the mean loss over the samples; None if the model returns its
                loss, and `no_target` is then the target.
        """
        batch_dims = [leaf.batch_dim for leaf in self.sequence.sample.leaves if isinstance(leaf, TensorLeaf)]

        def share(output: Any, target: Any) -> Tensor:
            tensors = output if isinstance(output, tuple) else (output,)
            values = output_values(self.sequence, tensors)
            with autocasting(self.sequence.sample, tensors[0].device):
                return loss_of(model_output(self.sequence, values), target, loss_fn) / self.plan.M

        return pipeline_runtime(list(stages), self.plan.M, share, self.csv, batch_dims)

    def parameters(self, stages: Iterable[PipelineStage]) -> list[nn.Parameter]:
        """For the optimizer of this process: what stages of it hold, once also where several hold it (tied weights)."""
        return [*dict.fromkeys(held for stage in stages for held in stage.submod.parameters())]

    def inputs(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """What `step` is given in the process of the first stage, for what the model is called with."""
        if args and kwargs:
            raise ArgumentError(
                f"got {counted(len(args), 'argument')} by position and {len(kwargs)} by keyword; pass the traced ones"
            )
        return tuple(tensor_leaves(kwargs or args, self.sequence.sample))

    @property
    def no_target(self) -> Tensor:
        """A target for a model that computes its loss itself: torch asks for one."""
        return torch.empty(self.plan.batch_size, 0)


def passes_of(plan: Plan, sequence: LayerSequence) -> tuple[str, list[str]]:
    """The passes of every rank, one line each, one token a pass: stage, F, B, I or W, micro-batch; and notes on them.

    A stage whose backward pass torch's engine cannot split has B in the place of I and W.
    """
    divides = SCHEDULES[plan.schedule].splits_backward
    whole = [index for index, stage in enumerate(plan.stages) if divides and not splits(sequence, stage)]
    csv = "".join(f"{','.join(_tokens(actions, whole))}\n" for actions in plan.actions())
    if not whole:
        return csv, []
    return csv, [
        f"Backward passes of {counted(len(whole), 'stage')} ({', '.join(map(str, whole))}) are not split, which "
        "torch's engine cannot where a parameter is used at several places or no gradient goes back; a step takes "
        "longer than planned."
    ]


def _tokens(actions: Iterable[Action], whole: Container[int]) -> Iterator[str]:
    """Of the passes of one rank; of stages in `whole` the backward pass is not split."""
    for action in actions:
        if action.kind not in COMPUTING or action.kind is ActionKind.R:
            continue
        if action.stage not in whole:
            yield str(action)
        elif action.kind is ActionKind.I:
            yield str(replace(action, kind=ActionKind.B))
        elif action.kind is not ActionKind.W:
            yield str(action)


def _make(request: Request) -> Made:
    plan = request.plan
    check_outputs(request.sequence)
    splits_backward = SCHEDULES[plan.schedule].splits_backward
    modules = (StageModule(request.sequence, stage, splits_backward=splits_backward) for stage in plan.stages)
    csv, on_passes = passes_of(plan, request.sequence)
    made = TorchPipeline(plan, request.sequence, tuple(modules), csv)
    notes = [
        f"{counted(plan.ranks, 'process')}, one for each rank; micro-batches of "
        f"{counted(request.micro_batch_size, 'sample')}, {plan.batch_size} in a step.",
        *on_passes,
    ]
    if any(layer.draws for layer in request.sequence.layers):
        notes.append(
            "Random numbers come from each process's own generator: runs with other cuts draw others, unlike with "
            "executor.Pipeline."
        )
    return Made(made, made.csv, {"schedule.csv": made.csv}, tuple(notes))


TARGET = Target(
    name="torch.distributed.pipelining",
    engine="torch.distributed.pipelining",
    make=_make,
    schedules=tuple(SCHEDULES),
    unit_paths=None,
    recompute=Recompute.ANY,
    autocasts=True,
)
