"""KV cache as the daemon sends it: two transports in two processes, one on each of the VM's devices, layers in one direction."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import select
import threading
import time
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.transport.verbs.device import Retries, VerbsFabric, open_fabric
from kvmoverd.adapters.transport.verbs.memory import MemoryBook
from kvmoverd.adapters.transport.verbs.transport import VerbsTransport
from kvmoverd.core.errors import PeerUnreachable
from kvmoverd.core.qos import KV_LANE, KvClass, Marks
from kvmoverd.core.status import Reason
from kvmoverd.ports.connection import Answer, Answered, Offer
from kvmoverd.ports.transport import IoVec, Received, Route, Send, Sent, Sink
from tests.rdma_vm.model import FAR, NEAR, TIMEOUT_EXPONENT

SENDER, RECEIVER = ("near", "boot-near"), ("far", "boot-far")
SLICE_BYTES, SLICES = 41_984, 6
SLICE_WORDS = SLICE_BYTES // 8
"""Six Layer Blocks of DeepSeek-V3.2 a frame: a quarter of a MiB."""
PLACES = 8
"""Frames' worth of memory at both ends, used in turn."""
SINK = 1
WAIT_S = 30.0


class Ground:
    """Registered memory in slices that don't touch, as blocks in a pool don't. A frame's slices end with its number."""

    def __init__(self) -> None:
        self.words: npt.NDArray[np.uint64] = np.zeros((PLACES, SLICES, SLICE_WORDS * 2), dtype=np.uint64)
        self.address, self.size_bytes, self.page_kind = self.words.ctypes.data, self.words.nbytes, "4 KiB"

    def close(self) -> None:
        """Python's own."""

    def numbers(self, frame: int) -> npt.NDArray[np.uint64]:
        return self.words[frame % PLACES, :, SLICE_WORDS - 1]

    def slices(self, frame: int) -> IoVec:
        found = np.full((SLICES, 2), SLICE_BYTES, dtype=np.uint64)
        found[:, 0] = self.address + (frame % PLACES * SLICES + np.arange(SLICES)) * 2 * SLICE_BYTES
        return found


def open_transport(device: str, marks: Marks, gid_index: int, ground: Ground) -> tuple[VerbsTransport, VerbsFabric]:
    """All classes with the same marks: it is the lane against the model that is looked at."""
    fabric = open_fabric(device, 1, gid_index, retries=Retries(timeout=TIMEOUT_EXPONENT))
    book = MemoryBook([fabric], lambda near, users: (0, fabric.name))
    book.add_pool(ground, ground.size_bytes)
    # A lane that starves makes no progress: nobody is to take it for a broken one here.
    links = VerbsTransport([fabric], book, marks=dict.fromkeys(KvClass, marks), io_timeout_s=120.0, fence_s=1.0)
    return links, fabric


class Layers:
    """A `Load`: sends of one layer each, through the transport; a piece is done when the far end has told that it applied it."""

    def __init__(self, marks: Marks = KV_LANE, gid_index: int = 1, depth: int = 8) -> None:
        self.depth, self.piece_bytes = depth, SLICE_BYTES * SLICES
        self._pipe, far = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self._receiver = context.Process(target=receive, args=(far, marks, gid_index), daemon=True)
        self._receiver.start()
        far.close()
        self._ground = Ground()
        self._links, self._fabric = open_transport(NEAR, marks, gid_index, self._ground)
        self._links.dial_with(self._dial)
        self._answers: dict[int, Answered] = {}
        self._pairs: dict[str, list[int]] = {NEAR: [], FAR: []}
        self._layers, self._offered = itertools.count(), itertools.count()
        self._pieces: dict[int, int] = {}
        self._route = Route(*RECEIVER, self._links.endpoint, bytes(32))
        threading.Thread(target=self._answered, daemon=True).start()
        self._connect()

    def _connect(self) -> None:
        """By a first layer: what connecting takes belongs to no window."""
        self.post(0)
        until_s = time.monotonic() + WAIT_S
        while not self.done():
            assert time.monotonic() < until_s, f"no layer arrived within {WAIT_S} s"
            time.sleep(0.01)

    def _dial(self, route: Route, offer: Offer, answered: Answered) -> None:
        number = next(self._offered)
        self._answers[number] = answered
        self._pairs[NEAR].append(offer.end.qp_number)
        self._pipe.send((number, offer))

    def _answered(self) -> None:
        """What the other process answers, until it has ended."""
        while True:
            try:
                number, answer = self._pipe.recv()
            except (EOFError, OSError):
                return
            if isinstance(answer, Answer):
                self._pairs[FAR].append(answer.end.qp_number)
            self._answers.pop(number)(answer if isinstance(answer, Answer) else PeerUnreachable(answer))

    def post(self, piece: int) -> None:
        # A sink lets each layer in once.
        layer = next(self._layers)
        self._pieces[layer] = piece
        self._ground.numbers(layer)[:] = layer
        self._links.submit([Send(layer, self._route, SINK, layer, 0, self._ground.slices(layer))])

    def done(self) -> list[int]:
        ended = [event for event in self._links.poll(64) if isinstance(event, Sent)]
        for one in ended:
            if one.reason is not Reason.OK:
                raise RuntimeError(f"layer {one.op_id} ended with {one.reason}: {one.message}")
        return [self._pieces.pop(one.op_id) for one in ended]

    def numbers(self) -> dict[str, list[int]]:
        return {device: list(pairs) for device, pairs in self._pairs.items()}

    def close(self) -> None:
        assert self._links.close(WAIT_S), "the transport's thread did not end"
        self._pipe.send(None)
        self._receiver.join(WAIT_S)


def receive(pipe: Connection, marks: Marks, gid_index: int) -> None:
    """The other daemon: takes offers from the pipe and lets every layer in. Ends with the pipe."""
    ground = Ground()
    links, _ = open_transport(FAR, marks, gid_index, ground)
    links.expect(Sink(SINK, lambda layer, first_block: ground.slices(layer), SENDER))
    told = threading.Lock()

    def answer(number: int, said: object) -> None:
        with told:
            pipe.send((number, said if isinstance(said, Answer) else str(said)))

    parent = os.getppid()
    while os.getppid() == parent:
        if links.fileno() in select.select([links.fileno(), pipe], [], [], 1.0)[0]:
            _check(links, ground)
        if not pipe.poll():
            continue
        if (asked := pipe.recv()) is None:
            break
        number, offer = asked
        links.accept(SENDER, offer, lambda said, number=number: answer(number, said))
    links.close(WAIT_S)


def _check(links: VerbsTransport, ground: Ground) -> None:
    """A layer that is told has arrived whole; its place may hold a later one by now."""
    for event in links.poll(64):
        if isinstance(event, Received):
            found = ground.numbers(event.layer)
            good = (found >= event.layer) & (found % PLACES == event.layer % PLACES)
            assert good.all(), f"layer {event.layer} is told, its slices end with {found}"
