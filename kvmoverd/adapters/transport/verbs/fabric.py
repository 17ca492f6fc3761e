"""What the links need of a CNIC, and no more: `device` does it with real verbs; tests do it in one process, with faults.

All methods are called by one thread, the transport's own, but for `register`, and `connect`, during which nobody else calls
that queue pair.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvmoverd.core.qos import Marks
from kvmoverd.ports.connection import PathEnd

WRITE = np.dtype(
    [
        ("local", "<u8"),
        ("remote", "<u8"),
        ("size_bytes", "<u4"),
        ("local_key", "<u4"),
        ("remote_key", "<u4"),
        ("_", "<u4"),
    ]
)
"""One slice of a chain, 32 bytes: addresses and keys at both ends. The compiled helper reads this very form."""
Writes = npt.NDArray[np.void]


class FabricError(Exception):
    """A call of the CNIC failed; the message names the call, its numbers and what the system said."""


class Opcode(enum.Enum):
    SEND = "send"
    WRITE = "write"
    RECEIVED = "received"
    """A message lies in the receive slot."""
    RECEIVED_IMMEDIATE = "received_immediate"
    """The writes before it have been applied; only the immediate came with it."""


@dataclass(frozen=True, slots=True)
class Completion:
    """`ok` False: it failed or was flushed, `status` says how in words; then only `qp_number` and `work_id` can be trusted."""

    qp_number: int
    work_id: int
    ok: bool
    opcode: Opcode
    size_bytes: int = 0
    immediate: int = 0
    status: str = ""


class Registration(Protocol):
    """Memory that the CNIC may touch, from `address` on, in pieces. `close` only when no work names it any more."""

    def keys(self, addresses: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
        """Local and remote key of each slice, shape (n, 2). No slice crosses two pieces: see `cuts`."""

    @property
    def cuts(self) -> npt.NDArray[np.uint64]:
        """Addresses where one piece ends and the next begins, rising; slices must be cut there."""

    def close(self) -> None: ...


class QueuePair(Protocol):
    """One end of a reliable connection. Work completes in the order posted; after `fail` everything posted is flushed."""

    @property
    def end(self) -> PathEnd: ...

    def connect(self, peer: PathEnd, marks: Marks) -> None:
        """Ready to receive and to send, with what the marks say read back and compared. Raises `FabricError`.

        From any thread; may block for a second, without the interpreter's lock where that can be had.
        """

    def post_writes(self, writes: Writes, work_id: int, immediate: int | None) -> None:
        """One chain, one doorbell. Its last write completes as `work_id`; with `immediate` the other end is told then.

        The caller leaves room in the send queue: a chain takes as many places as it has rows. Raises `FabricError`.
        """

    def post_message(self, address: int, size_bytes: int, key: int, work_id: int) -> None:
        """Sends bytes of registered memory into the next receive slot of the other end. Raises `FabricError`."""

    def post_receive(self, address: int, size_bytes: int, key: int, work_id: int) -> None:
        """Raises `FabricError`."""

    def fail(self) -> None:
        """To the error state: from now on nothing lands through it that was not on its way; all that is posted is flushed."""

    def destroy(self) -> None:
        """After this no write of the other end can land any more. May be called in any state, once."""


class Fabric(Protocol):
    """One port of one CNIC."""

    @property
    def name(self) -> str:
        """As rdma tools print it, with its port: "mlx5_0:1"."""

    @property
    def numa_node(self) -> int:
        """-1: not known."""

    def register(self, address: int, size_bytes: int, *, piece_bytes: int, dmabuf_fd: int = -1) -> Registration:
        """Pieces end at multiples of `piece_bytes` from `address`, or sooner where the device takes no more at once.

        From any thread. Raises `FabricError` with the sizes, the limit for locked memory, and what to do.
        """

    def make_queue_pair(self, *, send_max: int, receive_max: int) -> QueuePair:
        """Raises `FabricError`."""

    def poll(self, completions_max: int) -> Sequence[Completion]:
        """What has ended; never waits. Raises `FabricError`."""

    def arm(self) -> None:
        """`fileno` becomes readable for the next completion; `poll` once more afterwards. Raises `FabricError`."""

    def fileno(self) -> int: ...

    def close(self) -> None:
        """All queue pairs and registrations must be gone."""
