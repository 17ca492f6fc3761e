"""What a node asks of another node's daemon. `rpc.peer_client` speaks it over gRPC, `LocalPeer` without leaving the process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvmoverd.core.manifest import Namespace
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Depth, ReadPlan, Share
from kvmoverd.core.status import BlockOutcome, End, Path, Reason
from kvmoverd.core.store.places import Place
from kvmoverd.ports.transport import Route


@dataclass(frozen=True, slots=True)
class PeerDepth:
    """`helps`: it reads for others; `help_free_bytes`: what its pool has for that."""

    depth: Depth
    helps: bool
    help_free_bytes: int
    boot_id: str


@dataclass(frozen=True, slots=True)
class SplitFacts:
    """What the prefill node knows that bears on who reads. `pooled`: of the hit blocks, those that are clean in its pool.

    `helpers`: third nodes that may read, and their storage NICs; `floor_s`: what a split has to gain.
    """

    prefill: Depth
    pooled: Runs
    helpers: tuple[tuple[str, Depth], ...]
    starved_to_decode: bool
    starved_from_decode: bool
    floor_s: float


@dataclass(frozen=True, slots=True)
class Reservation:
    """What the prefill node asks a DE buffer for."""

    request_id: str
    attempt: int
    fingerprint: bytes
    block_keys: tuple[bytes, ...]
    tail_tokens: int
    hit_blocks: int
    path: Path | None
    timeout_s: float
    node: str
    boot_id: str
    session_id: str = ""
    """The prefill engine's, when both sides are one node; it never crosses the wire."""
    waited_s: float = 0.0
    """How long the request has waited for room by now."""
    places: Sequence[Place | None] = ()
    """Where the leading hit blocks lie, as far as the prefill node knows."""
    resident_blocks: int = 0
    """Leading hit blocks that lie in the prefill engine's pages: nobody has to read them."""
    shares: tuple[Share, ...] = ()
    """With `Path.PARTS`: who reads what."""
    facts: SplitFacts | None = None
    """With `Path.AUTO`: what the prefill node knows that bears on it."""

    @property
    def owner(self) -> str:
        """Whose the request is on the decode node."""
        return self.session_id or self.node


@dataclass(frozen=True, slots=True)
class Ticket:
    """Right to one DE buffer; void for another boot id."""

    boot_id: str
    ticket_id: int
    generation: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """`plan`: who reads what. With `Path.AUTO` the decode node has decided, and `depth` is what it saw of itself then."""

    ticket: Ticket
    push_sink: int
    route: Route | None
    """How to reach the sink; None: it is in this process."""
    plan: ReadPlan
    depth: Depth = field(default_factory=Depth)


@dataclass(frozen=True, slots=True)
class Helped:
    """A third node's part, as the decode node must know it: its layers come from there."""

    node: str
    boot_id: str
    blocks: Runs


@dataclass(frozen=True, slots=True)
class Help:
    """What a third node has to know of a request of two others. `keys` and `places` are those of the part's blocks."""

    request_id: str
    attempt: int
    namespace: Namespace
    keys: tuple[bytes, ...]
    places: Sequence[Place | None]
    decode_node: str
    """Gets the layers too; empty: nobody."""


@dataclass(frozen=True, slots=True)
class PartOrder:
    """A part that another node, or the decode side of this one, is to read.

    `part` is never used twice by this daemon. `ticket`: of the decode node; None for a third node, which gets `help`.
    """

    part: int
    blocks: Runs
    sink_id: int
    credit_layers: int
    first_layer: int
    holds: bool
    timeout_s: float
    ticket: Ticket | None = None
    help: Help | None = None
    rest: bool = False
    """Only layers from `first_layer` on are read; those before are where they have to be."""


@dataclass(frozen=True, slots=True)
class PartListener:
    """What a part tells its owner; blocks are counted among its own. `on_end` is called exactly once, last."""

    on_prefix: Callable[[int, BlockOutcome | None], None]
    on_end: Callable[[End], None]
    on_progress: Callable[[int, int], None] = lambda begun_blocks, read_bytes: None
    """Leading blocks that it can't give up any more, and bytes that it read from storage."""
    on_gave_up: Callable[[int], None] = lambda kept_blocks: None
    on_gave_rest: Callable[[int, int], None] = lambda kept_blocks, first_layer: None
    """Its blocks from `kept_blocks` on have layers [0, first_layer) from it and no more; `first_layer` 0: it gives nothing."""


class PartHandle(Protocol):
    """A part that runs somewhere."""

    def credit(self, prefix_blocks: int, layers: int) -> None:
        """`prefix_blocks`: how many of the part's blocks belong to the prefix."""

    def assemble(self, sink_id: int) -> None:
        """Of a third node's part: its layers go to this sink of the decode node, too."""

    def give_up(self, kept_blocks: int) -> None:
        """It may keep so many leading blocks, and what it has begun; `on_gave_up` follows, or the end."""

    def give_rest(self, kept_blocks: int) -> None:
        """While it sends: it may keep so many leading blocks whole, and of the others the layers that are begun.

        `on_gave_rest` follows, or the end.
        """

    def stop(self) -> None:
        """Ask it to stop; the listener's `on_end` follows in bounded time."""


class Peer(Protocol):
    """One other node. The coroutines raise `KvmoverError`; `PeerUnreachable` when the node does not answer in time."""

    async def reserve(self, reservation: Reservation) -> Reserved: ...

    async def set_prefix(self, ticket: Ticket, prefix_blocks: int, helped: Sequence[Helped]) -> list[int]:
        """Blocks from there on are new. The sinks for the layers of third nodes, in the order of `helped`."""

    def read_part(self, order: PartOrder, listener: PartListener) -> PartHandle: ...

    async def depth(self) -> PeerDepth:
        """How much its storage NIC has to read, and whether it helps."""

    async def release_ticket(self, ticket: Ticket, reason: Reason) -> None: ...

    async def return_ticket(self, ticket: Ticket) -> None:
        """The buffer goes back and the request to admission: the same attempt may reserve again."""

    async def route(self) -> Route | None:
        """Where the node's data channel listens; None for this process itself."""

    def lost(self) -> None:
        """Its data channel broke: ask for a new route next time."""


class Peers(Protocol):
    """All nodes that this one may talk to."""

    def peer(self, node: str) -> Peer | None:
        """None when no node has this name."""

    def describe(self) -> list[dict[str, Any]]:
        """What is known of each peer, as NodeStatus tells it."""

    def starved_from(self) -> set[str]:
        """Nodes that say that their KV to this one gets too little."""

    def tell_purged(self, fingerprints: Sequence[bytes], tenant: str) -> None:
        """Lets all nodes know that these namespaces, and all of a tenant that is not empty, were purged; soon, and as a hint."""
