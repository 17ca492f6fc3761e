"""NodeStatus: the node's books as one message."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvmover_proto import engine_pb2
from kvmoverd.node.node import Node
from kvmoverd.node.room import Room
from kvmoverd.node.services import Services
from kvmoverd.ports.connection import RdmaFacts
from kvmoverd.ports.membership import MembershipState
from kvmoverd.ports.storage import StorageCounters, StorageFacts, roots_of
from kvmoverd.rpc.shares import depth_message

_DETAILS = frozenset(field.name for field in engine_pb2.StorageStatus.DESCRIPTOR.fields) - {
    "root",
    "kind",
    "io_mode",
    "read_queue_bytes",
    "short_reads",
}
"""What a root may say of itself that status has a field for."""


def status_reply(
    node: Node, facts: dict[str, str], sent_bytes: Mapping[str, int], rdma: RdmaFacts | None = None
) -> engine_pb2.NodeStatusReply:
    """`facts` come from the composition root: version, transport, lane, local copies, uptime_ms and
    three of the loop's lag.

    `sent_bytes`: KV bytes sent to each node and applied there.
    """
    services = node.services
    return engine_pb2.NodeStatusReply(
        node=services.node,
        boot_id=services.boot_id,
        version=facts["version"],
        uptime_ms=int(facts["uptime_ms"]),
        draining=node.requests.draining,
        transport=facts["transport"],
        lane=facts["lane"],
        pool_bytes=services.pool.size_bytes,
        pool_pages=services.pool.page_kind,
        slots=[engine_pb2.SlotCounts(**counts) for counts in services.pool.slot_counts()],
        storage=_storage(node),
        peers=_peers(node, sent_bytes),
        sessions=len(node.sessions),
        regions=sum(len(session.regions) for session in node.sessions.all()),
        leases=len(node.leases),
        requests=dict(node.requests.by_kind()),
        outcomes=dict(node.requests.outcomes),
        loop_lag_us_max=int(facts["loop_lag_us_max"]),
        loop_lag_us_p99=int(facts["loop_lag_us_p99"]),
        loop_lags_over_1ms=int(facts["loop_lags_over_1ms"]),
        local_copies=facts["local_copies"],
        lanes=_lanes(node),
        rdma=_rdma(rdma) if rdma is not None else None,
        rooms=room_messages(services.room),
        reader=depth_message(services.reader.depth()),
        **_counts(services),
    )


def _counts(services: Services) -> dict[str, Any]:
    """What was decided here since the start."""
    counts = services.counts
    hints = dataclasses.asdict(counts.hints)
    return {
        "read_plans": counts.plans,
        "moved_parts": counts.moves,
        "dropped_blocks": counts.dropped,
        "prefetch": engine_pb2.PrefetchStatus(limit_bytes=services.limits.prefetch_bytes, **hints),
    }


def membership_message(state: MembershipState) -> engine_pb2.MembershipStatus:
    return engine_pb2.MembershipStatus(
        kind=state.kind,
        members=state.members,
        silent_ms=round(1000 * state.silent_s),
        told=state.is_told,
        why=state.why,
    )


def room_messages(room: Room) -> list[engine_pb2.RoomStatus]:
    """One for each purpose; for the loop's thread."""
    return [
        engine_pb2.RoomStatus(
            purpose=use.purpose.value,
            limit_bytes=use.limit_bytes,
            taken_bytes=use.taken_bytes,
            waiting=use.waiting,
            waiting_bytes=use.waiting_bytes,
            oldest_wait_ms=int(1000 * use.oldest_wait_s),
            refused=use.refused,
        )
        for use in room.uses()
    ]


def _rdma(facts: RdmaFacts) -> engine_pb2.RdmaStatus:
    return engine_pb2.RdmaStatus(
        library=facts.library,
        posting=facts.posting,
        cnics=[engine_pb2.CnicStatus(**dataclasses.asdict(cnic)) for cnic in facts.cnics],
        marks=facts.marks,
        registered_bytes=facts.registered_bytes,
        queue_pairs=facts.queue_pairs,
        queue_pairs_max=facts.queue_pairs_max,
        counters=facts.counters,
    )


def _peers(node: Node, sent_bytes: Mapping[str, int]) -> list[engine_pb2.PeerStatus]:
    known = node.peers.describe() if node.peers is not None else []
    starved = node.starved_nodes()
    return [
        engine_pb2.PeerStatus(**peer, sent_bytes=sent_bytes.get(peer["node"], 0), lane_starved=peer["node"] in starved)
        for peer in known
    ]


def _lanes(node: Node) -> list[engine_pb2.LaneStatus]:
    return [
        engine_pb2.LaneStatus(
            kv_class=lane.kv_class.value,
            marks=lane.marks,
            sent_bytes=lane.moved_bytes,
            rate_bytes_per_s=lane.rate_bytes_per_s,
            busy_percent=round(lane.busy_share * 100),
            floor_bytes_per_s=lane.floor_bytes_per_s,
            starved_ms=-(-lane.starved_ns // 1_000_000),
            starved_peers=lane.starved_nodes,
        )
        for lane in node.lanes()
    ]


def _storage(node: Node) -> list[engine_pb2.StorageStatus]:
    """Of each root. What waits at the desk has no root yet, and is told of the first."""
    desk = node.services.desk
    roots = roots_of(desk.storage)
    elsewhere_bytes = sum(counters.queued_bytes for _, counters in roots[1:])
    found = [_root(facts, counters) for facts, counters in roots]
    found[0].read_queue_bytes = max(0, desk.read_queue_bytes - elsewhere_bytes)
    return found


def _root(facts: StorageFacts, counters: StorageCounters) -> engine_pb2.StorageStatus:
    details = {name: value for name, value in facts.details.items() if name in _DETAILS}
    return engine_pb2.StorageStatus(
        root=facts.root,
        kind=facts.kind,
        io_mode=facts.io_mode,
        mode_note=facts.note,
        read_bytes=counters.read_bytes,
        written_bytes=counters.written_bytes,
        read_blocks=counters.read_blocks,
        written_blocks=counters.written_blocks,
        missed_blocks=counters.missed_blocks,
        corrupt_blocks=counters.corrupt_blocks,
        short_reads=counters.short_reads,
        failed_ops=counters.failed_ops,
        read_queue_bytes=counters.queued_bytes,
        **details,  # type: ignore[arg-type]
    )
