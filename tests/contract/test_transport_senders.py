"""A sink belongs to one sender, and takes each of its layers once, whatever comes over however many channels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from transport_kit import End, RawSender, await_first_byte, open_sink, own_key, untouched

from kvmoverd.adapters.transport.frames import Status
from kvmoverd.ports.transport import Received, RouteLost


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.fixture
def raw(receiver: End) -> Iterator[RawSender]:
    made = RawSender(receiver.transport.endpoint).accepted()  # type: ignore[attr-defined]
    yield made
    made.close()


def test_a_layer_that_is_on_its_way_is_not_let_in_by_another_channel(
    receiver: End, raw: RawSender, rng: np.random.Generator
) -> None:
    memory = untouched(2_000)
    open_sink(receiver, memory, rng)
    raw.header(1, 2_000)
    raw.sock.sendall(b"\x01" * 1_000)
    await_first_byte(memory)
    second = RawSender(receiver.transport.endpoint).accepted()  # type: ignore[attr-defined]
    second.header(1, 2_000)
    second.sock.sendall(b"\x02" * 2_000)
    assert second.ack().status is Status.REFUSED
    raw.sock.sendall(b"\x01" * 1_000)
    assert raw.ack().status is Status.APPLIED
    assert memory.tobytes() == b"\x01" * 2_000
    second.close()


def test_half_a_layer_that_comes_again_behind_the_whole_one_does_not_touch_it(
    receiver: End, raw: RawSender, rng: np.random.Generator
) -> None:
    memory = untouched(2_000)
    open_sink(receiver, memory, rng)
    for fill, size_bytes in ((b"\x01", 2_000), (b"\x02", 1_000)):
        raw.header(1, 2_000)
        raw.sock.sendall(fill * size_bytes)
    assert raw.ack().status is Status.APPLIED
    receiver.wait(Received, 1)
    raw.sock.sendall(b"\x02" * 1_000)
    assert raw.ack().status is Status.REFUSED
    assert memory.tobytes() == b"\x01" * 2_000
    assert len(receiver.of(Received)) == 1


def test_a_layer_whose_channel_broke_in_mid_frame_may_come_again(
    receiver: End, raw: RawSender, rng: np.random.Generator
) -> None:
    memory = untouched(2_000)
    open_sink(receiver, memory, rng)
    raw.header(1, 2_000)
    raw.sock.sendall(b"\x01" * 1_000)
    await_first_byte(memory)
    raw.close()
    receiver.wait(RouteLost, 1)
    again = RawSender(receiver.transport.endpoint).accepted()  # type: ignore[attr-defined]
    again.header(1, 2_000)
    again.sock.sendall(b"\x02" * 2_000)
    assert again.ack().status is Status.APPLIED
    assert memory.tobytes() == b"\x02" * 2_000
    again.close()


def test_another_boot_of_the_same_node_does_not_reach_the_sink(
    receiver: End, raw: RawSender, rng: np.random.Generator
) -> None:
    memory = untouched(100)
    open_sink(receiver, memory, rng)
    restarted = RawSender(receiver.transport.endpoint, own_key("boot-3")).accepted()  # type: ignore[attr-defined]
    restarted.header(1, 100)
    restarted.sock.sendall(b"x" * 100)
    assert restarted.ack().status is Status.REFUSED
    assert (memory == untouched(100)).all()
    restarted.close()
