"""Pictures show what was decided: every message, every cut with its bytes, limits where they can be read."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pandas
import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import rgb_to_hsv, to_rgb
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from planner.from_profile import plan_from_profile
from planner.keywords import SettingKeywords
from planner.pictures.canvas import TALLEST_IN
from planner.pictures.choices import plot_frontier, plot_sensitivity
from planner.pictures.layers import MOST_WRITTEN, plot_balance, plot_layers
from planner.pictures.memory import plot_memory, plot_memory_over_time
from planner.pictures.timeline import LEAST_WIDTH, plot_timeline
from planner.plan.plan import Plan
from planner.plan.simulator import simulate_plan
from planner.plan.units import bytes_text
from profiler.device import Device, Link
from profiler.errors import ArgumentError
from profiler.record import Profile

ROOT = Path(__file__).resolve().parents[2]


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
    assert axes.get_xlim()[1] == pytest.approx(2 * step.makespan_s)
    assert axes.get_xlabel().startswith("time in s;")
    with pytest.raises(ArgumentError, match="give one of them"):
        plot_timeline(plan, axes, predicted=False)


def test_a_row_has_micro_batches_in_all_boxes_or_in_none(plan: Plan, axes: Axes) -> None:
    """B0 to B9 had numbers, and the narrower B10 had none."""
    plot_timeline(plan, axes)
    for row in range(3):
        texts = [text.get_text() for text in axes.texts if text.get_position()[1] == row]
        for kind in "FB":
            assert len({len(text) > 1 for text in texts if text.startswith(kind)}) <= 1, texts


def test_of_many_pairs_the_picture_says_which_row_is_measured(plan: Plan, axes: Axes) -> None:
    """Every second row was named, and all of these were predicted ones."""
    many = wide(plan, 64)
    plot_timeline(many, axes, measured=simulate_plan(many))
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [f"stage {k}" for k in range(64)]
    assert [float(place) for place in axes.get_yticks()] == [2 * k + 0.5 for k in range(64)]
    assert "the upper one is predicted, the lower one measured" in axes.get_xlabel()


def test_what_crosses_many_cuts_alike_is_said_once(profile_of, axes: Axes) -> None:
    """64 texts of half a millimetre said the same."""
    count = MOST_WRITTEN + 2
    profile = profile_of({("a", 1): [(0.1, 0.1, 0.2, 10, 4, 8, 8)] * count})
    device = Device(name="a:0", kind="a", memory_bytes=10**9)
    plan = plan_from_profile(
        profile, [device] * count, batch_size=count, stages=count, micro_batches=count, micro_batches_per_stage=1
    )
    plot_layers(plan, profile, axes)
    assert axes.get_title().endswith("; 8 B cross at each")
    assert not axes.texts


def test_what_crosses_close_cuts_is_said_of_the_most(profile_of, axes: Axes) -> None:
    """Among 200 layers the texts of neighbouring cuts covered each other."""
    rows = [(0.1, 0.1, 0.2, 10, 4, 8 + layer, 8 + layer) for layer in range(200)]
    profile = profile_of({("a", 1): rows})
    device = Device(name="a:0", kind="a", memory_bytes=10**9)
    asked: SettingKeywords = {"stages": 40, "micro_batches": 40, "micro_batches_per_stage": 1, "time_limit_s": 1.0}
    plan = plan_from_profile(profile, [device] * 40, batch_size=40, **asked)
    edges = [*range(1, 40), 200]  # cuts after each of the first layers
    stages = tuple(
        stage.model_copy(update={"first_layer": first, "stop_layer": stop, "recompute": ()})
        for stage, first, stop in zip(plan.stages, [0, *edges], edges, strict=False)
    )
    plot_layers(plan.model_copy(update={"stages": stages}), profile, axes)
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: box.x0)
    assert 5 < len(boxes) < 39
    assert all(one.x1 <= other.x0 + 1 for one, other in pairwise(boxes))
    assert max(axes.texts, key=lambda text: text.get_position()[0]).get_text() == "46 B"
    assert axes.get_xlabel().endswith("what crosses on top, the most of close ones")


def test_memory_of_many_stages_is_a_map_up_to_the_limit(plan: Plan, axes: Axes) -> None:
    full = wide(plan, 8)
    limit = max(stage.memory.total for stage in full.stages) * 2
    stages = tuple(
        stage.model_copy(update={"devices": (stage.device.model_copy(update={"memory_bytes": limit}),)})
        for stage in full.stages
    )
    plot_memory_over_time(full.model_copy(update={"stages": stages}), axes)
    (image,) = axes.images
    assert image.get_clim() == (0, 100)
    fullest = np.asarray(image.get_array()).max(axis=1)  # of each stage, however short its peak
    assert fullest == pytest.approx([100 * stage.memory.total / limit for stage in full.stages])
    assert axes.get_title().endswith("50% of its device")


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


def test_a_stage_at_the_mean_is_no_less_than_it(plan: Plan, axes: Axes) -> None:
    """A stage just below the mean was labelled -0%."""
    times = plan.stages[0].times[0]
    less = times.model_copy(update={"forward_s": 0.9999 * times.forward_s})
    first, *others = plan.stages
    stages = [
        first.model_copy(update={"times": (less,)}),
        *(one.model_copy(update={"times": (times,)}) for one in others),
    ]
    plot_balance(plan.model_copy(update={"stages": tuple(stages)}), axes)
    assert {text.get_text() for text in axes.texts} == {"0%"}


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


def texts_that_touch(texts: Sequence[Text], axes: Axes) -> list[tuple[str, str]]:
    """Pairs of texts whose last lines, which are not empty, overlap in the drawn picture."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    boxes = []
    for text in texts:
        box, lines = text.get_window_extent(), text.get_text().count("\n") + 1
        boxes += [(text.get_text(), Bbox([box.min, (box.x1, box.y0 + box.height / lines)]))] if text.get_text() else []
    return [(one, other) for (one, a), (other, b) in combinations(boxes, 2) if a.overlaps(b)]


@pytest.mark.parametrize("seed", range(4))
def test_names_of_points_do_not_touch(frame: pandas.DataFrame, seed: int) -> None:
    """`K 64, M 1536` ran into the next one, and into the legend."""
    draw = np.random.default_rng(seed)
    found = pandas.concat([frame.iloc[:1]] * 11, ignore_index=True)
    found["batch_size"] = [64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]
    found["M"], found["K"] = found["batch_size"], 64
    found["samples_per_s"] = 8 + draw.uniform(0, 0.3, len(found))
    axes = plot_sensitivity(found, "batch_size")
    axes.figure.canvas.draw()
    assert len(axes.texts) > 3
    assert not texts_that_touch(axes.texts, axes)
    pyplot.close("all")


@pytest.mark.parametrize("style", ["default", "dark_background"])
def test_what_is_no_data_is_seen_on_dark_paper_as_well(
    plan: Plan, profile: Profile, frame: pandas.DataFrame, style: str
) -> None:
    """The frontier, cuts, means and limits were black on black."""
    with pyplot.style.context(style):
        for drawn in (plot_frontier(frame), plot_layers(plan, profile), plot_balance(plan), plot_memory(plan)):
            dashed = [line.get_color() for line in drawn.lines if line.get_linestyle() == "--"]
            for one in drawn.collections:
                dashed += [*one.get_edgecolor()] if isinstance(one, LineCollection) else []
            for colour in dashed:
                paper = rgb_to_hsv(to_rgb(drawn.get_facecolor()))[2]
                assert abs(rgb_to_hsv(to_rgb(colour))[2] - paper) > 0.5
            assert dashed or "limit" in drawn.get_title() or "device" in drawn.get_title()
        pyplot.close("all")


@pytest.mark.parametrize("seed", range(4))
def test_names_of_cases_do_not_touch(frame: pandas.DataFrame, seed: int) -> None:
    """Two of them did below the picture of memory limits."""
    limits = np.sort(np.random.default_rng(seed).integers(8, 96, len(frame))) * 2.0**30
    limits[1] = limits[0] * 1.02
    axes = plot_sensitivity(frame.assign(memory_limit=limits), "memory_limit")
    labels = axes.get_xticklabels()
    assert [text.get_text().strip() for text in labels] == [bytes_text(limit) for limit in sorted({*limits})]
    assert texts_that_touch(labels, axes) == []
    pyplot.close()


@pytest.mark.parametrize("file", ["notebooks/plan.json", "tests/data/formats/plan-2-orders.json"])
@pytest.mark.parametrize("width_in", [None, 4.0, 7.0, 30.0])
def test_letters_in_boxes_do_not_touch(file: str, width_in: float | None) -> None:
    given = None if width_in is None else pyplot.figure(figsize=(width_in, 3.0)).subplots()
    axes = plot_timeline(Plan.load(ROOT / file), given)
    assert texts_that_touch(axes.texts, axes) == []
    assert width_in != 30.0 or any(len(text.get_text()) > 1 for text in axes.texts)
    pyplot.close()
