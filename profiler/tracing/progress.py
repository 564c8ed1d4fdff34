"""How far a trace is: what is done now, and how long it will take.

For two thirds of the time the forward pass runs on fake tensors, module by module, which are counted. The other parts
follow each other; their shares are those of a Llama of 16 layers, and nearly those of GPT-2 and a residual network
[measured].
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum

from torch import nn

from profiler.observe.source_place import own_forward
from profiler.progress_line import ProgressLine


class Part(Enum):
    """A part of a trace: what is done, and the percentage at which it ends."""

    MODULES = "forward pass, module by module", 66.0
    GRAPH = "graph", 76.0
    ONE_SAMPLE = "the same with one sample", 92.0
    FACTS = "operations", 97.0
    LAYERS = "layers", 100.0

    @property
    def words(self) -> str:
        """What is done."""
        return self.value[0]

    @property
    def end(self) -> float:
        """Percentage."""
        return self.value[1]


class TraceProgress:
    """The bar of one trace, which may take several attempts.

    Args:
        model: whose modules are counted.
        wanted: whether it is shown, on a terminal.
    """

    def __init__(self, model: nn.Module, *, wanted: bool) -> None:
        called = sum(own_forward(module) is not _NO_FORWARD for module in model.modules())
        self._each = Part.MODULES.end / max(1, called)
        self._attempts = 0
        self._line = ProgressLine("trace", total=100.0, wanted=wanted)

    def begins(self) -> None:
        """An attempt begins."""
        self._attempts += 1
        self._line.reached(0.0)
        self._describe(Part.MODULES)

    def module_called(self) -> None:
        """One more module was called; a shared one may be called more than once."""
        self._line.reached(max(self._line.done, min(self._line.done + self._each, Part.MODULES.end)))

    def done(self, part: Part) -> None:
        """A part is over."""
        following = [*Part][[*Part].index(part) + 1 :]
        if following:
            self._describe(following[0])
        self._line.reached(max(self._line.done, part.end))

    def close(self) -> None:
        """Nothing is shown any more."""
        self._line.close()

    def _describe(self, part: Part) -> None:
        attempt = f" (attempt {self._attempts})" if self._attempts > 1 else ""
        self._line.now(part.words, name=f"trace{attempt}")


_NO_FORWARD = nn.Module.forward
_CURRENT: ContextVar[TraceProgress | None] = ContextVar("the trace that is shown", default=None)


@contextmanager
def shown(model: nn.Module, *, wanted: bool) -> Iterator[None]:
    """Within, traces of a model say how far they are."""
    progress = TraceProgress(model, wanted=wanted)
    token = _CURRENT.set(progress)
    try:
        yield
    finally:
        _CURRENT.reset(token)
        progress.close()


def begins() -> None:
    """See `TraceProgress.begins`; nothing where no trace is shown, as in the next two."""
    if (progress := _CURRENT.get()) is not None:
        progress.begins()


def module_called() -> None:
    """See `TraceProgress.module_called`."""
    if (progress := _CURRENT.get()) is not None:
        progress.module_called()


def done(part: Part) -> None:
    """See `TraceProgress.done`."""
    if (progress := _CURRENT.get()) is not None:
        progress.done(part)
