"""What is known of an engine (`Target`), what a target is asked (`Request`), and what comes of it (`Export`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from torch import nn

from planner.export.units import UnitPaths, Units
from planner.plan.plan import Plan
from planner.plan.units import seconds_text
from profiler.errors import ArgumentError
from profiler.files import replace_file
from profiler.tracing.sequence import LayerSequence


class Recompute(Enum):
    """What an engine can recompute."""

    ANY = "any segments of layers"
    STAGES = "every stage as a whole, or nothing"
    UNITS = "every unit by itself, or nothing"
    BLOCKS = "every block of a list by itself, or nothing"
    LEFT_TO_ENGINE = "the plan's choice cannot be handed over"


@dataclass(frozen=True, slots=True)
class Request:
    """What a target is asked for.

    Attributes:
        plan: as the engine runs it; before that is known as it was made.
        model: that the plan is for.
        sequence: its layers.
        units: what the engine puts on stages; None where it takes any layers.
    """

    plan: Plan
    model: nn.Module
    sequence: LayerSequence
    units: Units | None

    @property
    def stops(self) -> list[int]:
        """Ends of the stages."""
        return [stage.stop_layer for stage in self.plan.stages]

    @property
    def unit_paths(self) -> tuple[tuple[str, ...], ...]:
        """The units of each stage."""
        assert self.units is not None
        return self.units.of_stages(self.stops)

    @property
    def all_units(self) -> tuple[str, ...]:
        """The units of the model."""
        assert self.units is not None
        return self.units.paths

    @property
    def blocks(self) -> tuple[str, ...]:
        """Those of them that are blocks of a list."""
        assert self.units is not None
        return tuple(path for paths in self.units.blocks.values() for path in paths)

    @property
    def micro_batch_size(self) -> int:
        """Samples of each micro-batch."""
        return self.plan.micro_batch_sizes[0]

    @property
    def recomputes(self) -> bool:
        """Whether any stage recomputes something."""
        return any(stage.recompute for stage in self.plan.stages)


@dataclass(frozen=True, slots=True)
class Made:
    """What a target makes of a request; see `Export`."""

    value: Any
    text: str
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    module: nn.Module | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One engine: what it can, and what makes a plan its own.

    Attributes:
        name: as a user writes it.
        engine: in a sentence.
        make: writes a plan for it.
        schedules: of a plan, those that it can run.
        unit_paths: what stages are made of; None if it takes any layers.
        between: what these are, in a message.
        borders: of the units, how many may come before a cut; any number by default.
        tensors_between: most tensors with a gradient that may cross a border between stages; None for any number. Those
            without one, such as masks, are each stage's to have.
        recompute: what it can recompute.
        defers_statistics: whether running statistics of batch normalization move once a mini-batch, as with GPipe.
        adds_tied: whether it adds up the gradients of a parameter that several ranks hold.
        averages_replicas: whether it averages gradients over replicas.
        shards_optimizer: whether it is told that replicas share the optimizer's state.
        one_process: whether one process runs all stages; else the R replicas of stage k are its processes kR to
            (k + 1)R - 1.
        has_micro_batches: whether it cuts a mini-batch into micro-batches at all.
        precisions: recipes of mixed precision that it is told with the plan; under others it would train otherwise.
        autocasts: whether it computes in the autocast region that the plan was made for.
        check: refuses what only this target cannot, with a reason; it is asked before cuts move.
        suits: whether this row is for such a plan and model; else `otherwise` is.
        otherwise: another row for the same engine.
    """

    name: str
    engine: str
    make: Callable[[Request], Made]
    schedules: tuple[str, ...]
    unit_paths: UnitPaths | None
    between: str = "layers"
    borders: Callable[[Units], range] = lambda units: range(1, len(units.paths))
    tensors_between: int | None = None
    recompute: Recompute
    defers_statistics: bool = False
    adds_tied: bool = False
    averages_replicas: bool = False
    shards_optimizer: bool = False
    one_process: bool = False
    has_micro_batches: bool = True
    precisions: tuple[str, ...] = ()
    autocasts: bool = False
    check: Callable[[Request], None] = lambda request: None
    suits: Callable[[Plan, nn.Module], bool] = lambda plan, model: True
    otherwise: Target | None = None

    def row_for(self, plan: Plan, model: nn.Module) -> Target:
        """The row that is for this plan and model."""
        return self if self.otherwise is None or self.suits(plan, model) else self.otherwise.row_for(plan, model)


@dataclass(frozen=True, slots=True)
class Move:
    """A cut that could not stay.

    Attributes:
        stage: that begins there.
        before: layer that it began with.
        after: layer that it begins with.
        path: module of that layer.
    """

    stage: int
    before: int
    after: int
    path: str


@dataclass(frozen=True, slots=True)
class Export:
    """A plan as another engine takes it.

        made = plan.export("torchgpipe", model)
        print(made)                                  # what it is, what moved, and what that costs
        pipeline = GPipe(made.module, **made.value)

    Attributes:
        target: its name.
        plan: as the engine runs it, by our prediction: with cuts where the engine can have them.
        original: the plan that was exported.
        original_s: predicted seconds of its step, under the same conditions as those of `plan`.
        value: what the engine is given, see the page of exports for each target.
        text: the same to paste: a part of a configuration, of a command line or of a script.
        files: contents by name.
        notes: what to know before using it, a sentence each.
        moves: cuts that could not stay.
        module: what the engine is given as the model, where that is not the model itself.
    """

    target: str
    plan: Plan
    original: Plan
    original_s: float
    value: Any = field(repr=False)
    text: str = field(repr=False)
    files: Mapping[str, str] = field(repr=False)
    notes: tuple[str, ...]
    moves: tuple[Move, ...]
    module: nn.Module | None = field(default=None, repr=False)

    @property
    def cost_s(self) -> float:
        """Predicted seconds that a step takes more than the original plan's; not below zero but for rounding."""
        return self.plan.prediction.step_s - self.original_s

    @property
    def cost_share(self) -> float:
        """The same as a share of the original plan's step."""
        return self.cost_s / self.original_s

    @property
    def changed(self) -> str:
        """In a sentence what the engine does otherwise than planned, and what that costs."""
        parts = [
            f"stage {move.stage} begins at {move.path} (layer {move.after} in place of {move.before})"
            for move in self.moves
        ]
        if [stage.recompute for stage in self.plan.stages] != [stage.recompute for stage in self.original.stages]:
            parts.append("recompute is another")
        if self.original.skips and not self.plan.skips:
            parts.append("values that went past stages are relayed")
        if not parts:
            return "nothing moved: the engine runs the plan as it is"
        return (
            f"{'; '.join(parts)}: a step takes {seconds_text(self.plan.prediction.step_s)} by our prediction, "
            f"{seconds_text(abs(self.cost_s))} ({abs(self.cost_share):.1%}) {'more' if self.cost_s >= 0 else 'less'} "
            "than planned"
        )

    def save(self, folder: str | Path) -> list[Path]:
        """Write the files into a folder, which is made if it is missing; returns their paths.

        Raises:
            ArgumentError: a file cannot be written.
        """
        written = []
        for name, content in self.files.items():
            path = Path(folder) / name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, content.encode())
            except OSError as problem:
                raise ArgumentError(
                    f"cannot write {str(path)!r}: {problem.strerror or problem}; choose another folder"
                ) from problem
            written.append(path)
        return written

    def __str__(self) -> str:
        """What it is, what moved, and what to know."""
        return "\n".join([f"for {self.target}: {self.changed}", *self.notes, "", self.text])
