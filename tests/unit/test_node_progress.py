"""A session's progress book: what the engine sees, and what of an engine's words is believed."""

from __future__ import annotations

import asyncio
import os
import random

import pytest
from companion_kit import open_fds, until
from node_time import jumping_time
from progress_kit import BOOT_ID, shared

from kvmoverd.core.errors import BadRequest, UnknownSession
from kvmoverd.core.machines.actions import (
    Action,
    AnnounceLayers,
    AnnouncePrefix,
    AnnounceQuiet,
    Finish,
    FinishDelivery,
)
from kvmoverd.core.progress import ENTRIES, GENERATION_MAX, PREFIX_BLOCKS, UPDATED_NS, CallState, first_word
from kvmoverd.core.progress import header_words as header
from kvmoverd.core.status import End, Reason
from kvmoverd.node import progress
from kvmoverd.node.outbox import READY_S, Outbox, Told
from kvmoverd.node.progress import ProgressBook, ProgressEntry

RUNNING, UNQUIET, ENDED = CallState.RUNNING, CallState.UNQUIET, CallState.ENDED


def claim(book: ProgressBook, number: int = 1, generation: int = 1) -> ProgressEntry:
    with book.claiming(number, generation) as entry:
        return entry


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_the_header_says_whose_page_it_is() -> None:
    with shared() as (_, hands):
        assert hands.words[:8].tolist() == header(BOOT_ID)
        assert hands.words[4:6].tobytes() == BOOT_ID.encode()


async def test_an_entry_follows_its_call_to_the_end() -> None:
    with shared() as (book, hands):
        entry = claim(book, 3, 7)
        assert hands.state(3) == (7, 0, RUNNING, 0)
        entry.tell(AnnouncePrefix(5, None))
        entry.tell(AnnounceLayers(0, 1))
        assert hands.state(3) == (7, 2, RUNNING, 0) and hands.words[first_word(3) + PREFIX_BLOCKS] == 5
        entry.tell(AnnounceLayers(2, 2))
        entry.tell(Finish(End(Reason.PREFIX_CUT)))
        assert hands.state(3) == (7, 3, ENDED, Reason.PREFIX_CUT.value)
        stamp_ns = hands.words[first_word(3) + UPDATED_NS]
        entry.tell(AnnounceLayers(3, 3))
        assert hands.state(3)[1] == 3 and hands.words[first_word(3) + UPDATED_NS] == stamp_ns
        assert len(book) == 0


@pytest.mark.parametrize("finish", [Finish, FinishDelivery])
async def test_pages_that_are_not_quiet_are_said_to_be_so_and_hold_the_entry(finish: type[Finish]) -> None:
    with shared() as (book, hands):
        entry = claim(book)
        told: list[Action] = [finish(End(Reason.DEADLINE, pages_quiet=False)), AnnounceQuiet()]
        entry.tell(told[0])
        assert hands.state(1) == (1, 0, UNQUIET, Reason.DEADLINE.value)
        with pytest.raises(BadRequest, match="progress_entry 1 belongs to a call"):
            claim(book, 1, 2)
        entry.tell(told[1])
        assert hands.state(1) == (1, 0, ENDED, Reason.DEADLINE.value)
        claim(book, 1, 2)


@pytest.mark.parametrize(
    ("number", "generation", "said"),
    [
        (0, 1, "progress_entry is 0"),
        (ENTRIES + 1, 1, f"progress_entry is {ENTRIES + 1}, must be 1 to {ENTRIES}"),
        (1, 0, "progress_generation is 0"),
        (1, GENERATION_MAX + 1, "progress_generation"),
    ],
)
async def test_entries_that_do_not_exist_are_refused(number: int, generation: int, said: str) -> None:
    with shared() as (book, _), pytest.raises(BadRequest, match=said):
        claim(book, number, generation)


async def test_the_last_entry_lies_inside_the_page() -> None:
    with shared() as (book, hands):
        claim(book, ENTRIES, GENERATION_MAX).tell(AnnounceLayers(0, 65_534))
        assert hands.state(ENTRIES) == (GENERATION_MAX, 65_535, RUNNING, 0)


async def test_a_call_that_is_refused_leaves_its_entry_free() -> None:
    with shared() as (book, hands):
        with pytest.raises(BadRequest), book.claiming(1, 1):
            raise BadRequest("no")
        assert len(book) == 0 and hands.state(1)[2] is ENDED
        claim(book, 1, 2)


async def test_many_changes_are_two_wake_ups_at_most() -> None:
    with shared() as (book, hands):
        entries = [claim(book, number) for number in range(1, 9)]
        await turn()
        hands.wakes()
        entries[0].tell(AnnounceLayers(0, 0))
        assert hands.wakes() == 1
        for layer in range(1, 50):
            for entry in entries:
                entry.tell(AnnounceLayers(layer, layer))
        await turn()
        assert hands.wakes() == 1
        await turn()
        assert hands.wakes() == 0


async def test_credits_reach_the_call_that_listens() -> None:
    with shared() as (book, hands):
        taken: list[int] = []
        claim(book, 2, 9).listen(taken.append)
        hands.credit(2, 9, 1)
        await until(lambda: taken == [1])
        hands.credits[1] = 9 << 32 | 2
        hands.credit(2, 9, 3)
        await until(lambda: taken == [1, 3])
        hands.kick()
        await asyncio.sleep(0.005)
        assert taken == [1, 3]


async def test_a_credit_that_was_there_before_the_call_is_taken_when_it_listens() -> None:
    with shared() as (book, hands):
        hands.credit(1, 4, 2)
        await asyncio.sleep(0.005)
        taken: list[int] = []
        entry = claim(book, 1, 4)
        hands.kick()
        await asyncio.sleep(0.005)
        entry.listen(taken.append)
        assert taken == [2]


async def test_credits_of_another_generation_or_of_nobody_are_ignored() -> None:
    with shared() as (book, hands):
        taken: list[int] = []
        entry = claim(book, 1, 4)
        entry.listen(taken.append)
        for number, generation in ((1, 3), (1, 5), (2, 4), (ENTRIES, 0), (ENTRIES, GENERATION_MAX)):
            hands.credit(number, generation, 1)
            await asyncio.sleep(0.002)
        entry.tell(Finish(End(Reason.OK)))
        hands.credit(1, 4, 1)
        await asyncio.sleep(0.005)
        assert taken == []


async def test_random_words_all_over_the_page_reach_no_call_but_the_one_they_name() -> None:
    with shared() as (book, hands):
        taken: list[int] = []
        claim(book, 7, 0x1234).listen(taken.append)
        chance = random.Random(1)
        for _ in range(50):
            for index in range(ENTRIES):
                hands.credits[index] = chance.getrandbits(64)
            hands.kick()
            await asyncio.sleep(0)
        hands.credit(7, 0x1234, 3)
        await until(lambda: taken[-1:] == [3])
        assert len(taken) <= 2


async def test_a_flood_of_kicks_is_heard_a_few_times_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0
    scan = ProgressBook._scan

    def counted(book: ProgressBook) -> None:
        nonlocal looked
        looked += 1
        scan(book)

    monkeypatch.setattr(ProgressBook, "_scan", counted)
    with shared() as (_, hands):
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while loop.time() < began_s + 0.1:
            hands.kick()
            await asyncio.sleep(0)
        windows = (loop.time() - began_s) / progress.KICK_WINDOW_S
        assert 10 < looked <= progress.KICKS_MAX * (windows + 1)


async def test_a_kick_in_a_full_window_is_heard_at_its_end() -> None:
    with shared() as (book, hands):
        taken: list[int] = []
        claim(book, 1, 1).listen(taken.append)
        for _ in range(2 * progress.KICKS_MAX):
            hands.kick()
            await asyncio.sleep(0)
        hands.credit(1, 1, 3)
        await until(lambda: taken == [3])


async def test_an_engine_that_closes_its_ends_does_not_keep_the_loop_busy() -> None:
    with shared() as (book, hands):
        taken: list[int] = []
        entry = claim(book)
        entry.listen(taken.append)
        hands.credit(1, 1, 1)
        hands.close_pipes()
        await asyncio.sleep(0.005)
        assert taken == [1] and not book._listening
        entry.tell(AnnounceLayers(0, 0))
        assert hands.state(1) == (1, 1, RUNNING, 0)


async def test_after_the_session_nothing_is_written_and_nothing_is_open() -> None:
    fds = open_fds()
    with shared() as (book, hands):
        entry = claim(book)
        entry.listen(lambda layers: None)
        book.close()
        entry.tell(AnnounceLayers(0, 0))
        entry.tell(Finish(End(Reason.ENGINE_GONE)))
        entry.drop()
        assert hands.state(1) == (1, 0, RUNNING, 0)
        with pytest.raises(UnknownSession):
            claim(book, 2)
        with pytest.raises(BrokenPipeError):
            hands.kick()
        assert os.read(hands.wake_fd, 100) and os.read(hands.wake_fd, 100) == b""
        book.close()
        await turn()
    assert open_fds() == fds


# The outbox in front of it ----------------------------------------------------------------------------------------


async def got(outbox: Outbox) -> list[Told]:
    found = []
    while (told := await outbox.get()) is not None:
        found.append(told)
    return found


async def test_an_outbox_with_an_entry_keeps_layers_back_and_tells_the_rest_at_once() -> None:
    with shared() as (book, hands), jumping_time():
        outbox = Outbox()
        outbox.put(AnnouncePrefix(2, None))
        outbox.report_to(claim(book))
        assert hands.words[first_word(1) + PREFIX_BLOCKS] == 2
        assert await outbox.get() == AnnouncePrefix(2, None)
        outbox.put(AnnounceLayers(0, 0))
        waiting = asyncio.ensure_future(outbox.get())
        await asyncio.sleep(0.01)
        assert hands.state(1)[1] == 1 and not waiting.done()
        outbox.put(AnnounceLayers(1, 1))
        assert await waiting == AnnounceLayers(0, 1)
        for layer in range(2, 60):
            outbox.put(AnnounceLayers(layer, layer))
        end = Finish(End(Reason.OK))
        outbox.put(end)
        assert hands.state(1) == (1, 60, ENDED, Reason.OK.value)
        assert await got(outbox) == [AnnounceLayers(2, 59), end]


async def test_layers_that_stay_behind_what_was_told_are_told_in_their_time() -> None:
    with shared() as (book, _), jumping_time():
        outbox = Outbox()
        outbox.report_to(claim(book))
        outbox.put(AnnouncePrefix(2, None))
        outbox.put(AnnounceLayers(0, 1))
        assert await outbox.get() == AnnouncePrefix(2, None)
        began_s = asyncio.get_running_loop().time()
        assert await asyncio.wait_for(outbox.get(), 2.0) == AnnounceLayers(0, 1)
        assert asyncio.get_running_loop().time() - began_s >= READY_S / 2


async def test_an_outbox_without_an_entry_tells_every_layer_at_once() -> None:
    outbox = Outbox()
    outbox.put(AnnounceLayers(0, 0))
    assert await asyncio.wait_for(outbox.get(), 0.02) == AnnounceLayers(0, 0)


async def test_a_call_that_ended_before_it_could_report_leaves_a_free_entry() -> None:
    with shared() as (book, hands):
        outbox = Outbox()
        outbox.put(Finish(End(Reason.CANCELLED)))
        outbox.report_to(claim(book))
        assert hands.state(1)[2] is ENDED and len(book) == 0
        assert len(await got(outbox)) == 1
