"""Memory in holes between tensors goes back before it runs short: when, and that no thread is left behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from executor.watch.holes import LAST, OFTENEST_S, SELDOMEST_S, TIGHT, Holes, give_holes_back
from profiler.machine.allocator import has_glibc

WHOLE = 2**30


class World:
    """A process that holds tensors and holes in a group of `WHOLE` bytes."""

    def __init__(self) -> None:
        self.tensors = self.holes = self.given = 0

    def room(self) -> tuple[int, int]:
        return WHOLE, WHOLE - self.tensors - self.holes

    def give_back(self) -> None:
        self.given += 1
        self.holes = 0


def grown(world: World, holes: Holes, steps: Iterator[tuple[int, int]]) -> None:
    for tensors, more_holes in steps:
        world.tensors, world.holes = tensors, world.holes + more_holes
        assert world.tensors + world.holes <= WHOLE, "killed"
        assert holes.look() >= OFTENEST_S


def test_nothing_is_given_back_while_there_is_room() -> None:
    world = World()
    holes = Holes(world.room, world.give_back)
    grown(world, holes, ((1000 * step, WHOLE * 7 // 8 // 1002) for step in range(1000)))
    assert world.given == 0


def test_holes_never_fill_the_room_that_tensors_leave() -> None:
    world = World()
    holes = Holes(world.room, world.give_back)
    step = WHOLE // 200
    grown(world, holes, ((WHOLE * 3 // 4, step) for _ in range(1000)))
    assert 1000 // 60 <= world.given <= 1000 // 20
    before = world.given
    world.holes = 0
    grown(world, holes, ((int(WHOLE * 0.96), step) for _ in range(100)))
    assert world.given > before


def test_after_a_tight_moment_room_is_kept_as_before_it() -> None:
    world = World()
    holes = Holes(world.room, world.give_back)
    grown(world, holes, iter([(int(WHOLE * 0.98), 0)]))
    assert world.given == 1
    grown(world, holes, iter([(WHOLE // 2, WHOLE // 2 - WHOLE // 80), (WHOLE // 2, int(WHOLE * 0.4))]))
    assert world.given == 3, "less than TIGHT was left each time"
    assert TIGHT * WHOLE > WHOLE * 0.1


def test_where_nothing_helps_most_of_the_time_is_left_to_the_training() -> None:
    given = threading.Event()

    def in_vain() -> None:
        given.wait(0.02)

    assert Holes(lambda: (WHOLE, int(2 * LAST * WHOLE)), in_vain).look() >= 0.2
    assert 0.02 <= Holes(lambda: (WHOLE, 1), in_vain).look() < 0.2, "half of it, where the next page may be the last"
    assert Holes(lambda: (WHOLE, WHOLE), given.set).look() < SELDOMEST_S
    assert Holes(lambda: (2**50, 2**50), given.set).look() == SELDOMEST_S
    assert not given.is_set()


@pytest.mark.skipif(not has_glibc(), reason="only glibc keeps what is freed")
def test_the_thread_ends_with_its_owner() -> None:
    class Owner:
        pass

    before = set(threading.enumerate())
    owner = Owner()
    give_holes_back(owner)
    [thread] = set(threading.enumerate()) - before
    assert thread.daemon
    del owner
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
