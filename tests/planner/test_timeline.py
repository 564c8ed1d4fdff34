import itertools
import json
from collections import defaultdict

import pytest
from matplotlib import pyplot

from planner.from_profile import plan_from_profile
from planner.pictures.memory import plot_memory
from planner.pictures.timeline import plot_timeline
from planner.plan.simulator import simulate_plan
from planner.plan.timeline import box_texts, save_timeline_json
from profiler.device import Link


@pytest.fixture
def plan(profile_of, device):
    row = (0.1, 0.1, 0.2, 10, 4, 8, 8)
    profile = profile_of(
        {("a", size): [[value * size for value in row]] * 6 for size in (1, 2)},
        links=(Link(latency_s=0.01, bytes_per_s=100.0),),
    )
    return plan_from_profile(profile, [device()] * 3, batch_size=16, stages=3, micro_batches=14, recompute="always")


def test_boxes_have_their_micro_batch_all_or_none(plan):
    """B0 to B9 had numbers, and B10 had none."""
    events = [event for event in simulate_plan(plan).events if (event.lane, event.action.kind) == ("stage 0", "B")]
    assert len(events) == 14
    assert box_texts(events, [3.0] * 14) == [f"B{event.action.micro_batch}" for event in events]
    assert box_texts(events, [2.9] * 14) == ["B"] * 14
    assert box_texts(events, [3.0] * 13 + [0.9]) == ["B"] * 13 + [""]


@pytest.fixture
def trace(plan, tmp_path):
    save_timeline_json(plan, tmp_path / "trace.json")
    return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_slices_of_a_lane_are_in_order_and_never_overlap(trace, plan):
    lanes = defaultdict(list)
    for record in trace:
        if record["ph"] == "X":
            assert record["dur"] >= 0
            lanes[record["tid"]].append((record["ts"], record["ts"] + record["dur"]))
    assert len(lanes) == 3 + 4
    for spans in lanes.values():
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(spans))
    assert max(end for spans in lanes.values() for _, end in spans) == pytest.approx(
        simulate_plan(plan).makespan_s * 1e6
    )


def test_every_lane_has_a_name(trace):
    names = {record["tid"]: record["args"]["name"] for record in trace if record["name"] == "thread_name"}
    assert list(names.values()) == [
        "stage 0", "link 0>1", "link 1>0", "stage 1", "link 1>2", "link 2>1", "stage 2",
    ]  # fmt: skip
    assert set(names) == {record["tid"] for record in trace if record["ph"] == "X"}


def test_arrows_start_and_end_on_slices_and_never_go_back_in_time(trace):
    starts = {(record["tid"], record["ts"]) for record in trace if record["ph"] == "X"}
    tails = {record["id"]: record for record in trace if record["ph"] == "s"}
    heads = {record["id"]: record for record in trace if record["ph"] == "f"}
    assert set(tails) == set(heads)
    assert len(tails) == 2 * 4 * 14
    for number, tail in tails.items():
        assert (tail["tid"], tail["ts"]) in starts
        assert (heads[number]["tid"], heads[number]["ts"]) in starts
        assert tail["ts"] <= heads[number]["ts"]


def test_the_same_plan_gives_the_same_bytes(plan, tmp_path):
    for name in ("a.json", "b.json"):
        save_timeline_json(plan, tmp_path / name)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_plots_show_every_lane_and_stage(plan):
    figure, (above, below) = pyplot.subplots(2)
    axes = plot_timeline(plan, above)
    assert [label.get_text() for label in axes.get_yticklabels()][::3] == ["stage 0", "stage 1", "stage 2"]
    assert "K = 3, M = 14" in axes.get_title()
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "F  forward", "R  recompute", "B  backward", "send outputs", "send gradients",
    ]  # fmt: skip
    assert [label.get_text() for label in plot_memory(plan, below).get_xticklabels()] == [
        f"stage {stage}\ncpu" for stage in range(3)
    ]
    pyplot.close(figure)


def test_plots_open_their_own_figure(plan):
    for plot in (plot_timeline, plot_memory):
        figure = plot(plan).get_figure(root=True)
        assert figure is not None
        figure.canvas.draw()
        pyplot.close(figure)
