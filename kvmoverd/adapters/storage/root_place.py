"""The directory of a storage root: is it there, and still the one that it was?"""

from __future__ import annotations

import os
from pathlib import Path

from kvmoverd.adapters.storage.block_io import errno_name
from kvmoverd.core.errors import StorageUnusable


def device_of(root: Path, was: int) -> int:
    """Its device number, which must be `was`, unless that is 0: another one is there where its own was unmounted.

    Raises `StorageUnusable`, `OSError`.
    """
    if not root.is_dir():
        raise StorageUnusable(f"{root} is no directory: create it, or mount it", root=root)
    device = os.stat(root).st_dev
    if was not in (0, device):
        found = "is empty, is it mounted? It" if not os.listdir(root) else "is another filesystem: it"
        message = f"{root} {found} is on device {device} and was on {was}: mount it again, or restart"
        raise StorageUnusable(message, root=root, device=device, was=was)
    return device


def unusable(root: Path, error: OSError) -> StorageUnusable:
    return StorageUnusable(f"{root}: {errno_name(error)} ({error})", root=root, errno=error.errno)
