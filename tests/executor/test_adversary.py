"""Random models by random plans in small; ten thousand, and in processes, in tests/benchmarks/test_adversary.py.

A failing example prints its `Case`, which `check` takes.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.executor.adversary import Case, Subject, planned_case, random_case, wrong
from tests.models.random_models import Recipe, random_recipe


def check(case: Case) -> None:
    assert wrong(case, Subject(case.recipe)) == {}, case


@settings(derandomize=True, deadline=None, max_examples=4)
@given(st.integers(0, 2**32))
def test_random_models_train_as_they_would_alone(seed: int) -> None:
    chance = random.Random(seed)
    recipe = random_recipe(chance, chance.randint(5, 14))
    subject = Subject(str(recipe))
    for _ in range(2):
        case = random_case(recipe, len(subject.sequence), chance)
        assert wrong(case, subject) == {}, case
    case = planned_case(subject, chance)
    assert wrong(case, subject) == {}, case


@pytest.mark.parametrize(
    "case",
    [
        # A hook that brings gradients into layout was called with None, for a result of `unbind` that nothing reads.
        Case(
            "stack 1 1; stack 1 1; sum 3; last 1 0; fill_ 2; pair 2 p0 p1; reshape 5 3; unbind 6"
            " | returns 9,8 | loss 9 | frozen p0",
            batch_size=2,
            micro_batches=2,
            cuts=(1, 2),
            recompute=((), (), ()),
        ),
        # Rows of overlapping windows of one sample are a view: their gradient was brought into its layout, in which
        # two elements share their memory, so that one of the two was lost. Expanded ones ended the step.
        Case(
            "linear 0 p0; view 2 3,4; windows 3; rows 4 p1 | returns 5 | loss 5",
            batch_size=3,
            micro_batches=3,
            cuts=(1,),
            recompute=((), ()),
        ),
        Case(
            "linear 0 p0; expand 2 2; rows 3 p1 | returns 4 | loss 4",
            batch_size=3,
            micro_batches=3,
            cuts=(1,),
            recompute=((), ()),
        ),
        # A value that carries a gradient only since a later stage writes it came there as if it carried one before:
        # what was made of it until then was kept for a backward pass, and written in place, which torch refused.
        Case(
            "add 0 0; mul 2 2; add_gain_ 2 p0; relu_ 3; tanh_ 4; add 4 2 | returns 6 | loss 6",
            batch_size=3,
            micro_batches=3,
            cuts=(1,),
            recompute=((), ()),
        ),
        # What is made early, and an input, come to the loss past all stages, in a record.
        Case(
            "linear 0 p0; linear 2 p1; tanh 3; linear 4 p2; embed 1 p3; linear 5 p4 | returns 2,0,7,1,2 | loss 2,0,7,1"
            " | as record",
            batch_size=5,
            micro_batches=2,
            cuts=(1, 2, 3),
            schedule="1f1b",
            recompute=((), ((1, 2),), (), ()),
            skips=True,
        ),
        # Hyper-connections and a position: gradients shared memory with the next stage's.
        Case(
            "hyper 0 p0 p1 p2; hyper 2 p3 p4 p5; position 3 p6; sum 4 | returns 5 | loss 5",
            batch_size=4,
            micro_batches=4,
            cuts=(2, 4),
            recompute=((), (), ()),
        ),
    ],
)
def test_cases_that_were_wrong(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    "recipe",
    [
        "linear 0 p0; embed 1 p2; norm 2 p4 p3; relu_ 3; squeeze 4; mul_ 2; add 5 5; row_ 4"
        " | returns 4,7 | loss 7 | frozen p0",
        "biased 0 p2 p3; biased 2 p4 p5; tanh_ 2; pair 1 p8 p9; biased 3 p10 p11; tanh 6; cumsum 5; first_ 6; relu_ 8"
        " | returns 9 | loss 9 | frozen p9",
    ],
)
def test_what_the_loss_does_not_use_is_planned_too(recipe: str) -> None:
    """Costs were counted with a backward pass of what is overwritten, which training does not have: nothing fitted."""
    subject = Subject(recipe)
    case = planned_case(subject, random.Random(0))
    assert wrong(case, subject) == {}, case


def test_a_recipe_is_its_text() -> None:
    for seed in range(20):
        recipe = random_recipe(random.Random(seed), 10)
        assert Recipe.parse(str(recipe)) == recipe
