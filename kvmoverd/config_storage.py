"""The [[storage]] tables of the config: the roots where blocks are kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmoverd.adapters.storage.segments.fitting import SEGMENTS_MIN
from kvmoverd.adapters.storage.segments.settings import Limit, SegmentSettings
from kvmoverd.core.errors import ConfigError
from kvmoverd.core.store.places import PAGE_BYTES
from kvmoverd.toml_table import Table, duration_text, plain, size_text

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
NAME_FORM = "1 to 128 letters, digits, '.', '_' or '-'"
KINDS_ON_DISK = ("auto", "usrbio", "uring", "threads")
KINDS = (*KINDS_ON_DISK, "memory", "null")
LAYOUTS = ("auto", "segments", "files")
ROLES = ("main", "copy")
ROOTS_MAX = 8
LIMITS_MAX = 1024
STORE_BYTES_MAX = 1 << 60
SEGMENT_UNIT_BYTES = 1 << 20
MODEL_CHARACTERS_MAX = 512
INODES_MIN = 16
READ_RATE_MAX = 1 << 40
LARGE_BLOCK_BYTES = 4 << 20
"""Ops that wait for their turn count against `io_deadline`: half of it must be enough for all of them at this size."""


@dataclass(frozen=True, slots=True)
class StorageConfig:
    """A storage root; `create` makes the directory when it is missing. "memory" and "null" use `name`, `ops_max` and
    `read_rate_max` only.

    `segments`: what the layout of that name needs to know.
    """

    name: str
    kind: str
    path: Path
    create: bool
    role: str
    layout: str
    threads: int
    ops_max: int
    direct: bool
    io_deadline_s: float
    read_rate_max: int
    fill: bool
    segments: SegmentSettings

    @property
    def is_main(self) -> bool:
        return self.role == "main"

    @property
    def is_on_disk(self) -> bool:
        return self.kind in KINDS_ON_DISK

    def describe(self) -> dict[str, object]:
        """Plain values under the keys of the file."""
        own, segments = plain("storage", self), plain("segments", self.segments)
        assert isinstance(own, dict) and isinstance(segments, dict)
        del own["segments"]
        return {
            **own,
            **{name: value for name, value in segments.items() if name != "limits"},
            "limit": segments["limits"],
        }


def storage_roots(tables: Sequence[Table], base: Path) -> tuple[StorageConfig, ...]:
    """In the order of the file, which is that of reading. Raises `ConfigError`."""
    if not tables:
        raise ConfigError("storage is missing: one [[storage]] names where blocks are kept")
    roots = tuple(_root(table, base) for table in tables)
    mains = [table.key("role") for table, root in zip(tables, roots, strict=True) if root.is_main]
    if len(mains) != 1:
        found = f"{' and '.join(mains)} are" if mains else "none is"
        raise ConfigError(f'{found} "main": one of the {len(roots)} roots must be, the others are "copy"')
    names = Counter(root.name for root in roots)
    paths = Counter(root.path for root in roots if root.is_on_disk)
    for table, root in zip(tables, roots, strict=True):
        if names[root.name] > 1:
            raise ConfigError(f"{table.key('name')} is {root.name!r}, which another root has too")
        if paths[root.path] > 1:
            raise ConfigError(f"{table.key('path')} is {str(root.path)!r}, which another root has too")
        for other in roots:
            if root.is_on_disk and other.is_on_disk and other.path in root.path.parents:
                raise ConfigError(f"{table.key('path')} is {str(root.path)!r}, inside that of root {other.name!r}")
    return roots


def _root(table: Table, base: Path) -> StorageConfig:
    kind = table.choice("kind", "auto", KINDS)
    found = StorageConfig(
        name=table.text("name", pattern=NAME, form=NAME_FORM),
        kind=kind,
        path=table.path("path", None if kind in KINDS_ON_DISK else ".", base),
        create=table.flag("create", default=False),
        role=table.choice("role", "main", ROLES),
        layout=table.choice("layout", "auto", LAYOUTS),
        threads=table.count("threads", 16, 1, 256),
        ops_max=table.count("ops_max", 64, 1, 4096),
        direct=table.flag("direct", default=True),
        io_deadline_s=table.duration_s("io_deadline", 10.0, 0.1, 600.0),
        read_rate_max=table.size_bytes("read_rate_max", 0, 0, READ_RATE_MAX),
        fill=table.flag("fill", default=True),
        segments=_segments(table),
    )
    _check(table, found)
    table.done()
    return found


def _segments(table: Table) -> SegmentSettings:
    default = SegmentSettings()
    return SegmentSettings(
        segment_bytes=table.size_bytes("segment_bytes", default.segment_bytes, SEGMENT_UNIT_BYTES, 64 << 30),
        log_pages=table.count("log_pages", default.log_pages, 16, 1 << 20),
        commit_blocks=table.count("commit_blocks", default.commit_blocks, 1, 4096),
        commit_wait_s=table.duration_s("commit_wait", default.commit_wait_s, 0.0, 1.0),
        index_ram_bytes_max=table.size_bytes("index_ram_bytes_max", default.index_ram_bytes_max, 1 << 20, 1 << 44),
        bytes_max=table.size_bytes("bytes_max", default.bytes_max, 0, STORE_BYTES_MAX),
        inodes_max=table.count("inodes_max", default.inodes_max, 0, 1 << 40),
        high=table.fraction("high", default.high, 0.01, 0.99),
        low=table.fraction("low", default.low, 0.01, 0.99),
        grace_s=table.duration_s("grace", default.grace_s, 0.1, 86_400.0),
        poll_s=table.duration_s("poll", default.poll_s, 0.01, 10.0),
        heartbeat_s=table.duration_s("heartbeat", default.heartbeat_s, 0.05, 60.0),
        dead_s=table.duration_s("dead", default.dead_s, 0.2, 3600.0),
        unlink_bytes_per_s=float(
            table.size_bytes("unlink_bytes_per_s", int(default.unlink_bytes_per_s), 1 << 20, 1 << 50)
        ),
        limits=tuple(_limit(limit) for limit in table.tables("limit", count_max=LIMITS_MAX)),
    )


def _limit(table: Table) -> Limit:
    form = f"at most {MODEL_CHARACTERS_MAX} characters"
    found = Limit(
        tenant=table.text("tenant", "", pattern=f"(?s).{{0,{MODEL_CHARACTERS_MAX}}}", form=form),
        model_id=table.text("model_id", "", pattern=f"(?s).{{0,{MODEL_CHARACTERS_MAX}}}", form=form),
        bytes_max=table.size_bytes("bytes_max", 0, 0, STORE_BYTES_MAX),
        ttl_s=table.duration_s("ttl", 0.0, 0.0, 86_400.0 * 3650),
    )
    if not (found.bytes_max or found.ttl_s):
        raise ConfigError(f"{table.key('bytes_max')} and {table.key('ttl')} are missing: it limits nothing")
    table.done()
    return found


def _check(table: Table, root: StorageConfig) -> None:
    """What two keys say together."""
    segments, key = root.segments, table.key
    if root.ops_max < root.threads:
        keys = f"{key('ops_max')} is {root.ops_max}, {key('threads')} is {root.threads}"
        raise ConfigError(f"{keys}: with fewer ops than threads some threads could never work")
    turn_s = root.ops_max * LARGE_BLOCK_BYTES / root.read_rate_max if root.read_rate_max else 0.0
    if turn_s > root.io_deadline_s / 2:
        raise ConfigError(
            f"{key('read_rate_max')} is {size_text(root.read_rate_max)} a second: {key('ops_max')}, {root.ops_max}, reads of "
            f"{size_text(LARGE_BLOCK_BYTES)} take {turn_s:.1f} s, which is more than half of io_deadline, "
            f"{duration_text(root.io_deadline_s)}; make ops_max smaller, or io_deadline longer"
        )
    if segments.segment_bytes % SEGMENT_UNIT_BYTES:
        raise ConfigError(f"{key('segment_bytes')} is {segments.segment_bytes}, must be a multiple of 1MiB")
    if segments.low >= segments.high:
        raise ConfigError(f"{key('low')} is {segments.low:g}, must be below {key('high')}, {segments.high:g}")
    least_bytes = SEGMENTS_MIN * segments.segment_bytes + 2 * segments.log_pages * PAGE_BYTES
    if 0 < segments.bytes_max < least_bytes:
        raise ConfigError(
            f"{key('bytes_max')} is {segments.bytes_max}, must be 0B or at least {SEGMENTS_MIN} segments and two logs, "
            f"{least_bytes}: what is being written can't be dropped; or make segment_bytes smaller"
        )
    if 0 < segments.inodes_max < INODES_MIN:
        raise ConfigError(f"{key('inodes_max')} is {segments.inodes_max}, must be 0 or at least {INODES_MIN}")
    longest_s = root.io_deadline_s + 2 * segments.poll_s
    if segments.grace_s < longest_s:
        raise ConfigError(
            f"{key('grace')} is {segments.grace_s:g}s, must be at least io_deadline and two polls, {longest_s:g}s: others "
            "read what was dropped until they hear of it"
        )
    if segments.dead_s < 4 * segments.heartbeat_s:
        raise ConfigError(
            f"{key('dead')} is {segments.dead_s:g}s, must be at least four heartbeats, {4 * segments.heartbeat_s:g}s"
        )
