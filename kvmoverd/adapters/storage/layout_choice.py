"""Which layout a root has, or shall have: what lies there decides, else the filesystem."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from kvmoverd.adapters.storage.block_io import errno_name
from kvmoverd.adapters.storage.root_format import FILES, SEGMENTS, check_format, stored_format
from kvmoverd.adapters.storage.usrbio_probe import is_3fs
from kvmoverd.core.errors import StorageUnusable

AUTO = "auto"
LAYOUTS = (AUTO, SEGMENTS, FILES)
VERSION = "kvm1"

_STATFS_BYTES = 256
"""More than any `struct statfs` has; its first field is the type, a long."""
_SHARED = {
    0x6969: "nfs",
    0x517B: "smb",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x65735546: "fuse",
}
"""Types of `statfs` whose clients may see each other's appends late or not at all."""
_libc = ctypes.CDLL(None, use_errno=True)


def choose_layout(root: Path, asked: str = AUTO) -> str:
    """ "segments" or "files". Raises `StorageUnusable` where another layout lies than is asked for, or an unknown version.

    Blocks. An empty root gets files on NFS, CIFS and on FUSE that is not 3FS, as what others append there may be seen late;
    segments anywhere else.
    """
    base = root / VERSION
    try:
        found = stored_format(base)
        layout = asked if asked != AUTO else found[0] if found else layout_for(root)
        if layout not in LAYOUTS:
            raise StorageUnusable(f"{base} holds layout {layout!r}, which this build does not know", layout=layout)
        check_format(base, layout)
    except OSError as error:
        raise StorageUnusable(f"{root}: {errno_name(error)} ({error})", root=root, errno=error.errno) from error
    return layout


def layout_for(root: Path) -> str:
    """The layout of a root that is empty. Raises `OSError`."""
    return FILES if filesystem_type(root) in _SHARED and not is_3fs(root) else SEGMENTS


def filesystem_type(root: Path) -> int:
    """`f_type` of `statfs`, which Python's `os.statvfs` leaves out. Raises `OSError`."""
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.statfs(os.fsencode(root), found):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(root))
    return ctypes.c_long.from_buffer(found).value & 0xFFFFFFFF
