"""Can this process read a directory through rings of 3FS? Found out in another one, which the library may well end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvmoverd.adapters.storage.uring_probe import uring_refusal
from kvmoverd.adapters.storage.usrbio_iov import reclaim_pools
from kvmoverd.adapters.storage.usrbio_library import LIBRARY, Library

PROBE_S = 20.0
"""Its daemon answers requests after up to some seconds while a cluster is busy."""
FILESYSTEM = "fuse.hf3fs"
_PROBE = "import sys; from kvmoverd.adapters.storage.usrbio_probe import try_usrbio; try_usrbio(*sys.argv[1:])"


def usrbio_refusal(root: Path, library: str = LIBRARY) -> str:
    """Why rings of 3FS can't be used for a directory; empty when they can. Blocks while a child tries, once per directory."""
    return uring_refusal((sys.executable, "-c", _PROBE, str(root), library), PROBE_S)


def try_usrbio(root: str, library: str) -> None:
    """What a child does: it looks for a mount of 3FS there that shares memory, and tidies up. Raises whatever goes wrong."""
    reclaim_pools(Library(library).mount_point(root))


def is_3fs(root: Path, mounts: str = "/proc/self/mountinfo") -> bool:
    """Is the directory on 3FS, as far as the kernel's table of mounts says? Asks no filesystem, so never hangs."""
    place = os.path.abspath(root)
    kinds: dict[str, str] = {}
    for line in Path(mounts).read_text(errors="surrogateescape").splitlines():
        fields, _, rest = line.partition(" - ")
        point = fields.split()[4].replace("\\040", " ")
        kinds[point] = rest.split()[0]
    while place not in kinds and place != "/":
        place = os.path.dirname(place)
    return kinds.get(place) == FILESYSTEM
