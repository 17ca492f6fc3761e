"""Ends of links that lie, stall or die: the link fails with words, no byte lands late, and nobody else suffers."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from transport_kit import SENDER, Bytes, End, cut, noise, scattered, stream_of, untouched
from verbs_raw_kit import RawAsker, await_true, first_places
from verbs_town import FAR, Town

from kvmoverd.adapters.transport.frames import Status
from kvmoverd.adapters.transport.verbs.messages import (
    GRANT_BYTES,
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
from kvmoverd.ports.connection import Answer
from kvmoverd.ports.transport import IoVec, Received, Sink, SinkQuiet

FENCE_S = 0.2
SIZE_BYTES = 3_000


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(31)


@pytest.fixture
def far(town: Town) -> End:
    return town.node(FAR, fence_s=FENCE_S, io_timeout_s=1.0)[1]


@pytest.fixture
def asker(town: Town, far: End) -> Iterator[RawAsker]:
    made = RawAsker(town.wire, far.transport, SENDER).connected()  # type: ignore[arg-type]
    yield made
    town.wire.release()
    made.close()


def opened(far: End, memory: Bytes, rng: np.random.Generator, pieces: int = 20) -> IoVec:
    slices = scattered(memory, rng, pieces)
    # The sink keeps the memory, as a pool does: what is granted may be written until the sink is quiet.
    far.expect(1, lambda layer, first_block, memory=memory: slices)  # type: ignore[misc]
    return slices


def granted(asker: RawAsker, sequence: int = 1, layer: int = 0) -> Places:
    asker.say(Ask(sequence, 1, layer, 0, SIZE_BYTES))
    return asker.hear(Grant, len([message for message in asker.heard if isinstance(message, Grant)]) + 1)[-1].places


def test_a_layer_is_told_when_its_immediate_came_and_not_before(
    far: End, asker: RawAsker, rng: np.random.Generator
) -> None:
    memory, source = untouched(SIZE_BYTES), noise(rng, SIZE_BYTES)
    slices = opened(far, memory, rng)
    places = granted(asker)
    asker.write(source[:1_000], first_places(places, 1_000), None)
    time.sleep(0.05)
    far.pump(0)
    assert far.events == []
    asker.write(source, places, 1)
    assert asker.hear(Applied) == [Applied(1)]
    assert far.wait(Received, 1) == [Received(1, 0, 0, SIZE_BYTES)]
    assert (stream_of(memory, slices) == source).all()


def test_a_forgotten_sink_is_quiet_when_its_sender_let_go_and_the_link_lives(
    far: End, asker: RawAsker, rng: np.random.Generator
) -> None:
    memory = untouched(SIZE_BYTES)
    opened(far, memory, rng)
    granted(asker)
    far.transport.forget(1)
    assert asker.hear(Revoke) == [Revoke(1)]
    assert far.transport.poll(8) == []
    asker.say(Abandoned(1))
    assert far.wait(SinkQuiet, 1) == [SinkQuiet(1)]
    assert asker.hear(Refused)[0].status is Status.REFUSED
    opened(far, memory, rng)
    places = granted(asker, 2)
    asker.write(noise(rng, SIZE_BYTES), places, 2)
    assert asker.hear(Applied) == [Applied(2)]


def test_bytes_that_came_for_a_sink_that_was_forgotten_meanwhile_are_refused_and_it_is_quiet(
    far: End, asker: RawAsker, rng: np.random.Generator
) -> None:
    opened(far, untouched(SIZE_BYTES), rng)
    places = granted(asker)
    far.transport.forget(1)
    asker.hear(Revoke)
    asker.write(noise(rng, SIZE_BYTES), places, 1)
    assert "was closed" in asker.hear(Refused)[0].words
    assert far.wait(SinkQuiet, 1) == [SinkQuiet(1)] and far.of(Received) == []


@pytest.mark.parametrize("end", ["fence", "peer_gone", "silence", "close"])
def test_no_byte_lands_once_a_sink_is_quiet_whose_sender_does_not_answer(
    town: Town, far: End, asker: RawAsker, rng: np.random.Generator, end: str
) -> None:
    """What its CNIC has been given goes on: only the destroyed end stops it."""
    memory = untouched(SIZE_BYTES)
    opened(far, memory, rng)
    places = granted(asker)
    town.wire.hold()
    asker.write(noise(rng, SIZE_BYTES), places, 1)
    town.wire.step(5)
    assert (memory != 0xEE).any()
    began_s = time.monotonic()
    match end:
        case "fence":
            far.transport.forget(1)
        case "peer_gone":
            far.transport.forget(1)
            far.transport.peer_gone(SENDER, "its beat stopped")  # type: ignore[attr-defined]
        case "silence":
            time.sleep(0.9)
            far.transport.forget(1)
        case "close":
            assert far.transport.close(5.0)
    if end != "close":
        assert far.wait(SinkQuiet, 1, timeout_s=5.0) == [SinkQuiet(1)]
    if end == "fence":
        assert time.monotonic() - began_s > FENCE_S * 0.9
    memory[:] = 0xEE
    town.wire.forbid(memory.ctypes.data, SIZE_BYTES)
    town.wire.release()
    asker.breaks()
    assert (memory == 0xEE).all() and far.of(Received) == []


def test_a_sender_that_says_nothing_more_loses_its_link_and_its_layer_is_free_again(
    town: Town, far: End, asker: RawAsker, rng: np.random.Generator
) -> None:
    memory, source = untouched(SIZE_BYTES), noise(rng, SIZE_BYTES)
    slices = opened(far, memory, rng)
    granted(asker)
    await_true(lambda: far.transport.facts.fences == 1, "a fence", 5.0)  # type: ignore[attr-defined]
    second = RawAsker(town.wire, far.transport, SENDER, link_id=8).connected()  # type: ignore[arg-type]
    places = granted(second, 5)
    second.write(source, places, 5)
    second.hear(Applied)
    assert (stream_of(memory, slices) == source).all()
    second.close()


def test_a_new_generation_ends_the_former_one_before_it_is_answered(
    town: Town, far: End, asker: RawAsker, rng: np.random.Generator
) -> None:
    memory, source = untouched(SIZE_BYTES), noise(rng, SIZE_BYTES)
    slices = opened(far, memory, rng)
    places = granted(asker)
    town.wire.hold()
    asker.write(noise(rng, SIZE_BYTES), places, 1)
    second = RawAsker(town.wire, far.transport, SENDER, generation=2).connected()  # type: ignore[arg-type]
    town.wire.release()
    asker.breaks()
    assert (memory == 0xEE).all()
    second.say(Ask(1, 1, 0, 0, SIZE_BYTES, again=True))
    second.write(source, second.hear(Grant)[0].places, 1)
    second.hear(Applied)
    assert (stream_of(memory, slices) == source).all()
    second.close()
    for generation in (1, 2):
        late = RawAsker(town.wire, far.transport, SENDER, generation=generation)  # type: ignore[arg-type]
        assert "generation 2 is known" in str(late.answer)
        late.close()


def test_a_layer_whose_word_was_lost_is_not_told_twice_and_is_answered_as_applied(
    town: Town, far: End, asker: RawAsker, rng: np.random.Generator
) -> None:
    opened(far, untouched(SIZE_BYTES), rng)
    asker.write(noise(rng, SIZE_BYTES), granted(asker), 1)
    far.wait(Received, 1)
    far.transport.forget(1)
    second = RawAsker(town.wire, far.transport, SENDER, generation=2).connected()  # type: ignore[arg-type]
    second.say(Ask(1, 1, 0, 0, SIZE_BYTES, again=True))
    assert second.hear(Applied) == [Applied(1)]
    second.say(Ask(2, 1, 0, 0, SIZE_BYTES, again=True))
    assert second.hear(Refused)[0].sequence == 2
    assert len(far.of(Received)) == 1
    second.close()


@pytest.mark.parametrize(
    ("offered", "words"),
    [
        ({"protocol": 99}, "links of protocol 99"),
        ({"peer_cnic": 1}, "CNIC 1 is asked for, there are 1"),
        ({"peer_cnic": -1}, "CNIC -1 is asked for"),
        ({"receive_slots": 3}, "3 slots of"),
        ({"message_bytes": GRANT_BYTES - 1}, f"slots of {GRANT_BYTES - 1} bytes"),
    ],
)
def test_offers_that_make_no_sense_are_refused_with_words(
    town: Town, far: End, offered: dict[str, int], words: str
) -> None:
    raw = RawAsker(town.wire, far.transport, SENDER, **offered)  # type: ignore[arg-type]
    assert words in str(raw.answer) and not isinstance(raw.answer, Answer)
    raw.close()


NOT_OF_A_GRANTER: list[Message] = [
    Grant(1, 1, 0, np.zeros(1, "<u8,<u4,<u4").astype([("address", "<u8"), ("size_bytes", "<u4"), ("key", "<u4")])),
    Applied(1),
    Revoke(1),
    Refused(1, Status.REFUSED, 0, ""),
    OtherCnic(1, 0),
]


@pytest.mark.parametrize(
    "messages",
    [
        *([message] for message in NOT_OF_A_GRANTER),
        [Abandoned(9)],
        [Bye()],
        [Ask(2, 1, 9, 0, SIZE_BYTES), Ask(2, 1, 9, 0, SIZE_BYTES)],
        [Ask(1 + (1 << 32), 1, 9, 0, SIZE_BYTES)],
        [Ask(sequence, 1, sequence, 0, SIZE_BYTES) for sequence in range(2, 19)],
    ],
    ids=lambda messages: f"{len(messages)}-{type(messages[-1]).__name__}",
)
def test_a_sender_that_says_nonsense_loses_its_link_and_nothing_else_happens(
    town: Town, far: End, asker: RawAsker, rng: np.random.Generator, messages: list[Message]
) -> None:
    memory = untouched(SIZE_BYTES)
    opened(far, memory, rng)
    granted(asker)
    asker.say(*messages)
    await_true(lambda: town.nodes[0].transport.facts.links_in == 0, "the end of the link")
    far.pump(0)
    assert far.events == [] and (memory == 0xEE).all()
    far.transport.forget(1)
    assert far.wait(SinkQuiet, 1) == [SinkQuiet(1)]


@pytest.mark.parametrize("immediate", [0, 2, 0xFFFFFFFF])
def test_an_immediate_of_a_frame_that_nobody_knows_ends_the_link_and_nothing_is_told(
    town: Town, far: End, asker: RawAsker, rng: np.random.Generator, immediate: int
) -> None:
    opened(far, untouched(SIZE_BYTES), rng)
    places = granted(asker)
    asker.write(noise(rng, SIZE_BYTES), places, immediate)
    await_true(lambda: town.nodes[0].transport.facts.links_in == 0, "the end of the link")
    far.pump(0)
    assert far.events == []


def test_bytes_that_are_no_message_end_the_link(town: Town, far: End, asker: RawAsker) -> None:
    class Garbage(Credit):
        def encode(self) -> bytes:
            return b"\xff" * 40

    asker.say(Garbage())
    await_true(lambda: town.nodes[0].transport.facts.links_in == 0, "the end of the link")


def test_a_write_outside_what_was_granted_ends_the_link_only(
    town: Town, far: End, asker: RawAsker, rng: np.random.Generator
) -> None:
    memory = untouched(SIZE_BYTES)
    opened(far, memory, rng)
    places = granted(asker).copy()
    places["key"] += 1
    asker.write(noise(rng, SIZE_BYTES), places, 1)
    assert "access" in asker.breaks()
    await_true(lambda: town.nodes[0].transport.facts.links_in == 0, "the end of the link")
    assert (memory == 0xEE).all()


def test_a_sink_of_another_sender_is_not_opened_by_a_link(town: Town, far: End, rng: np.random.Generator) -> None:
    slices = cut(untouched(SIZE_BYTES), rng, 3)
    far.transport.expect(Sink(1, lambda layer, first_block: slices, ("c", "boot-1")))
    raw = RawAsker(town.wire, far.transport, SENDER).connected()  # type: ignore[arg-type]
    raw.say(Ask(1, 1, 0, 0, SIZE_BYTES))
    assert "sink 1 is not open here for a of boot boot-1" in raw.hear(Refused)[0].words
    raw.close()
