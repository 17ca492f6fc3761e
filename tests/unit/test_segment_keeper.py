"""The keeper of a root: every job in its turn, and none can end or silence the others for good."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvmoverd.adapters.storage.segments.keeper import Keeper

WAIT_S = 5.0


def until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline_s, f"not true within {WAIT_S} s"
        time.sleep(0.002)


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    keeper = Keeper("test")
    yield keeper
    assert keeper.close(WAIT_S)


def test_a_job_runs_at_once_and_again_in_its_period(keeper: Keeper) -> None:
    ran_s: list[float] = []
    keeper.every(0.05, "beat", lambda: ran_s.append(time.monotonic()))
    keeper.start()
    until(lambda: len(ran_s) >= 3)
    assert ran_s[2] - ran_s[0] >= 0.095


def test_a_job_that_has_more_to_do_lets_the_others_have_their_turn(keeper: Keeper) -> None:
    turns: list[str] = []

    def long() -> bool:
        turns.append("long")
        return len(turns) < 200

    keeper.every(60, "long", long)
    keeper.every(0, "short", lambda: turns.append("short"))
    keeper.start()
    until(lambda: len(turns) >= 200)
    assert 60 <= turns[:200].count("long") <= 140


def test_a_failing_job_is_counted_and_comes_again(keeper: Keeper) -> None:
    tries: list[int] = []

    def fails_twice() -> None:
        tries.append(1)
        if len(tries) <= 2:
            raise OSError(5, "broken")

    keeper.every(0.01, "job", fails_twice)
    keeper.start()
    until(lambda: keeper.stats()["job"].runs >= 2)
    assert keeper.stats()["job"].failures == 2 or keeper.stats()["job"].runs > 2
    until(lambda: len(tries) >= 3 and keeper.stats()["job"].runs >= 3)
    assert keeper.stats()["job"].failures == 2
    assert keeper.stats()["job"].error == ""


def test_what_a_failure_said_is_kept_until_a_run_goes_well(keeper: Keeper) -> None:
    def fails() -> None:
        raise OSError(5, "broken")

    keeper.every(60, "job", fails)
    keeper.start()
    until(lambda: keeper.stats()["job"].runs == 1)
    assert keeper.stats()["job"].error == "OSError: [Errno 5] broken"


def test_a_woken_job_does_not_wait_for_its_period(keeper: Keeper) -> None:
    ran: list[int] = []
    keeper.every(60, "job", lambda: ran.append(1))
    keeper.start()
    until(lambda: len(ran) == 1)
    keeper.wake("job")
    until(lambda: len(ran) == 2)


def test_a_job_woken_while_it_runs_runs_once_more(keeper: Keeper) -> None:
    began, go_on, ran = threading.Event(), threading.Event(), []

    def job() -> None:
        ran.append(1)
        began.set()
        go_on.wait(WAIT_S)

    keeper.every(60, "job", job)
    keeper.start()
    assert began.wait(WAIT_S)
    keeper.wake("job")
    go_on.set()
    until(lambda: len(ran) == 2)


def test_a_job_that_hangs_is_named_and_holds_up_no_end() -> None:
    keeper, go_on, began = Keeper("test"), threading.Event(), threading.Event()

    def hangs() -> None:
        began.set()
        go_on.wait(WAIT_S)

    keeper.every(60, "statvfs", hangs)
    keeper.start()
    assert began.wait(WAIT_S)
    time.sleep(0.02)
    stuck = keeper.stuck(after_s=0.01)
    assert stuck is not None and stuck.job == "statvfs" and stuck.for_s >= 0.01
    began_s = time.monotonic()
    assert not keeper.close(0.05)
    assert time.monotonic() - began_s < 1.0
    go_on.set()
    assert keeper.close(WAIT_S) and keeper.stuck(after_s=0) is None


def test_a_keeper_that_was_never_started_is_closed_at_once() -> None:
    assert Keeper("test").close(0)
