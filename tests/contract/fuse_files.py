"""The files behind a FUSE mount of the tests: everything is passed through to a directory.

With `volatile` set, what is written stays in this process's memory until it is synced: a power cut is its end.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import fuse_wire as wire
from fuse_wire import Caching, Op, Request, SetAttr

PAGE = 4096
_PASSED_ON = ~(os.O_DIRECT | os.O_APPEND | os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL)
"""Open flags for the file behind: its offsets come from the kernel, its pages need not be aligned."""


@dataclass(slots=True, eq=False)
class Node:
    """A file the kernel knows of, held by a descriptor that follows it through renames. `pages`: written, not synced."""

    fd: int
    inode: tuple[int, int]
    lookups: int = 0
    pages: dict[int, bytearray] = field(default_factory=dict)
    end: int = 0

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self.fd}"

    def size_of(self, found: os.stat_result) -> int:
        return max(found.st_size, self.end)


class Files:
    """Answers requests, or raises `OSError` with the errno that the kernel is to get."""

    def __init__(self, backing: str, caching: Caching, *, volatile: bool = False) -> None:
        self.backing = os.path.realpath(backing)
        self.caching = caching
        self.volatile = volatile
        fd = os.open(self.backing, os.O_PATH)
        found = os.fstat(fd)
        self._nodes = {wire.ROOT_NODE: Node(fd, (found.st_dev, found.st_ino), lookups=1)}
        self._numbers = {(found.st_dev, found.st_ino): wire.ROOT_NODE}
        self._next_node = wire.ROOT_NODE + 1
        self._handles: dict[int, int] = {}
        self._listings: dict[int, list[tuple[str, int, int]]] = {}
        self._next_handle = 1
        self._calls: dict[int, Callable[[Request], bytes]] = {
            Op.LOOKUP: self._lookup,
            Op.GETATTR: lambda request: self._attr(self._nodes[request.node]),
            Op.SETATTR: self._setattr,
            Op.READLINK: lambda request: os.readlink("", dir_fd=self._nodes[request.node].fd).encode(),
            Op.SYMLINK: self._symlink,
            Op.MKNOD: self._mknod,
            Op.MKDIR: self._mkdir,
            Op.UNLINK: lambda request: self._remove(os.unlink, request),
            Op.RMDIR: lambda request: self._remove(os.rmdir, request),
            Op.RENAME: lambda request: self._rename(request, wire.WORD.size),
            Op.RENAME2: lambda request: self._rename(request, wire.RENAME2_IN.size),
            Op.LINK: self._link,
            Op.OPEN: self._open,
            Op.CREATE: self._create,
            Op.READ: self._read,
            Op.WRITE: self._write,
            Op.STATFS: lambda request: wire.statfs_answer(os.statvfs(self.backing)),
            Op.RELEASE: self._release,
            Op.FLUSH: lambda request: b"",
            Op.FSYNC: self._fsync,
            Op.OPENDIR: self._opendir,
            Op.READDIR: self._readdir,
            Op.RELEASEDIR: self._releasedir,
        }

    def answer(self, request: Request) -> bytes:
        """What the kernel is told; ENOSYS for all that is no plain file system, as on 3FS."""
        call = self._calls.get(request.op)
        if call is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        return call(request)

    def name_of(self, request: Request) -> str:
        """The path that a request is about, below the backing directory; "" for the directory itself."""
        node = self._nodes.get(request.node)
        offsets = {
            Op.LOOKUP: 0,
            Op.UNLINK: 0,
            Op.RMDIR: 0,
            Op.MKDIR: wire.MKDIR_IN.size,
            Op.MKNOD: wire.MKNOD_IN.size,
            Op.CREATE: wire.CREATE_IN.size,
            Op.RENAME: wire.WORD.size,
            Op.RENAME2: wire.RENAME2_IN.size,
            Op.LINK: wire.WORD.size,
        }
        path = os.readlink(node.path) if node else ""
        if request.op in offsets:
            path = os.path.join(path, request.names(offsets[Op(request.op)])[0])
        return path.removeprefix(self.backing).removeprefix("/")

    def forget(self, node_number: int, lookups: int) -> None:
        node = self._nodes[node_number]
        node.lookups -= lookups
        if node.lookups <= 0 and node_number != wire.ROOT_NODE and not node.pages:
            del self._nodes[node_number], self._numbers[node.inode]
            os.close(node.fd)

    def cut(self, keep: float, seed: int) -> int:
        """The power fails: of the unsynced pages a share of `keep`, drawn by `seed`, was on the disk. Gives what is lost."""
        draw, lost = random.Random(seed), 0
        for node in self._nodes.values():
            kept = [number for number in sorted(node.pages) if draw.random() < keep]
            lost += len(node.pages) - len(kept)
            self._sync(node, kept)
        return lost

    def unsynced(self) -> int:
        """Pages that were written and not yet synced."""
        return sum(len(node.pages) for node in self._nodes.values())

    # Names.

    def _lookup(self, request: Request) -> bytes:
        try:
            return self._entry(request.node, request.names(0)[0])
        except FileNotFoundError:
            if not self.caching.negative_s:
                raise
            return wire.entry_answer(0, bytes(wire.ATTR.size), self.caching)

    def _entry(self, parent: int, name: str) -> bytes:
        number, node = self._node(parent, name)
        found = os.fstat(node.fd)
        node.lookups += 1
        return wire.entry_answer(number, wire.attributes(found, node.size_of(found)), self.caching)

    def _node(self, parent: int, name: str) -> tuple[int, Node]:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._nodes[parent].fd)
        found = os.fstat(fd)
        inode = (found.st_dev, found.st_ino)
        number = self._numbers.get(inode)
        if number is None:
            number, self._next_node = self._next_node, self._next_node + 1
            self._nodes[number], self._numbers[inode] = Node(fd, inode), number
        else:  # under its latest name, which is what a rule asks for
            os.close(self._nodes[number].fd)
            self._nodes[number].fd = fd
        return number, self._nodes[number]

    def _owned(self, request: Request, name: str) -> bytes:
        if request.uid or request.gid:
            parent = self._nodes[request.node].fd
            os.chown(name, request.uid, request.gid, dir_fd=parent, follow_symlinks=False)
        return self._entry(request.node, name)

    def _symlink(self, request: Request) -> bytes:
        name, target = request.names(0)
        os.symlink(target, name, dir_fd=self._nodes[request.node].fd)
        return self._owned(request, name)

    def _mknod(self, request: Request) -> bytes:
        mode, rdev, _, _ = wire.MKNOD_IN.unpack_from(request.body)
        name = request.names(wire.MKNOD_IN.size)[0]
        os.mknod(name, mode, rdev, dir_fd=self._nodes[request.node].fd)
        return self._owned(request, name)

    def _mkdir(self, request: Request) -> bytes:
        mode, _ = wire.MKDIR_IN.unpack_from(request.body)
        name = request.names(wire.MKDIR_IN.size)[0]
        os.mkdir(name, mode, dir_fd=self._nodes[request.node].fd)
        return self._owned(request, name)

    def _remove(self, how: Callable[..., None], request: Request) -> bytes:
        how(request.names(0)[0], dir_fd=self._nodes[request.node].fd)
        return b""

    def _rename(self, request: Request, names_at: int) -> bytes:
        if names_at == wire.RENAME2_IN.size and wire.RENAME2_IN.unpack_from(request.body)[1]:
            raise OSError(errno.EINVAL, "no flags of rename, as on 3FS")
        (new_parent,) = wire.WORD.unpack_from(request.body)
        old, new = request.names(names_at)
        os.rename(old, new, src_dir_fd=self._nodes[request.node].fd, dst_dir_fd=self._nodes[new_parent].fd)
        self._node(new_parent, new)
        return b""

    def _link(self, request: Request) -> bytes:
        (old,) = wire.WORD.unpack_from(request.body)
        name = request.names(wire.WORD.size)[0]
        os.link(self._nodes[old].path, name, dst_dir_fd=self._nodes[request.node].fd, follow_symlinks=True)
        return self._entry(request.node, name)

    def _opendir(self, request: Request) -> bytes:
        with os.scandir(self._nodes[request.node].path) as entries:
            listing = [(entry.name, entry.inode(), _kind(entry)) for entry in entries]
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._listings[handle] = listing
        return wire.OPEN_OUT.pack(handle, 0, 0)

    def _readdir(self, request: Request) -> bytes:
        handle, offset, size_bytes, *_ = wire.IO_IN.unpack_from(request.body)
        return wire.dirents(self._listings[handle], offset, size_bytes)

    def _releasedir(self, request: Request) -> bytes:
        del self._listings[wire.WORD.unpack_from(request.body)[0]]
        return b""

    # Attributes.

    def _attr(self, node: Node) -> bytes:
        found = os.fstat(node.fd)
        return wire.attr_answer(wire.attributes(found, node.size_of(found)), self.caching)

    def _setattr(self, request: Request) -> bytes:
        valid, _, _, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid, _ = (
            wire.SETATTR_IN.unpack_from(request.body)
        )
        node, which = self._nodes[request.node], SetAttr(valid & 0x1FF)
        if SetAttr.MODE in which:
            os.chmod(node.path, stat.S_IMODE(mode))
        if which & (SetAttr.UID | SetAttr.GID):
            os.chown(node.path, uid if SetAttr.UID in which else -1, gid if SetAttr.GID in which else -1)
        if SetAttr.SIZE in which:
            self._truncate(node, size)
        if which & (SetAttr.ATIME_NOW | SetAttr.MTIME_NOW):
            os.utime(node.path)
        elif which & (SetAttr.ATIME | SetAttr.MTIME):
            found = os.fstat(node.fd)
            access_ns = atime * 10**9 + atime_ns if SetAttr.ATIME in which else found.st_atime_ns
            change_ns = mtime * 10**9 + mtime_ns if SetAttr.MTIME in which else found.st_mtime_ns
            os.utime(node.path, ns=(access_ns, change_ns))
        return self._attr(node)

    def _truncate(self, node: Node, size_bytes: int) -> None:
        os.truncate(node.path, size_bytes)
        node.end = min(node.end, size_bytes)
        for number in [number for number in node.pages if number * PAGE >= size_bytes]:
            del node.pages[number]
        if rest := size_bytes % PAGE:
            page = node.pages.get(size_bytes // PAGE)
            if page is not None:
                page[rest:] = bytes(PAGE - rest)

    # Bytes.

    def _open(self, request: Request) -> bytes:
        flags, _ = wire.PAIR.unpack_from(request.body)
        if flags & os.O_TRUNC:
            self._truncate(self._nodes[request.node], 0)
        return self._handle(self._nodes[request.node], flags)

    def _create(self, request: Request) -> bytes:
        flags, mode, _, _ = wire.CREATE_IN.unpack_from(request.body)
        name = request.names(wire.CREATE_IN.size)[0]
        made = os.open(name, os.O_CREAT | (flags & os.O_EXCL) | os.O_WRONLY, mode, dir_fd=self._nodes[request.node].fd)
        os.close(made)
        entry = self._owned(request, name)
        number, node = self._node(request.node, name)
        assert number
        if flags & os.O_TRUNC:
            self._truncate(node, 0)
        return entry + self._handle(node, flags)

    def _handle(self, node: Node, flags: int) -> bytes:
        # Written pages may have to be filled up from the file behind, so a file for writing can always be read here.
        access = os.O_RDWR if flags & os.O_ACCMODE == os.O_WRONLY else flags & os.O_ACCMODE
        fd = os.open(node.path, (flags & _PASSED_ON & ~(os.O_ACCMODE | os.O_TRUNC)) | access)
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        self._handles[handle] = fd
        return wire.OPEN_OUT.pack(handle, wire.FOPEN_DIRECT_IO if flags & os.O_DIRECT else 0, 0)

    def _release(self, request: Request) -> bytes:
        os.close(self._handles.pop(wire.WORD.unpack_from(request.body)[0]))
        return b""

    def _read(self, request: Request) -> bytes:
        handle, offset, size_bytes, *_ = wire.IO_IN.unpack_from(request.body)
        node = self._nodes[request.node]
        got = os.pread(self._handles[handle], size_bytes, offset)
        if not node.pages:
            return got
        end = min(offset + size_bytes, max(node.end, offset + len(got)))
        patched = bytearray(got.ljust(max(0, end - offset), b"\0"))
        for number in range(offset // PAGE, -(-end // PAGE)):
            if page := node.pages.get(number):
                low, high = max(offset, number * PAGE), min(end, number * PAGE + PAGE)
                patched[low - offset : high - offset] = page[low - number * PAGE : high - number * PAGE]
        return bytes(patched)

    def _write(self, request: Request) -> bytes:
        handle, offset, size_bytes, *_ = wire.IO_IN.unpack_from(request.body)
        payload = request.body[wire.IO_IN.size : wire.IO_IN.size + size_bytes]
        if not self.volatile:
            return wire.PAIR.pack(os.pwrite(self._handles[handle], payload, offset), 0)
        node, end = self._nodes[request.node], offset + size_bytes
        for number in range(offset // PAGE, -(-end // PAGE)):
            if number not in node.pages:
                old = os.pread(self._handles[handle], PAGE, number * PAGE)
                node.pages[number] = bytearray(old.ljust(PAGE, b"\0"))
            low, high = max(offset, number * PAGE), min(end, number * PAGE + PAGE)
            node.pages[number][low - number * PAGE : high - number * PAGE] = payload[low - offset : high - offset]
        node.end = max(node.end, end)
        return wire.PAIR.pack(size_bytes, 0)

    def _fsync(self, request: Request) -> bytes:
        node = self._nodes[request.node]
        self._sync(node, sorted(node.pages))
        return b""

    def _sync(self, node: Node, numbers: Iterable[int]) -> None:
        if not node.pages:
            return
        end = max(node.end, os.fstat(node.fd).st_size)
        fd = os.open(node.path, os.O_WRONLY)
        try:
            for number in numbers:
                os.pwrite(fd, node.pages[number][: end - number * PAGE], number * PAGE)
        finally:
            os.close(fd)
        node.pages.clear()
        node.end = 0


def _kind(entry: os.DirEntry[str]) -> int:
    return stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode) >> 12
