"""What a segment store says of itself by name, as status has it. For any thread; nothing here waits for a device."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvmoverd.adapters.storage.root_format import SEGMENTS
from kvmoverd.adapters.storage.segments.adoption import AdoptionStats
from kvmoverd.adapters.storage.segments.collector_stats import CollectorCounters
from kvmoverd.adapters.storage.segments.follow_stats import FollowStats
from kvmoverd.adapters.storage.segments.index import LoadState
from kvmoverd.adapters.storage.segments.keeper import JobStats
from kvmoverd.adapters.storage.segments.recovery import RecoveryStats
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.snapshot_writer import SnapshotStats
from kvmoverd.adapters.storage.segments.writes import AppendCounters

Details = Mapping[str, int | str]


def index_details(state: LoadState) -> Details:
    return {
        "layout": SEGMENTS,
        "index_keys": state.keys,
        "index_ram_bytes": state.ram_bytes,
        "index_namespaces_left_out": state.namespaces_left_out,
        "index_keys_refused": state.keys_refused,
        "negative_entries": state.bad_for_a_while,
    }


def follow_details(stats: FollowStats) -> Details:
    return {
        "index_peers": stats.live,
        "index_lag_ms_max": stats.lag_ms_max,
        "index_lag_author": stats.lag_author,
        "index_pages_damaged": stats.damaged_pages,
        "index_unread_logs": stats.unread_logs,
        "index_lost_entries": stats.lost_entries,
        "index_load_entries_per_s": round(stats.load_entries_per_s),
    }


def collector_details(counters: CollectorCounters, settings: SegmentSettings) -> Details:
    return {
        "used_bytes": counters.used_bytes_now,
        "used_inodes": counters.used_inodes_now,
        "budget_bytes": settings.bytes_max,
        "evicted_bytes": counters.evicted_bytes + counters.no_space_bytes,
        "no_space_segments": counters.no_space_segments,
        "rooms_refused": counters.rooms_refused,
        "salvaged_blocks": counters.salvaged_blocks,
        "lost_hot_blocks": counters.lost_hot_blocks,
        "dying_bytes": counters.dying_bytes_now,
        "trash_bytes": counters.trash_bytes_now,
        "unknown_peers": counters.unknown_peers_now,
        "collect_failures": counters.failures,
    }


def append_details(counters: AppendCounters, growing: Collection[int]) -> Details:
    return {
        "open_segments": len(growing),
        "full_disks": counters.full_disks,
        "author_renewals": counters.renewals,
        "commit_ms_max": round(counters.longest_commit_s * 1e3),
    }


def owner_details(adoption: AdoptionStats, recovery: RecoveryStats, snapshots: SnapshotStats) -> Details:
    return {
        "adopted_authors": adoption.owned,
        "adoption_failures": adoption.failures,
        "recovering_authors": recovery.waiting,
        "recovery_failures": recovery.failures,
        "uncounted_directories": recovery.uncounted,
        "snapshot_failures": snapshots.failures,
    }


def job_details(jobs: Collection[JobStats]) -> Details:
    return {
        "job_failures": sum(job.failures for job in jobs),
        "job_ms_max": round(max((job.longest_s for job in jobs), default=0.0) * 1e3),
    }
