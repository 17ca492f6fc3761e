"""The words of the client library: what goes into calls and comes out of them. Sizes in bytes, durations in seconds."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Reason(enum.Enum):
    """Why a request or a block ended as it did. The values are the numbers of `kvmover.v1.Reason`, which explains them."""

    OK = 1
    PREFIX_CUT = 2
    CANCELLED = 3
    DEADLINE = 4
    ENGINE_GONE = 5
    PEER_LOST = 6
    POOL_EXHAUSTED = 7
    MISS = 8
    CORRUPT = 9
    SHORT_READ = 10
    IO_ERROR = 11
    NO_SPACE = 12
    STALE_ATTEMPT = 13
    LEASE_EXPIRED = 14
    SHUTTING_DOWN = 15
    DROPPED = 16
    INTERNAL = 17
    TOO_BIG = 18


class BlockState(enum.Enum):
    """State of one block in an answer. The values are the numbers of `kvmover.v1.BlockState`."""

    HIT = 1
    MISS = 2
    FAILED = 3


class Path(enum.Enum):
    """Which node's storage NIC reads the hit blocks. The values are the numbers of `kvmover.v1.Path`.

    AUTO, the usual one: the nodes decide from their queues, and third nodes may help. PARTS: as `Plan.parts` says.
    """

    PE = 1
    DE = 2
    AUTO = 3
    PARTS = 4


@dataclass(frozen=True, slots=True)
class BlockResult:
    """What became of one block: HIT with reason OK, MISS with reason MISS, or FAILED and why."""

    state: BlockState
    reason: Reason


@dataclass(frozen=True, slots=True)
class End:
    """Last word of a call.

    While `pages_quiet` is false the engine must not re-use the pages it named: await `quiet()`. Blocks
    [0, `prefix_blocks`) of the request are good. `retryable`: a further attempt may succeed.
    """

    reason: Reason
    message: str = ""
    pages_quiet: bool = True
    prefix_blocks: int = 0
    moved_bytes: int = 0
    storage_read_bytes: int = 0
    retryable: bool = False
    remedy: str = ""


@dataclass(frozen=True)
class Layout:
    """Shape of a Full Block: for each layer the sizes of its segments, in bytes per whole block. The daemon checks it."""

    block_tokens: int
    layers: tuple[tuple[int, ...], ...]

    @classmethod
    def uniform(cls, *, layers: int, tokens: int, token_bytes: int) -> Layout:
        """All layers alike, one segment each.

        >>> Layout.uniform(layers=61, tokens=64, token_bytes=656).block_bytes
        2561024
        """
        return cls(tokens, ((tokens * token_bytes,),) * layers)

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    @property
    def block_bytes(self) -> int:
        """Bytes of a Full Block, without padding."""
        return sum(sum(segments) for segments in self.layers)


@dataclass(frozen=True)
class Manifest:
    """All that makes two KV caches interchangeable, as in `common.proto`. An absent digest is refused by the daemon."""

    model_id: str
    weights_digest: bytes
    tokenizer_digest: bytes
    layout: Layout
    dtype: str
    rope_scaling: str = ""
    parallel_geometry: str = "replicated"
    lora_id: str = ""
    tenant: str = ""
    epoch: int = 0


@dataclass(frozen=True)
class Model:
    """A registered namespace. `fingerprint` (32 bytes) roots its block keys; `slots_max`: blocks the pool could hold."""

    manifest: Manifest
    fingerprint: bytes
    block_bytes: int
    slots_max: int

    @property
    def layout(self) -> Layout:
        return self.manifest.layout


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks that one node reads: ranges [first, stop) of their places in the prompt, ascending.

    >>> Part("node-1", ((0, 40), (60, 80)))
    Part(node='node-1', blocks=((0, 40), (60, 80)))
    """

    node: str
    blocks: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Plan:
    """What the prefill side says of a request, the same in `stream_layers` and `push_layers`. See `RequestPlan`.

    `block_keys`: all full blocks of the prompt. `page_sets`: one set when each layer has its own pages, several for a
    ring; each set lists the pages of all blocks and of the tail, in token order. `decode_node` "": nothing is pushed.

    `path`: `Path.AUTO` unless there is a reason; None without hits. `resident_blocks`: leading hit blocks whose KV is in the
    pages already: they are not loaded. With `Path.PARTS`, `parts` are all other hit blocks, each once. With `Path.AUTO`,
    `helpers` are the third nodes that may read, any if none is named, and with `no_helpers` none.
    """

    request_id: str
    attempt: int
    fingerprint: bytes
    block_keys: Sequence[bytes]
    tail_tokens: int
    hit_blocks: int
    decode_node: str
    path: Path | None
    region_id: int
    page_sets: Sequence[Sequence[int]]
    timeout_s: float = 60.0
    resident_blocks: int = 0
    parts: Sequence[Part] = ()
    helpers: Sequence[str] = ()
    no_helpers: bool = False


@dataclass(frozen=True, slots=True)
class ReaderDepth:
    """A node's storage NIC: bytes that wait or are under way, and the rate that it was last seen to read at; 0: not known."""

    queue_bytes: int = 0
    rate_bytes_per_s: int = 0

    @property
    def busy_s(self) -> float:
        """How long it takes to read what waits; 0 when the rate is not known."""
        return self.queue_bytes / self.rate_bytes_per_s if self.rate_bytes_per_s else 0.0


@dataclass(frozen=True, slots=True)
class RoomUse:
    """Room of the node's pool for one purpose: "read", "de_buffer", "write_back" or "help". While requests wait for it, more of
    them only wait longer. `refused`: those that found none in time, since the daemon's start."""

    purpose: str
    limit_bytes: int
    taken_bytes: int
    waiting: int
    waiting_bytes: int
    oldest_wait_s: float
    refused: int


@dataclass(frozen=True, slots=True)
class StoreChain:
    """Consecutive full blocks of one chain, in `store_chains`.

    `parent_key`: that of the block before the first, or `ROOT`; `first_depth`: position of the first block, from 0.
    """

    keys: Sequence[bytes]
    parent_key: bytes
    first_depth: int


@dataclass(frozen=True, slots=True)
class LookupResult:
    """`prefix_blocks` leading keys are stored; of these, `pooled_blocks` leading ones are in this node's pool.

    `starved_to` and `starved_from`: nodes to and from which KV gets less than the daemon's `transport.lane_floor`. `reader`,
    `rooms`: how busy this node is.
    """

    prefix_blocks: int
    pooled_blocks: int
    starved_to: tuple[str, ...] = ()
    starved_from: tuple[str, ...] = ()
    reader: ReaderDepth = ReaderDepth()
    rooms: tuple[RoomUse, ...] = ()

    def path_to(self, decode_node: str, wanted: Path) -> Path:
        """`wanted`, or the other side where only that one keeps the hit blocks off a lane that starves.

        `Path.AUTO` needs none of this: the nodes see to it themselves; nor does `Path.PARTS`, which is taken as it is.

        >>> LookupResult(2, 1, starved_to=("d",)).path_to("d", Path.PE)
        <Path.DE: 2>
        """
        there, back = decode_node in self.starved_to, decode_node in self.starved_from
        if there == back or wanted in (Path.AUTO, Path.PARTS):
            return wanted
        return Path.DE if there else Path.PE


@dataclass(frozen=True, slots=True)
class Purged:
    """What was found in a namespace's files; the bytes are freed in the background."""

    purged_blocks: int
    purged_bytes: int


@dataclass(frozen=True, slots=True)
class Lease:
    """Holds the HIT blocks of a fetch in the pool for `lease_s` seconds from its grant; `renew` extends it."""

    lease_id: int
    lease_generation: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class FetchResult:
    """One result per key, in the order of the request. `lease` is None when nothing is held."""

    blocks: tuple[BlockResult, ...]
    lease: Lease | None


@dataclass(frozen=True, slots=True)
class Prefix:
    """How much of the hit prefix is good, and why the next block is not; None when all are."""

    prefix_blocks: int
    first_lost: BlockResult | None


@dataclass(frozen=True, slots=True)
class Attached:
    """The prefill side has reserved: full blocks of the prompt, tokens of its tail, name of the prefill node."""

    blocks: int
    tail_tokens: int
    prefill_node: str


@dataclass(frozen=True, slots=True)
class Whole:
    """`deliver` may be called. `prefix_blocks` came from storage, the others were computed."""

    prefix_blocks: int


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of the prompt's new full blocks."""

    durable_blocks: int
    dropped_blocks: int
