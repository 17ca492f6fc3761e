"""Shared memory: copies within this process, and pulls between daemons of one machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvmoverd.adapters.memory import iovec, libc
from kvmoverd.adapters.memory.region import Regions
from kvmoverd.adapters.transport.hub import Hub
from kvmoverd.adapters.transport.local import CopyChoice, LocalCopies
from kvmoverd.adapters.transport.medium import ChannelSettings, CheckKey
from kvmoverd.adapters.transport.threaded import ThreadedTransport
from kvmoverd.adapters.transport.unix import UnixMedium
from kvmoverd.ports.memory import Memory
from kvmoverd.ports.transport import Send


class ShmTransport(ThreadedTransport):
    """Implements `Transport` within a machine. `socket_path` None: within this process only.

    `arena`: where the largest pages are; copies are quicker when the kernel knows. `regions`: who has mapped the engines'
    regions; without it none of them may have huge pages. `compiled` False: the kernel copies. `queue_max` bounds the copies
    here and the sends per route, `inbound_max` the connections of other daemons, `connections` those of a route. Raises
    `ConfigError`, and `TransportRefused` where the system starts no thread.
    """

    def __init__(
        self,
        node: str,
        boot_id: str,
        socket_path: str | Path | None,
        *,
        check_key: CheckKey,
        copy_threads: int = 2,
        io_timeout_s: float = 10.0,
        queue_max: int = 4_096,
        inbound_max: int = 1_024,
        connections: int = 1,
        arena: Memory | None = None,
        regions: Regions | None = None,
        compiled: bool = iovec.COMPILED,
    ) -> None:
        super().__init__("shm")
        self._choice = CopyChoice(arena, regions, compiled=compiled)
        self._medium: UnixMedium | None = None
        self._hub: Hub | None = None
        if socket_path is not None:
            self._listen_at(
                Path(socket_path), node, boot_id, check_key, io_timeout_s, queue_max, inbound_max, connections
            )
        self._local = LocalCopies(
            self._sinks,
            self._events,
            self._threads,
            copy_threads=copy_threads,
            queue_max=queue_max,
            choice=self._choice,
        )

    @property
    def endpoint(self) -> str:
        """Where daemons of this machine dial: `unix:PATH`; empty without a socket."""
        return self._medium.endpoint if self._medium is not None else ""

    @property
    def copy_text(self) -> str:
        """How this process copies, e.g. "compiled, process_vm_readv for hugetlb regions"."""
        return self._choice.text

    @property
    def lane_text(self) -> str:
        """How transfers to other nodes are marked."""
        return "shared memory: no network, no lane"

    def sent_bytes(self) -> dict[str, int]:
        """Bytes applied at each node since start."""
        return self._hub.sent_bytes() if self._hub is not None else {}

    def submit(self, sends: Sequence[Send]) -> None:
        for send in sends:
            if send.route is None:
                self._local.submit(send)
            else:
                assert self._hub is not None, f"send {send.op_id} has a route, this transport has no socket"
                self._hub.submit(send, send.route)

    def _listen_at(
        self,
        path: Path,
        node: str,
        boot_id: str,
        check_key: CheckKey,
        io_timeout_s: float,
        queue_max: int,
        inbound_max: int,
        connections: int,
    ) -> None:
        """Receivers pull from this process: Yama must be told that they may."""
        libc.allow_pulls()
        self._medium = UnixMedium(path)
        settings = ChannelSettings(node, boot_id, io_timeout_s, queue_max, connections, self._stop_fd)
        self._hub = self._open_hub(self._medium, settings, check_key=check_key, inbound_max=inbound_max)

    def _stop_taking(self) -> None:
        self._local.stop()
        if self._hub is not None:
            self._hub.stop_taking()

    def _release(self) -> None:
        if self._medium is not None:
            self._medium.release()
