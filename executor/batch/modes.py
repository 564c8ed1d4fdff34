"""What surrounds a call of a pipeline: autocast, parameters and a scaler have to be as planned."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from executor.layout import Layout
from planner.plan.plan import Plan
from profiler.errors import ArgumentError
from profiler.precision import recipe_of
from profiler.text import are, counted
from profiler.torch_private import storage_of


def refuse_other_modes(
    plan: Plan, devices: Collection[torch.device], frozen: Sequence[tuple[str, nn.Parameter]]
) -> None:
    """Refuse what would make layers compute something else than planned, and messages hold something else.

    Args:
        plan: the plan.
        devices: of this process's stages.
        frozen: its parameters that were not trained when the pipeline was constructed, with their names; of a name
            that of the model as well as the one that computes for it.

    Raises:
        ArgumentError: the call is inside another autocast region, or frozen parameters are frozen no more.
    """
    planned = plan.sample.autocast
    for kind in {device.type for device in devices}:
        if torch.is_autocast_enabled(kind) and str(torch.get_autocast_dtype(kind)) != f"torch.{planned}":
            raise ArgumentError(
                f"the call is inside an autocast region of {torch.get_autocast_dtype(kind)}, the plan was made "
                f"for {planned or 'none'}; leave the region, or plan with autoplan(..., autocast=...)"
            )
    thawed = list(dict.fromkeys(name for name, parameter in frozen if parameter.requires_grad))
    if thawed:
        raise ArgumentError(
            f"of the parameters that were frozen when the pipeline was constructed, {len(thawed)} "
            f"{are(len(thawed))} not any more, such as {thawed[0]}, and would get no gradient; plan "
            "again for the model as it is, and construct anew"
        )


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """Where a model holds a parameter, and which it was when the pipeline was constructed."""

    name: str
    model: nn.Module
    parameter: nn.Parameter

    @property
    def now(self) -> nn.Parameter | None:
        """The one that is there now; None where there is none any more."""
        *path, own_name = self.name.split(".")
        module = self.model
        for part in path:
            inside = module._modules
            found = inside[part] if part in inside else None  # noqa: SIM401 - a scripted module's is no dict
            if found is None:
                return None
            module = found
        held = module._parameters
        return held[own_name] if own_name in held else None  # noqa: SIM401 - likewise


def held_parameters(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> list[HeldParameter]:
    """Of a model's parameters, by their names in it."""
    return [HeldParameter(name, model, parameter) for name, parameter in parameters.items()]


def refuse_assigned(held: Iterable[HeldParameter]) -> None:
    """Refuse a model that holds other parameters by now, on other memory, or none: the pipeline goes on with its own.

    Raises:
        ArgumentError: naming one of them.
    """
    assigned = []
    for place in held:
        now = place.now
        if now is None or (now is not place.parameter and storage_of(now) != storage_of(place.parameter)):
            assigned.append(place.name)
    if assigned:
        raise ArgumentError(
            f"since the pipeline was constructed, {counted(len(assigned), 'parameter')} of the model, such as "
            f"{assigned[0]}, {'was' if len(assigned) == 1 else 'were'} replaced by others, as "
            "load_state_dict(..., assign=True) does, or another module in its place, or taken away; the pipeline "
            "computes with those that it had: change the model and load before constructing it, or without assign=True"
        )


class HeldModules:
    """The modules of a model and their modes, as they were when the pipeline was constructed.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (name, module, module.training, None if isinstance(module, torch.jit.ScriptModule) else _children(module))
            for name, module in model.named_modules()
        ]

    def refuse_others(self, *, training: bool) -> None:
        """Refuse a model that has other modules by now, or to train in other modes: the layers are those that it had.

        A model in evaluation mode as a whole is traced in training mode, since that is what a plan is for.

        Raises:
            ArgumentError: naming one of them.
        """
        for name, module, _, children in self._held:
            if children is not None and _children(module) != children:
                raise ArgumentError(
                    f"since the pipeline was constructed, modules in {_named(name)} were replaced, added or removed, "
                    "and it computes with those that it had; change the model before constructing it"
                )
        if training and not self._held[0][2]:
            raise ArgumentError(
                "the model is in evaluation mode, as model.eval() and from_pretrained leave it, and a step trains it "
                "as in training mode; call model.train() before the pipeline is constructed, and then eval() on those "
                "of its modules that are to stay in evaluation mode"
            )
        turned = [(name, mode) for name, module, mode, _ in self._held if training and module.training != mode]
        if turned:
            name, mode = turned[0]
            before, now, call = ("training", "evaluation", "train") if mode else ("evaluation", "training", "eval")
            raise ArgumentError(
                f"{counted(len(turned), 'module')}, such as {_named(name)}, {are(len(turned))} in {now} mode, and "
                f"{'was' if len(turned) == 1 else 'were'} in {before} mode when the pipeline was constructed; the step "
                f"computes as then: call {call}() on what was changed, or construct a pipeline in the modes to train in"
            )


def _children(module: nn.Module) -> tuple[nn.Module | None, ...]:
    return tuple(module._modules.values())


def _named(path: str) -> str:
    return repr(path) if path else "the model itself"


def refuse_unscaled(precision: str | None, scaler: torch.amp.GradScaler | None) -> None:
    """Refuse a step whose small gradients would vanish.

    Raises:
        ArgumentError: the recipe computes in float16, and there is no scaler.
    """
    recipe = recipe_of(precision)
    if recipe is not None and recipe.needs_scaler and scaler is None:
        raise ArgumentError(
            f"precision={precision!r} computes gradients in float16, where small ones are 0, and the step has no "
            "scaler; pass step(..., scaler=torch.amp.GradScaler(device)), and call its step and update"
        )


def loss_scale(scaler: torch.amp.GradScaler, layout: Layout, device: torch.device) -> Tensor:
    """What a scaler multiplies losses with, a scalar on that device.

    Raises:
        ArgumentError: it would see the gradients of one of several processes only.
    """
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    if not layout.alone and not isinstance(scaler, ShardedGradScaler):
        raise ArgumentError(
            f"the scaler is a {type(scaler).__name__}, which sees this process's gradients only; pass "
            "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler in each of several processes"
        )
    return scaler.scale(torch.ones((), device=device))
