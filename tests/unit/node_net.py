"""Several nodes in one process: the real machines, drivers and books of each, calls and data channels between them in memory.

Storage is one: what a node stores, all can read. Calls take `Net.delay_s` each way. `cut` takes the way between two nodes,
`kill` a node with all that it knows; the others hear of either at once, as from a watch. A far send has its places from the
moment it is submitted, like one of a CNIC: while `FarGate.closed` it waits, and lands also in a sink that was forgotten.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from node_far import FarGate
from node_kit import MANIFEST, NodeKit, running

from kvmoverd.core.admission import Purpose
from kvmoverd.core.errors import KvmoverError, PeerUnreachable
from kvmoverd.core.status import End, Reason
from kvmoverd.node.helper_book import HelperBook
from kvmoverd.node.local_peer import LocalPeer
from kvmoverd.node.peer import (
    Helped,
    PartHandle,
    PartListener,
    PartOrder,
    Peer,
    PeerDepth,
    Reservation,
    Reserved,
    Ticket,
)
from kvmoverd.node.pushing import PushDriver
from kvmoverd.node.reading import Destination, PartDriver
from kvmoverd.node.reasons import reason_of
from kvmoverd.node.streaming import StreamDriver
from kvmoverd.ports.transport import Route

NAMES = ("p", "d", "h", "i")
"""Prefill, decode, and two that help."""


class FarPeer:
    """`Peer` from one node of the net to another. What a part tells comes after the delay, too, in its order."""

    def __init__(self, net: Net, own: NodeKit, other: NodeKit) -> None:
        self.net, self.own, self.other = net, own, other
        self.handles: set[_FarPart] = set()

    async def reserve(self, reservation: Reservation) -> Reserved:
        await self._travel("reserve")
        node = self.other.node
        reserved = await node.decode_side.reserve(
            node.models.get(reservation.fingerprint), replace(reservation, session_id="")
        )
        await self._travel("reserved")
        return replace(reserved, route=self.net.route(self.other))

    async def set_prefix(self, ticket: Ticket, prefix_blocks: int, helped: Sequence[Helped]) -> list[int]:
        await self._travel("set_prefix")
        sinks = await self.other.node.decode_side.set_prefix(ticket, prefix_blocks, helped)
        await self._travel("prefix_set")
        return sinks

    def read_part(self, order: PartOrder, listener: PartListener) -> PartHandle:
        return _FarPart(self, order, listener)

    async def depth(self) -> PeerDepth:
        await self._travel("depth")
        services, helps = self.other.services, self.other.node.helper_side.helps
        free_bytes = self.other.admission.free_bytes(Purpose.HELP)
        return PeerDepth(services.reader.depth(), helps, free_bytes, services.boot_id)

    async def release_ticket(self, ticket: Ticket, reason: Reason) -> None:
        await self._travel("release_ticket")
        self.other.node.decode_side.release_ticket(ticket, reason)

    async def return_ticket(self, ticket: Ticket) -> None:
        await self._travel("return_ticket")
        self.other.node.decode_side.return_ticket(ticket)

    async def route(self) -> Route | None:
        return self.net.route(self.other)

    def lost(self) -> None:
        """A route is made anew each time."""

    async def _travel(self, call: str) -> None:
        """One way of a call. Raises `PeerUnreachable`."""
        self.net.calls[call] += 1
        self.check()
        await asyncio.sleep(self.net.delay_s)
        self.check()
        error = self.net.refuses(call, self.own.services.node, self.other.services.node)
        if error is not None:
            raise error

    def check(self) -> None:
        """Raises `PeerUnreachable` when there is no way to the other node."""
        own, other = self.own.services.node, self.other.services.node
        if other in self.net.dead or self.net.is_cut(own, other):
            raise PeerUnreachable(f"no way from {own} to {other}")


class _FarPart:
    """A `PartHandle` whose words travel; its end comes once, also when the way to its reader is lost."""

    def __init__(self, peer: FarPeer, order: PartOrder, listener: PartListener) -> None:
        self.peer, self.order, self.listener = peer, order, listener
        self.part: PartDriver | None = None
        self.ended = False
        peer.handles.add(self)
        if self._is_lost():
            asyncio.get_running_loop().call_soon(self.lost, f"no way to {peer.other.services.node}")
        self._there(self._open)

    def credit(self, prefix_blocks: int, layers: int) -> None:
        self._there(lambda: self.part and self.part.credit(prefix_blocks, layers))

    def assemble(self, sink_id: int) -> None:
        self._there(lambda: self.part and self.part.assemble(sink_id))

    def give_up(self, kept_blocks: int) -> None:
        self._there(lambda: self.part and self.part.give_up(kept_blocks))

    def give_rest(self, kept_blocks: int) -> None:
        self._there(lambda: self.part and self.part.give_rest(kept_blocks))

    def stop(self) -> None:
        self._there(lambda: self.part and self.part.stop())

    def lost(self, message: str) -> None:
        self._end(End(Reason.PEER_LOST, message))

    def _open(self) -> None:
        net, own, node = self.peer.net, self.peer.own, self.peer.other.node
        owner, to_owner = (own.services.node, own.services.boot_id), net.route(own)
        said = self.listener
        heard = PartListener(
            lambda blocks, lost: self._here(lambda: said.on_prefix(blocks, lost)),
            lambda end: self._here(lambda: self._end(end)),
            lambda begun, read_bytes: self._here(lambda: said.on_progress(begun, read_bytes)),
            lambda kept: self._here(lambda: said.on_gave_up(kept)),
            lambda kept, first_layer: self._here(lambda: said.on_gave_rest(kept, first_layer)),
        )
        error = net.refuses("read_part", own.services.node, self.peer.other.services.node)
        try:
            if error is not None:
                raise error
            if self.order.help is None:
                destination = Destination(to_owner, self.order.sink_id)
                self.part = node.decode_side.read_part(self.order, owner, destination, heard)
            else:
                decode = net.kits.get(self.order.help.decode_node)
                to_decode = net.route(decode) if decode is not None else None
                self.part = node.helper_side.open(
                    self.order, owner=owner, to_owner=to_owner, to_decode=to_decode, listener=heard
                )
        except KvmoverError as refused:
            name, end = self.peer.other.services.node, End(reason_of(refused), str(refused))
            self._here(lambda: self._end(replace(end, message=f"{name}: {end.message}")))
            return
        self.part.start()

    def _end(self, end: End) -> None:
        if not self.ended:
            self.ended = True
            self.peer.handles.discard(self)
            self.listener.on_end(end)

    def _there(self, act: Callable[[], object]) -> None:
        self.peer.net.later(lambda: None if self._is_lost() else act())

    def _here(self, tell: Callable[[], object]) -> None:
        self.peer.net.later(lambda: None if self.ended or self._is_lost() else tell())

    def _is_lost(self) -> bool:
        own, other = self.peer.own.services.node, self.peer.other.services.node
        return bool({own, other} & self.peer.net.dead) or self.peer.net.is_cut(own, other)


class NetPeers:
    """`Peers` of one node: all nodes of the net, itself too."""

    def __init__(self, net: Net, own: NodeKit) -> None:
        self._own = own
        self._peers: dict[str, Peer] = {own.services.node: LocalPeer(own.node.decode_side, own.node.models)}
        self.far = {name: FarPeer(net, own, other) for name, other in net.kits.items() if other is not own}
        self._peers |= self.far
        self.starved: set[str] = set()

    def peer(self, node: str) -> Peer | None:
        return self._peers.get(node)

    def describe(self) -> list[dict[str, object]]:
        return [{"node": name} for name in self.far]

    def starved_from(self) -> set[str]:
        return self.starved

    def tell_purged(self, fingerprints: Sequence[bytes], tenant: str) -> None:
        """Nothing is purged here."""


class Net:
    """Nodes by name; `kits["p"]` is the prefill node by habit, "d" the decode node, "h" and "i" are there to help."""

    def __init__(self) -> None:
        self.kits: dict[str, NodeKit] = {}
        self.fars: dict[str, FarGate] = {}
        self.peers: dict[str, NetPeers] = {}
        self.delay_s = 0.0
        self.calls: Counter[str] = Counter()
        self.dead: set[str] = set()
        self.cuts: set[frozenset[str]] = set()
        self.refuses: Callable[[str, str, str], KvmoverError | None] = lambda call, own, other: None
        """By call, caller and called: what is raised instead."""
        self._mail: deque[Callable[[], object]] = deque()

    def build(self, names: Sequence[str], **options: object) -> None:
        records: dict[bytes, dict[bytes, bytes]] = {}
        for name in names:
            boot_id = f"boot-{name}"
            self.fars[name] = FarGate(self, name, boot_id)
            kit = NodeKit(node=name, boot_id=boot_id, far=self.fars[name], **options)  # type: ignore[arg-type]
            kit.storage._records = records
            self.kits[name] = kit
        for name, kit in self.kits.items():
            self.peers[name] = kit.node.peers = NetPeers(self, kit)
            kit.node.helper_book = HelperBook(kit.services, kit.node.peers)

    def __getitem__(self, name: str) -> NodeKit:
        return self.kits[name]

    def route(self, kit: NodeKit) -> Route:
        return Route(kit.services.node, kit.services.boot_id, "", b"")

    def far_of(self, node: str, boot_id: str) -> FarGate | None:
        far = self.fars.get(node)
        return far if far is not None and far.boot_id == boot_id and node not in self.dead else None

    def is_cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self.cuts

    def later(self, act: Callable[[], object]) -> None:
        """Words of parts: after the delay, in the order they were said."""
        self._mail.append(act)
        loop = asyncio.get_running_loop()
        if self.delay_s:
            loop.call_later(self.delay_s, self._deliver)
        else:
            loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._mail.popleft()()

    # What goes wrong --------------------------------------------------------------------------------------------------

    def cut(self, one: str, other: str) -> None:
        """No word and no byte passes between the two any more, and both know."""
        self.cuts.add(frozenset((one, other)))
        self._lose(one, other)
        self._lose(other, one)

    def heal(self) -> None:
        self.cuts.clear()

    def kill(self, name: str) -> None:
        """The node is gone with all that it knows; what it has under way lands nowhere."""
        kit = self.kits[name]
        self.dead.add(name)
        kit.pumping = False
        for driver in kit.node.requests.live():
            driver._deadline.cancel()
            if isinstance(driver, StreamDriver):
                driver._balancer.close()
                own = [reader.handle for reader in driver._readers.values() if isinstance(reader.handle, PartDriver)]
                for part in own:
                    part._deadline.cancel()
        for far in self.fars.values():
            far.lose(name)
        for other in self.kits:
            if other not in self.dead:
                self._lose(other, name)

    def _lose(self, node: str, other: str) -> None:
        """What the daemon of `node` does when the other is lost."""
        kit, boot_id, message = self.kits[node], self.kits[other].services.boot_id, f"no word from {other}"
        for handle in list(self.peers[node].far[other].handles):
            handle.lost(message)
        kit.node.decode_side.peer_lost(other, boot_id, message)
        kit.node.parts.peer_lost(other, boot_id, message)
        for driver in kit.node.requests.live():
            if isinstance(driver, PushDriver | StreamDriver) and driver.request.goes_over(other, boot_id):
                driver.stop(Reason.PEER_LOST, f"{other}: {message}")
        kit.node.prefills.peer_lost(other, boot_id, message)

    # Steps and checks -------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> list[NodeKit]:
        return [kit for name, kit in self.kits.items() if name not in self.dead]

    def close_gates(self) -> None:
        """From now on nothing happens by itself: no read, no copy, no send to another node."""
        for kit in self.alive:
            kit.disk.closed = kit.wire.closed = True
        for far in self.fars.values():
            far.closed = True

    def open_gates(self) -> None:
        for kit in self.alive:
            kit.disk.closed = kit.wire.closed = False
        for far in self.fars.values():
            far.closed = False

    def release_one(self) -> bool:
        """The oldest read happens, or else the oldest send; False when nothing waits on any node."""
        alive = self.alive
        fars = [self.fars[kit.services.node] for kit in alive]
        if any(kit.disk.release_one() for kit in alive):
            return True
        return any(kit.wire.release_one() for kit in alive) or any(far.release_one() for far in fars)

    async def everything_is_home(self) -> None:
        for kit in self.alive:
            await kit.everything_is_home()

    def read_blocks(self) -> dict[str, int]:
        """Blocks that each node began to read from storage."""
        return {name: sum(kit.disk.reads.values()) for name, kit in self.kits.items()}

    def layer_reads(self) -> Counter[tuple[bytes, int]]:
        """By key and layer: how often a read of it began, on all nodes together."""
        return sum((kit.disk.layer_reads for kit in self.kits.values()), Counter())

    def far_bytes(self) -> dict[tuple[str, str], int]:
        """KV bytes that landed, by sender and receiver."""
        return {(name, to): size for name, far in self.fars.items() for to, size in far.sent_bytes.items() if size}

    def forget_counts(self) -> None:
        for kit in self.kits.values():
            kit.forget_counts()
        for far in self.fars.values():
            far.sent_bytes.clear()


@asynccontextmanager
async def node_net(nodes: int = 2, **options: object) -> AsyncIterator[Net]:
    """The first `nodes` of `NAMES`; `options` as for `NodeKit`."""
    net = Net()
    net.build(NAMES[:nodes], **options)
    kits = list(net.kits.values())
    for kit in kits:
        await kit.node.namespaces.register(MANIFEST)
    async with running(kits):
        yield net
