"""One op on one block file, start to end, in the thread that calls. Every outcome is a completion or an `OSError`."""

from __future__ import annotations

import os
import time

from kvmoverd.adapters.storage.block_io import BlockIo, open_regular, read_into
from kvmoverd.adapters.storage.layout_a import LayoutA, unlink_quietly
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.record import RecordMismatch, check_layers, memory_view, seal, verify
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import BlockProbe, BlockRead, BlockWrite, StorageDone

LOOKS = 2
"""Damage that is gone at the second look came from the way, not from the disk."""
_DAMAGED = frozenset({Reason.CORRUPT, Reason.SHORT_READ})


class BlockFiles:
    def __init__(self, layout: LayoutA, io: BlockIo) -> None:
        self._layout = layout
        self._io = io

    def read(self, op: BlockRead, *, looks: int = LOOKS) -> StorageDone:
        """Reads and checks. What is damaged at every look is moved aside, so that the next write repairs it.

        `looks`: how often the file is read at most; fewer where others looked before.
        """
        path = self._layout.block_path(op.namespace, op.key)
        for _ in range(looks):
            done, inode = self._read_once(op, path)
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
            fate = f"still there: {error}"
        return StorageDone(op.op_id, done.reason, done.moved_bytes, message=f"{path}: {done.message}; {fate}")

    def open(self, op: BlockRead) -> tuple[int, int]:
        """(descriptor, size in bytes) of a block's file, to be read by others; they close it. Raises `OSError`."""
        fd, status = self._io.open_read(self._layout.block_path(op.namespace, op.key))
        return fd, status.st_size

    def write(self, op: BlockWrite) -> StorageDone:
        """Temporary file, sync, name; `moved_bytes` is 0 when an equal block was there."""
        path = self._layout.block_path(op.namespace, op.key)
        if _is_stored(op, path):
            return StorageDone(op.op_id, Reason.OK)
        record = memory_view(op.address, op.namespace.layout.record_bytes)
        seal(record, op.namespace, key=op.key, parent=op.parent, depth=op.depth, write_time_ns=time.time_ns())
        temp = self._layout.new_temp()
        try:
            self._io.write_new(temp, record)
            self._publish(op, temp, path)
        finally:
            unlink_quietly(temp)
        return StorageDone(op.op_id, Reason.OK, len(record))

    def probe(self, op: BlockProbe) -> StorageDone:
        """Counts leading keys whose file exists and has the right size."""
        record_bytes = op.namespace.layout.record_bytes
        for present, key in enumerate(op.keys):
            try:
                found_bytes = os.stat(self._layout.block_path(op.namespace, key)).st_size
            except FileNotFoundError:
                found_bytes = -1
            if found_bytes != record_bytes:
                return StorageDone(op.op_id, Reason.OK, present=present)
        return StorageDone(op.op_id, Reason.OK, present=len(op.keys))

    def _read_once(self, op: BlockRead, path: str) -> tuple[StorageDone, int]:
        """A completion, and the inode that was read."""
        span, record_bytes = op.span, op.namespace.layout.record_bytes
        record = memory_view(op.address, record_bytes)
        fd, status = self._io.open_read(path)
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
            check_layers(record, op.namespace, op.key, op.first_layer, op.layers.stop)
        except RecordMismatch as error:
            return StorageDone(op.op_id, Reason.CORRUPT, got, message=str(error)), status.st_ino
        return StorageDone(op.op_id, Reason.OK, got), status.st_ino

    def _publish(self, op: BlockWrite, temp: str, path: str) -> None:
        try:
            self._layout.publish(temp, path)
        except FileExistsError:
            if not _is_stored(op, path):
                os.replace(temp, path)


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


def _is_stored(op: BlockWrite, path: str) -> bool:
    """Is there a file of the right size with this block's header? Its layers are checked by whoever reads it."""
    try:
        fd, status = open_regular(path)
    except FileNotFoundError:
        return False
    try:
        if status.st_size != op.namespace.layout.record_bytes:
            return False
        verify(os.pread(fd, HEADER_BYTES, 0), op.namespace, op.key)
    except RecordMismatch:
        return False
    finally:
        os.close(fd)
    return True
