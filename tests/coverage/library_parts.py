"""What the second survey's list is made of: an entry of a library, and the batches that its models are called with."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.coverage.model_list import Case
from tests.coverage.survey_models import Candidate, mean_square, torchvision

MINI_BATCH = 6  # three micro-batches of 2
VOCABULARY = 64
Sample = Callable[[], Any]


def entry(
    library: str,
    path: str,
    sample: Sample,
    *args: Any,
    name: str = "",
    own_loss: bool = False,
    build: Callable[..., Any] | None = None,
    **settings: Any,
) -> Candidate:
    """A model by the path of what builds it, `"package.module:Class"`.

    Args:
        library: as it is called where packages are published.
        path: of a class or function; what `build` is given instead of its result.
        sample: the batch that the model is called with.
        args: positional arguments of what builds it.
        name: of the model; the last part of the path by default.
        own_loss: whether the model returns its loss.
        build: what makes a module of what lies at the path and the arguments.
        settings: keyword arguments of what builds it.
    """
    called = name or path.rpartition(":")[2].rpartition(".")[2]
    return Candidate(library, called, partial(_case, path, sample, args, settings, own_loss, build))


def _case(
    path: str, sample: Sample, args: tuple[Any, ...], settings: Any, own_loss: bool, build: Callable[..., Any] | None
) -> Case:
    torchvision()  # several libraries import it
    thing = found(path)
    model = thing(*args, **settings) if build is None else build(thing, *args, **settings)
    loss_fn = None if own_loss else mean_square
    return Case(model, sample(), loss_fn, None if own_loss else torch.zeros(MINI_BATCH))


def found(path: str) -> Any:
    """What lies at `"package.module:name.name"`."""
    module, _, names = path.partition(":")
    thing = importlib.import_module(module)
    for name in names.split("."):
        thing = getattr(thing, name)
    return thing


class Calling(nn.Module):
    """A model whose training calls another method than `forward`, as those of densities do."""

    def __init__(self, model: nn.Module, method: str) -> None:
        super().__init__()
        self.model = model
        self.method = method

    def forward(self, *args: Any) -> Any:
        return getattr(self.model, self.method)(*args)


def floats(*shape: int) -> Sample:
    """Normal values, with the batch in front."""
    return lambda: torch.randn(MINI_BATCH, *shape)


def image(extent: int = 32, channels: int = 3) -> Sample:
    """Square pictures with values from 0 to 1."""
    return lambda: torch.rand(MINI_BATCH, channels, extent, extent)


def tokens(length: int = 16, vocabulary: int = VOCABULARY) -> Sample:
    """Texts."""
    return lambda: some_tokens(length, vocabulary)


def some_tokens(length: int = 16, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(vocabulary, (MINI_BATCH, length))


def classes(count: int = 5) -> Tensor:
    return torch.randint(count, (MINI_BATCH,))
