"""The companion socket's view of the node: sessions begin, descriptors come, sessions end."""

from __future__ import annotations

import asyncio

from kvmoverd.node.node import Node
from kvmoverd.rpc.companion import SessionPeer

FD_WAIT_S = 60.0


class EngineSessions:
    """`SessionHooks` of the companion server."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def opened(self, peer: SessionPeer) -> tuple[str, bytes]:
        session, token = self._node.session_opened(peer.client, peer.pid)
        return session.session_id, token

    def fd_received(self, session_id: str, fd: int, label: str) -> int:
        """A ticket for RegisterRegion; it is void after a minute."""
        ticket = self._node.fd_received(session_id, fd)
        asyncio.get_running_loop().call_later(FD_WAIT_S, self._node.drop_fd, session_id, ticket)
        return ticket

    def closed(self, session_id: str, why: str) -> None:
        self._node.session_closed(session_id, why)
