"""The companion socket's view of the node: sessions begin, descriptors come, sessions end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvmoverd.adapters.memory.shared_page import EnginePages
from kvmoverd.core.errors import QueueFull
from kvmoverd.node.node import Node
from kvmoverd.node.progress import ProgressBook
from kvmoverd.ports.progress import SharedPages
from kvmoverd.rpc.companion import SessionPeer

log = logging.getLogger(__name__)

FD_WAIT_S = 60.0


class EngineSessions:
    """`SessionHooks` of the companion server."""

    def __init__(self, node: Node, open_pages: Callable[[], SharedPages] = EnginePages) -> None:
        self._node = node
        self._open_pages = open_pages

    def opened(self, peer: SessionPeer) -> tuple[str, bytes]:
        session, token = self._node.session_opened(peer.client, peer.pid)
        return session.session_id, token

    def progress_pages(self, session_id: str) -> SharedPages | None:
        """Opens the session's pages; None when there are none to be had: its calls get messages then."""
        session = self._node.sessions.by_id(session_id)
        assert session is not None and session.progress is None, f"pages of {session_id} are opened out of turn"
        try:
            pages = self._open_pages()
        except QueueFull as error:
            log.warning("session %s: %s", session_id, error)
            return None
        session.progress = ProgressBook(pages, self._node.services.clock, self._node.services.boot_id)
        return pages

    def fd_received(self, session_id: str, fd: int, label: str) -> int:
        """A ticket for RegisterRegion; it is void after a minute."""
        ticket = self._node.fd_received(session_id, fd)
        asyncio.get_running_loop().call_later(FD_WAIT_S, self._node.drop_fd, session_id, ticket)
        return ticket

    def closed(self, session_id: str, why: str) -> None:
        self._node.session_closed(session_id, why)
