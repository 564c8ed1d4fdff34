"""Who is to blame, by what is known of the ranks; the time is what a test says it is."""

import pytest

from executor.watch.accusation import Blame
from executor.watch.position import Phase, Position
from planner.plan.actions import Action, ActionKind
from profiler.machine.journal import Entry

TIMEOUT_S = 60.0
LATE_S = 59.0  # by then any rank's turn to blame has come
RECEIVES, COMPUTES = list(ActionKind).index(ActionKind.RECV_F), list(ActionKind).index(ActionKind.F)


AT = Position(Phase.ACTION, 5, 7, Action(0, ActionKind.RECV_F, 3))


def action(count: int, kind: int, calls: int = 5, rank: int = 0) -> Entry:
    return count, Phase.ACTION, calls, 7, rank, kind, 3


def outside(count: int, calls: int = 5) -> Entry:
    return count, Phase.OUTSIDE, calls, 7, 0, 0, 0


def blame_of(rank: int) -> Blame:
    return Blame(rank, 3, {other: None for other in range(3) if other != rank}, timeout_s=TIMEOUT_S, now_s=0.0)


def accused(
    entries: dict[int, Entry], *, by: int = 0, silent: tuple[int, ...] = (), now_s: float = LATE_S
) -> str | None:
    """What a rank says in the end, all ranks being at these entries since the beginning."""
    blame = blame_of(by)
    for heard_s in (0.0, now_s):
        for rank, entry in entries.items():
            if rank == by:
                blame.note(entry, now_s=heard_s)
            elif rank not in silent or heard_s == 0.0:
                blame.hear(rank, {"at": list(entry)}, now_s=heard_s)
    cause = blame.stuck(now_s=now_s)
    return None if cause is None else cause.text


def test_the_rank_that_does_not_answer_is_to_blame() -> None:
    entries = {rank: action(9, RECEIVES, rank=rank) for rank in range(3)}
    text = accused(entries, silent=(2,))
    assert text is not None
    assert text.startswith("rank 2 of 3 failed: it has not answered for 59 s")
    assert "last at step 7, stage 2, micro-batch 3, action 2RECV_F3; rank 0 has waited 59 s at step 7" in text


def test_the_rank_that_computes_while_others_wait_is_to_blame() -> None:
    entries = {0: action(9, RECEIVES), 1: action(9, COMPUTES, rank=1), 2: action(9, RECEIVES, rank=2)}
    for rank in (0, 2):
        text = accused(entries, by=rank)
        assert text is not None
        assert text.startswith("rank 1 of 3 failed: it has been at step 7, stage 1, micro-batch 3, action 1F3 for 59 s")
        assert f"rank {rank} has waited 59 s" in text


def test_the_rank_that_makes_no_further_call_is_to_blame() -> None:
    """Rank 1 is in the same call as rank 0, and waits for nobody: but rank 2 has not begun that call."""
    text = accused({0: action(9, RECEIVES), 1: action(9, COMPUTES), 2: outside(9, calls=4)})
    assert text is not None
    assert text.startswith(
        "rank 2 of 3 failed: it has been at step 7, outside of the pipeline's calls for 59 s, after 4"
    )


def test_where_all_wait_for_each_other_a_rank_accuses_itself() -> None:
    text = accused({rank: action(9, RECEIVES, rank=rank) for rank in range(3)}, by=1)
    assert text is not None
    assert text.startswith("rank 1 of 3 failed: rank 1 has waited 59 s at step 7")
    assert "rank 0 at step 7" in text
    assert "rank 2 at step 7" in text


@pytest.mark.parametrize("phase", [Phase.CONSTRUCTION, Phase.PREPARATION, Phase.SAVE, Phase.LOAD])
def test_a_rank_that_traces_or_writes_has_all_the_time_it_needs(phase: Phase) -> None:
    assert accused({0: action(9, RECEIVES), 1: (9, phase, 5, 7, 0, 0, 0), 2: action(9, RECEIVES)}) is None


def test_nobody_is_to_blame_while_this_rank_computes() -> None:
    assert accused({0: action(9, COMPUTES), 1: action(9, RECEIVES), 2: action(9, RECEIVES)}, silent=(1, 2)) is None


def test_each_new_entry_begins_the_wait_anew() -> None:
    blame = blame_of(0)
    for count in range(5):
        blame.note(action(count, RECEIVES), now_s=40.0 * count)
        assert blame.stuck(now_s=40.0 * count + 39.0) is None


def test_ranks_take_their_turn_to_tell_of_one_that_is_stuck() -> None:
    """In rank order: who has spoken is heard before the next one's turn."""
    turns_s = [blame_of(rank).pause_s(now_s=0.0) for rank in range(3)]
    assert turns_s == pytest.approx([48.0, 50.0, 52.0])
    entries = {rank: action(9, RECEIVES, rank=rank) for rank in range(3)}
    for rank, turn_s in enumerate(turns_s):
        assert accused(entries, by=rank, now_s=turn_s - 0.1) is None
        assert accused(entries, by=rank, now_s=turn_s + 0.1) is not None


def test_a_process_that_ends_without_goodbye_is_to_blame_at_once() -> None:
    blame = blame_of(2)
    blame.hear(1, {"at": list(action(9, COMPUTES, rank=1))}, now_s=1.0)
    blame.hear(1, None, now_s=2.0)
    cause = blame.gone(AT, now_s=2.0)
    assert cause is not None
    assert cause.rank == 1
    assert cause.text.startswith("rank 1 of 3 failed: its process ended without a word (killed, ")
    assert cause.text.endswith("last at step 7, stage 1, micro-batch 3, action 1F3")


@pytest.mark.parametrize(("rank", "turn_s"), [(0, 0.0), (1, 0.2)])
def test_a_process_that_ends_too_early_is_to_blame_in_turn(rank: int, turn_s: float) -> None:
    blame = blame_of(rank)
    blame.hear(2, {"finished": 4}, now_s=1.0)
    blame.hear(2, None, now_s=1.0)
    if turn_s:
        assert blame.gone(AT, now_s=1.0) is None
        assert blame.pause_s(now_s=1.0) == pytest.approx(turn_s)
    cause = blame.gone(AT, now_s=1.1 + turn_s)
    assert cause is not None
    assert cause.text.startswith("rank 2 of 3 failed: it ended after 4 of the pipeline's calls")
    assert f"rank {rank} makes a call more: step 7" in cause.text


def test_a_process_that_has_done_its_part_may_go() -> None:
    blame = blame_of(0)
    blame.hear(2, {"finished": 5}, now_s=1.0)
    blame.hear(2, None, now_s=1.0)
    assert blame.gone(AT, now_s=10.0) is None
