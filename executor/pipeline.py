"""`Pipeline`: train a model by a plan.

    pipe = Pipeline(model, plan, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(pipe.parameters())
    for x, y in batches:
        loss = pipe.step(x, target=y)       # M micro-batches forward and backward through K stages
        optimizer.step()
        optimizer.zero_grad()

The same lines run in one process, which then carries out all stages, and in K processes under `launch` or torchrun,
where rank k carries out stage k. Losses and gradients are the same in every bit on CPU: they are a function of model,
data, M and seed, not of K or the cuts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.gradient_norm import global_norm
from executor.micro_batch import shapes_of, sizes_for, split_inputs, split_target
from executor.placement import Placement, place
from executor.position import Phase
from executor.randomness import generator_of, preserved
from executor.runtime import Evaluation, Runtime
from executor.stage_runner import MicroBatch, StageRunner
from executor.stopwatch import TimedAction
from executor.tied import sum_gradients
from executor.transport import Distributed, InProcess
from executor.watch import Given, Watch
from executor.world import check_world_size, join, wait_limit
from planner.plan import Plan
from planner.schedule import ActionKind, gpipe_schedule, make_schedule
from profiler.errors import ArgumentError, ForeignPlanError, PlanError, PlanFileError
from profiler.loss import LossFunction
from profiler.sample import batch_extent, tensor_leaves
from profiler.sequence import LayerSequence
from profiler.stage_function import StageFunction
from profiler.tracing import trace, trace_evaluation


class Pipeline:
    """A model, cut and trained as a plan says.

    Args:
        model: the model that the plan was made for. Parameters on the CPU are trained in place.
        plan: the plan.
        loss_fn: `loss_fn(output, target)` returns the mean loss over the samples; None if the model returns its loss.
        seed: of all random numbers that the model draws.
        check_finite: end the step with an error that names step and micro-batch when a loss is not finite; this waits
            for each loss to be computed, which on CUDA costs time.
        timeout_s: how long a process waits for another before all end; as `launch` says, or follows from the plan, if
            None (see `executor.watch`).

    Attributes:
        plan: the plan.
        rank: of this process; 0 where it runs alone.
        watch: sees to it that all processes end when one fails.

    Raises:
        ForeignPlanError: the plan was made for another model or another number of processes, or the processes have
            different plans.
        NotTraceableError: the model cannot be traced.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        loss_fn: LossFunction | None = None,
        seed: int = 0,
        check_finite: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        if not isinstance(plan, Plan):
            raise ArgumentError(f"the plan is a {type(plan).__name__}; pass a Plan, Plan.load(path) reads one")
        self.plan = plan
        self._model = model
        limit_s = wait_limit(plan, timeout_s)
        self.rank, self._world_size = join(timeout_s=limit_s)
        self.watch = Watch(self.rank, self._world_size, timeout_s=limit_s)
        with self.watch.call(Phase.CONSTRUCTION, {"the plan": _digest(plan.to_json()), "the seed": str(seed)}):
            check_world_size(plan, self._world_size)
            self._sequence = _traced(model, plan)
            _check_model(self._sequence, plan)
            self._build(loss_fn, seed, check_finite)

    def _build(self, loss_fn: LossFunction | None, seed: int, check_finite: bool) -> None:
        """What carries out the stages of this process."""
        plan, world_size = self.plan, self._world_size
        self._stages = list(range(plan.K)) if world_size == 1 else [self.rank]
        devices = {stage: _device(plan, stage) for stage in self._stages}
        if world_size > 1 and devices[self.rank].type == "cuda":
            torch.cuda.set_device(devices[self.rank])  # NCCL works on the current device
        self._placement: Placement = place(self._sequence, plan, self._stages, devices)
        self._runners = {
            stage: StageRunner(
                self._sequence.on(devices[stage]),
                plan.stages[stage].first_layer,
                plan.stages[stage].stop_layer,
                devices[stage],
                self._placement.read_by[stage],
                self._placement.buffers[stage],
                loss_fn,
                seed,
            )
            for stage in self._stages
        }
        transport = InProcess(devices) if world_size == 1 else Distributed(self.rank, devices[self.rank])
        self._runtime = Runtime(self._runners, transport, self._sequence, plan, self.watch.log, check_finite)
        self._devices = devices
        self._steps = 0
        self._evaluation: Evaluation | None = None

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that this process trains.

        A process whose stages have none gets one without elements: torch's optimizers refuse an empty list, and the
        same lines are to run in every process.
        """
        return iter(list(self._placement.named_parameters().values()) or [nn.Parameter(torch.empty(0))])

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this process trains, with their original names (a tied one with its first)."""
        named = self._placement.named_parameters().items()
        return ((self._sequence.aliases.get(name, (name,))[0], parameter) for name, parameter in named)

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """One training step: gradients of the mini-batch's mean loss are added to the parameters' `.grad`.

        Args:
            args: what the model is called with, the whole mini-batch, in every process.
            target: passed to `loss_fn`; tensors have the batch as dimension 0.
            kwargs: what the model is called with.

        Returns:
            The mean loss over the mini-batch, a scalar on this process's first device, in every process.

        Raises:
            ArgumentError: the arguments differ from what the model was traced with; before anything runs.
            ExecutionError: an action failed; the message names stage, micro-batch and cause.
        """
        with self.watch.call(Phase.PREPARATION, self._given("step", args, kwargs, target)):
            batches = self._micro_batches(args, kwargs, target)
            recompute = tuple(bool(stage.recompute) for stage in self.plan.stages)
            schedule = make_schedule(
                self.plan.schedule, stages=self.plan.K, micro_batches=len(batches), recompute=recompute
            )
            with torch.enable_grad(), preserved([generator_of(device) for device in set(self._devices.values())]):
                self._runtime.run({stage: schedule[stage] for stage in self._stages}, batches, self._steps)
            sum_gradients(self._placement.tied, self.rank)
            for runner in self._runners.values():
                runner.move_buffers()
            self._steps += 1
            loss = self._shared_loss()
            self.watch.log.step = self._steps
        return loss

    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """The mean loss of a batch in evaluation mode: no dropout, batch normalization by running statistics.

        Arguments and result are those of `step`; nothing is trained.

        Raises:
            NotTraceableError: in evaluation mode the model does other operations than in training.
        """
        with self.watch.call(Phase.PREPARATION, self._given("evaluate", args, kwargs, target)):
            batches = self._micro_batches(args, kwargs, target)
            schedule = gpipe_schedule(stages=self.plan.K, micro_batches=len(batches), recompute=(False,) * self.plan.K)
            forward_only = (ActionKind.RECV_F, ActionKind.F, ActionKind.SEND_F)
            lists = {stage: tuple(a for a in schedule[stage] if a.kind in forward_only) for stage in self._stages}
            self._runtime.run(lists, batches, self._steps, evaluation=self._evaluated())
            return self._shared_loss()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients of all stages so that their common Euclidean norm is at most `max_norm`.

        Use this in place of `torch.nn.utils.clip_grad_norm_`, which in one of K processes sees one stage only. A tied
        parameter counts once. Every process calls it.

        Returns:
            The norm before, in float64; the same in every process and for every K.
        """
        with self.watch.call(Phase.NORM, {"the call": "clip_grad_norm_"}):
            norm = global_norm(self._placement, tuple(self._sequence.parameters), self.rank, self._world_size)
        if norm > max_norm:
            for parameter in self._placement.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(float(max_norm / norm))
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers of this process's stages under all their original names.

        In one process this is what `model.state_dict()` holds; in K processes the K parts together do.
        """
        held: dict[str, Tensor] = dict(self._placement.named_parameters())
        for buffers in self._placement.buffers.values():
            held.update(buffers)
        whole = self._model.state_dict(keep_vars=True)
        named = {
            alias: tensor.detach()
            for name, tensor in held.items()
            for alias in self._sequence.aliases.get(name, ())
            if alias in whole
        }
        if 0 in self._runners:  # what no layer reads belongs to the first stage
            read = {*self._sequence.parameters, *self._sequence.buffers}
            used = {alias for name in read for alias in self._sequence.aliases.get(name, ())}
            named.update({name: value.detach() for name, value in whole.items() if name not in used})
        return named

    def last_step_actions(self) -> tuple[TimedAction, ...]:
        """How long each forward, recompute and backward pass of this process took in the last step."""
        return self._runtime.stopwatch.read()

    def _given(self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Given:
        """What the ranks must have in common before they exchange a message of a call, or its size would be wrong."""
        if self._world_size == 1:
            return {}
        return {"the call": call, "the batch": shapes_of([args, kwargs]), "the target": shapes_of(target)}

    def _micro_batches(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> list[MicroBatch]:
        """The arguments cut into micro-batches, after they were checked."""
        if args and kwargs:
            raise ArgumentError("pass the model's arguments all by position or all by keyword, as in the sample")
        spec = self._sequence.sample
        tensors = tensor_leaves(kwargs if kwargs else args, spec)
        batch_size = batch_extent(tensors, spec)
        sizes = sizes_for(batch_size, self.plan.micro_batch_sizes)
        inputs = split_inputs(tensors, spec, sizes)
        targets = split_target(target, sizes)
        return [
            MicroBatch(
                index, size, size / batch_size, dict(zip(self._sequence.inputs, inputs[index], strict=True)), part
            )
            for index, (size, part) in enumerate(zip(sizes, targets, strict=True))
        ]

    def _shared_loss(self) -> Tensor:
        """The loss on every process: the last stage's."""
        last = self._runners.get(self.plan.K - 1)
        device = self._devices[self._stages[0]]
        loss = torch.zeros((), device=device, dtype=torch.float64) if last is None else last.loss().to(device)
        if self._world_size > 1:
            dist.broadcast(loss, src=self.plan.K - 1)
        return loss

    def _evaluated(self) -> Evaluation:
        """The layers in evaluation mode; traced when first needed."""
        if self._evaluation is None:
            sequence = trace_evaluation(self._model, self._sequence)
            functions = {
                index: StageFunction(
                    sequence.on(self._devices[index]),
                    stage.first_layer,
                    stage.stop_layer,
                    self._placement.read_by[index],
                )
                for index, stage in enumerate(self.plan.stages)
                if index in self._runners
            }
            self._evaluation = Evaluation(sequence, functions)
        return self._evaluation


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _device(plan: Plan, stage: int) -> torch.device:
    """The torch device of a stage.

    Raises:
        ForeignPlanError: this machine has no such device.
    """
    name = plan.stages[stage].device.name
    try:
        device = torch.device(name)
    except RuntimeError as problem:
        raise PlanFileError(f"stage {stage} is planned for {name!r}, which is no torch device; plan again") from problem
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ForeignPlanError(
            f"stage {stage} is planned for {device}, but this process sees {torch.cuda.device_count()} CUDA devices; "
            "plan for the devices that are here"
        )
    return device


def _traced(model: nn.Module, plan: Plan) -> LayerSequence:
    """The model's layers, traced as the plan says."""
    try:
        return trace(model, plan.sample)
    except PlanError:
        raise
    except Exception as problem:
        raise PlanFileError(
            f"the plan's sample does not describe a call of a model ({type(problem).__name__}: {problem}); plan again"
        ) from problem


def _check_model(sequence: LayerSequence, plan: Plan) -> None:
    if sequence.fingerprint != plan.model_fingerprint:
        raise ForeignPlanError(
            f"the plan was made for a model with fingerprint {plan.model_fingerprint}, this model has "
            f"{sequence.fingerprint} (torch {torch.__version__}); plan again for this model"
        )
    if plan.stages[-1].stop_layer != len(sequence):
        raise ForeignPlanError(
            f"the plan's stages hold {plan.stages[-1].stop_layer} layers, the model has {len(sequence)}; plan again"
        )
    for index, stage in enumerate(plan.stages):
        for segment in stage.recompute:
            if (segment.first, segment.stop) != (stage.first_layer, stage.stop_layer):
                raise ForeignPlanError(
                    f"stage {index} recomputes layers [{segment.first}, {segment.stop}) of "
                    f"[{stage.first_layer}, {stage.stop_layer}); this executor recomputes whole stages only"
                )
