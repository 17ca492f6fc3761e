"""Transport port: moves layers between this process's memory and a sink, here or in another daemon.

The wire never carries an address to write to: the receiver opens a `Sink`, the sender names it, and the receiver's own
books say where its bytes go. A send is complete when it was applied at the destination.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvmoverd.core.qos import KvClass
from kvmoverd.core.status import Reason

IoVec: TypeAlias = npt.NDArray[np.uint64]
"""Shape (n, 2): address and length in bytes of each slice, as `struct iovec` on 64-bit machines."""

Sender: TypeAlias = tuple[str, str]
"""Node and boot id of another daemon, as its data channel has proved them."""


@dataclass(frozen=True, slots=True)
class Route:
    """How to reach a node: its name, boot id, data endpoint and the one-time key of its `Hello`."""

    node: str
    boot_id: str
    endpoint: str
    key: bytes


@dataclass(frozen=True, slots=True)
class Send:
    """One layer, gathered from `source`, to a sink. `route` None: a sink of this process.

    `first_block` says where in the request the bytes begin; the receiver checks it against what the sink allows.
    The source belongs to the adapter until the completion. `kv_class`: the lane that it rides on, where there are several.
    """

    op_id: int
    route: Route | None
    sink_id: int
    layer: int
    first_block: int
    source: IoVec
    kv_class: KvClass = KvClass.LAYERS


@dataclass(slots=True)
class Sink:
    """A place where layers may arrive, each once, from one sender.

    `resolve(layer, first_block)` gives the slices to write, or None when that frame is not allowed. It may be called from
    any thread, must be quick and must not fail. The bytes of a frame must equal the bytes of its slices exactly.
    `sender`: only frames of its channels are let in; None: only sends of this process. A layer that is on its way or has
    arrived is not let in again; one that failed is.

    `on_sums(layer, sums)`: called before a layer is told, where its bytes were summed on their way, which is cheaper than to
    do it afterwards; it must be quick and not fail, too. `sums` is what `core.record.chained_crcs` finds, a row for each part
    of the layer, where a part is as long as the last of `sum_ends` says, and these are the places in it up to which a sum
    goes. A transport that can't do it never calls.
    """

    sink_id: int
    resolve: Callable[[int, int], IoVec | None]
    sender: Sender | None = None
    sum_ends: npt.NDArray[np.uint64] | None = None
    on_sums: Callable[[int, npt.NDArray[np.uint32]], None] | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """A send ended: OK means applied at the destination, anything else that it was not, or not wholly."""

    op_id: int
    reason: Reason
    moved_bytes: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class Received:
    """A whole layer was applied to a sink of this process."""

    sink_id: int
    layer: int
    first_block: int
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class SinkQuiet:
    """After `forget`: nothing will write through this sink any more."""

    sink_id: int


@dataclass(frozen=True, slots=True)
class RouteLost:
    """The channel to (`inbound` false) or from a node broke; its sends under way get their own completions.

    A channel may be several connections: the first that breaks ends them all, and this is said once. One from a node may
    break long after that node has opened another: it ends no more than what came over it. `sink_ids`: of an inbound one,
    the sinks that are open here and got frames over it. What got none yet goes on; who sends to it knows how.
    """

    node: str
    boot_id: str
    inbound: bool
    message: str
    sink_ids: frozenset[int] = frozenset()


TransportEvent = Sent | Received | SinkQuiet | RouteLost


class Transport(Protocol):
    def expect(self, sink: Sink) -> None:
        """Open a sink."""

    def forget(self, sink_id: int) -> None:
        """Close a sink: later frames drain into scratch. A `SinkQuiet` follows when no write can land any more."""

    def submit(self, sends: Sequence[Send]) -> None:
        """Take sends; each gets exactly one `Sent`.

        Sends are begun in the order given, those of one sink too, but a later one may be applied before an earlier one: a
        layer is ready by its own `Received`, whatever became of those before it.
        """

    def poll(self, events_max: int) -> list[TransportEvent]: ...

    def fileno(self) -> int:
        """Readable when `poll` has something."""

    def close(self, timeout_s: float) -> bool:
        """Stop; True when no thread touches any memory any more."""
