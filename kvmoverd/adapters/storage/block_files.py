"""Layout A as `Blocks`: one op on one block file, start to end, in the thread that calls.

Every outcome is a completion or an `OSError`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from kvmoverd.adapters.storage.block_io import (
    UNREADABLE,
    BlockIo,
    choose_io,
    close_quietly,
    errno_name,
    open_regular,
    read_into,
)
from kvmoverd.adapters.storage.blocks import LOOKS, End, Opened
from kvmoverd.adapters.storage.layout_a import LayoutA, unlink_quietly
from kvmoverd.adapters.storage.learned_index import LearnedIndex
from kvmoverd.adapters.storage.root_format import FILES
from kvmoverd.adapters.storage.sealing import seal_write
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.manifest import Namespace
from kvmoverd.core.record import RecordMismatch, check_layers, memory_view, verify
from kvmoverd.core.status import Reason
from kvmoverd.core.store.places import Place
from kvmoverd.ports.storage import BlockProbe, BlockRead, BlockWrite, StorageDone

BAD_S = 30.0
"""How long a block is left alone after the device failed to read it: some take a minute for each such failure."""
_DAMAGED = frozenset({Reason.CORRUPT, Reason.SHORT_READ})


def file_blocks(root: Path, *, direct: bool = True) -> FileBlocks:
    """Layout A over a directory. Raises `StorageUnusable` for a root that can't be written."""
    layout = LayoutA(root)
    try:
        io = choose_io(layout.new_temp(), direct=direct)
    except OSError as error:
        layout.close()
        raise StorageUnusable(f"{root} can't be written: {errno_name(error)} ({error})", root=root) from error
    return FileBlocks(layout, io)


class FileBlocks:
    """`Blocks` of layout A. A block that a device fails to read is not tried again for `BAD_S`, unless it is stored anew."""

    def __init__(self, layout: LayoutA, io: BlockIo) -> None:
        self.io = io
        self.index = LearnedIndex()
        self.on_close: Callable[[int], None] = lambda fd: None
        self._layout = layout

    def open_namespace(self, namespace: Namespace) -> None:
        self._layout.open_namespace(namespace)

    def purge(self, namespace: Namespace) -> tuple[int, int]:
        return self._layout.purge(namespace)

    def purge_tenant(self, tenant: str) -> tuple[int, int]:
        return self._layout.purge_tenant(tenant)

    def heard(self, author: str, log: int) -> None:
        """Names are looked up in the directory itself: there is nothing to hear."""

    def signature(self) -> tuple[str, int]:
        return "", 0

    def trial_path(self) -> str:
        return self._layout.new_temp()

    def details(self) -> Mapping[str, int | str]:
        bad_blocks, reclaimed = self.index.bad_blocks, self._layout.reclaimed_temps
        refusal = self._layout.refusal
        return {"layout": FILES, "negative_entries": bad_blocks, "reclaimed_temps": reclaimed, "refusal": refusal}

    def notes(self) -> list[str]:
        bad_blocks = self.index.bad_blocks
        return [f"{bad_blocks} blocks could not be read and are left alone for {BAD_S:g} s"] if bad_blocks else []

    def close(self, timeout_s: float) -> bool:
        """Nothing of its own touches a slot: always True, at once."""
        self._layout.close()
        return True

    def read(self, op: BlockRead, *, looks: int = LOOKS) -> StorageDone:
        """Reads and checks. What is damaged at every look is moved aside, so that the next write repairs it.

        `looks`: how often the file is read at most; fewer where others looked before.
        """
        path = self._layout.block_path(op.namespace, op.key)
        self._refuse_bad(op, path)
        for _ in range(looks):
            try:
                done, inode = self._read_once(op, path)
            except OSError as error:
                self._not_read(op, error)
                raise
            if done.reason not in _DAMAGED:
                return done
        if op.first_layer:
            inode = _inode_of_record(op, path)
            if inode < 0:
                message = f"{path}: {done.message}; replaced meanwhile"
                return StorageDone(op.op_id, Reason.CORRUPT, done.moved_bytes, message=message)
        try:
            fate = self._layout.set_aside(path, inode)
        except OSError as error:
            self.index.mark_bad(op.namespace, op.key, for_s=BAD_S)
            fate = f"still there, and left alone for {BAD_S:g} s: {error}"
        return StorageDone(op.op_id, done.reason, done.moved_bytes, message=f"{path}: {done.message}; {fate}")

    def open(self, op: BlockRead) -> Opened:
        path = self._layout.block_path(op.namespace, op.key)
        self._refuse_bad(op, path)
        try:
            fd, status = self.io.open_read(path)
        except OSError as error:
            self._not_read(op, error)
            raise
        return Opened(fd, 0, status.st_size == op.namespace.layout.record_bytes)

    def let_go(self, opened: Opened) -> None:
        close_quietly(opened.fd)

    def check(self, op: BlockRead, opened: Opened | None) -> None:
        record = memory_view(op.address, op.namespace.layout.record_bytes)
        check_layers(record, op.namespace, op.key, op.layers.start, op.layers.stop)

    def failed(self, op: BlockRead, place: Place | None, error: OSError) -> None:
        if error.errno in UNREADABLE:
            self.index.mark_bad(op.namespace, op.key, for_s=BAD_S)

    def write(self, op: BlockWrite, end: End) -> None:
        try:
            done = self._written(op)
        except FileNotFoundError:
            if not self._layout.look(now=True):
                raise OSError(errno.EIO, self._layout.refusal) from None
            done = self._written(op)
        end(done)

    def _written(self, op: BlockWrite) -> StorageDone:
        """Temporary file, sync, name; `moved_bytes` is 0 when an equal block was there. One that can't be read is replaced."""
        path = self._layout.block_path(op.namespace, op.key)
        is_bad = self.index.bad_for_s(op.namespace, op.key) > 0
        if not is_bad and _is_stored(op.namespace, op.key, path):
            return StorageDone(op.op_id, Reason.OK)
        record = seal_write(op)
        temp = self._layout.new_temp()
        try:
            self.io.write_new(temp, record)
            self._publish(op, temp, path, replaces=is_bad)
        finally:
            unlink_quietly(temp)
        self.index.repaired(op.namespace, op.key)
        return StorageDone(op.op_id, Reason.OK, len(record))

    def probe(self, op: BlockProbe) -> StorageDone:
        """Counts leading keys whose file exists, has the right size, its header if asked for, and is not left alone."""
        record_bytes = op.namespace.layout.record_bytes
        for present, key in enumerate(op.keys):
            path = self._layout.block_path(op.namespace, key)
            try:
                found_bytes = os.stat(path).st_size
            except FileNotFoundError:
                found_bytes = -1
            is_there = found_bytes == record_bytes and not self.index.bad_for_s(op.namespace, key)
            if not is_there or (op.looks and not _is_stored(op.namespace, key, path)):
                return StorageDone(op.op_id, Reason.OK, present=present)
        return StorageDone(op.op_id, Reason.OK, present=len(op.keys))

    def _read_once(self, op: BlockRead, path: str) -> tuple[StorageDone, int]:
        """A completion, and the inode that was read."""
        span, record_bytes = op.span, op.namespace.layout.record_bytes
        record = memory_view(op.address, record_bytes)
        fd, status = self.io.open_read(path)
        try:
            got = 0
            if status.st_size >= record_bytes:
                got = read_into(fd, record[span.start : span.stop], span.start)
        finally:
            os.close(fd)
        if got < len(span) or status.st_size < record_bytes:
            ends = status.st_size if status.st_size < record_bytes else span.start + got
            message = f"the file ends after {ends} of {record_bytes} bytes"
            return StorageDone(op.op_id, Reason.SHORT_READ, got, message=message), status.st_ino
        try:
            if status.st_size > record_bytes:
                raise RecordMismatch("record_bytes", found=status.st_size, expected=record_bytes)
            self.check(op, None)
        except RecordMismatch as error:
            return StorageDone(op.op_id, Reason.CORRUPT, got, message=str(error)), status.st_ino
        return StorageDone(op.op_id, Reason.OK, got), status.st_ino

    def _not_read(self, op: BlockRead, error: OSError) -> None:
        self.failed(op, None, error)
        if isinstance(error, FileNotFoundError):
            self._layout.look()

    def _publish(self, op: BlockWrite, temp: str, path: str, *, replaces: bool) -> None:
        try:
            self._layout.publish(temp, path)
        except FileExistsError:
            if replaces or not _is_stored(op.namespace, op.key, path):
                os.replace(temp, path)

    def _refuse_bad(self, op: BlockRead, path: str) -> None:
        """Raises `FileNotFoundError`: to whoever asks, a block that can't be read now is not there."""
        left_s = self.index.bad_for_s(op.namespace, op.key)
        if left_s:
            raise FileNotFoundError(
                errno.ENOENT, f"it could not be read, and is left alone for {left_s:.0f} s more", path
            )


def _inode_of_record(op: BlockRead, path: str) -> int:
    """The inode under this name when its header page is the one in the slot; -1 when another record has the name now.

    Only then may a range that does not match be held against the file: the ranges before it came from that header's.
    """
    try:
        fd, status = open_regular(path)
    except OSError:
        return -1
    try:
        same = os.pread(fd, HEADER_BYTES, 0) == memory_view(op.address, HEADER_BYTES)
        return status.st_ino if same else -1
    except OSError:
        return -1
    finally:
        os.close(fd)


def _is_stored(namespace: Namespace, key: bytes, path: str) -> bool:
    """Is there a file of the right size with this block's header? Its layers are checked by whoever reads it.

    One whose header can't be read is none.
    """
    try:
        fd, status = open_regular(path)
    except OSError:
        return False
    try:
        if status.st_size != namespace.layout.record_bytes:
            return False
        verify(os.pread(fd, HEADER_BYTES, 0), namespace, key)
    except (RecordMismatch, OSError):
        return False
    finally:
        os.close(fd)
    return True
