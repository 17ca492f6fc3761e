"""What a segment store says of itself by name, as status has it. For any thread; nothing here waits for a device."""

from __future__ import annotations

from collections.abc import Mapping

from kvmoverd.adapters.storage.root_format import SEGMENTS
from kvmoverd.adapters.storage.segments.collector_stats import CollectorCounters
from kvmoverd.adapters.storage.segments.follow_stats import FollowStats
from kvmoverd.adapters.storage.segments.index import LoadState
from kvmoverd.adapters.storage.segments.settings import SegmentSettings

Details = Mapping[str, int | str]


def index_details(state: LoadState) -> Details:
    return {
        "layout": SEGMENTS,
        "index_keys": state.keys,
        "index_ram_bytes": state.ram_bytes,
        "index_namespaces_left_out": state.namespaces_left_out,
        "negative_entries": state.bad_for_a_while,
    }


def follow_details(stats: FollowStats) -> Details:
    return {
        "index_peers": stats.live,
        "index_lag_ms_max": stats.lag_ms_max,
        "index_pages_damaged": stats.damaged_pages,
    }


def collector_details(counters: CollectorCounters, settings: SegmentSettings) -> Details:
    return {
        "used_bytes": counters.used_bytes_now,
        "used_inodes": counters.used_inodes_now,
        "budget_bytes": settings.bytes_max,
        "evicted_bytes": counters.evicted_bytes + counters.no_space_bytes,
    }
