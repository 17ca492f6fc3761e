"""A decode node that a test drives as a prefill node would: reservations, parts, helpers' layers, word by word."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from node_kit import LAYOUT, Anonymous, Engine, until
from node_net import Net

from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Share
from kvmoverd.core.status import BlockOutcome, End, Path, Reason
from kvmoverd.node.assembling import AssemblyDriver
from kvmoverd.node.mover import Need
from kvmoverd.node.outbox import Outbox
from kvmoverd.node.peer import Helped, PartListener, PartOrder, Reservation, Reserved, Ticket
from kvmoverd.node.reading import Destination, PartDriver
from kvmoverd.node.sessions import as_pages
from kvmoverd.node.slices import slot_iovec

LAYERS = LAYOUT.layer_count
OWNER = ("p", "boot-p")
_NUMBERS = itertools.count(1)


@dataclass(eq=False)
class Part:
    """A part of the decode node, and the memory of the prefill node that it sends to: a row of bytes for each block."""

    blocks: Runs
    memory: Anonymous
    sink_id: int
    prefix: tuple[int, BlockOutcome | None] | None = None
    kept: list[int] = field(default_factory=list)
    rests: list[tuple[int, int]] = field(default_factory=list)
    end: End | None = None
    landed: list[int] = field(default_factory=list)
    driver: PartDriver | None = None
    words: list[str] = field(default_factory=list)

    def payloads(self) -> np.ndarray:  # type: ignore[type-arg]
        return np.arange(self.blocks.count, dtype=np.uint64) * np.uint64(LAYOUT.block_bytes) + np.uint64(
            self.memory.address
        )

    def blocks_of(self, layer: int) -> int:
        """How many of its blocks a layer comes with."""
        given = [kept for kept, first_layer in self.rests if first_layer and layer >= first_layer]
        return given[0] if given else self.prefix[0] if self.prefix else 0

    def block(self, place: int) -> bytes:
        return bytes(self.memory.bytes[place * LAYOUT.block_bytes : (place + 1) * LAYOUT.block_bytes])


class DeRig:
    """One request on node "d" of a net, reserved by "p"; its hits are stored, and in no pool."""

    def __init__(self, net: Net, *, hit: int, blocks: int, tail: int = 0) -> None:
        self.net, self.kit, self.there = net, net["p"], net["d"]
        self.side = self.there.node.decode_side
        self.keys = self.kit.chain(blocks)
        self.hit, self.blocks, self.tail = hit, blocks, tail
        self.decode: Engine = self.there.engine(blocks + 1)
        self.parts: list[Part] = []
        self.reserved: Reserved | None = None

    async def reserve(self, *own: tuple[int, int], resident: int = 0) -> Ticket:
        """The decode node reads these ranges, the prefill node the other hits."""
        engine = self.kit.engine(max(8, self.hit))
        await self.kit.store(engine, self.keys[: self.hit])
        self.kit.forget_clean()
        self.net.forget_counts()
        mine = Runs.of(*own)
        rest = Runs.of((resident, self.hit)).minus(mine)
        shares = tuple(Share(node, blocks) for node, blocks in (("p", rest), ("d", mine)) if blocks)
        asked = Reservation(
            "x",
            1,
            self.kit.namespace.fingerprint,
            self.keys,
            self.tail,
            self.hit,
            Path.PARTS,
            5.0,
            *OWNER,
            shares=shares,
            resident_blocks=resident,
        )
        self.reserved = await self.side.reserve(self.kit.namespace, asked)
        return self.reserved.ticket

    @property
    def ticket(self) -> Ticket:
        assert self.reserved is not None
        return self.reserved.ticket

    @property
    def assembly(self) -> AssemblyDriver:
        return self.side._by_ticket[self.ticket]

    def attach(self) -> Outbox:
        return self.side.attach(self.kit.namespace, "x", 1, self.decode.session.session_id, 5.0)

    def part(self, *spans: tuple[int, int], first_layer: int = 0, holds: bool = True) -> Part:
        """The decode node reads these blocks as a part, all layers of which may be sent."""
        blocks = Runs.of(*spans)
        memory = Anonymous(max(1, blocks.count) * LAYOUT.block_bytes)
        sender = ("d", "boot-d")
        sink_id = self.kit.mover.expect(
            lambda layer, first: (
                slot_iovec(LAYOUT, layer, part.payloads()[: part.blocks_of(layer)], 0)
                if first == blocks.first
                else None
            ),
            lambda layer, moved: part.landed.append(layer),
            sender,
        )
        part = Part(blocks, memory, sink_id)
        self.parts.append(part)
        listener = PartListener(
            lambda count, lost: self._heard(part, "prefix", (count, lost)),
            lambda end: self._heard(part, "end", end),
            lambda begun, read_bytes: None,
            lambda kept: self._heard(part, "gave up", kept),
            lambda kept, first_layer: self._heard(part, "gave rest", (kept, first_layer)),
        )
        order = PartOrder(next(_NUMBERS), blocks, sink_id, LAYERS, first_layer, holds, 5.0, self.ticket)
        destination = Destination(self.net.route(self.kit), sink_id)
        part.driver = self.side.read_part(order, OWNER, destination, listener)
        part.driver.start()
        return part

    @staticmethod
    def _heard(part: Part, word: str, what: object) -> None:
        part.words.append(word)
        match word, what:
            case "prefix", (int() as count, lost):
                part.prefix = count, lost  # type: ignore[assignment]
            case "end", End():
                part.end = what
            case "gave up", int():
                part.kept.append(what)
            case "gave rest", (int() as kept, int() as first_layer):
                part.rests.append((kept, first_layer))

    async def set_prefix(self, prefix_blocks: int, *helped: tuple[str, tuple[int, int]]) -> list[int]:
        parts = [Helped(node, f"boot-{node}", Runs.of(blocks)) for node, blocks in helped]
        return await self.side.set_prefix(self.ticket, prefix_blocks, parts)

    def send(self, node: str, sink_id: int, layer: int, blocks: Sequence[int], first: int) -> list[Reason]:
        """A layer of these blocks from a node into the buffer; the answer comes into the list. The tail is the last block."""
        kit, answers = self.net[node], list[Reason]()
        rows = [(self.keys[block], LAYOUT.block_bytes) for block in blocks if block < self.blocks]
        memory = Anonymous((len(rows) + 1) * LAYOUT.block_bytes)
        for row, (key, _) in enumerate(rows):
            at = row * LAYOUT.block_bytes
            memory.bytes[at : at + LAYOUT.block_bytes] = np.frombuffer(kit.content(key), dtype=np.uint8)
        starts = np.arange(len(blocks), dtype=np.uint64) * np.uint64(LAYOUT.block_bytes) + np.uint64(memory.address)
        source = slot_iovec(LAYOUT, layer, starts, self.tail if self.blocks in blocks else 0)

        def done(_layer: int, reason: Reason, _moved: int, _message: str) -> None:
            assert memory is not None
            answers.append(reason)

        kit.mover.send(self.net.route(self.there), sink_id, layer, first, source, done, need=Need.ASSEMBLY)
        return answers

    def push(self, layer: int, *blocks: int) -> list[Reason]:
        """As `send`, of the prefill node, which pushes these blocks of the layer."""
        assert self.reserved is not None
        return self.send("p", self.reserved.push_sink, layer, blocks, blocks[0])

    async def push_all(self, blocks: Sequence[int], layers: range = range(LAYERS)) -> None:
        """Layers of what the prefill node pushes."""
        sent = [self.push(layer, *blocks) for layer in layers]
        await until(lambda: all(sent), "the layers are in")
        assert sent == [[Reason.OK]] * len(layers)

    def deliver(self) -> Outbox:
        pages = as_pages(list(range(self.blocks + (self.tail > 0))))
        return self.side.deliver("x", 1, self.decode.region, pages, self.decode.session.session_id)

    def delivered_right(self) -> None:
        for page, key in enumerate(self.keys):
            assert self.decode.block(page) == self.kit.content(key), f"block {page} is wrong"

    async def over(self) -> None:
        """The prefill node lets its own sinks go; then all is home on all nodes."""
        for part in self.parts:
            self.kit.mover.forget(part.sink_id, lambda: None)
        for kit, engine in [(self.there, self.decode)]:
            kit.node.session_closed(engine.session.session_id, "the test ends")
        await self.net.everything_is_home()
