"""What the processes of a pipeline know of their last steps: gathered, as a table, as a timeline, and reported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor.layout import Layout
from executor.measure.clocks import clock_offset_s
from executor.measure.measured import Recorded, measured_frame, real_timelines
from executor.measure.replanning import Replanning
from executor.run.runtime import Runtime
from executor.state.placement import Placement
from executor.watch.position import Phase
from executor.watch.watch import Watch
from planner.plan.plan import Plan
from planner.plan.timeline import save_timeline_json
from profiler.errors import ArgumentError
from profiler.machine.backend import backend_of
from profiler.machine.device_kind import Peak

if TYPE_CHECKING:
    import pandas

    from planner.plan.simulator import Timeline


class Recording:
    """The last steps of one process, and of all of them; every process calls what is about all.

    Args:
        plan: by which they train.
        layout: which stages this process runs.
        device: the first of its stages'.
        runtime: that carries them out.
        placement: its tensors.
        watch: sees to it that all processes end when one fails.
    """

    def __init__(
        self, plan: Plan, layout: Layout, device: torch.device, runtime: Runtime, placement: Placement, watch: Watch
    ) -> None:
        self._plan, self._layout, self._device = plan, layout, device
        self._runtime, self._placement, self._watch = runtime, placement, watch
        self._peak = Peak()

    def frame(self) -> pandas.DataFrame:
        """See `Pipeline.measured`."""
        return measured_frame(self._plan, self._everyone())

    def timeline(self) -> Timeline:
        """See `Pipeline.measured_timeline`.

        Raises:
            ArgumentError: there was no step.
        """
        timelines = real_timelines(self._plan, self._everyone())
        if not timelines:
            raise ArgumentError("there is no step to show yet; call step first")
        return timelines[-1]

    def save(self, path: str | Path) -> None:
        """See `Pipeline.save_trace`."""
        timeline = self.timeline()
        if self._layout.process == 0:
            save_timeline_json(self._plan, path, timeline)

    def said_after(self, steps: int, replanning: Replanning) -> str:
        """What there is to say on process 0 after so many steps, of how well the plan predicted them."""
        whole = self._layout.processes == self._plan.ranks * self._plan.replicas
        if not whole or not replanning.due(steps):
            return ""
        everyone = self._everyone()
        if self._layout.process != 0:
            return ""
        with self._watch.aside(Phase.PLANNING):
            return replanning.report(everyone)

    @contextmanager
    def watching_memory(self) -> Iterator[None]:
        """Measure the peak memory of the steps inside."""
        masters = {id(master) for _, master in self._placement.rounded}  # the optimizer's, like its state
        trained = list(self._placement.named_parameters().values())
        held: list[Tensor] = [own for own in self._placement.parameters.values() if id(own) not in masters]
        cast = {id(master) for _, master in self._placement.cast}  # whose gradients go when the step begins, unseen
        held += [own.grad for own in trained if own.grad is not None and id(own) not in cast]
        held += [computing for computing, _ in self._placement.rounded]
        held += [buffer for buffers in self._placement.buffers.values() for buffer in buffers.values()]
        with backend_of(self._device).watching(self._device, held) as self._peak:
            yield

    def _everyone(self) -> list[Recorded]:
        """What the first replica's processes know of their last steps."""
        layout = self._layout
        with self._watch.call(Phase.MEASURED, {"the call": "measured"}):
            own = Recorded(
                steps=self._runtime.action_times.steps(),
                offset_s=clock_offset_s(layout, self._device),
                peak_bytes=self._peak.peak_bytes and self._peak.peak_bytes + self._runtime.slots_bytes,
                stages=layout.stages,
            )
            if layout.alone:
                return [own]
            everyone: list[Any] = [None] * layout.processes
            dist.all_gather_object(everyone, own)
            return [everyone[process] for process in layout.first_replica]
