"""Ends that are written to can't be trusted either: what a link does when one says what no real one would. Over fake CNICs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from transport_kit import SENDER, End, cut, noise, scattered, untouched
from verbs_raw_kit import RawGranter, await_true, first_places
from verbs_town import Town, route_of

from kvmoverd.adapters.transport.frames import Status
from kvmoverd.adapters.transport.verbs.messages import (
    Abandoned,
    Applied,
    Ask,
    Bye,
    Credit,
    Grant,
    Message,
    OtherCnic,
    Places,
    Refused,
    Revoke,
)
from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import Route, RouteLost

FENCE_S = 0.2
SIZE_BYTES = 3_000


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(31)


@pytest.fixture
def granter(town: Town) -> Iterator[RawGranter]:
    made = RawGranter(town.wire)
    yield made
    town.wire.release()
    town.close()
    town.nodes.clear()
    made.close()


def sending(town: Town, granter: RawGranter) -> tuple[End, Route]:
    node, end = town.node(SENDER, io_timeout_s=0.5)
    node.transport.dial_with(granter.dial)
    return end, replace(route_of(node), node="b", boot_id="boot-2")


def as_grant(sequence: int, places: Places, total: int | None = None, first: int = 0) -> Grant:
    return Grant(sequence, len(places) if total is None else total, first, places)


Answers = Callable[[Ask, Places], list[Message]]

NONSENSE: dict[str, tuple[Answers, str]] = {
    "unknown": (lambda ask, places: [as_grant(ask.sequence + 1, places)], "which does not wait for it"),
    "too-few-bytes": (lambda ask, places: [as_grant(ask.sequence, first_places(places, 10))], "10 bytes were granted"),
    "hole": (lambda ask, places: [as_grant(ask.sequence, places, 9, 3)], "places 3 on were granted"),
    "twice": (lambda ask, places: [as_grant(ask.sequence, places)] * 2, "places 0 on were granted"),
    "applied": (lambda ask, places: [Applied(ask.sequence)], "it was not written"),
    "applied-unknown": (lambda ask, places: [Applied(ask.sequence + 5)], "which does not wait for it"),
    "revoke-unknown": (lambda ask, places: [Revoke(ask.sequence + 5)], "which does not wait for it"),
    "cnic": (lambda ask, places: [OtherCnic(ask.sequence, 1)], "is sent to CNIC 1 of 1"),
    "ask": (lambda ask, places: [ask], "Ask came to the end that sends layers"),
    "bye": (lambda ask, places: [Bye()], "Bye came to the end that sends layers"),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_a_granter_that_says_nonsense_loses_the_link_and_the_send_says_why(
    town: Town, granter: RawGranter, rng: np.random.Generator, what: str
) -> None:
    end, route = sending(town, granter)
    answers, words = NONSENSE[what]
    memory = untouched(SIZE_BYTES)
    op_id = end.send(route, 1, 0, cut(noise(rng, SIZE_BYTES), rng, 5))
    await_true(lambda: bool(granter.offers), "an offer")
    ask = granter.hear(Ask)[0]
    granter.say(*answers(ask, granter.places(memory)))
    done = end.sent(op_id)
    assert done.reason is Reason.PEER_LOST and words in done.message and "no answer for 0.5 s" in done.message
    assert len(granter.offers) == 2 and granter.offers[1].generation > granter.offers[0].generation
    assert len(end.wait(RouteLost, 1)) == 1


def test_a_granter_that_gives_back_slots_which_it_does_not_have_loses_the_link(
    town: Town, granter: RawGranter, rng: np.random.Generator
) -> None:
    end, route = sending(town, granter)
    op_id = end.send(route, 1, 0, cut(noise(rng, SIZE_BYTES), rng, 5))
    await_true(lambda: bool(granter.offers), "an offer")
    granter.hear(Ask)
    granter.end._owed += 100
    granter.say(Credit())
    done = end.sent(op_id)
    assert done.reason is Reason.PEER_LOST and "slots were given back" in done.message


def test_what_is_revoked_is_not_written_any_more_and_given_up_behind_what_was(
    town: Town, granter: RawGranter, rng: np.random.Generator
) -> None:
    end, route = sending(town, granter)
    memory, source = untouched(60_000), noise(rng, 60_000)
    op_id = end.send(route, 1, 0, scattered(source, rng, 3_000))
    await_true(lambda: bool(granter.offers), "an offer")
    ask = granter.hear(Ask)[0]
    town.wire.hold()
    granter.say(as_grant(ask.sequence, granter.places(memory)), Revoke(ask.sequence))
    await_true(lambda: town.wire.step(20) >= 0 and _pumped(granter, Abandoned), "the last word")
    landed = memory.copy()
    assert granter.told == []
    town.wire.settle()
    assert (memory == landed).all()
    granter.say(Refused(ask.sequence, Status.REFUSED, 0, "sink 1 was closed"))
    town.wire.release()
    done = end.sent(op_id)
    assert done.reason is Reason.CANCELLED and "sink 1 was closed" in done.message


def _pumped(granter: RawGranter, kind: type[Message]) -> bool:
    granter.pump()
    return any(isinstance(message, kind) for message in granter.heard)


def test_a_granter_with_few_slots_is_never_written_to_without_one(
    town: Town, granter: RawGranter, rng: np.random.Generator
) -> None:
    granter.shrink(4)
    end, route = sending(town, granter)
    sources = [noise(rng, 100) for _ in range(12)]
    memory = untouched(100)
    ops = [end.send(route, 1, layer, cut(source, rng, 3)) for layer, source in enumerate(sources)]
    await_true(lambda: bool(granter.offers), "an offer")
    places = granter.places(memory)
    for index in range(len(ops)):
        ask = granter.hear(Ask, index + 1)[index]
        granter.say(as_grant(ask.sequence, places))
        granter.await_true(lambda ask=ask: ask.sequence in granter.told, "the immediate")  # type: ignore[misc]
        granter.say(Applied(ask.sequence))
    assert {end.sent(op_id).reason for op_id in ops} == {Reason.OK}
    assert town.wire.tally.waits_for_slots == 0


def test_an_answer_with_no_room_for_a_question_is_no_link(
    town: Town, granter: RawGranter, rng: np.random.Generator
) -> None:
    granter.message_bytes = 16
    end, route = sending(town, granter)
    done = end.sent(end.send(route, 1, 0, cut(noise(rng, 100), rng, 3)))
    assert done.reason is Reason.PEER_LOST and "slots of 16 bytes" in done.message
