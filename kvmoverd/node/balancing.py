"""Balancing: watches the readers of one request, and moves what they have not read to those who have time.

Until the prefix is known these are whole blocks, then the layers that a part has not begun. While layers go it watches third
nodes, too: one that does not send what is its turn is replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvmoverd.core.admission import Purpose
from kvmoverd.core.balance import ASK_AGAIN_NS, Going, Pace, choose_move
from kvmoverd.core.machines.actions import Action
from kvmoverd.core.machines.stream import StreamMachine, StreamState
from kvmoverd.core.machines.stream_part import StreamPart
from kvmoverd.core.shares import Depth, Share
from kvmoverd.core.split import Reader
from kvmoverd.core.status import Path
from kvmoverd.node.prefill import PrefillRequest
from kvmoverd.node.turns import Turns
from kvmoverd.node.watched import Watched, granted, remains

TICK_S = 0.01
"""How long after the parts began they are looked at for the first time without having told anything."""
TICK_GROWS = 1.5
TICK_MAX_S = 0.25
REST_TICK_S = 0.1
"""How often parts that send are looked at which have nothing to tell."""
STALL_LOOKS = 4
"""How often within `split.stall` it is seen whether a third node's layers come."""
LOOK_AGAIN_NS = 10_000_000
LOOK_AGAIN_MAX_NS = 100_000_000
"""Progress comes with every batch of reads: looking at it more often costs more than it finds. Ever more seldom, while it
finds nothing."""
QUIET_NS = 60_000_000
"""Whose prefix is known and who tells nothing for so long keeps nobody waiting that another could relieve."""
MOVES_MAX = 32
"""Of one request: what moves that often has nowhere to go."""
_WATCHED = (StreamState.READING, StreamState.STREAMING)


class Balancer:
    """Of one stream. With `Path.AUTO` every part may be shared out anew; else only those of readers that starve or stand still,
    since the caller has chosen who reads."""

    def __init__(
        self,
        request: PrefillRequest,
        machine: StreamMachine,
        *,
        run: Callable[[Sequence[Action]], None],
        probe: Callable[[int], bool],
    ) -> None:
        """`probe`: asks a part's reader to give nothing up, which it answers if it is alive; False: it can't be asked yet."""
        self._request = request
        self._probe = probe
        self._services = request.services
        self._layout = request.plan.namespace.layout
        self._machine = machine
        self._run = run
        self._parts: dict[int, Watched] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tick_s = TICK_S
        self._look_next_ns = 0
        self._look_again_ns = LOOK_AGAIN_NS
        self._moved_ns: int | None = None
        self._moves = 0
        stall_ns = int(request.services.split.stall_s * 1e9)
        self._turns = Turns(machine, stall_ns=stall_ns, reads_ns=self._reads_ns)
        self._depths: dict[str, Depth] = {}
        """Of those who were to get blocks, before they got them."""

    def began(self, part: int) -> None:
        """A reader begins with a part."""
        now_ns = self._services.clock.now_ns()
        share = self._machine.parts[part].share
        is_here = share.node == self._services.node
        pooled = self._request.planner.pooled(share.blocks) if is_here and not self._machine.parts[part].rest else 0
        depth = self._depths.pop(share.node, None) or self._depth(share.node)
        self._parts[part] = Watched(now_ns, depth, Pace(now_ns), pooled, now_ns, now_ns)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def heard(self, part: int, begun_blocks: int, read_bytes: int) -> None:
        """A reader tells how far it is."""
        watched = self._parts.get(part)
        if watched is None or self._machine.state not in _WATCHED:
            return
        now_ns = self._services.clock.now_ns()
        watched.heard(begun_blocks, read_bytes, now_ns)
        if now_ns >= self._look_next_ns:
            self._look(now_ns)

    def gave_up(self, part: int, kept_blocks: int) -> None:
        """A reader answers what it keeps: to be told before the machine hears of it."""
        watched, known = self._parts.get(part), self._machine.parts.get(part)
        if watched is None or known is None:
            return
        watched.heard_ns, watched.probed_ns, watched.asked = self._services.clock.now_ns(), None, False
        if known.moving_to and kept_blocks < known.count:
            self._services.counts.moves[watched.why] += 1
            self._request.planner.given(Share(known.moving_to, known.share.blocks.tail(kept_blocks)))

    def gave_rest(self, part: int, kept_blocks: int, first_layer: int) -> None:
        """A reader that sends answers what it keeps, as `PartListener.on_gave_rest` has it: to be told before the machine is."""
        watched, known = self._parts.get(part), self._machine.parts.get(part)
        if watched is None or known is None:
            return
        watched.heard_ns = self._services.clock.now_ns()
        if first_layer and known.rest_to:
            self._services.counts.moves[watched.why] += 1
            self._services.counts.moves["rest"] += 1
            self._request.planner.given(Share(known.rest_to, granted(known).tail(kept_blocks)))

    def fenced(self, part: int) -> None:
        """A reader has failed, or stands still, and another one reads its part anew."""
        watched = self._parts.pop(part, None)
        self._services.counts.moves["stalled" if watched is not None and watched.stalled else "failed"] += 1

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        now_ns = self._services.clock.now_ns()
        match self._machine.state:
            case StreamState.READING:
                self._look(now_ns)
                self._see_to_silence(now_ns)
                self._tick_s = min(TICK_MAX_S, self._tick_s * TICK_GROWS)
            case StreamState.STREAMING:
                if not self._sees_to_layers(now_ns):
                    return
            case _:
                return
        if self._timer is None and self._machine.state in _WATCHED:
            self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def _sees_to_layers(self, now_ns: int) -> bool:
        """Looks at parts that send; False when there is none to which it could see."""
        rests, helpers = self._may_move(), not self._turns.are_over
        for part in self._turns.stalled(now_ns, buffer_is_open=self._request.prefix_set) if helpers else ():
            self._stands_still(part)
        self._see_to_silence(now_ns)
        if rests and now_ns >= self._look_next_ns:
            self._look(now_ns)
        stall_look_s = min(TICK_MAX_S, self._services.split.stall_s / STALL_LOOKS)
        self._tick_s = min(REST_TICK_S if rests else TICK_MAX_S, stall_look_s if helpers else TICK_MAX_S)
        return rests or helpers

    def _stands_still(self, part: int) -> None:
        watched = self._parts.get(part)
        if watched is not None:
            watched.stalled = True
        self._run(self._machine.on_part_stalled(part))

    def _reads_ns(self, known: StreamPart) -> int:
        """How long its storage NIC needs for what waits there, and a layer of the part. One that stands still needs nothing."""
        depth, layout = self._depth_now(known.share.node), self._layout
        if not depth.rate_bytes_per_s or depth.silent_ns >= int(self._services.split.stall_s * 1e9):
            return 0
        layer_bytes = known.count * layout.record_bytes // layout.layer_count
        return (depth.queue_bytes + layer_bytes) * 1_000_000_000 // depth.rate_bytes_per_s

    def _see_to_silence(self, now_ns: int) -> None:
        for part, watched in list(self._parts.items()):
            self._see_whether_it_lives(part, watched, now_ns)

    def _see_whether_it_lives(self, part: int, watched: Watched, now_ns: int) -> None:
        """A third node that has nothing to tell, because its reads wait, is asked whether it is there.

        Until its prefix is told, that is, be it of a rest: what it owes afterwards is `Turns`' affair.
        """
        known, half_ns = self._machine.parts.get(part), int(self._services.split.stall_s * 1e9 / 2)
        if known is None or known.prefix is not None or not self._machine.is_helper(known.share.node):
            return
        if watched.probed_ns is None and now_ns - watched.heard_ns >= half_ns:
            watched.probed_ns = now_ns
            if not known.moving_to and not watched.asked:
                watched.asked = True
                if not self._probe(part):
                    watched.asked = False
        elif watched.probed_ns is not None and now_ns - watched.probed_ns >= half_ns:
            self._stands_still(part)

    def _look(self, now_ns: int) -> None:
        """Moves what should move, one part at a time: the next look sees what came of it."""
        self._look_next_ns = now_ns + self._look_again_ns
        self._look_again_ns = min(LOOK_AGAIN_MAX_NS, int(self._look_again_ns * TICK_GROWS))
        if not self._may_move():
            return
        going = self._going(now_ns)
        if not any(part.may_give for part in going):
            return
        idle, block_bytes = self._idle(), self._layout.record_bytes
        move = choose_move(
            going,
            idle=idle,
            block_bytes=block_bytes,
            now_ns=now_ns,
            floor_s=self._services.split.floor_s,
            room_blocks=self._room_blocks([*(part.node for part in going), *(reader.node for reader in idle)]),
        )
        if move is None:
            return
        self._moves += 1
        self._moved_ns, self._look_again_ns = now_ns, LOOK_AGAIN_NS
        self._parts[move.part].why = move.why
        self._depths[move.to_node] = self._depth_now(move.to_node)
        self._run(self._machine.on_move(move.part, move.kept_blocks, move.to_node))

    def _going(self, now_ns: int) -> list[Going]:
        planner = self._request.planner
        starved = planner.starved_from()
        if planner.starved_to_decode():
            starved = starved | {self._services.node}
        return [
            self._going_part(known, watched, starves=known.share.node in starved, now_ns=now_ns)
            for part, known in self._machine.parts.items()
            if not known.fenced and (watched := self._parts.get(part)) is not None
        ]

    def _going_part(self, known: StreamPart, watched: Watched, *, starves: bool, now_ns: int) -> Going:
        if self._machine.state is StreamState.STREAMING:
            return self._going_on(known, watched, starves=starves, now_ns=now_ns)
        # It can't give any more, and what it still reads it does not tell: it may have found its blocks in its pool.
        is_quiet = known.prefix is not None and now_ns - watched.grew_ns >= QUIET_NS
        wanted_bytes = (known.count - watched.pooled_blocks) * self._layout.record_bytes
        has_read = not is_quiet or watched.read_bytes >= wanted_bytes
        return Going(
            part=known.part,
            node=known.share.node,
            blocks=known.count,
            begun_blocks=watched.begun_blocks if known.prefix is None else known.count,
            read_bytes=watched.read_bytes,
            since_ns=watched.since_ns,
            starved=starves,
            may_give=known.may_give
            and watched.probed_ns is None
            and not watched.asked
            and self._may_be_asked(watched, now_ns, starves=starves),
            may_take=has_read and self._may_take(known.share.node),
            depth=watched.depth,
            pooled_blocks=min(watched.pooled_blocks, known.count),
            pace=watched.pace,
            nic=self._request.planner.depth_now(known.share.node),
            done=known.ended or is_quiet or known.lost_block() is not None,
        )

    def _going_on(self, known: StreamPart, watched: Watched, *, starves: bool, now_ns: int) -> Going:
        """A part that sends. One that is silent and has nothing to give found its blocks in its pool, for all that is known."""
        found, blocks = remains(known, watched, self._layout, self._services.reader.range_bytes), granted(known).count
        is_quiet = now_ns - watched.grew_ns >= QUIET_NS
        return Going(
            part=known.part,
            node=known.share.node,
            blocks=blocks,
            begun_blocks=blocks,
            read_bytes=watched.read_bytes,
            since_ns=watched.since_ns,
            starved=starves,
            may_give=known.may_give_rest and self._may_be_asked(watched, now_ns, starves=starves),
            may_take=not is_quiet or not found.left_bytes,
            depth=watched.depth,
            pace=watched.pace,
            nic=self._request.planner.depth_now(known.share.node),
            done=not found.left_bytes or (is_quiet and not known.may_give_rest),
            remains=found,
        )

    def _may_move(self) -> bool:
        """Is there a part that could be asked at all?"""
        if not self._services.split.rebalances or self._moves >= MOVES_MAX:
            return False
        sends = self._machine.state is StreamState.STREAMING
        return any(known.may_give_rest if sends else known.may_give for known in self._machine.parts.values())

    def _room_blocks(self, nodes: Sequence[str]) -> dict[str, int]:
        """Of layers nobody takes more than it has room for now: what it could not take in would be lost to the request."""
        if self._machine.state is not StreamState.STREAMING:
            return {}
        planner, block_bytes = self._request.planner, self._layout.record_bytes
        return {node: planner.rest_bytes(node) // block_bytes for node in nodes}

    def _may_be_asked(self, watched: Watched, now_ns: int, *, starves: bool) -> bool:
        """After a move nothing moves for a while: whoever has got blocks has to show first how fast it reads them.

        Reads that wait behind those of other requests do not stand still.
        """
        patience_ns = int(self._services.split.stall_s * 1e9) + 2 * watched.queue_ns
        if starves or now_ns - watched.grew_ns >= patience_ns:
            return True
        settled = self._moved_ns is None or now_ns - self._moved_ns >= ASK_AGAIN_NS
        return settled and self._request.plan.path is Path.AUTO

    def _may_take(self, node: str) -> bool:
        """This node takes no more than it has room for at once: a request that holds a DE buffer does not queue for it."""
        if node != self._services.node or node == self._request.plan.decode_node:
            return True
        if self._machine.state is StreamState.STREAMING:
            return True
        theirs = sum(known.count for known in self._machine.parts.values() if known.share.node != node)
        size_bytes = theirs * self._layout.record_bytes
        return self._services.room.fits_now(Purpose.READ, size_bytes)

    def _idle(self) -> list[Reader]:
        """Nodes without a part that could have one."""
        plan, planner, own = self._request.plan, self._request.planner, self._services.node
        busy = {known.share.node for known in self._machine.parts.values()}
        starved = planner.starved_from()
        owners = [node for node in dict.fromkeys((plan.decode_node, own)) if node and node not in busy]
        if own == plan.decode_node:
            owners = [node for node in owners if node == plan.decode_node]
        found = [
            Reader(node, self._depth_now(node), starved=node in starved) for node in owners if self._may_take(node)
        ]
        helping = [node for node in busy if self._machine.is_helper(node)]
        return found + [Reader(node, depth) for node, depth in planner.helpers(helping)]

    def _depth_now(self, node: str) -> Depth:
        return self._request.planner.depth_now(node) or self._depth(node)

    def _depth(self, node: str) -> Depth:
        """As it was when the request began; this node's own as it is."""
        reserved = self._request.reserved
        return self._request.planner.depth(node, reserved.depth if reserved is not None else Depth())
