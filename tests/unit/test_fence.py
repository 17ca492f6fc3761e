"""Fence of attempts: the highest attempt alone goes on, and opens each kind of call once."""

from __future__ import annotations

from random import Random

import pytest

from kvmoverd.core.errors import StaleAttempt
from kvmoverd.core.fence import AttemptFence


def test_a_higher_attempt_is_new_and_calls_of_the_same_attempt_are_not() -> None:
    fence = AttemptFence(10)
    assert fence.enter("stream", "r", 1)
    assert not fence.enter("push", "r", 1)
    assert fence.enter("push", "r", 3)
    assert not fence.enter("stream", "r", 3)
    assert fence.enter("stream", "other", 1)


def test_a_lower_attempt_is_refused_with_both_numbers_whatever_its_kind() -> None:
    fence = AttemptFence(10)
    fence.enter("stream", "r", 5)
    with pytest.raises(StaleAttempt, match="request 'r': attempt 4 is not above attempt 5") as refused:
        fence.enter("push", "r", 4)
    assert refused.value.details == {"request_id": "r", "attempt": "4", "known": "5"}


def test_a_kind_of_call_opens_once_an_attempt() -> None:
    fence = AttemptFence(10)
    fence.enter("stream", "r", 5)
    with pytest.raises(StaleAttempt, match="attempt 5 is not above attempt 5"):
        fence.enter("stream", "r", 5)
    assert not fence.enter("push", "r", 5)


def test_a_call_that_took_nothing_may_be_made_again_but_a_lower_attempt_stays_out() -> None:
    fence = AttemptFence(10)
    fence.enter("stream", "r", 2)
    fence.withdraw("stream", "r", 2)
    assert not fence.enter("stream", "r", 2)
    fence.withdraw("stream", "r", 2)
    with pytest.raises(StaleAttempt):
        fence.enter("stream", "r", 1)


def test_withdrawing_an_attempt_that_is_over_changes_nothing() -> None:
    fence = AttemptFence(10)
    fence.enter("stream", "r", 2)
    fence.withdraw("stream", "r", 1)
    fence.withdraw("stream", "unknown", 1)
    with pytest.raises(StaleAttempt):
        fence.enter("stream", "r", 2)


def test_the_request_that_was_quiet_longest_is_forgotten_first() -> None:
    fence = AttemptFence(2)
    fence.enter("stream", "a", 9)
    fence.enter("stream", "b", 9)
    fence.enter("push", "a", 9)
    fence.enter("stream", "c", 9)
    assert len(fence) == 2
    assert fence.enter("stream", "b", 1)
    with pytest.raises(StaleAttempt):
        fence.enter("stream", "c", 1)


def test_what_is_held_is_never_forgotten_however_much_comes_after_it() -> None:
    fence = AttemptFence(2)
    fence.enter("stream", "live", 7)
    fence.hold("live")
    fence.hold("live")
    for number in range(100):
        fence.enter("stream", f"other {number}", 1)
    assert len(fence) == 3
    with pytest.raises(StaleAttempt):
        fence.enter("push", "live", 6)
    fence.let_go("live")
    fence.enter("stream", "one more", 1)
    fence.enter("stream", "and one", 1)
    assert fence.is_current("live", 7), "one of its calls is still live"


def test_a_request_that_is_let_go_is_the_last_to_be_forgotten() -> None:
    fence = AttemptFence(2)
    fence.enter("stream", "live", 7)
    fence.hold("live")
    fence.enter("stream", "a", 1)
    fence.enter("stream", "b", 1)
    fence.let_go("live")
    assert (len(fence), fence.is_current("a", 1), fence.is_current("live", 7)) == (2, False, True)
    fence.enter("stream", "c", 1)
    fence.enter("stream", "d", 1)
    assert (len(fence), fence.is_current("live", 7)) == (2, False)


def test_a_hold_may_come_before_the_first_call() -> None:
    fence = AttemptFence(2)
    fence.hold("r")
    assert fence.enter("stream", "r", 1)
    fence.let_go("r")
    assert fence.is_current("r", 1)


def test_an_attempt_that_is_fenced_off_is_refused_with_all_lower_ones_and_the_next_one_is_new() -> None:
    fence = AttemptFence(10)
    fence.enter("stream", "r", 2)
    assert fence.fence_off("r", 2)
    for attempt in (1, 2):
        with pytest.raises(StaleAttempt, match=f"attempt {attempt} is not above attempt 2") as refused:
            fence.enter("push", "r", attempt)
        assert refused.value.details["known"] == "2"
    assert not fence.is_current("r", 2), "what is over may not go on while the node drains"
    assert fence.enter("push", "r", 3)
    assert not fence.enter("stream", "r", 3)


def test_a_request_may_be_fenced_off_before_its_first_call() -> None:
    fence = AttemptFence(10)
    assert fence.fence_off("r", 4)
    with pytest.raises(StaleAttempt):
        fence.enter("stream", "r", 4)
    assert fence.enter("stream", "r", 5)


def test_fencing_off_what_is_fenced_off_or_overtaken_is_no_news() -> None:
    fence = AttemptFence(10)
    assert fence.fence_off("r", 4)
    assert not fence.fence_off("r", 4)
    assert not fence.fence_off("r", 3)
    fence.enter("stream", "r", 7)
    assert not fence.fence_off("r", 6)
    assert not fence.enter("push", "r", 7), "the attempt that goes on is left alone"
    assert fence.fence_off("r", 9)


def test_withdrawing_a_call_does_not_let_in_what_is_fenced_off() -> None:
    fence = AttemptFence(10)
    fence.enter("stream", "r", 2)
    fence.fence_off("r", 2)
    fence.withdraw("stream", "r", 2)
    with pytest.raises(StaleAttempt):
        fence.enter("stream", "r", 2)


def test_fences_of_unknown_requests_are_remembered_like_requests_and_no_longer() -> None:
    fence = AttemptFence(2)
    fence.hold("live")
    for number in range(100):
        fence.fence_off(f"r{number}", 1)
    assert len(fence) == 3
    with pytest.raises(StaleAttempt):
        fence.enter("stream", "r99", 1)
    assert fence.enter("stream", "r0", 1)


@pytest.mark.parametrize("seed", range(5))
def test_attempts_never_go_back(seed: int) -> None:
    random, fence = Random(seed), AttemptFence(100)
    known: dict[str, tuple[int, set[str]]] = {}
    for _ in range(1000):
        kind, request_id, attempt = random.choice("sp"), random.choice("abcd"), random.randint(1, 40)
        highest, kinds = known.get(request_id, (0, set()))
        if attempt < highest or (attempt == highest and kind in kinds):
            with pytest.raises(StaleAttempt):
                fence.enter(kind, request_id, attempt)
            continue
        assert fence.enter(kind, request_id, attempt) == (attempt > highest)
        known[request_id] = (attempt, {kind} | (kinds if attempt == highest else set()))
