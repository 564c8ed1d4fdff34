import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.cost.layer_costs import CostModel, range_sums
from planner.cost.messages import Message
from planner.cost.parameter_ranges import ParameterRanges
from planner.cost.stage_memory import stage_memory
from planner.plan.actions import AHEAD_BYTES
from planner.plan.micro_batches import MicroBatches
from planner.plan.stage import Segment
from planner.plan.units import bytes_text, count_text, seconds_text
from profiler.errors import ProfileError
from tests.planner.made_up import most_held

#        forward, recompute, backward, kept, transient, output, output gradient
AT_2 = [(1, 1, 2, 10, 4, 8, 4), (2, 2, 4, 20, 6, 0, 0)]
AT_4 = [(3, 2, 5, 21, 8, 16, 8), (4, 3, 8, 40, 12, 0, 0)]


def test_costs_lie_on_the_line_between_measured_sizes(profile_of):
    costs = CostModel(profile_of({("a", 2): AT_2, ("a", 4): AT_4})).layers("a", 3)
    assert costs.forward_s.tolist() == [2, 3]
    assert costs.backward_s.tolist() == [3.5, 6]
    assert costs.kept_bytes.tolist() == [16, 30]  # 15.5 rounded up
    assert costs.output_gradient_bytes.tolist() == [6, 0]


@pytest.mark.parametrize("size", [1, 5])
def test_costs_are_not_extrapolated(profile_of, size):
    model = CostModel(profile_of({("a", 2): AT_2, ("a", 4): AT_4}))
    assert not model.covers("a", size)
    with pytest.raises(ProfileError, match=f"micro-batch of {size} samples? lies outside the 2 to 4 samples"):
        model.layers("a", size)


def test_an_unknown_device_kind_or_optimizer_is_named(profile_of):
    model = CostModel(profile_of({("a", 2): AT_2}))
    with pytest.raises(ProfileError, match=r"device kind 'b'; the profile holds \['a'\]"):
        model.layers("b", 2)
    with pytest.raises(ProfileError, match="optimizer SGD was not measured on device kind 'a'"):
        model.optimizer("a", "SGD")


def test_ranges():
    values = np.array([3.0, 1.0, 2.0])
    assert range_sums(values)[0].tolist() == [0, 3, 4, 6]
    assert range_sums(values)[1].tolist() == [0, 0, 1, 3]


def test_shared_parameters_are_held_once_and_have_a_gradient_for_each_reader(profile_of):
    profile = profile_of(
        {("a", 1): [(1,) * 3 + (0,) * 4] * 3},
        parameters=[(100, True), (10, True), (1, False)],
        readers=[(0, 2), (1, 2), (0, 2)],
    )
    ranges = ParameterRanges(profile)
    assert ranges.unique[0, 3] == 111  # p0 once though layers 0 and 2 read it
    assert ranges.trainable[0, 3] == 110
    assert ranges.gradients[0, 3] == 210  # layers 0 and 2 each have an accumulator for p0
    assert ranges.gradients[2, 3] == 100
    assert ranges.unique[1, 3] == 111
    assert ranges.unique[1, 2] == 11


def test_memory_by_hand(profile_of, device):
    rows = [(1, 1, 2, 10, 4, 8, 4), (1, 1, 2, 20, 6, 6, 2), (1, 1, 2, 30, 1, 0, 0)]
    profile = profile_of(
        {("a", 2): rows},
        parameters=[(100, True)] * 3,
        readers=[(0,), (1,), (2,)],
        buffers=[0, 7, 0],
        optimizer=(0.0, 2.0),
        input_bytes=3,
        reserve_bytes=5,
    )
    model, ranges = CostModel(profile), ParameterRanges(profile)
    split = MicroBatches(batch_size=8, count=4)
    optimizer = model.optimizer("a", "AdamW")

    def memory(first, stop, *segments, schedule="gpipe", number=1):
        return stage_memory(
            model,
            ranges,
            device(),
            schedule,
            split,
            optimizer,
            number=number,
            first=first,
            stop=stop,
            segments=[Segment(first=begin, stop=end) for begin, end in segments],
        )

    kept = memory(1, 2)
    assert kept.model_dump() == {
        "parameters": 107,
        "gradients": 100,
        "optimizer": 200,
        "activations": 4 * (8 + 20) + 8 * 3,
        "deferred": 0,
        "transient": 6,
        "receive_buffers": 4 * (2 + 6 + 4),  # gradients posted and read, outputs and gradients that leave; all short
        "reserve": 5,
    }
    again = memory(1, 2, (1, 2))
    assert (again.activations, again.transient) == (4 * 8 + 8 * 3, 20 + 6)
    ends = memory(0, 3)
    assert (ends.activations, ends.transient, ends.receive_buffers) == (4 * 60 + 24, 1, 0)
    # what enters a segment and what leaves it for a kept layer stays for every micro-batch
    middle = memory(0, 3, (1, 2))
    assert (middle.activations, middle.transient) == (4 * (10 + 30 + 8 + 6) + 24, 20 + 6)
    # segments follow each other: one boundary; the last one's values are there while what is behind it goes back
    two = memory(0, 3, (0, 1), (1, 2))
    assert (two.activations, two.transient) == (4 * (30 + 8 + 6) + 24, 20 + 6)
    # 1F1B has as many under way as there are stages from this one on
    assert memory(1, 2, schedule="1f1b", number=3).activations == 3 * (8 + 20) + 24
    assert memory(1, 2, schedule="1f1b", number=9).activations == 4 * (8 + 20) + 24
    # and as many messages: gradients posted and read, outputs and gradients that leave, inputs posted ahead
    under_way = [memory(1, 2, schedule="1f1b", number=number).receive_buffers for number in (1, 2, 3, 4)]
    assert under_way == [
        2 * 2 + 1 * 6 + 2 * 4 + 2 * 8,
        3 * 2 + 2 * 6 + 3 * 4 + 2 * 8,
        4 * 2 + 3 * 6 + 4 * 4 + 1 * 8,
        4 * 2 + 4 * 6 + 4 * 4 + 0 * 8,
    ]


def test_few_long_and_many_short_messages_are_under_way(profile_of, device):
    long, short = AHEAD_BYTES, AHEAD_BYTES // 3
    rows = [(1, 1, 2, 0, 0, long, long), (1, 1, 2, 0, 0, short, short), (1, 1, 2, 0, 0, 0, 0)]
    model = CostModel(profile_of({("a", 2): rows}, parameters=[(4, True)] * 3, readers=[(0,), (1,), (2,)]))
    split = MicroBatches(batch_size=16, count=8)
    costs = model.layers("a", 2)
    messages = Message.after_layers(costs, costs)
    assert messages.at_receiver(8, split, 8, keeps_all=True).tolist() == [2 * long, 3 * short, 0]
    assert messages.at_sender(8, 8).tolist() == [(3 + 2) * long, (4 + 3) * short, 0]
    assert messages.at_receiver(3, split, 2).tolist() == [(2 + 2) * long, (3 + 3) * short, 0]


@given(st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_memory_equals_the_oracle_for_unequal_micro_batches(profiles, oracle, device, data):
    profile = data.draw(profiles(kinds=("a",)))
    batch_size = data.draw(st.integers(1, 14))
    split = MicroBatches(batch_size, data.draw(st.integers(1, batch_size)))
    first = data.draw(st.integers(0, len(profile.layers) - 1))
    stop = data.draw(st.integers(first + 1, len(profile.layers)))
    schedule, number = data.draw(st.sampled_from(["gpipe", "1f1b"])), data.draw(st.integers(1, 4))
    judge = oracle(profile, (device(),), batch_size)
    segments = data.draw(st.sampled_from(judge.patterns(first, stop)))
    model = CostModel(profile)
    memory = stage_memory(
        model,
        ParameterRanges(profile),
        device(),
        schedule,
        split,
        model.optimizer("a", "AdamW"),
        number=number,
        first=first,
        stop=stop,
        segments=[Segment(first=begin, stop=end) for begin, end in segments],
    )
    held = split.sizes[: most_held(schedule, number, len(split.sizes))]
    assert memory.total == judge.memory("a", first, stop, split.sizes, held, segments)


@given(st.integers(1, 200), st.data())
def test_micro_batches_add_up_and_are_nearly_equal(batch_size, data):
    split = MicroBatches(batch_size, data.draw(st.integers(1, batch_size)))
    assert sum(split.sizes) == batch_size
    assert len(split.sizes) == split.count
    assert list(split.sizes) == sorted(split.sizes, reverse=True)
    assert (split.sizes[0], split.sizes[-1]) == (split.largest, split.smallest)
    assert split.sizes.count(split.largest) == split.number_largest
    assert split.largest - split.smallest == (0 if split.equal else 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bytes_text(0), "0 B"),
        (bytes_text(80 * 2**30), "80.0 GiB"),
        (seconds_text(2e-6), "2.00 us"),
        (seconds_text(125), "125 s"),
        (count_text(7_000_000_000), "7.00 B"),
    ],
)
def test_sizes_for_people(text, expected):
    assert text == expected
