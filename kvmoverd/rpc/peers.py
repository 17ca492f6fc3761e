"""All other nodes: one `GrpcPeer` each, made when it is first asked for, and this node itself among them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvmover_proto import node_pb2
from kvmoverd.node.peer import Peer
from kvmoverd.ports.membership import Membership
from kvmoverd.rpc.peer_client import GrpcPeer

TELLING_MAX = 1024
"""Nodes that are told of purges at once, and wait to be; beyond that they find out from the store."""


class GrpcPeers:
    """`Peers` of `node.peer`: `own` answers for this node's own name without a network."""

    def __init__(self, membership: Membership, own_node: str, own: Peer, make: Callable[[str, str], GrpcPeer]) -> None:
        self._membership = membership
        self._own_node = own_node
        self._own = own
        self._make = make
        self._peers: dict[str, GrpcPeer] = {}
        self._telling: set[asyncio.Task[None]] = set()

    def peer(self, node: str) -> Peer | None:
        return self._own if node == self._own_node else self.other(node)

    def other(self, node: str) -> GrpcPeer | None:
        address = self._membership.address_of(node)
        if address is None:
            return None
        known = self._peers.get(node)
        if known is None or known.address != address:
            known = self._peers[node] = self._make(node, address)
        return known

    def describe(self) -> list[dict[str, Any]]:
        """Every node of the membership, also those never spoken to."""
        return [self._describe(node) for node in self._membership.nodes() if node != self._own_node]

    def _describe(self, node: str) -> dict[str, Any]:
        address = self._membership.address_of(node) or ""
        known = self._peers.get(node)
        if known is None:
            return {"node": node, "address": address, "state": "unknown"}
        told = {"node": node, "address": address, "state": known.state, "boot_id": known.boot_id}
        return told | {"lane_starved_from": known.lane_starved_from}

    def starved_from(self) -> set[str]:
        return {node for node, known in self._peers.items() if known.lane_starved_from}

    def tell_purged(self, fingerprints: Sequence[bytes], tenant: str) -> None:
        """In the background; each node is asked once."""
        request = node_pb2.PurgedRequest(fingerprints=fingerprints, tenant=tenant)
        for node in self._membership.nodes():
            peer = self.other(node) if node != self._own_node else None
            if peer is not None and len(self._telling) < TELLING_MAX:
                task = asyncio.get_running_loop().create_task(peer.purged(request))
                self._telling.add(task)
                task.add_done_callback(self._telling.discard)

    def lost(self, node: str) -> None:
        """Its data channel broke."""
        if node in self._peers:
            self._peers[node].lost()

    def parts_lost(self, node: str, sink_ids: Collection[int], why: str) -> None:
        """What that node sends to these sinks comes no more: the parts that it reads for them are over."""
        if node in self._peers:
            self._peers[node].parts_lost(sink_ids, why)

    def gone(self, node: str, boot_id: str, why: str) -> None:
        """That boot of the node is void."""
        if node in self._peers:
            self._peers[node].gone_boot(boot_id, why)

    async def close(self) -> None:
        for task in self._telling:
            task.cancel()
        for peer in self._peers.values():
            await peer.close()
