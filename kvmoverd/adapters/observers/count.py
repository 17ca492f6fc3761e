"""Counts what happened; label sets are small: no request id, no key."""

from __future__ import annotations

from collections import Counter

from kvmoverd.core.status import Reason


class CountingObserver:
    """`counts`: ended requests by (kind, reason), failed blocks as kind "block", dropped ones by why, sessions, peers, lanes by
    what befell them."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.read_blocks = 0
        self.read_bytes = 0

    def request_ended(self, kind: str, request_id: str, reason: Reason, message: str) -> None:
        self.counts[kind, reason.name] += 1

    def blocks_read(self, blocks: int, read_bytes: int) -> None:
        self.read_blocks += blocks
        self.read_bytes += read_bytes

    def block_failed(self, root: str, key: bytes, reason: Reason, message: str) -> None:
        self.counts["block", reason.name] += 1

    def blocks_dropped(self, why: str, blocks: int, message: str) -> None:
        self.counts["dropped", why] += blocks

    def session_ended(self, session_id: str, client: str, why: str) -> None:
        self.counts["session", "ended"] += 1

    def peer_changed(self, node: str, state: str, message: str) -> None:
        self.counts["peer", state] += 1

    def lane_changed(self, lane: str, node: str, state: str, message: str) -> None:
        self.counts["lane", state] += 1
