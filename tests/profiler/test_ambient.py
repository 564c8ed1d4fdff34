"""What holds around a call that trains, and is as it was after it."""

import threading

import torch

from profiler.observe.ambient import as_in_training


def keeps_casts() -> bool:
    """Whether a region that asks for it keeps the casts of leaves."""
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
        return torch.is_autocast_cache_enabled()


def test_no_region_within_keeps_casts_and_each_after_it() -> None:
    for _ in range(2):
        with as_in_training():
            with as_in_training():
                assert not keeps_casts()
            assert not keeps_casts()
            assert not torch.is_autocast_cache_enabled()
        assert torch.is_autocast_cache_enabled()
        assert keeps_casts()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert not torch.is_autocast_cache_enabled()


def test_it_holds_in_the_thread_that_trains_and_no_other() -> None:
    original = torch.set_autocast_cache_enabled
    began, may_end, found = threading.Event(), threading.Event(), []

    def train() -> None:
        with as_in_training():
            began.set()
            assert may_end.wait(60)
            found.append(keeps_casts())

    other = threading.Thread(target=train)
    with as_in_training():
        other.start()
        assert began.wait(60)
    assert keeps_casts()
    may_end.set()
    other.join()
    assert found == [False]
    assert torch.set_autocast_cache_enabled is original
