"""Observer port: the node tells, the edges log and count. Calls are quick and never fail."""

from __future__ import annotations

from typing import Protocol

from kvmoverd.core.status import Reason


class Observer(Protocol):
    def request_ended(self, kind: str, request_id: str, reason: Reason, message: str) -> None: ...

    def blocks_read(self, blocks: int, read_bytes: int) -> None: ...

    def block_failed(self, root: str, key: bytes, reason: Reason, message: str) -> None: ...

    def blocks_dropped(self, why: str, blocks: int, message: str) -> None:
        """New blocks that will not be stored; `why` is one of a few fixed words."""

    def session_ended(self, session_id: str, client: str, why: str) -> None: ...

    def peer_changed(self, node: str, state: str, message: str) -> None: ...

    def lane_changed(self, lane: str, node: str, state: str, message: str) -> None:
        """`state` is "starved" or "well"; `node` empty: the lane to all nodes together."""
