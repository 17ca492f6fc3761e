"""Stream driver: Layer Blocks of the hit prefix into a prefill engine's pages, from one reader or several."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import ClassVar

from kvmoverd.core.errors import KvmoverError
from kvmoverd.core.machines.actions import (
    Action,
    AskForRest,
    AskToGiveUp,
    FencePart,
    Finish,
    Grant,
    PushRest,
    Quiesce,
    Reserve,
    SetPrefix,
    StartPart,
)
from kvmoverd.core.machines.stream import StreamMachine, StreamState
from kvmoverd.core.runs import Runs
from kvmoverd.core.status import BlockOutcome, End, Reason
from kvmoverd.node.balancing import Balancer
from kvmoverd.node.driver import Driver
from kvmoverd.node.peer import Helped, PartListener, PartOrder, Peer
from kvmoverd.node.prefill import PrefillRequest
from kvmoverd.node.reading import Destination, PartDriver
from kvmoverd.node.reasons import reason_of
from kvmoverd.node.sessions import Region
from kvmoverd.node.stream_reader import StreamReader
from kvmoverd.ports.transport import IoVec, Sender


class StreamDriver(Driver):
    """One StreamLayers call. The sinks it opens, one for each part, let in only layers that were granted, once each."""

    kind: ClassVar[str] = "prefill"

    def __init__(self, request: PrefillRequest) -> None:
        super().__init__(request.services, request.plan.call)
        plan = request.plan
        self.request = request
        self._machine = StreamMachine(
            layers=plan.namespace.layout.layer_count,
            resident_blocks=plan.resident_blocks,
            hit_blocks=plan.hit_blocks,
            decode_node=plan.decode_node,
            own_node=self.services.node,
            ring_sets=plan.ring_sets,
            pushes=request.peer is not None,
            new_part=lambda: next(self.services.ids),
        )
        self._readers: dict[int, StreamReader] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._balancer = Balancer(request, self._machine, run=self.run, probe=self._probe)
        request.join("stream")
        request.on_reserved.append(self._reserved)
        request.on_reserve_failed.append(self._reserve_failed)
        request.on_failed.append(self.fail)
        request.on_computed.insert(0, lambda layers: self.run(self._machine.on_computed(layers)))
        request.on_pushed.append(lambda layers: self.run(self._machine.on_pushed(layers)))

    @property
    def machine(self) -> StreamMachine:
        return self._machine

    def start(self) -> None:
        self.run(self._machine.start())

    def fail(self, end: End) -> None:
        """The other call of the request has failed."""
        self.stop(end.reason, end.message)

    def uses_region(self, region: Region) -> bool:
        return self.request.plan.region is region

    def gone(self) -> None:
        self._balancer.close()
        self.request.leave("stream", self.ended.reason if self.ended else Reason.CANCELLED)

    def do(self, action: Action) -> None:
        match action:
            case Reserve():
                self.request.reserve()
            case StartPart(part):
                self._start_part(part)
            case SetPrefix(prefix_blocks):
                self._set_prefix(prefix_blocks)
            case Grant(part, blocks, layers):
                self._grant(self._readers[part], blocks, layers)
            case AskToGiveUp(part, kept_blocks):
                self._ask_to_give_up(self._readers[part], kept_blocks)
            case AskForRest(part, kept_blocks):
                self._ask_for_rest(self._readers[part], kept_blocks)
            case PushRest(blocks, first_layer):
                self.request.push_rest(blocks, first_layer)
            case FencePart(part):
                self._fence(self._readers[part])
            case Quiesce():
                self._begin_quiesce()
            case Finish(end):
                self.request.finished(end)
                self.outbox.put(action)
            case _:
                self.outbox.put(action)

    def _reserved(self) -> None:
        assert self.request.reads is not None, "reserved, and nobody knows who reads"
        self.run(self._machine.on_reserved(self.request.reads.shares))

    def _reserve_failed(self, reason: Reason, message: str) -> None:
        self.run(self._machine.on_reserve_failed(reason, message))

    # Readers ----------------------------------------------------------------------------------------------------------

    def _start_part(self, part: int) -> None:
        known, own = self._machine.parts[part], self.services.node
        node, decode_node = known.share.node, self.request.plan.decode_node
        reader = StreamReader(known, node == own, 0 if known.holds else self._machine.credit_layers())
        self._readers[part] = reader
        if not self._is_wanted(reader):
            return
        self._balancer.began(part)
        if node == decode_node and not known.rest:
            self._when_decode_node_is_ready(reader)
        elif node == own:
            self._read_here(reader)
        else:
            self._spawn(self._ask_helper(reader))

    def _is_wanted(self, reader: StreamReader) -> bool:
        """Has it still to be started? One that was given up, or whose request ended, before it was asked has nothing to end."""
        known = reader.known
        live = self._machine.state in (StreamState.READING, StreamState.STREAMING)
        if live and self._machine.parts.get(known.part) is known and not known.fenced:
            return True
        reader.ended = True
        self._tell_if_quiet()
        return False

    def _when_decode_node_is_ready(self, reader: StreamReader) -> None:
        """What it takes over after the prefix must be known to it as a third node's part first."""
        if self._machine.state is StreamState.STREAMING and not self.request.prefix_set:
            self.request.on_prefix_set.append(lambda: self._ask_decode_node(reader))
        else:
            self._ask_decode_node(reader)

    def _ask_decode_node(self, reader: StreamReader) -> None:
        if not self._is_wanted(reader):
            return
        peer, reserved = self.request.peer, self.request.reserved
        assert peer is not None and reserved is not None, "a DE read without a ticket"
        route = reserved.route
        self._open(reader, None if route is None else (route.node, route.boot_id))
        self._ask(reader, peer, reader.order(self.request, self._left_s(), ticket_of_decode_node=True))

    async def _ask_helper(self, reader: StreamReader) -> None:
        """A third node, or the decode node for a rest, which is no matter of its buffer. It may have to be greeted first: its
        boot is the only sender that the sink takes.
        """
        known = reader.known
        peer = self.request.planner.peers.peer(known.share.node) if self.request.planner.peers is not None else None
        if peer is None:
            self._part_failed(reader, Reason.PEER_LOST, f"no node is named {known.share.node!r}")
            return
        try:
            route = await peer.route()
        except KvmoverError as error:
            self._part_failed(reader, reason_of(error), f"{known.share.node}: {error}")
            return
        if self._is_wanted(reader):
            self._open(reader, None if route is None else (route.node, route.boot_id))
            self._ask(reader, peer, reader.order(self.request, self._left_s(), ticket_of_decode_node=False))

    def _open(self, reader: StreamReader, sender: Sender | None) -> None:
        def resolve(layer: int, first_block: int) -> IoVec | None:
            return reader.resolve(self.request.plan, layer, first_block)

        def on_layer(layer: int, moved_bytes: int) -> None:
            self.moved_bytes += moved_bytes
            self.run(self._machine.on_part_layer(reader.known.part, layer))

        reader.sender = sender
        reader.sink_id = self.services.mover.expect(resolve, on_layer, sender)

    def _left_s(self) -> float:
        return self._deadline.when() - self._loop.time()

    def _ask(self, reader: StreamReader, peer: Peer, order: PartOrder) -> None:
        try:
            reader.handle = peer.read_part(order, self._listener(reader))
        except KvmoverError as error:
            self._part_failed(reader, reason_of(error), f"{reader.known.share.node}: {error}")

    def _read_here(self, reader: StreamReader) -> None:
        known, plan = reader.known, self.request.plan
        self._open(reader, None)
        assert reader.sink_id is not None, "no sink was opened"
        part = PartDriver(
            self.services,
            plan.call,
            namespace=plan.namespace,
            keys=plan.keys_of(known.share.blocks),
            credit_layers=reader.granted_layers,
            destination=Destination(None, reader.sink_id),
            listener=self._listener(reader),
            first_block=known.share.blocks.first,
            first_layer=known.first_layer,
            holds=known.holds,
        )
        if known.rest:
            part.read_rest()
        reader.handle = part
        self.request.hand_room_to(part, known.count)
        part.start()

    def _listener(self, reader: StreamReader) -> PartListener:
        part = reader.known.part

        def on_prefix(prefix_blocks: int, first_lost: BlockOutcome | None) -> None:
            self.run(self._machine.on_part_prefix(part, prefix_blocks, first_lost))

        def on_gave_up(kept_blocks: int) -> None:
            self._balancer.gave_up(part, kept_blocks)
            self.run(self._machine.on_gave_up(part, kept_blocks))

        def on_gave_rest(kept_blocks: int, first_layer: int) -> None:
            self._balancer.gave_rest(part, kept_blocks, first_layer)
            self.run(self._machine.on_gave_rest(part, kept_blocks, first_layer))

        def on_progress(begun_blocks: int, read_bytes: int) -> None:
            self._balancer.heard(part, begun_blocks, read_bytes)

        def on_end(end: End) -> None:
            self._part_ended(reader, end)

        return PartListener(on_prefix, on_end, on_progress, on_gave_up, on_gave_rest)

    def _part_ended(self, reader: StreamReader, end: End) -> None:
        reader.ended = True
        self.read_bytes += end.storage_read_bytes
        if end.reason is Reason.OK:
            self.run(self._machine.on_part_ended(reader.known.part))
        else:
            self.run(self._machine.on_part_failed(reader.known.part, end.reason, end.message, end.prefix_blocks))
        self._tell_if_quiet()

    def _part_failed(self, reader: StreamReader, reason: Reason, message: str) -> None:
        """It was never begun."""
        reader.ended = True
        self.run(self._machine.on_part_failed(reader.known.part, reason, message))
        self._tell_if_quiet()

    def _ask_to_give_up(self, reader: StreamReader, kept_blocks: int) -> None:
        if reader.handle is not None:
            reader.handle.give_up(kept_blocks)
        else:
            # It was not asked to read yet: all that it is not to keep may go.
            self._balancer.gave_up(reader.known.part, kept_blocks)
            self.run(self._machine.on_gave_up(reader.known.part, kept_blocks))

    def _ask_for_rest(self, reader: StreamReader, kept_blocks: int) -> None:
        """A part that sends has a handle; its answer, or its end, is on its way when it hears of this too late."""
        if reader.handle is not None:
            reader.handle.give_rest(kept_blocks)

    def _probe(self, part: int) -> bool:
        reader = self._readers[part]
        if reader.handle is None:
            return False
        reader.handle.give_up(reader.known.count)
        return True

    def _grant(self, reader: StreamReader, blocks: int, layers: int) -> None:
        reader.granted_layers = layers
        if reader.handle is not None:
            reader.handle.credit(blocks, layers)

    # The prefix -------------------------------------------------------------------------------------------------------

    def _set_prefix(self, prefix_blocks: int) -> None:
        decode_node = self.request.plan.decode_node
        parts = [(reader, self._granted(reader)) for reader in self._readers.values()]
        there = Runs.union(blocks for reader, blocks in parts if reader.known.share.node == decode_node)
        helpers = [(reader, blocks) for reader, blocks in parts if blocks and self._is_helper(reader)]
        helped = [Helped(reader.known.share.node, reader.boot_id, blocks) for reader, blocks in helpers]

        def on_sinks(sinks: list[int]) -> None:
            for (reader, _), sink_id in zip(helpers, sinks, strict=False):
                if reader.handle is not None and not reader.fencing:
                    reader.handle.assemble(sink_id)

        self.request.set_prefix(prefix_blocks, there=there, helped=helped, on_sinks=on_sinks)

    def _granted(self, reader: StreamReader) -> Runs:
        """The reader's blocks of the prefix."""
        known = reader.known
        is_there = self._machine.parts.get(known.part) is known and known.granted_blocks is not None
        return known.share.blocks.head(known.granted_blocks or 0) if is_there else Runs()

    def _is_helper(self, reader: StreamReader) -> bool:
        return self._machine.is_helper(reader.known.share.node)

    # Fences -----------------------------------------------------------------------------------------------------------

    def _fence(self, reader: StreamReader) -> None:
        """One part: its reader is told, but not waited for. It may be dead; what it sends goes nowhere."""
        self._balancer.fenced(reader.known.part)
        if reader.handle is not None and not reader.ended:
            reader.handle.stop()
        self._close(reader, lambda: self.run(self._machine.on_part_fenced(reader.known.part)))

    def _close(self, reader: StreamReader, on_quiet: Callable[[], None]) -> None:
        reader.fencing = True

        def quiet() -> None:
            reader.sink_id = None
            on_quiet()
            self._tell_if_quiet()

        if reader.sink_id is None:
            quiet()
        else:
            self.services.mover.forget(reader.sink_id, quiet)

    def _begin_quiesce(self) -> None:
        """Readers that are not to count, or whose request did not go well, are stopped; the others end by themselves."""
        self._balancer.close()
        for reader in list(self._readers.values()):
            counts = self._machine.went_well and self._granted(reader)
            if not counts and reader.handle is not None and not reader.ended and not reader.fencing:
                reader.handle.stop()
            if not reader.fencing:
                self._close(reader, lambda: None)
        self._tell_if_quiet()

    def _tell_if_quiet(self) -> None:
        """A sink that is closed lets nothing land. Ends of other nodes are waited for only if all went well: they count bytes."""
        readers, well = self._readers.values(), self._machine.went_well
        awaited = (one for one in readers if one.is_local or (well and self._granted(one)))
        if all(one.sink_id is None for one in readers) and all(one.ended for one in awaited):
            self.run(self._machine.on_quiet())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
