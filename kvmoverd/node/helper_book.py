"""Which third nodes may help to read, and how busy others' storage NICs are: known beforehand, no request waits for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from kvmoverd.core.breaker import Breaker
from kvmoverd.core.errors import KvmoverError
from kvmoverd.core.shares import Depth
from kvmoverd.node.peer import Peer, PeerDepth, Peers
from kvmoverd.node.services import Services

NODES_MAX = 8
"""Looked at for one request."""
ORDER_NS = 1_000_000_000
"""How long the order of nodes is kept: with many of them it takes longer than all else here."""
FRESH_NS = 50_000_000
"""What is older is asked for again, while requests come."""
TRUSTED_NS = 60_000_000_000
"""What is older counts for nothing. Until then a node is as idle as it was: if it got busy meanwhile, it is late with its part,
and that is moved."""
LATELY_NS = 500_000_000
"""What is older says nothing of what a node does now."""
SETTLE_NS = 20_000_000
"""What was assigned to a node shows in what it says of itself after so long."""
CALL_S = 0.5
PAUSE_S, PAUSE_MAX_S = 1.0, 8.0
"""Who did not answer is asked again after this; longer, when it goes on like that."""
_ASSIGNED_MAX = 256


def _new_breaker() -> Breaker:
    return Breaker(failures_max=1, pause_s=PAUSE_S, pause_max_s=PAUSE_MAX_S)


@dataclass(slots=True)
class _Known:
    """`assigned`: when and how many bytes, as far as the node may not have counted them in `told`."""

    told: PeerDepth | None = None
    asked_ns: int = 0
    asking: asyncio.Task[None] | None = None
    breaker: Breaker = field(default_factory=_new_breaker)
    assigned: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_ASSIGNED_MAX))

    def assigned_bytes(self) -> int:
        return sum(size_bytes for _, size_bytes in self.assigned)


class HelperBook:
    """Asks in the background, and only while there are requests that could use a helper, or whose reads may move.

    Belongs to the loop's thread.
    """

    def __init__(self, services: Services, peers: Peers) -> None:
        self._services = services
        self._peers = peers
        self._known: dict[str, _Known] = {}
        self._order: Sequence[str] = ()
        self._ordered_ns: int | None = None

    def candidates(
        self, exclude: Collection[str], wanted: Sequence[str] | None = None
    ) -> tuple[tuple[str, Depth], ...]:
        """Nodes that said of late that they help and have room, the least busy first: `split.helpers_max` at most.

        `exclude`: the request's own nodes, and those whose lane to here starves. `wanted`: only these; None: the
        `split.helper_nodes`, or any peers. Of who was never asked nothing is known yet: it is asked now.
        """
        settings, now_ns = self._services.split, self._services.clock.now_ns()
        if settings.helpers_max <= 0:
            return ()
        found: dict[str, Depth] = {}
        for node in self._looked_at(exclude, wanted, now_ns):
            known = self._looked_up(node, now_ns)
            depth = _trusted(known, now_ns) if known is not None else None
            if depth is not None:
                found[node] = depth
        fastest = max((depth.rate_bytes_per_s for depth in found.values()), default=0) or 1
        by_wait = sorted(found, key=lambda node: found[node].queue_bytes / (found[node].rate_bytes_per_s or fastest))
        return tuple((node, found[node]) for node in by_wait[: settings.helpers_max])

    def depth(self, node: str) -> Depth | None:
        """Any node's storage NIC now, whether it helps or not; None if it was not heard of lately: it is asked, too."""
        now_ns = self._services.clock.now_ns()
        known = self._looked_up(node, now_ns)
        if known is None or known.told is None or now_ns - known.asked_ns > LATELY_NS:
            return None
        depth = known.told.depth
        return replace(depth, queue_bytes=_queue_now(depth, known.asked_ns, known.assigned, now_ns))

    def help_bytes(self, node: str) -> int:
        """What any node has room for as a helper, as it said of late, without what it was given since; 0: it does not help, or
        nothing is known of it."""
        now_ns = self._services.clock.now_ns()
        known = self._looked_up(node, now_ns)
        if known is None or known.told is None or now_ns - known.asked_ns > LATELY_NS or not known.told.helps:
            return 0
        return max(0, known.told.help_free_bytes - known.assigned_bytes())

    def assigned(self, node: str, size_bytes: int) -> None:
        """A plan gives it so much to read: it counts until the node itself says so."""
        known = self._known.get(node)
        if known is not None:
            known.assigned.append((self._services.clock.now_ns(), size_bytes))

    def close(self) -> None:
        """Gives up the calls that are under way."""
        for known in self._known.values():
            if known.asking is not None:
                known.asking.cancel()

    def _looked_at(self, exclude: Collection[str], wanted: Sequence[str] | None, now_ns: int) -> list[str]:
        nodes: Iterable[str] = self._any_order(now_ns) if wanted is None else dict.fromkeys(wanted)
        own = self._services.node
        return [node for node in nodes if node != own and node not in exclude][:NODES_MAX]

    def _any_order(self, now_ns: int) -> Sequence[str]:
        """Of every node another one: else all would look at the same few."""
        if self._ordered_ns is None or now_ns - self._ordered_ns >= ORDER_NS:
            own = blake2b(self._services.node.encode()).digest()
            nodes = self._services.split.helper_nodes or [str(peer["node"]) for peer in self._peers.describe()]
            self._order = sorted(nodes, key=lambda node: blake2b(node.encode(), key=own, digest_size=8).digest())
            self._ordered_ns = now_ns
        return self._order

    def _looked_up(self, node: str, now_ns: int) -> _Known | None:
        """What is known, after asking for more if that is due; None when no node has this name."""
        known = self._known.get(node)
        if known is not None and (known.asking or (known.told and now_ns - known.asked_ns < FRESH_NS)):
            return known
        peer = self._peers.peer(node)
        if peer is None:
            return None
        known = self._known.setdefault(node, _Known())
        if known.breaker.wait_s(now_ns / 1e9) <= 0:
            known.asking = asyncio.get_running_loop().create_task(self._ask(known, peer, now_ns))
        return known

    async def _ask(self, known: _Known, peer: Peer, now_ns: int) -> None:
        try:
            async with asyncio.timeout(CALL_S):
                known.told = await peer.depth()
        except (KvmoverError, TimeoutError):
            known.told = None
            known.breaker.on_failure(self._services.clock.now_ns() / 1e9)
        else:
            known.breaker.on_success()
            known.asked_ns = now_ns
            while known.assigned and known.assigned[0][0] < now_ns - SETTLE_NS:
                known.assigned.popleft()
        finally:
            known.asking = None


def _trusted(known: _Known, now_ns: int) -> Depth | None:
    """Its depth with what it was given since; None when it doesn't help, has no room, or was not heard of for long."""
    told = known.told
    if told is None or now_ns - known.asked_ns > TRUSTED_NS or not told.helps:
        return None
    queue_bytes = _queue_now(told.depth, known.asked_ns, known.assigned, now_ns)
    if told.help_free_bytes <= min(queue_bytes, known.assigned_bytes()):
        return None
    return Depth(queue_bytes, told.depth.rate_bytes_per_s)


def _queue_now(told: Depth, told_ns: int, assigned: Iterable[tuple[int, int]], now_ns: int) -> int:
    """What it still has to read of what it said and of what it was given, if it goes on at its rate."""
    left, since_ns = float(told.queue_bytes), told_ns
    for given_ns, size_bytes in (*assigned, (now_ns, 0)):
        left = max(0.0, left - told.rate_bytes_per_s * max(0, given_ns - since_ns) / 1e9) + size_bytes
        since_ns = max(since_ns, given_ns)
    return int(left)
