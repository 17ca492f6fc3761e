"""One observer that is several."""

from __future__ import annotations

from kvmoverd.core.status import Reason
from kvmoverd.ports.observer import Observer


class FanOutObserver:
    """Tells every one of `observers`, in order."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def request_ended(self, kind: str, request_id: str, reason: Reason, message: str) -> None:
        for observer in self._observers:
            observer.request_ended(kind, request_id, reason, message)

    def blocks_read(self, blocks: int, read_bytes: int) -> None:
        for observer in self._observers:
            observer.blocks_read(blocks, read_bytes)

    def block_failed(self, root: str, key: bytes, reason: Reason, message: str) -> None:
        for observer in self._observers:
            observer.block_failed(root, key, reason, message)

    def session_ended(self, session_id: str, client: str, why: str) -> None:
        for observer in self._observers:
            observer.session_ended(session_id, client, why)

    def peer_changed(self, node: str, state: str, message: str) -> None:
        for observer in self._observers:
            observer.peer_changed(node, state, message)
