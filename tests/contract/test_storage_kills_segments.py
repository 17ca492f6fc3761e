"""What a power cut may not take from a segment store's parts, each beside the whole."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuse_kit import FuseMount, fuse_mount

from kvmoverd.adapters.storage.segments.author import Author
from kvmoverd.adapters.storage.segments.log_writer import LogWriter
from kvmoverd.adapters.storage.segments.writes_io import WriteIo
from kvmoverd.core.store.log_pages import Kind, LogPage, decode_page, entries_of
from kvmoverd.core.store.places import PAGE_BYTES, log_name

LOG_PAGES = 4
"""Head, two pages, seal."""


@pytest.fixture
def fuse(tmp_path: Path) -> Iterator[FuseMount]:
    with fuse_mount(tmp_path / "place", tmp_path / "backing", volatile=True) as fuse:
        yield fuse


def page(segment: int) -> LogPage:
    entries = entries_of([(os.urandom(32), bytes(32), 1, 0)])
    return LogPage(Kind.BLOCKS, 0, 0, segment=segment, record_pages=1, entries=entries)


def segments_told(directory: Path) -> set[int]:
    """What the logs say."""
    found = set()
    for number in (1, 2, 3, 4):
        path = directory / log_name(number)
        raw = path.read_bytes() if path.exists() else b""
        for at in range(len(raw) // PAGE_BYTES):
            told = decode_page(raw[at * PAGE_BYTES : (at + 1) * PAGE_BYTES], number, at)
            found |= {told.segment} if told is not None and told.kind is Kind.BLOCKS else set()
    return found


@pytest.mark.parametrize("fails", ["", "*log.00000001", "*log.00000002"])
def test_pages_that_are_told_durable_outlive_a_power_cut_also_where_a_log_ends_between_them(
    fuse: FuseMount, fails: str
) -> None:
    io = WriteIo(direct=True)
    (fuse.place / "authors").mkdir()
    author = Author(fuse.place / "authors", node="node", boot_id="1", io=io, dead_s=60.0)
    log = LogWriter(author, io, pages=LOG_PAGES)
    if fails:
        fuse.fail("FSYNC", fails, errno.EIO)
    failures = log.publish([page(segment) for segment in (1, 2, 3)])
    durable = {segment for segment, failure in zip((1, 2, 3), failures, strict=True) if failure is None}
    fuse.power_cut()
    assert segments_told(author.directory) == durable
    assert durable == {"": {1, 2, 3}, "*log.00000001": set(), "*log.00000002": {1, 2}}[fails]
