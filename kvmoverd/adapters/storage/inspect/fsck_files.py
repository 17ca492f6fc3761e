"""The check of a store of one file per block."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvmoverd.adapters.storage.block_io import errno_name
from kvmoverd.adapters.storage.inspect.catalog import Progress
from kvmoverd.adapters.storage.inspect.manifests import Spaces, read_spaces
from kvmoverd.adapters.storage.inspect.parallel import each
from kvmoverd.adapters.storage.inspect.place import StorePlace
from kvmoverd.adapters.storage.inspect.records import LOOKS, RecordReader, check_record, open_direct
from kvmoverd.adapters.storage.inspect.report import FsckReport
from kvmoverd.adapters.storage.inspect.strangers import blocks_in, fan_directories, strangers_of_files
from kvmoverd.adapters.storage.layout_a import LayoutA
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.record import RecordMismatch


@dataclass(frozen=True, slots=True)
class BadFile:
    """A block's file that is not whole and right. `inode`: what was read, -1 where it could not be opened."""

    path: str
    inode: int
    what: str
    unreadable: bool


@dataclass(slots=True)
class FanCheck:
    """Of the files of one directory."""

    files: int = 0
    read_bytes: int = 0
    bad: list[BadFile] = field(default_factory=list)


def check_files(place: StorePlace, report: FsckReport, *, repair: bool, threads: int, progress: Progress) -> None:
    """Fills in the report. Raises `StorageUnusable`, `OSError` where the root itself can't be read, or repaired."""
    spaces = read_spaces(place.base)
    report.wrong_manifests = len(spaces.wrong)
    for what in spaces.wrong.values():
        report.problem(what)
    bad: list[BadFile] = []
    local = threading.local()

    def check(fan: tuple[bytes, Path]) -> FanCheck:
        if not hasattr(local, "reader"):
            local.reader = RecordReader()
        return _check_fan(*fan, spaces, local.reader)

    for checked in each(_fans(place, spaces), check, threads=threads):
        report.blocks += checked.files
        report.bytes += checked.read_bytes
        bad += checked.bad
        progress(f"{report.blocks} blocks, {report.bytes >> 20} MiB read")
    for one in bad:
        report.unreadable += one.unreadable
        report.corrupt += not one.unreadable
        report.problem(f"{one.path}: {one.what}")
    for stranger in strangers_of_files(place):
        report.unknown_files += 1
        report.problem(f"{stranger}: an unknown file, no part of a store")
    damaged = [one for one in bad if not one.unreadable]
    if repair and damaged:
        _set_aside(place, damaged, report)


def _fans(place: StorePlace, spaces: Spaces) -> Iterator[tuple[bytes, Path]]:
    for fingerprint16 in spaces.directories:
        for fan in fan_directories(place.base / fingerprint16.hex()):
            yield fingerprint16, fan


def _check_fan(fingerprint16: bytes, fan: Path, spaces: Spaces, reader: RecordReader) -> FanCheck:
    checked = FanCheck()
    try:
        names = blocks_in(fan)
    except FileNotFoundError:
        return checked
    except OSError as error:
        checked.bad.append(BadFile(str(fan), -1, errno_name(error), unreadable=True))
        return checked
    for name in names:
        key = bytes.fromhex(name.partition(".")[0])
        _check_file(f"{fan}/{name}", fingerprint16, key, spaces.spaces.get(fingerprint16), reader, checked)
    return checked


def _check_file(
    path: str, fingerprint16: bytes, key: bytes, space: Namespace | None, reader: RecordReader, checked: FanCheck
) -> None:
    inode, what = -1, ""
    for look in range(LOOKS):
        try:
            fd, status = open_direct(path)
            try:
                inode = status.st_ino
                size_bytes = status.st_size
                checked.read_bytes += size_bytes if not look else 0
                _check_content(reader, fd, size_bytes, fingerprint16, key, space)
            finally:
                os.close(fd)
        except FileNotFoundError:
            # Purged, or moved aside by a daemon, while this was on its way.
            return
        except RecordMismatch as error:
            what = str(error)
        except OSError as error:
            checked.files += 1
            checked.bad.append(BadFile(path, inode, errno_name(error), unreadable=True))
            return
        else:
            checked.files += 1
            return
    checked.files += 1
    checked.bad.append(BadFile(path, inode, what, unreadable=False))


def _check_content(
    reader: RecordReader, fd: int, size_bytes: int, fingerprint16: bytes, key: bytes, space: Namespace | None
) -> None:
    """Raises `RecordMismatch`, `OSError`."""
    record_bytes = space.layout.record_bytes if space else size_bytes
    if size_bytes != record_bytes or size_bytes <= HEADER_BYTES:
        raise RecordMismatch("record_bytes", found=size_bytes, expected=record_bytes)
    header = check_record(reader.read(fd, 0, record_bytes), record_bytes, space)
    for name, found, expected in (
        ("fingerprint", header.fingerprint[:16].hex(), fingerprint16.hex()),
        ("key", header.key.hex(), key.hex()),
    ):
        if found != expected:
            raise RecordMismatch(name, found=found, expected=expected)


def _set_aside(place: StorePlace, damaged: list[BadFile], report: FsckReport) -> None:
    """As a daemon does with what it finds damaged: a block that was stored anew meanwhile stays."""
    layout = LayoutA(place.root)
    try:
        for one in damaged:
            try:
                fate = layout.set_aside(one.path, one.inode)
            except FileNotFoundError:
                fate = "gone meanwhile"
            report.repaired += 1
            report.problem(f"{one.path}: {fate}")
    finally:
        layout.close()
