"""Layout A: one file per block.

    <root>/kvm1/<fingerprint, 16 bytes in hex>/manifest.json       published once, compared at open
                                              /<hh>/<hh>/<key in hex>.blk
                /.tmp/<host>.<pid>-<start>.<random>                being written
                /.quarantine/                                      found damaged
                /.epochs/<family>/<epoch>                          highest number counts
                /.trash/                                           purged, being deleted

A block gets its name only after its bytes are durable. The name itself may be lost in a power cut: that is a miss,
never a wrong block, and a directory sync per block would halve the rate.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from pathlib import Path

from kvmoverd.adapters.storage.namespaces import (
    check_epoch,
    link_or_rename,
    make_directory,
    publish_manifest,
    raise_epoch,
    stored_namespaces,
)
from kvmoverd.adapters.storage.owners import TempNames, reclaim_orphans
from kvmoverd.adapters.storage.root_place import device_of, unusable
from kvmoverd.adapters.storage.trash import Trash
from kvmoverd.core.errors import ManifestMismatch, StaleEpoch, StorageUnusable
from kvmoverd.core.manifest import Namespace

log = logging.getLogger(__name__)

VERSION = "kvm1"
LOOK_S = 1.0
"""Where a block is not there, it is looked no oftener than this whether the store itself is."""
QUARANTINE_FILES_MAX = 64
"""Damaged records beyond this many are deleted: they are kept to be looked at, not for ever."""


class LayoutA:
    """Paths of one root and what happens to them. Raises `StorageUnusable` for a root that can't be used."""

    def __init__(self, root: Path) -> None:
        self._base = root / VERSION
        self._base_place = str(self._base)
        self._temps = self._base / ".tmp"
        self._quarantine = self._base / ".quarantine"
        self._epochs = self._base / ".epochs"
        self._names = TempNames()
        self._root, self._device, self._looked_s = root, 0, 0.0
        self._open_spaces: dict[bytes, Namespace] = {}
        self.refusal = ""
        """Why nothing can be found or written, as far as is known; empty when it can."""
        self._make()
        try:
            self.reclaimed_temps = reclaim_orphans(self._temps, now_s=time.time())
        except OSError as error:
            raise unusable(root, error) from error
        self._trash = Trash(self._base / ".trash")

    def close(self) -> None:
        self._trash.close()

    def _make(self) -> None:
        """Makes what is missing; on another filesystem than the root had, as where its own was unmounted, nothing."""
        root = self._root
        try:
            self._device = device_of(root, self._device)
            for directory in (self._base, self._temps, self._quarantine, self._epochs, self._base / ".trash"):
                make_directory(directory)
        except OSError as error:
            raise unusable(root, error) from error

    def block_path(self, namespace: Namespace, key: bytes) -> str:
        name = key.hex()
        return f"{self._namespace_place(namespace)}/{name[:2]}/{name[2:4]}/{name}.blk"

    def new_temp(self) -> str:
        return f"{self._temps}/{self._names.new()}"

    def look(self, *, now: bool = False) -> bool:
        """Whether the store is there; one that was deleted is made anew, with the namespaces that are open. Blocks.

        To be asked where a block is not there: it looks every `LOOK_S`, and `now` at once. `refusal` is set by it.
        """
        now_s = time.monotonic()
        if not now and now_s - self._looked_s < LOOK_S:
            return not self.refusal
        self._looked_s = now_s
        if self._temps.is_dir() and self._epochs.is_dir():
            self.refusal = ""
            return True
        try:
            self._make()
            for namespace in list(self._open_spaces.values()):
                # One that another node has meanwhile published otherwise, or a newer epoch of, is for the next who registers it.
                with contextlib.suppress(ManifestMismatch, StaleEpoch):
                    self._publish(namespace)
        except (OSError, StorageUnusable) as error:
            if self.refusal != str(error):
                log.warning("%s is gone: %s", self._base, error)
            self.refusal = str(error)
            return False
        log.warning("%s was deleted or replaced, and is made anew: what was stored there is gone", self._base)
        self.refusal = ""
        return True

    def open_namespace(self, namespace: Namespace) -> None:
        """Raises `ManifestMismatch`, `StaleEpoch`, `StorageUnusable`."""
        if not self.look(now=True):
            raise StorageUnusable(self.refusal, root=self._root)
        try:
            self._publish(namespace)
        except OSError as error:
            raise unusable(self._base, error) from error
        self._open_spaces[namespace.fingerprint] = namespace

    def _publish(self, namespace: Namespace) -> None:
        check_epoch(self._epochs, namespace)
        publish_manifest(self._namespace_path(namespace), namespace, Path(self.new_temp()))
        raise_epoch(self._epochs, namespace)

    def purge(self, namespace: Namespace) -> tuple[int, int]:
        """Counts (blocks, bytes), then hides the namespace by one rename. Raises `StorageUnusable`."""
        directory = self._namespace_path(namespace)
        self._open_spaces.pop(namespace.fingerprint, None)
        try:
            blocks = _count_blocks(directory)
            self._trash.throw(directory)
        except OSError as error:
            raise unusable(self._base, error) from error
        return blocks, blocks * namespace.layout.record_bytes

    def purge_tenant(self, tenant: str) -> tuple[int, int]:
        """Purges every namespace whose manifest names the tenant. Raises `StorageUnusable`."""
        blocks = freed_bytes = 0
        try:
            for namespace in stored_namespaces(self._base):
                if namespace.manifest.tenant == tenant:
                    found = self.purge(namespace)
                    blocks, freed_bytes = blocks + found[0], freed_bytes + found[1]
        except OSError as error:
            raise unusable(self._base, error) from error
        return blocks, freed_bytes

    def publish(self, temp: str, path: str) -> None:
        """Names a finished file. Raises `FileExistsError` when the name is taken, `OSError` in a purged namespace."""
        try:
            link_or_rename(temp, path)
        except FileNotFoundError:
            # The namespace's own directory is not made here: a write that is late for a purge must not bring it back.
            fan = Path(path).parent
            make_directory(fan.parent)
            make_directory(fan)
            link_or_rename(temp, path)

    def set_aside(self, path: str, inode: int) -> str:
        """Takes a damaged record's name away; says what was done. A good record that replaced it meanwhile stays."""
        if os.stat(path).st_ino != inode:
            return "replaced meanwhile"
        if len(os.listdir(self._quarantine)) >= QUARANTINE_FILES_MAX:
            os.unlink(path)
            return f"deleted, {QUARANTINE_FILES_MAX} records are in quarantine"
        place = self._quarantine / f"{Path(path).stem}.{secrets.token_hex(4)}"
        os.rename(path, place)
        return f"moved to {place}"

    def _namespace_path(self, namespace: Namespace) -> Path:
        return Path(self._namespace_place(namespace))

    def _namespace_place(self, namespace: Namespace) -> str:
        return f"{self._base_place}/{namespace.fingerprint[:16].hex()}"


def unlink_quietly(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _count_blocks(directory: Path) -> int:
    return sum(name.endswith(".blk") for _, _, names in os.walk(directory) for name in names)
