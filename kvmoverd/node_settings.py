"""What a node's parts get out of the daemon's config: values, never the whole."""

from __future__ import annotations

from kvmoverd.config import Config
from kvmoverd.core.admission import Purpose
from kvmoverd.node.services import Limits, SplitSettings


def limits_of(config: Config) -> Limits:
    """Bounds of requests."""
    requests = config.requests
    return Limits(
        timeout_default_s=requests.timeout_default_s,
        timeout_max_s=requests.timeout_max_s,
        admission_wait_s=requests.admission_wait_s,
        attach_timeout_s=requests.attach_timeout_s,
        lease_default_s=requests.lease_default_s,
        live_max=requests.live_max,
        queue_max=requests.queue_max,
        leases_max=config.pool.leases_max,
        prefetch_bytes=config.pool.prefetch_bytes,
    )


def split_of(config: Config) -> SplitSettings:
    """How requests are read by several nodes; without room for others' blocks this node helps nobody."""
    split = config.split
    return SplitSettings(
        floor_s=split.floor_s,
        helpers_max=split.helpers_max,
        helper_nodes=split.helper_nodes,
        helps=split.helps and config.pool.help_bytes > 0,
        stall_s=split.stall_s,
        rebalances=split.rebalances,
    )


def room_bytes_of(config: Config) -> dict[Purpose, int]:
    """Shares of the pool."""
    return {purpose: getattr(config.pool, f"{purpose.value}_bytes") for purpose in Purpose}
