"""Which pair of CNICs takes over, and what is remembered of links so that a frame repeated over another one is not told twice."""

from __future__ import annotations

import itertools

import pytest

from kvmoverd.adapters.transport.verbs.link import PAUSE_MAX_S, PAUSE_MIN_S, Patience
from kvmoverd.adapters.transport.verbs.pairs import other_pair
from kvmoverd.adapters.transport.verbs.pasts import TOLD_MAX, Pasts

A, B = ("a", "boot-1"), ("b", "boot-1")


@pytest.mark.parametrize(("cnics", "peer_cnics"), [(1, 1), (1, 4), (4, 1), (2, 2), (3, 5), (8, 8)])
def test_pairs_that_fail_one_after_the_other_are_all_tried_once_and_disjoint_ones_first(
    cnics: int, peer_cnics: int
) -> None:
    tried = [(0, 0)]
    while (pair := other_pair(tried[0], cnics, peer_cnics, out=set(), on_trial=set(), tried=tried)) is not None:
        tried.append(pair)
    assert sorted(tried) == sorted(itertools.product(range(cnics), range(peer_cnics)))
    least = min(cnics, peer_cnics)
    assert len({near for near, _ in tried[:least]}) == len({far for _, far in tried[:least]}) == least


def test_a_pair_on_trial_comes_last_and_one_that_is_out_never() -> None:
    def other(**told: set[tuple[int, int]]) -> tuple[int, int] | None:
        return other_pair((0, 0), 2, 2, **({"out": {(0, 0)}, "on_trial": set(), "tried": set()} | told))

    assert other() == (1, 1)
    assert other(on_trial={(1, 1)}) in ((0, 1), (1, 0))
    assert other(on_trial={(1, 1), (0, 1), (1, 0)}) == (1, 1)
    assert other(out={(0, 0), (1, 1), (0, 1), (1, 0)}) is None
    assert other(tried={(1, 1), (0, 1), (1, 0)}) is None


def test_what_one_link_told_is_known_of_its_sender_whatever_its_other_links_tell() -> None:
    pasts = Pasts()
    pasts.begin(A, 1, 1).told.append(5)
    busy = pasts.begin(A, 2, 1)
    busy.told.extend(range(100, 100 + 10 * TOLD_MAX))
    assert pasts.told(A, 5) and pasts.told(A, 99 + 10 * TOLD_MAX)
    assert not pasts.told(A, 100) and not pasts.told(B, 5)
    assert pasts.begin(A, 1, 2).told[0] == 5 and pasts.generation(A, 1) == 2
    pasts.drop(A)
    assert not pasts.told(A, 5) and pasts.generation(A, 1) is None


def test_more_links_than_the_limit_push_out_the_oldest_of_who_was_quiet_longest() -> None:
    pasts = Pasts(links_max=4)
    for sender, link_id in [(A, 1), (A, 2), (B, 1), (B, 2), (A, 1), (B, 3), (B, 4)]:
        pasts.begin(sender, link_id, 1)
    known = [(sender, n) for sender in (A, B) for n in range(1, 5) if pasts.generation(sender, n) is not None]
    assert known == [(B, 1), (B, 2), (B, 3), (B, 4)]
    pasts.drop(B)
    pasts.begin(A, 7, 1)
    assert pasts.generation(A, 7) == 1


def test_a_pair_that_fails_while_another_one_works_is_tried_ever_more_seldom_and_at_once_when_none_works() -> None:
    patience, now_s, pauses_s = Patience(), 100.0, []
    for _ in range(6):
        patience.rest(now_s, elsewhere=True)
        patience.doubted = True
        pauses_s.append(patience.until_s - now_s)
        assert patience.rests(patience.until_s - 0.01) and not patience.rests(patience.until_s)
        now_s = patience.until_s
    assert pauses_s == [1.0, 4.0, 16.0, 60.0, 60.0, 60.0]
    patience.rest(now_s, elsewhere=True)
    patience.hurry(now_s)
    assert patience.until_s == now_s + PAUSE_MAX_S
    patience.rest(now_s)
    assert patience.until_s == now_s + PAUSE_MAX_S
    patience.prove()
    patience.rest(now_s)
    assert patience.until_s == now_s + PAUSE_MIN_S
