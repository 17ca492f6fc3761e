"""Real verbs between two processes: one is stopped, killed or told to stop in the middle, and no byte lands late."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from markers import needs_rxe
from transport_kit import SENDER, UNTOUCHED, WAIT_S, End, noise, scattered, stream_of, untouched
from verbs_pair import Desk, rxe_node
from verbs_raw_kit import await_true
from verbs_words import Words

from kvmoverd.core.status import Reason
from kvmoverd.ports.transport import Received, Route, RouteLost, SinkQuiet

pytestmark = needs_rxe

RECEIVER = ("b", "boot-2")
SIZE_BYTES, LAYERS, PIECES, SEED = 6 << 20, 4, 150, 5
FENCE_S = 0.5


class Child:
    """`verbs_child.py`, and the words with it."""

    def __init__(self, role: str, end: End, sender: tuple[str, str]) -> None:
        script = Path(__file__).with_name("verbs_child.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), role, *map(str, (SIZE_BYTES, LAYERS, PIECES, SEED))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.words = Words(self._process.stdout, self._process.stdin, end.transport, sender)  # type: ignore[arg-type]
        await_true(lambda: ("ready",) in self.words.said or self._process.poll() is not None, "the child", 60.0)
        assert self._process.poll() is None, "the child did not start"

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)
        stat = Path(f"/proc/{self._process.pid}/stat")
        if number == signal.SIGSTOP:
            await_true(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "T", "a stop")

    def close(self) -> None:
        self._process.kill()
        self._process.wait(WAIT_S)
        self.words.join(WAIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(41)


@pytest.fixture
def here(request: pytest.FixtureRequest) -> Iterator[End]:
    end = End(rxe_node("rxe1", Desk(), RECEIVER, fence_s=FENCE_S, io_timeout_s=3.0))
    yield end
    assert end.transport.close(WAIT_S)


@contextlib.contextmanager
def child(role: str, end: End) -> Iterator[Child]:
    made = Child(role, end, SENDER if role == "sends" else RECEIVER)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("fate", ["forgotten", "stopped", "killed"])
def test_no_byte_of_a_sender_lands_once_its_sink_is_quiet(here: End, rng: np.random.Generator, fate: str) -> None:
    memory, other = untouched(SIZE_BYTES), untouched(SIZE_BYTES)
    slices, others = scattered(memory, rng, PIECES), scattered(other, rng, PIECES)
    here.expect(1, lambda layer, first_block: slices)
    here.expect(2, lambda layer, first_block: others)
    with child("sends", here) as sender:
        await_true(lambda: bool((memory != UNTOUCHED).any()), "the first bytes", 30.0)
        if fate == "stopped":
            sender.signal(signal.SIGSTOP)
        if fate == "killed":
            sender.signal(signal.SIGKILL)
        began_s = time.monotonic()
        here.transport.forget(1)
        here.wait(SinkQuiet, 1)
        took_s = time.monotonic() - began_s
        memory[:] = UNTOUCHED
        time.sleep(0.3)
        assert (memory == UNTOUCHED).all(), f"bytes landed after {took_s:.2f} s of waiting"
        if fate == "stopped":
            sender.signal(signal.SIGCONT)
        if fate in ("stopped", "forgotten"):
            await_true(lambda: len(sender.words.said) == LAYERS + 2, "the ends of all sends", 30.0)
            assert {said[1] for said in sender.words.said[1:-1]} <= {"OK", "CANCELLED"}
            # On the same queue pair, so it was cut by the fence, and repeated.
            assert sender.words.said[-1] == ("ended", "OK")
            here.pump(0.2)
            assert [event.layer for event in here.of(Received) if event.sink_id == 2] == [0]
            source = noise(np.random.default_rng(SEED), SIZE_BYTES)
            assert np.bincount(stream_of(other, others)).tolist() == np.bincount(source).tolist()
        assert (memory == UNTOUCHED).all()


@pytest.mark.parametrize("fate", ["stopped", "killed"])
def test_a_receiver_that_stops_or_dies_in_the_middle_ends_the_sends_in_bounded_time(
    rng: np.random.Generator, fate: str
) -> None:
    end = End(rxe_node("rxe1", Desk(), SENDER, io_timeout_s=2.0))
    source = noise(rng, SIZE_BYTES)
    rows = scattered(source, rng, PIECES)
    with child("receives", end) as receiver:
        route = Route(*RECEIVER, "verbs:1", b"k" * 32)
        ops = [end.send(route, 1, layer, rows) for layer in range(LAYERS)]
        assert end.sent(ops[0]).reason is Reason.OK
        receiver.signal(signal.SIGSTOP if fate == "stopped" else signal.SIGKILL)
        began_s = time.monotonic()
        reasons = [end.sent(op_id, 15.0).reason for op_id in ops]
        assert set(reasons) <= {Reason.OK, Reason.PEER_LOST} and time.monotonic() - began_s < 12.0
        late = end.sent(end.send(route, 1, LAYERS, rows), 15.0)
        assert late.reason is Reason.PEER_LOST and late.message
        assert not end.wait(RouteLost, 1)[0].inbound
        assert end.transport.close(WAIT_S)
