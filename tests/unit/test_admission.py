"""Admission: shares by purpose, and waiting in order without anyone being overtaken for ever."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest

from kvmoverd.core.admission import Admission, Granted, Purpose, Waiting
from kvmoverd.core.errors import QueueFull, TooBig

READ, DE_BUFFER, WRITE_BACK, _ = Purpose


def admission(*, queue_max: int = 10) -> Admission:
    return Admission({READ: 100, DE_BUFFER: 50, WRITE_BACK: 10}, queue_max=queue_max)


def test_what_fits_is_granted_and_what_is_given_back_can_be_taken_again() -> None:
    room = admission()
    assert room.ask(READ, 1, 60) == Granted()
    assert room.ask(READ, 2, 40) == Granted()
    assert (room.taken_bytes(READ), room.free_bytes(READ)) == (100, 0)
    assert room.give_back(READ, 60) == []
    assert room.ask(READ, 3, 60) == Granted()


def test_one_purpose_does_not_take_from_another() -> None:
    room = admission()
    room.ask(READ, 1, 100)
    assert room.ask(DE_BUFFER, 2, 50) == Granted()
    assert room.ask(WRITE_BACK, 3, 10) == Granted()
    assert room.ask(READ, 4, 1) == Waiting(0)


def test_a_large_request_is_not_overtaken_by_small_ones_that_would_fit() -> None:
    room = admission()
    room.ask(READ, 1, 60)
    assert room.ask(READ, 2, 90) == Waiting(0)
    assert room.ask(READ, 3, 1) == Waiting(1)
    assert room.waiting(READ) == 2
    assert room.give_back(READ, 60) == [2, 3]
    assert (room.taken_bytes(READ), room.waiting(READ)) == (91, 0)


def test_requests_are_granted_in_order_as_far_as_the_room_goes() -> None:
    room = admission()
    room.ask(READ, 1, 100)
    for number, size_bytes in ((2, 30), (3, 30), (4, 60), (5, 10)):
        room.ask(READ, number, size_bytes)
    assert room.give_back(READ, 100) == [2, 3]
    assert room.give_back(READ, 30) == [4, 5]


def test_an_older_request_goes_before_those_that_came_later_and_behind_those_of_its_age() -> None:
    room = admission()
    room.ask(READ, 1, 100, since_s=1.0)
    assert room.ask(READ, 2, 30, since_s=5.0) == Waiting(0)
    assert room.ask(READ, 3, 80, since_s=7.0) == Waiting(1)
    assert room.ask(READ, 4, 90, since_s=5.0) == Waiting(1)
    assert room.ask(READ, 5, 80, since_s=2.0) == Waiting(0)
    assert room.give_back(READ, 100) == [5]
    assert room.ask(READ, 6, 20, since_s=0.0) == Granted(), "nobody older waits, and it fits"
    assert [room.give_back(READ, size) for size in (80, 20)] == [[2], []]


def test_who_leaves_the_queue_lets_those_behind_go_on() -> None:
    room = admission()
    room.ask(READ, 1, 60)
    room.ask(READ, 2, 90)
    room.ask(READ, 3, 20)
    room.ask(READ, 4, 20)
    room.ask(READ, 5, 20)
    assert room.leave(READ, 4) == []
    assert room.leave(READ, 2) == [3, 5]
    assert room.leave(READ, 99) == []
    assert room.taken_bytes(READ) == 100


def test_what_could_never_fit_is_refused_at_once_with_the_limit_named() -> None:
    room = admission()
    with pytest.raises(TooBig, match=r"51 bytes of the pool are needed, pool.de_buffer_bytes allows 50"):
        room.ask(DE_BUFFER, 1, 51)
    assert room.ask(DE_BUFFER, 2, 50) == Granted()


def test_one_waiter_too_many_is_refused_with_the_numbers() -> None:
    room = admission(queue_max=1)
    room.ask(WRITE_BACK, 1, 10)
    room.ask(WRITE_BACK, 2, 10)
    with pytest.raises(QueueFull, match=r"1 requests wait for pool.write_back_bytes, at most 1 may"):
        room.ask(WRITE_BACK, 3, 10)
    assert room.give_back(WRITE_BACK, 10) == [2]


def test_a_request_that_needs_nothing_waits_for_nobody() -> None:
    room = admission(queue_max=1)
    room.ask(READ, 1, 100)
    room.ask(READ, 2, 1)
    assert room.ask(READ, 3, 0) == Granted()
    assert room.give_back(READ, 0) == []
    assert room.waiting(READ) == 1


def test_more_given_back_than_was_taken_stops_the_caller() -> None:
    room = admission()
    room.ask(READ, 1, 5)
    with pytest.raises(AssertionError, match="6 bytes given back, 5 are taken"):
        room.give_back(READ, 6)


@pytest.mark.parametrize("seed", range(10))
def test_grants_come_in_order_and_never_exceed_the_limit(seed: int) -> None:
    random, limit, queue_max = Random(seed), 100, 8
    room = Admission(dict.fromkeys(Purpose, limit), queue_max=queue_max)
    queue: deque[tuple[int, int]] = deque()
    held: dict[int, int] = {}
    for number in range(1500):
        granted: list[int] = []
        match random.randrange(4):
            case 0 if held:
                granted = room.give_back(READ, held.pop(random.choice(sorted(held))))
            case 1 if queue:
                leaver = random.choice(queue)
                queue.remove(leaver)
                granted = room.leave(READ, leaver[0])
            case _:
                size_bytes = random.randint(1, limit)
                if len(queue) == queue_max:
                    continue
                match room.ask(READ, number, size_bytes):
                    case Granted():
                        assert not queue
                        held[number] = size_bytes
                    case Waiting(ahead):
                        assert ahead == len(queue)
                        queue.append((number, size_bytes))
        for expected in granted:
            first, size_bytes = queue.popleft()
            assert first == expected
            held[first] = size_bytes
        assert room.taken_bytes(READ) == sum(held.values()) <= limit
        assert room.waiting(READ) == len(queue)
        assert not queue or queue[0][1] > room.free_bytes(READ), "room is left and the first one waits"


def test_a_purpose_without_a_limit_gets_nothing() -> None:
    admission = Admission({READ: 10}, queue_max=1)
    assert admission.free_bytes(Purpose.HELP) == 0
    with pytest.raises(TooBig, match=r"1 bytes of the pool are needed, pool\.help_bytes allows 0"):
        admission.ask(Purpose.HELP, 1, 1)
    assert admission.ask(Purpose.HELP, 2, 0) == Granted()
