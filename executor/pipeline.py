"""`Pipeline`: train a model by a plan.

    pipe = Pipeline(model, plan, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(pipe.parameters())
    for x, y in pipe.batches(loader):       # rank 0 reads the loader
        loss = pipe.step(x, target=y)       # M micro-batches forward and backward through K stages
        optimizer.step()
        optimizer.zero_grad()

The same lines run in one process, which then carries out all stages of all replicas, and under `launch` or torchrun in
one process for each rank of each replica. Losses and gradients are the same in every bit on CPU: they are a function of
model, data, M, R, schedule and seed, not of K, the cuts, recompute or the processes.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from executor.batch.calls import Call, Calls
from executor.batch.feed import Feed
from executor.batch.modes import (
    HeldModules,
    held_parameters,
    refuse_assigned,
    refuse_other_modes,
    refuse_unscaled,
)
from executor.carrier import Carrier
from executor.checkpoints.run_identity import Run
from executor.first_step import after_the_step, compared, is_settled
from executor.layout import layout_of
from executor.measure.action_times import TimedAction
from executor.measure.replanning import Replan, Replanning
from executor.plan_check import check_arguments, device_of, takes_target
from executor.recording import Recording
from executor.run.runtime import Runtime
from executor.run.stage_runner import StageRunner
from executor.run.transports import ANY, LIBRARY, transport_for
from executor.state.buffers import BufferMover
from executor.state.gradient_norm import global_norm
from executor.state.materialize import Initializer, materialized
from executor.state.named_state import extra_state, named_state, tensor_names
from executor.state.optimizer_steps import after_each_step, before_each_step, refuse_line_search, refuse_replaced
from executor.state.parameter_hooks import refuse_lost_hooks
from executor.state.placement import Placement, of_no_layer, place
from executor.state.replicas import GradientSum, group_of_peers
from executor.state.shared_loss import SharedLoss
from executor.state.shared_state import share_state
from executor.state.sharing import Shares, owners
from executor.watch.holes import give_holes_back
from executor.watch.position import Phase
from executor.watch.watch import Watch
from executor.world import check_world_size, group_on_host, join, wait_limit
from planner.plan.of_model import check_model, traced_as_planned
from planner.plan.plan import Plan
from profiler.arguments import fits_its_arguments
from profiler.errors import ArgumentError
from profiler.machine.backend import backend_of
from profiler.machine.channel import push_nobody_off
from profiler.quantities import MOST_MICRO_BATCHES, check_count, shown
from profiler.run.loss import LossFunction
from profiler.tracing.computing_model import computing_model

if TYPE_CHECKING:
    import pandas

    from planner.plan.simulator import Timeline


class Pipeline:
    """A model, cut and trained as a plan says.

    The same line in every process; a process on its own runs all stages:

    >>> from planner import autoplan
    >>> model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.ones(8, 8)
    >>> y, loss_fn = torch.zeros(8, 2), nn.functional.mse_loss
    >>> plan = autoplan(model, x, devices=1, loss_fn=loss_fn, target=y, time_budget_s=0.0, cache=False, progress=False)
    >>> pipe = Pipeline(model, plan, loss_fn=loss_fn)
    >>> optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    >>> before = pipe.step(x, target=y)
    >>> optimizer.step()
    >>> bool(pipe.evaluate(x, target=y) < before), pipe.predict(x).shape
    (True, torch.Size([8, 2]))

    Args:
        model: the model that the plan was made for. Parameters on the CPU are trained in place.
        plan: the plan.
        loss_fn: `loss_fn(output, target)` returns the mean loss over the samples; None if the model returns its loss,
            or is only to `predict`.
        seed: of all random numbers that the model draws.
        check_finite: end the step with an error that names step and micro-batch when a loss is not finite; this waits
            for each loss to be computed, which on CUDA costs time.
        compare_first_step: before the first step run its first micro-batch through the model as it is, and end with
            an error where loss or gradients are not those of the layers; see `executor.first_step`.
        replan: what is done after step 20 and then every thousandth: "report" warns on rank 0 where steps take longer
            or less than the plan doubts; the plan's profile lets it say, too, whether another plan is worth a change;
            None does nothing. The plan never changes by itself.
        initialize: of a model on the meta device, whose tensors come to life only where they are used: fills those of
            the module that it is called with, in place of the module's own initializer; see
            `executor.state.materialize`.
        timeout_s: how long a process waits for another before all end; as `launch` says, or follows from the plan, if
            None (see `executor.watch.watch`).
        transport: what carries messages between processes: "auto" is memory that they share where two of them compute
            on the cores of one machine, and the library of their devices (gloo, NCCL) everywhere else; "gloo" uses no
            shared memory.

    Attributes:
        plan: the plan.
        rank: of this process; 0 where it runs alone.
        run: says which checkpoints are its own.
        first_step: what came of comparing the first step with the model, in words; "" in other processes than the
            first, and before.
        watch: sees to it that all processes end when one fails.

    Raises:
        ForeignPlanError: the plan was made for another model or another number of processes, or the processes have
            different plans.
        NotTraceableError: the model cannot be traced.
    """

    @fits_its_arguments
    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        loss_fn: LossFunction | None = None,
        seed: int = 0,
        check_finite: bool = False,
        compare_first_step: bool = True,
        replan: Replan = "report",
        initialize: Initializer | None = None,
        timeout_s: float | None = None,
        transport: str = ANY,
    ) -> None:
        check_arguments(
            model,
            plan,
            loss_fn=loss_fn,
            initialize=initialize,
            seed=seed,
            timeout_s=timeout_s,
            transport=transport,
            check_finite=check_finite,
            compare_first_step=compare_first_step,
        )
        self.plan = plan
        self.run = Run()
        self._replanning = Replanning(plan, replan)
        self._model = model
        self._computing = computing_model(model, plan.sample.precision)
        self._modules = HeldModules(model)
        self._modes = [module.training for module in self._computing.modules()]
        self._loss_fn = loss_fn
        self._compares = compare_first_step
        self.first_step = ""
        limit_s = wait_limit(plan, timeout_s)
        self.rank, world_size = join()
        self.watch = Watch(self.rank, world_size, timeout_s=limit_s)
        given = {"the plan": _digest(plan.to_json()), "the seed": str(seed), "the transport": transport}
        give_holes_back(self)
        with self.watch.call(Phase.CONSTRUCTION, given):
            check_world_size(plan, world_size)
            self._layout = layout_of(plan, self.rank, world_size)
            self._sequence = traced_as_planned(self._computing, plan)
            check_model(self._computing, self._sequence, plan)
            self._takes_target = takes_target(self._sequence, loss_fn)
            self._place(loss_fn, seed, initialize)
        # All meet before process groups are made: nothing could end the wait for one that is stuck.
        with self.watch.call(Phase.CONSTRUCTION, {"the call": "the end of the construction"}):
            self._connect(check_finite, transport)
            self.watch.log.phase(Phase.SHARING)
            share_state(self._sequence, plan, self._layout, self._placement, self._unread)

    def __reduce__(self) -> Any:
        """It is bound to this process: to its tensors, and to what waits for other processes.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(
            "a Pipeline cannot be pickled or copied; construct another from the model and pipe.plan where it is to be, "
            "in the function that launch calls, say, and keep its state by save_checkpoint, or pipe.state_dict() in "
            "one process"
        )

    def _place(self, loss_fn: LossFunction | None, seed: int, initialize: Initializer | None) -> None:
        """The stages of this process."""
        plan, layout = self.plan, self._layout
        self._devices = devices = {stage: device_of(plan, stage, layout.replica) for stage in layout.stages}
        self._device = devices[layout.stages[0]]  # where the loss is, and what all stages share
        materialize = partial(materialized, self._model, initialize=initialize, seed=seed)
        originals = dict(self._model.named_parameters(remove_duplicate=False))
        self._placement: Placement = place(self._sequence, plan, layout, devices, materialize, originals)
        self._frozen = [
            (name, own)
            for name, held in self.named_parameters()
            for own in (held, originals.get(name, held))
            if not held.requires_grad
        ]
        trained = {name: own for name, own in self._placement.named_parameters().items() if own.requires_grad}
        own = {id(parameter) for _, parameter in self.named_parameters()}
        own_ones = {name: held for name, held in originals.items() if id(held) in own}
        self._in_the_model = held_parameters(self._model, own_ones)
        read = {name: originals[name] for name in self._sequence.parameters if name in originals}
        self._in_the_comparison = held_parameters(self._model, read)
        self._replaced = {name: originals[name] for name, own in trained.items() if originals.get(name, own) is not own}
        if self._replaced:
            before_each_step(self, lambda pipe, optimizer: refuse_replaced(optimizer, pipe._replaced))
        if not layout.has_all_stages or (plan.shard_optimizer and not layout.alone):
            mine = frozenset(map(id, self._placement.named_parameters().values()))
            before_each_step(self, lambda _, optimizer: refuse_line_search(optimizer, mine))
        self._runners = {
            stage: StageRunner(devices[stage], self._placement.buffers[stage], loss_fn, seed, alone=layout.alone)
            for stage in layout.stages
        }
        self._seed = seed
        self._unread = of_no_layer(self._model, self._sequence, materialize) if 0 in self._runners else {}

    def _connect(self, check_finite: bool, wanted: str) -> None:
        """What carries out the stages of this process, together with the others."""
        plan, layout, devices = self.plan, self._layout, self._devices
        if not layout.alone:
            backend_of(self._device).use(self._device)
        transport = transport_for(layout, [skip.ends for skip in plan.skips], devices, wanted)
        self._runtime = Runtime(self._runners, transport, self.watch.log, check_finite)
        group, on_host = group_of_peers(layout), group_on_host(layout)
        for made in (*transport.groups, group, on_host):
            if made is not None:
                self.watch.add_group(made)
        self.watch.add_wait(transport.interrupt)
        push_nobody_off()
        self._owners = owners(self._sequence, plan, layout, self._placement)
        owner_of = [self._owners.get(name) for name, _ in self._placement.parameters]
        gradients = GradientSum(self._placement.collectors(), layout, group, owner_of)
        named = self._placement.named_parameters()
        self._shares = Shares(((named[name], owner) for name, owner in self._owners.items()), layout, group)
        if plan.shard_optimizer and not layout.alone:
            after_each_step(self, Pipeline._exchange)
        shared = SharedLoss(layout, self._device, through_memory=wanted != LIBRARY)
        self.watch.add_wait(shared.interrupt)
        self._calls = Calls(self._computing, plan, layout, self._sequence, devices, self._placement)
        self._feed = Feed(self._calls, layout, self.watch, on_host)
        carried_by = (self._calls, self._runners, self._runtime, self._placement)
        self._carrier = Carrier(layout, devices, *carried_by, gradients, shared, BufferMover(layout, group))
        self._steps = 0
        self._recording = Recording(plan, layout, self._device, self._runtime, self._placement, self.watch)
        self._stand_in = nn.Parameter(torch.empty(0))

    @property
    def replica(self) -> int:
        """The one of the plan's replicas that this process belongs to; 0 where it runs all of them."""
        return self._layout.replica

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that this process trains.

        A process whose stages have none, or frozen ones only, gets one without elements: torch's optimizers refuse an
        empty list, and the same lines are to run in every process.
        """
        own = list(self._placement.named_parameters().values())
        if not any(parameter.requires_grad for parameter in own):
            own.append(self._stand_in)
        return iter(own)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this process trains, with their original names (a tied one with its first)."""
        named = self._placement.named_parameters().items()
        return ((self._sequence.aliases.get(name, (name,))[0], parameter) for name, parameter in named)

    def stepped_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of `named_parameters()` whose optimizer state this process keeps: all, unless replicas share it."""
        named, replica = self._placement.named_parameters().items(), self._layout.replica
        return (
            (self._sequence.aliases.get(name, (name,))[0], parameter)
            for name, parameter in named
            if self._owners.get(name, replica) == replica
        )

    def _exchange(self, optimizer: torch.optim.Optimizer) -> None:
        """After a step of an optimizer of this pipeline: let the replicas have each other's share.

        All processes do so at the same steps, also those whose parameters in it are frozen by now; one whose groups
        are all empty is taken for this pipeline's, since that of another model has parameters.
        """
        own = {id(parameter) for parameter in (*self._placement.named_parameters().values(), self._stand_in)}
        held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        if not held or not own.isdisjoint(held):
            with self.watch.call(Phase.EXCHANGE, {"the call": "optimizer.step"}):
                self._shares.forget_state_of_others(optimizer)
                self._shares.exchange()

    def batches(self, loader: Iterable[Any] | None) -> Iterator[Any]:
        """All batches of a loader that rank 0 alone reads, in a loop that all ranks go through together.

            for x, y in pipe.batches(loader):
                loss = pipe.step(x, target=y)

        Every process calls it, and what the loader of another rank holds, or whether it has one, does not matter. There
        the loop yields stand-ins: batches of the same structure, whose tensors have shapes and dtypes but no data (they
        are on the meta device, and stay there when they are moved). They may be sliced and computed with like others. A
        call that is given stand-ins, or none, takes its data from rank 0, which sends to each rank what its stages
        read. Other leaves of a batch, such as strings, are the same on all ranks.

        Args:
            loader: a `DataLoader`, or anything else to iterate over; None where there is none, on other ranks than 0.

        Raises:
            ExecutionError: reading a batch failed; the message names the cause, on all ranks.
        """
        return self._feed.batches(loader)

    def step(
        self,
        *args: Any,
        target: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        accumulate: int = 1,
        **kwargs: Any,
    ) -> Tensor:
        """One training step: gradients of the mini-batch's mean loss are added to the parameters' `.grad`.

        Gradients of several mini-batches for one step of the optimizer:

            for x, y in four:
                loss = pipe.step(x, target=y, accumulate=4)         # as (loss / 4).backward() does
            optimizer.step(); optimizer.zero_grad()

        Args:
            args: what the model is called with, the whole mini-batch: on rank 0, and on all other ranks either the same
                or none, as `batches` does; then what they read comes from rank 0. From its first call on each of
                `step`, `evaluate` and `predict` takes its data in one of these ways.
            target: passed to `loss_fn`; tensors have the batch as dimension 0. Given where `args` are. Where the model
                computes its loss itself and takes an argument of this name, it is that.
            scaler: scales the gradients, where half precision would lose small ones; call its `step` and `update` as
                usual. Of several processes each needs torch's `ShardedGradScaler`, which lets all skip a step alike.
            accumulate: calls that make up one step of the optimizer: each adds that part of its gradients, so that
                mini-batches of equal size give those of their common mean. The loss that is returned stays as it is.
            kwargs: what the model is called with.

        Returns:
            The mean loss over the mini-batch, a scalar on this process's first device, in every process.

        Raises:
            ArgumentError: there is no scaler and the recipe needs one; or the arguments differ from what the model was
                traced with, or from those of other ranks, of which later calls compare some elements, at every
                sixteenth call, and a beat of 0.25 s says so.
            ExecutionError: an action failed; the message names stage, micro-batch and cause. Gradients are then as they
                were before. But those that earlier steps had left, of a plan without replicas, may hold a part of this
                step's.
        """
        check_count("accumulate", accumulate, most=MOST_MICRO_BATCHES)
        refuse_unscaled(self.plan.sample.precision, scaler)
        target = self._outside_of_model(target, kwargs)
        given = self._feed.given("step", args, kwargs, target)
        if accumulate > 1:
            given = {**given, "accumulate": str(accumulate)}
        with self.watch.call(Phase.PREPARATION, given):
            refuse_other_modes(self.plan, self._devices.values(), self._frozen)
            refuse_assigned(self._in_the_model)
            self._modules.refuse_others(training=True)
            call = self._feed.call("step", args, kwargs, target, training=True)
            refuse_lost_hooks(self._placement)
            self._placement.follow()
            self._compare_first_step(args, kwargs, target)
            loss = self._carrier.train(call, self._steps, scaler, accumulate)
            self._steps += 1
            self._feed.end()
            self.watch.log.step = self._steps
        said = self._recording.said_after(self._steps, self._replanning)
        if said:
            warnings.warn(said, stacklevel=2)
        if self._compares:
            self._compares, self.first_step = False, after_the_step(self.first_step)
            warnings.warn(f"before the first step the layers were {self.first_step}", stacklevel=2)
        return loss

    def _outside_of_model(self, target: Any, kwargs: dict[str, Any]) -> Any:
        """The target of the loss function; one that is the model's joins its other arguments."""
        if self._takes_target and target is not None:
            kwargs["target"] = target
            return None
        return target

    def _compare_first_step(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> None:
        """In the one process that is always given all data."""
        self._compares &= self.rank == 0
        if self._compares:
            refuse_assigned(self._in_the_comparison)
            batch = self._calls.first_micro_batch(self._calls.understood(args, kwargs, target, training=True))
            self.first_step = compared(self._computing, self._modes, self.plan, batch, self._loss_fn)
            self._compares = not is_settled(self.first_step)
        if not self._compares:
            self._in_the_comparison = []

    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """The mean loss of a batch in evaluation mode: no dropout, batch normalization by running statistics.

        Nothing is trained.

        Args:
            args: as `step` has them.
            target: likewise.
            kwargs: likewise.

        Raises:
            NotTraceableError: in evaluation mode the model reads parameters elsewhere than in training.
        """
        target = self._outside_of_model(target, kwargs)
        with self.watch.call(Phase.PREPARATION, self._feed.given("evaluate", args, kwargs, target)):
            loss = self._carrier.evaluate(self._called("evaluate", args, kwargs, target), self._steps)
            self._feed.end()
        return loss

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for a batch in evaluation mode, in the process of the last stage.

            logits = pipe.predict(x)
            if logits is not None:                              # there, where y is too if every rank reads the loader
                right += (logits.argmax(-1) == y).sum()

        No gradient is kept, and neither a target nor a `loss_fn` is needed. Every process calls it.

        Args:
            args: what the model is called with, the whole batch; given as to `step`. What the model can do without in
                evaluation mode may be left out, such as its `labels`.
            kwargs: what the model is called with.

        Returns:
            The model's output, of any structure, in the process of the last stage; None in others. Tensors are joined
            along the dimension that the trace knows for the batch's. Those without it have to be equal in all
            micro-batches, but for scalars, which are taken for means over samples, as a loss is, and averaged. Of
            several replicas each has the output for its own samples, as if it had been called with
            `x.tensor_split(plan.replicas)[pipe.replica]`; a process that runs all has it for the batch.

        Raises:
            ArgumentError: the arguments differ from what the model was traced with, or an output has no one batch
                dimension to join micro-batches along, before anything runs; or one without differs between them.
            NotTraceableError: in evaluation mode the model reads parameters elsewhere than in training.
        """
        with self.watch.call(Phase.PREPARATION, self._feed.given("predict", args, kwargs, None)):
            output = self._carrier.predict(self._called("predict", args, kwargs, None), self._steps)
            self._feed.end()
        return output

    def _called(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Call:
        """A call in evaluation mode, before it is carried out."""
        refuse_other_modes(self.plan, self._devices.values(), self._frozen)
        refuse_assigned(self._in_the_model)
        self._modules.refuse_others(training=False)
        call = self._feed.call(kind, args, kwargs, target, training=False)
        self._placement.follow()
        return call

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients of all stages so that their common Euclidean norm is at most `max_norm`.

        Use this in place of `torch.nn.utils.clip_grad_norm_`, which in one of K processes sees one stage only. A tied
        parameter counts once. Every process calls it. Gradients are scaled by `max_norm / norm`, where torch adds 1e-6
        to the norm.

        Returns:
            The norm before, in float64; the same in every process and for every K.

        Raises:
            ArgumentError: `max_norm` is no number, or below 0, or another one on another rank.
        """
        try:
            most = float(max_norm) if isinstance(max_norm, int | float | Tensor) else math.nan
        except (TypeError, ValueError, OverflowError, RuntimeError):  # of a complex number, several, too large, on meta
            most = math.nan
        if not most >= 0:
            raise ArgumentError(f"max_norm is {shown(max_norm)}; give a number that is not below 0, such as 1.0")
        with self.watch.call(Phase.NORM, {"the call": "clip_grad_norm_", "max_norm": f"{most:.17g}"}):
            norm = global_norm(self._placement, tuple(self._sequence.parameters), self._layout, self._owners)
        if norm > most:
            for parameter in self._placement.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(float(most / norm))
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers of this process's stages under all their original names.

        Under a recipe of mixed precision these are the master weights, and what has none as it computes.
        In one process this is what `model.state_dict()` holds; in K processes the K parts together do.
        """
        return named_state(self._model, self._sequence, self._placement, self._unread)

    def state_names(self) -> list[str]:
        """Original names of all parameters and buffers of the model that a checkpoint holds, sorted."""
        return tensor_names(self._model)

    def extra_state(self) -> dict[str, Any]:
        """What modules keep in addition to tensors (`get_extra_state`), in the process of the first stage."""
        return extra_state(self._model) if 0 in self._runners else {}

    @property
    def steps(self) -> int:
        """Training steps done, those of the checkpoint that was loaded included."""
        return self._steps

    @property
    def seed(self) -> int:
        """Of all random numbers that the model draws; with step, micro-batch and layer it is their key."""
        return self._seed

    def resume(self, steps: int, seed: int) -> None:
        """Go on as after `steps` steps with that seed; `executor.checkpoint.load_checkpoint` calls this."""
        self._steps = self.watch.log.step = steps
        self._seed = seed
        for runner in self._runners.values():
            runner.seed = seed

    def last_step_actions(self) -> tuple[TimedAction, ...]:
        """How long each forward, recompute and backward pass of this process took in the last step."""
        return self._runtime.action_times.read()

    def measured(self) -> pandas.DataFrame:
        """Times and peak memory of each stage over the last steps, next to the plan's prediction.

        Every process calls this, and each gets the whole table: see `executor.measure.measured.measured_frame`. Of
        several replicas it is about the first.
        """
        return self._recording.frame()

    def save_trace(self, path: str | Path) -> None:
        """Write the last step as Chrome Trace Event JSON, with the tracks of the plan's `save_timeline_json`.

        Every process calls this; the first one writes, to `path`. Of several replicas it is about the first.
        """
        self._recording.save(path)

    def measured_timeline(self) -> Timeline:
        """The last step as it was, for `planner.pictures.timeline.plot_timeline`.

        Every process calls this, and each gets all stages. Of several replicas it is about the first.
        """
        return self._recording.timeline()

    def watch_memory(self) -> AbstractContextManager[None]:
        """Measure the peak memory of the steps inside, for `measured`; on CPU this slows them down."""
        return self._recording.watching_memory()


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
