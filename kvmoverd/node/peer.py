"""What a node asks of another node's daemon. `rpc.peer_client` speaks it over gRPC, `LocalPeer` without leaving the process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvmoverd.core.status import BlockOutcome, End, Path, Reason
from kvmoverd.core.store.places import Place
from kvmoverd.ports.transport import Route


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
    ticket: Ticket
    push_sink: int
    route: Route | None
    """How to reach the sink; None: it is in this process."""


@dataclass(frozen=True, slots=True)
class PartListener:
    """What a remote part tells its owner. `on_end` is called exactly once, last."""

    on_prefix: Callable[[int, BlockOutcome | None], None]
    on_end: Callable[[End], None]


class PartHandle(Protocol):
    """A part that runs somewhere."""

    def credit(self, prefix_blocks: int, layers: int) -> None: ...

    def stop(self) -> None:
        """Ask it to stop; the listener's `on_end` follows in bounded time."""


class Peer(Protocol):
    """One other node. The coroutines raise `KvmoverError`; `PeerUnreachable` when the node does not answer in time."""

    async def reserve(self, reservation: Reservation) -> Reserved: ...

    async def set_prefix(self, ticket: Ticket, prefix_blocks: int) -> None: ...

    def read_part(
        self, ticket: Ticket, sink_id: int, credit_layers: int, timeout_s: float, listener: PartListener
    ) -> PartHandle: ...

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
