"""Storage port: moves stored blocks into pool slots and back. Never blocks the loop, never retries on its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.status import Reason
from kvmoverd.core.store.places import Place


@dataclass(slots=True)
class BlockRead:
    """Read layers [first_layer, stop_layer) of the record of `key` into its slot; `stop_layer` 0: to the last layer.

    The slot at `address` has `namespace.layout.record_bytes` writable bytes, aligned to `ALIGN_BYTES`: the header page
    first, the payload `HEADER_BYTES` after it. The bytes that move are those of `layout.read_span`. A read from layer 0
    brings the header; one that begins later goes on where an earlier read of this slot, which ended OK, has stopped, and is
    checked against the header that lies there: should another record have taken the name meanwhile, it is CORRUPT.

    The bytes of the span belong to the adapter until the completion; the slot's others may be read by others meanwhile. The
    completion is OK only after all of the span came and the record's size, key, fingerprint and the checksum of every
    layer of the range matched.

    `rest_from`, if not 0: of this block only layers from there on are read into this slot, in two steps. First a read of layers
    [0, rest_from), which moves the header page alone and checks it; then ranges from `rest_from` on, as any later ranges. The
    first of these brings the page that it shares with the layers before it, too.

    `place`: where the record lies, as far as the caller has heard. A read from layer 0 takes it for a hint, which counts
    only where the adapter knows no better; a later range goes on there: it is what the completion before it said.

    `low`: nobody waits for it; a device that knows priorities does it after others'.
    """

    op_id: int
    namespace: Namespace
    key: bytes
    address: int
    first_layer: int = 0
    stop_layer: int = 0
    place: Place | None = None
    low: bool = False
    rest_from: int = 0

    @property
    def layers(self) -> range:
        """The layers of the range that come; none with the header page alone."""
        return range(max(self.first_layer, self.rest_from), self.stop_layer or self.namespace.layout.layer_count)

    @property
    def span(self) -> range:
        """Bytes of the record, and of the slot, that move."""
        layout = self.namespace.layout
        stop_layer = self.stop_layer or layout.layer_count
        if not self.rest_from or self.first_layer > self.rest_from:
            return layout.read_span(self.first_layer, stop_layer)
        return layout.rest_span(self.first_layer, stop_layer) if self.first_layer else range(HEADER_BYTES)


@dataclass(frozen=True, slots=True)
class BlockWrite:
    """Make the payload at `address + HEADER_BYTES` durable under `key`; the adapter fills the header page at `address`.

    OK means durable and visible to every node. `moved_bytes` 0: a record of the right size with this key's header was there
    and was left; its layers were not read, as that would double the I/O of each duplicate. If one is damaged, a read finds it
    and says CORRUPT, and it is found no more, so that the next write is a real one. `layer_crcs`: the payload's chained
    checksums, of whoever had the bytes in his cache before; empty: the adapter computes them.
    """

    op_id: int
    namespace: Namespace
    key: bytes
    parent: bytes
    depth: int
    address: int
    layer_crcs: tuple[int, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class BlockProbe:
    """How many leading keys are stored? Looks at existence and size, not at content.

    `looks`: as a write would find them: in the main root, each with a record of the right size under its header.
    """

    op_id: int
    namespace: Namespace
    keys: tuple[bytes, ...]
    looks: bool = False


StorageOp = BlockRead | BlockWrite | BlockProbe


@dataclass(slots=True)
class StorageDone:
    """Completion of one op. `moved_bytes`: bytes that the device moved; `present`: leading keys found by a probe.

    `place`: where the record was read or written, where the adapter has such places. `quiet` false: the op took too long and
    has failed, but the device may still touch its slot; a second completion of the same op, quiet, comes when it has let go.
    A write that ends OK and is not quiet is durable, and a read that does is whole: copies are still being made, which read the
    payload and write the header page. Nobody changes a completion, or
    the op; freezing them would treble what they cost.
    """

    op_id: int
    reason: Reason
    moved_bytes: int = 0
    present: int = 0
    message: str = ""
    place: Place | None = None
    quiet: bool = True


@dataclass(frozen=True, slots=True)
class StorageFacts:
    """What the adapter really does; `io_mode` is "direct", "buffered" or "memory".

    `note` says why if not as asked, and what a person should know of how it reads. It may change while the adapter runs.
    `details`: more of it by name, units in the names; what NodeStatus has a field for, it tells.
    """

    root: str
    kind: str
    io_mode: str
    note: str = ""
    details: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(slots=True)
class StorageCounters:
    """Totals since start, of completed ops only; `queued_bytes` is what waits or is under way now."""

    read_bytes: int = 0
    written_bytes: int = 0
    read_blocks: int = 0
    written_blocks: int = 0
    missed_blocks: int = 0
    corrupt_blocks: int = 0
    short_reads: int = 0
    failed_ops: int = 0
    queued_bytes: int = 0


class BlockIndex(Protocol):
    """What is stored, as far as RAM knows; for the loop: 500 keys take 0.1 ms. Never touches a device.

    `complete`: what it does not know is not stored, at most a second ago; where it is false a probe may find more.
    """

    @property
    def complete(self) -> bool: ...

    def known(self, namespace: Namespace, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """For each key whether it is known to be stored."""

    def places(self, namespace: Namespace, keys: Sequence[bytes]) -> list[Place | None]:
        """Where they lie, to be told to other nodes as hints."""

    def touch(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """These were used, from storage or from the pool: what is used is kept."""

    def pin(self, namespace: Namespace, keys: Sequence[bytes], for_s: float) -> int:
        """Keeps these for so long, 0: no longer; how many are known. A promise of this node's own blocks only, a wish else."""

    def found(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """A read or a probe found these."""

    def lost(self, namespace: Namespace, key: bytes) -> None:
        """A read did not find this one, or found it damaged."""

    def forget(self, namespace: Namespace) -> None:
        """The namespace was purged."""


class Storage(Protocol):
    """One storage root. `open_namespace` and the purges block and are called off the loop; all else is for the loop."""

    @property
    def facts(self) -> StorageFacts: ...

    @property
    def counters(self) -> StorageCounters: ...

    @property
    def index(self) -> BlockIndex: ...

    def open_namespace(self, namespace: Namespace) -> None:
        """Publish or compare the manifest. Raises `ManifestMismatch`, `StaleEpoch`, `StorageUnusable`."""

    def purge(self, namespace: Namespace) -> tuple[int, int]:
        """Make every block of the namespace invisible, free its bytes in the background: (blocks, bytes) found."""

    def purge_tenant(self, tenant: str) -> tuple[int, int]:
        """As `purge`, of every namespace of the tenant that the root has, open or not. Raises `StorageUnusable`."""

    def heard(self, author: str, log: int) -> None:
        """Another node writes log number `log`, 0: not known which, under this name: if it is new here, look at once.

        Never blocks.
        """

    def signature(self) -> tuple[str, int]:
        """What others may be told of this node's writing, as `heard` takes it; ("", 0) where nobody needs to look."""

    def submit(self, ops: Sequence[StorageOp]) -> None:
        """Take ops; each gets one completion, and a second one if the first is not `quiet`.

        At most `ops_max` (a setting) may be under way: the node counts.
        """

    def poll(self, completions_max: int) -> list[StorageDone]: ...

    def fileno(self) -> int:
        """Readable when `poll` has something."""

    def close(self, timeout_s: float) -> bool:
        """Stop; True when no thread or device touches a slot any more."""


@runtime_checkable
class Roots(Protocol):
    """A storage that is made of several roots, each with facts and counters of its own."""

    def parts(self) -> Sequence[tuple[StorageFacts, StorageCounters]]:
        """In the order of reading; roots that were left out are among them."""


def roots_of(storage: Storage) -> Sequence[tuple[StorageFacts, StorageCounters]]:
    """Facts and counters of each root: the storage's own, where it is one."""
    return storage.parts() if isinstance(storage, Roots) else [(storage.facts, storage.counters)]
