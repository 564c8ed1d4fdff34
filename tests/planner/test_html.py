"""What notebooks show of plans and profiles: it holds every pass and every byte, and nothing of a name is obeyed."""

from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from planner.from_profile import plan_from_profile
from planner.plan.colours import ACTION_COLOURS, ACTION_NAMES, MEMORY_COLOURS
from planner.plan.html import MOST_BARS, memory_svg, timeline_svg
from planner.plan.plan import Plan
from planner.plan.stage import StageMemory
from profiler.device import Link
from profiler.html import MOST_ROWS, table

SVG = "{http://www.w3.org/2000/svg}"
NASTY = '<script>alert("1")</script>&'


@pytest.fixture(scope="module")
def profile(profile_of):
    row = (0.1, 0.1, 0.2, 10, 4, 8, 8)
    return profile_of({("a", 1): [row] * 4}, links=(Link(latency_s=0.01, bytes_per_s=100.0),))


@pytest.fixture(scope="module")
def plan(profile, device) -> Plan:
    return plan_from_profile(
        profile, [device()] * 2, batch_size=8, stages=2, micro_batches=8, recompute="always", schedule="gpipe"
    )


def picture(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text[text.index("<svg") :])


def test_every_pass_is_a_box_of_its_length(plan: Plan) -> None:
    paths = [path.get("d", "").count("M") for path in picture(timeline_svg(plan)).iter(f"{SVG}path")]
    recomputed = plan.K * (plan.M - 1)  # the last micro-batch is not recomputed
    assert sum(paths) == 2 * plan.K * plan.M + recomputed
    letters = [text.text for text in picture(timeline_svg(plan)).iter(f"{SVG}text")]
    assert {"F0", "B7", "stage 1"} <= {*letters}


def test_bars_of_memory_are_as_long_as_the_bytes(plan: Plan) -> None:
    """The bars are far shorter than the limit here: it is said, and they have the whole width."""
    bars = [bar for bar in picture(memory_svg(plan)).iter(f"{SVG}rect") if bar.get("height") != "10.0"]
    total = sum(memory.total for memory in plan.device_memories)
    longest = max(memory.total for memory in plan.device_memories)
    lengths = sum(float(bar.get("width", "0")) for bar in bars)
    assert lengths == pytest.approx(total / longest * 610, abs=0.1 * len(bars))
    assert "far beyond the bars" in memory_svg(plan)


def test_the_limit_is_a_line_where_bars_come_near_it(plan: Plan) -> None:
    stages = tuple(
        stage.model_copy(
            update={"devices": (stage.device.model_copy(update={"memory_bytes": 2 * stage.memory.total}),)}
        )
        for stage in plan.stages
    )
    near = plan.model_copy(update={"stages": stages})
    assert len([*picture(memory_svg(near)).iter(f"{SVG}line")]) == 2
    assert "50%" in memory_svg(near)


def test_every_kind_and_class_has_a_colour() -> None:
    assert {*ACTION_COLOURS} == {*ACTION_NAMES}
    assert [*MEMORY_COLOURS] == [*StageMemory.model_fields]


def test_a_step_that_is_too_long_is_said_to_be(plan: Plan) -> None:
    many = plan.model_copy(update={"micro_batch_sizes": (1,) * MOST_BARS})
    assert "too many" in timeline_svg(many)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)


def test_names_are_text_and_never_markup(plan: Plan, profile) -> None:
    stages = tuple(
        stage.model_copy(
            update={
                "module_paths": (NASTY, NASTY),
                "devices": (stage.device.model_copy(update={"name": NASTY}),),
            }
        )
        for stage in plan.stages
    )
    layers = tuple(layer.model_copy(update={"name": NASTY}) for layer in profile.layers)
    for value in (
        plan.model_copy(update={"stages": stages, "optimizer": NASTY}),
        profile.model_copy(update={"layers": layers}),
    ):
        found = _Tags()
        found.feed(value._repr_html_())
        assert "script" not in found.tags
        assert {"table", "td"} <= {*found.tags}
        assert "&lt;script&gt;" in value._repr_html_()


def test_nothing_but_letters_in_boxes_is_black_or_white(plan: Plan, profile) -> None:
    """Text and lines have the page's colour, or they vanish on a dark page."""
    for text in picture(timeline_svg(plan)).iter(f"{SVG}text"):
        assert text.get("fill") == "currentColor" or text.get("font-size") == "10"
    for shown in (profile._repr_html_(), memory_svg(plan)):
        assert "black" not in shown
        assert "white" not in shown


def test_a_long_table_says_what_it_leaves_out() -> None:
    text = table(["row"], [[str(row)] for row in range(MOST_ROWS + 5)])
    assert "5 rows are left out" in text
    assert ">0<" in text
    assert f">{MOST_ROWS + 4}<" in text
