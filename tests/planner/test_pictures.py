"""Pictures show what was decided: every message, every cut with its bytes, limits where they can be read."""

from dataclasses import replace

import numpy as np
import pandas
import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes

from planner.from_profile import plan_from_profile
from planner.pictures.canvas import TALLEST_IN
from planner.pictures.choices import plot_frontier, plot_sensitivity
from planner.pictures.layers import plot_balance, plot_layers
from planner.pictures.memory import plot_memory, plot_memory_over_time
from planner.pictures.timeline import LEAST_WIDTH, plot_timeline
from planner.plan.plan import Plan
from planner.plan.simulator import simulate_plan
from profiler.device import Link
from profiler.errors import ArgumentError
from profiler.record import Profile


@pytest.fixture(scope="module")
def profile(profile_of) -> Profile:
    row = (0.1, 0.1, 0.2, 10, 4, 8, 8)
    return profile_of({("a", 1): [row] * 6}, links=(Link(latency_s=0.02, bytes_per_s=1e6),))


@pytest.fixture(scope="module")
def plan(profile, device) -> Plan:
    return plan_from_profile(profile, [device()] * 3, batch_size=24, stages=3, micro_batches=24)


@pytest.fixture
def axes():
    figure, made = pyplot.subplots()
    yield made
    pyplot.close(figure)


def wide(plan: Plan, stages: int) -> Plan:
    """The same plan with so many more stages, each a copy of the second."""
    copies = tuple(
        plan.stages[1].model_copy(update={"first_layer": k, "stop_layer": k + 1, "rank": k}) for k in range(stages)
    )
    return plan.model_copy(update={"stages": copies})


def test_every_message_is_drawn_and_wide_enough_to_see(plan: Plan, axes: Axes) -> None:
    """Of 259 messages ten were to be seen: the others were narrower than a pixel."""
    fast = plan.model_copy(
        update={
            "stages": tuple(
                stage.model_copy(
                    update={
                        "times": tuple(
                            t.model_copy(update={"send_forward_s": 0.0075, "send_backward_s": 0.0075})
                            for t in stage.times
                        )
                    }
                )
                for stage in plan.stages
            )
        }
    )
    plot_timeline(fast, axes)
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert len(names) == 3 + 4
    end_ms = axes.get_xlim()[1]
    for name, boxes in zip(names, axes.collections, strict=True):
        extents = [path.get_extents().width for path in boxes.get_paths()]
        assert len(extents) == (24 if name.startswith("link") else 48)
        assert min(extents) >= end_ms * LEAST_WIDTH * 0.999


def test_links_that_say_nothing_are_a_remark(plan: Plan, axes: Axes) -> None:
    silent = plan.model_copy(
        update={
            "stages": tuple(
                stage.model_copy(
                    update={
                        "times": tuple(
                            t.model_copy(update={"send_forward_s": 1e-6, "send_backward_s": 1e-6}) for t in stage.times
                        )
                    }
                )
                for stage in plan.stages
            )
        }
    )
    plot_timeline(silent, axes)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["stage 0", "stage 1", "stage 2"]
    assert "not drawn are busy for at most 0.0%" in axes.get_xlabel()


def test_predicted_and_measured_are_on_one_clock(plan: Plan, axes: Axes) -> None:
    step = simulate_plan(plan)
    slow = replace(
        step,
        makespan_s=2 * step.makespan_s,
        events=tuple(replace(e, start_s=2 * e.start_s, end_s=2 * e.end_s) for e in step.events),
    )
    plot_timeline(plan, axes, measured=slow)
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names[:2] == ["stage 0 predicted", "stage 0 measured"]
    assert len(names) == 6
    assert axes.get_xlim()[1] == pytest.approx(2e3 * step.makespan_s)
    with pytest.raises(ArgumentError, match="give one of them"):
        plot_timeline(plan, axes, predicted=False)


def test_64_stages_fit_on_a_page(plan: Plan) -> None:
    """A timeline of 64 stages was 8,670 pixels high."""
    many = wide(plan, 64)
    for picture in (plot_timeline(many), plot_memory(many), plot_memory_over_time(many), plot_balance(many)):
        figure = picture.get_figure(root=True)
        assert figure is not None
        assert figure.get_figheight() <= TALLEST_IN
        pyplot.close(figure)


def test_a_limit_far_away_is_text_and_the_bars_have_the_height(plan: Plan, axes: Axes) -> None:
    """Bars of 32 MiB under a line at 12 GiB were an empty picture."""
    largest = max(memory.total for memory in plan.device_memories) / 2**20
    plot_memory(plan, axes)
    assert axes.get_ylim()[1] == pytest.approx(1.08 * largest)
    assert "limit of each device: 954 MiB" in axes.get_title()
    axes.clear()
    stages = tuple(
        s.model_copy(update={"devices": (s.device.model_copy(update={"memory_bytes": 2 * s.memory.total}),)})
        for s in plan.stages
    )
    plot_memory(plan.model_copy(update={"stages": stages}), axes)
    assert axes.get_ylim()[1] == pytest.approx(2.16 * largest)
    assert "limit" not in axes.get_title()


def test_memory_over_time_reaches_the_peak(plan: Plan, axes: Axes) -> None:
    plot_memory_over_time(plan, axes)
    peaks = [float(np.max(np.asarray(line.get_ydata()))) * 2**20 for line in axes.lines]
    assert peaks == pytest.approx([stage.memory.total for stage in plan.stages])


def test_every_cut_says_what_crosses(plan: Plan, profile: Profile, axes: Axes) -> None:
    plot_layers(plan, profile, axes)
    cuts = [stage.stop_layer - 0.5 for stage in plan.stages[:-1]]
    assert [(text.get_position()[0], text.get_text()) for text in axes.texts] == [(cut, "8 B") for cut in cuts]
    total_ms = sum(bar.get_height() for bars in axes.containers for bar in bars)
    assert total_ms == pytest.approx(6 * 300)
    loaded = Plan.parse_json(plan.to_json(), source="", error=ArgumentError)
    with pytest.raises(ArgumentError, match="does not know its profile"):
        plot_layers(loaded, ax=axes)


def test_other_layers_are_refused(plan: Plan, profile_of, axes: Axes) -> None:
    other = profile_of({("a", 1): [(0.1, 0.1, 0.2, 10, 4, 8, 8)] * 5})
    with pytest.raises(ArgumentError, match="6 layers and the profile 5"):
        plot_layers(plan, other, axes)


def test_balance_names_the_slowest(plan: Plan, axes: Axes) -> None:
    times = plan.stages[2].times[0]
    slow = plan.stages[2].model_copy(update={"times": (times.model_copy(update={"forward_s": 5 * times.forward_s}),)})
    plot_balance(plan.model_copy(update={"stages": (*plan.stages[:2], slow)}), axes)
    assert axes.get_title().startswith("balance: stage 2 takes 1.4")


@pytest.fixture
def frame() -> pandas.DataFrame:
    rows = [(4.0, 10, 1), (2.0, 30, 2), (3.0, 40, 4), (1.0, 50, 8), (float("nan"), float("nan"), 0)]
    return pandas.DataFrame(
        [
            {
                "step_s": s,
                "largest_memory_bytes": m,
                "K": k,
                "M": 8,
                "schedule": "gpipe",
                "samples_per_s": 8 / s,
                "x": n,
            }
            for n, (s, m, k) in enumerate(rows)
        ]
    )


def test_the_frontier_is_what_no_plan_beats_in_both(frame: pandas.DataFrame, axes: Axes) -> None:
    plot_frontier(frame, axes)
    assert [text.get_text() for text in axes.texts] == ["K 1, M 8", "K 2, M 8", "K 8, M 8"]
    assert "4 plans" in axes.get_title()
    with pytest.raises(ArgumentError, match="no column 'step_s'"):
        plot_frontier(frame.drop(columns="step_s"), axes)


def test_cases_without_a_plan_are_crosses(frame: pandas.DataFrame, axes: Axes) -> None:
    plot_sensitivity(frame, "x", axes)
    planned, without = axes.lines
    assert np.asarray(planned.get_ydata()).tolist() == [2.0, 4.0, 8 / 3, 8.0]
    assert np.asarray(without.get_xdata()).tolist() == [4]
    with pytest.raises(ArgumentError, match="no column 'y'"):
        plot_sensitivity(frame, "y", axes)
