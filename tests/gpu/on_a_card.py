"""Plans and models of the tests that need a card."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import isclose
from typing import NamedTuple

import torch
from torch.nn import functional

from executor import Pipeline
from planner import Plan
from profiler.device import Device
from profiler.machine.local import local_devices
from profiler.tracing.sample import call_arguments
from tests.benchmarks.stage_models import Model
from tests.models.densenet import DenseNet
from tests.models.unet import UNet

NAME = "cuda:0"


class Trained(NamedTuple):
    """What comes of some steps.

    Attributes:
        losses: of the steps.
        held: by the stages that run here: weights and gradients, on the host.
        said: by the comparison of the first step.
    """

    losses: list[float]
    held: dict[str, torch.Tensor]
    said: str


def unet(batch: int) -> Model:
    """With images of 256 x 256."""
    classes = torch.randint(2, (batch, 256, 256))
    return Model(UNet(depth=4, channels=48), torch.randn(batch, 3, 256, 256), functional.cross_entropy, classes)


def densenet(batch: int) -> Model:
    """DenseNet-121, with images of 224 x 224."""
    images, classes = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
    return Model(
        DenseNet(growth=32, blocks=(6, 12, 24, 16), num_classes=1000), images, functional.cross_entropy, classes
    )


def card(share: float = 1.0) -> Device:
    """The first card, or a device with that share of its memory."""
    (device,) = local_devices([NAME]).devices
    return device.model_copy(update={"memory_bytes": int(device.memory_bytes * share)})


def on_card(plan: Plan) -> Plan:
    """The plan with all its stages on the first card."""
    device = card(1 / plan.K / plan.replicas)
    stages = [stage.model_copy(update={"devices": (device,) * plan.replicas}) for stage in plan.stages]
    return plan.model_copy(update={"stages": tuple(stages)})


@contextmanager
def equal_in_every_run() -> Iterator[None]:
    """Within, kernels add in an order of their own no more, as those of attention and of scattered sums do."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def trained(model: Model, plan: Plan, steps: int) -> Trained:
    """What comes of some steps."""
    pipe = Pipeline(model.model, plan, loss_fn=model.loss_fn)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    args, kwargs = call_arguments(model.sample)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(pipe.step(*args, target=model.target, **kwargs).item())
        optimizer.step()
    held = {
        f"{what} of {name}": tensor.detach().cpu()
        for name, parameter in pipe.named_parameters()
        for what, tensor in (("gradient", parameter.grad), ("weight", parameter))
        if tensor is not None
    }
    return Trained(losses, held, pipe.first_step)


def unlike(found: Trained, whole: Trained) -> list[str]:
    """What is not equal in every bit; NaN equals NaN.

    Of losses a rounding may differ: the cross entropy of images is added up in an order of its own in every run, also
    where kernels are asked not to (`nll_loss2d`).
    """
    names = [
        name
        for name, tensor in found.held.items()
        if not torch.equal(tensor.nan_to_num(1234.5), whole.held[name].nan_to_num(1234.5))
    ]
    close = all(isclose(*pair, rel_tol=1e-6) for pair in zip(found.losses, whole.losses, strict=True))
    return names if close else ["loss", *names]
