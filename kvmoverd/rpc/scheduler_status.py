"""The scheduler's books as it shows them: numbers, and the first of its groups and nodes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from itertools import islice

from kvmover_proto import scheduler_pb2
from kvmoverd.core.scheduling.cluster import Cluster
from kvmoverd.core.scheduling.state import Group, Node
from kvmoverd.rpc.scheduler_office import Office

SHOWN_MAX = 256
"""Groups, and nodes: with names of full length they are a third of the bound, and making the answer takes about 2 ms."""
COUNTED_MAX = 10_000
"""Waiting requests of which it is counted whose they are, the longest waiting ones: 1 ms."""


def status_message(office: Office, streams: int, facts: Mapping[str, object]) -> scheduler_pb2.GetSchedulerStatusReply:
    """`facts`: of the process. Answered by one that does not lead, too."""
    found = {**office.numbers(streams).json(), **facts}
    if office.cluster is not None:
        found |= _details(office.cluster)
    return scheduler_pb2.GetSchedulerStatusReply(
        scheduler=office.identity,
        leads=office.leads,
        leader=office.leader,
        policy=office.settings.policy,
        json=json.dumps(found, separators=(",", ":")),
    )


def _details(cluster: Cluster) -> dict[str, object]:
    tenants = Counter(entry.request.tenant for entry in islice(cluster.waiting_entries(), COUNTED_MAX))
    return {
        "waiting_by_tenant": dict(tenants.most_common(SHOWN_MAX)),
        "first_groups": [_group(group) for group in islice(cluster.groups(), SHOWN_MAX)],
        "first_nodes": [_node(node) for node in islice(cluster.nodes.values(), SHOWN_MAX)],
    }


def _group(group: Group) -> dict[str, object]:
    return {
        "group": group.name,
        "role": group.role.value,
        "model": group.model,
        "engines": len(group.engines),
        "requests": sum(engine.seq_e for engine in group.engines.values()),
        "tokens": group.tok_sum,
        "unheard": group.unheard_count,
    }


def _node(node: Node) -> dict[str, object]:
    report = node.report
    return {
        "node": node.name,
        "engines": len(node.engines),
        "read_queue_bytes": node.queue_bytes,
        "read_rate_bytes_per_s": report.storage.rate_bytes_per_s if report is not None else 0,
        "buffer_free_bytes": report.buffer_free_bytes if report is not None else 0,
        "starved": report is not None and report.starved,
        "draining": node.draining,
    }
