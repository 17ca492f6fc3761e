"""Directories of one segment store that belong to nobody alone: manifests, epochs, temporary names."""

from __future__ import annotations

import time
from pathlib import Path

from kvmoverd.adapters.storage.namespaces import (
    check_epoch,
    make_directory,
    publish_manifest,
    raise_epoch,
    sync_directory,
)
from kvmoverd.adapters.storage.owners import TempNames, reclaim_orphans
from kvmoverd.adapters.storage.root_format import SEGMENTS, publish_format
from kvmoverd.adapters.storage.root_place import device_of, unusable
from kvmoverd.core.manifest import Namespace

VERSION = "kvm1"


class SegmentRoot:
    """Makes what is missing. Raises `StorageUnusable` for a root that can't be used, or holds another kind of store."""

    def __init__(self, root: Path) -> None:
        self.base = root / VERSION
        self.authors = self.base / "authors"
        self.trash = self.base / ".trash"
        self._temps = self.base / ".tmp"
        self._epochs = self.base / ".epochs"
        self._names = TempNames()
        self._root, self._device = root, 0
        self.make()
        try:
            self.reclaimed_temps = reclaim_orphans(self._temps, now_s=time.time())
        except OSError as error:
            raise unusable(root, error) from error

    def make(self) -> None:
        """Makes what is missing: also later, where somebody deleted it. Raises `StorageUnusable`.

        On another filesystem than it was, as where the root's was unmounted meanwhile, nothing is made.
        """
        root = self._root
        try:
            self._device = device_of(root, self._device)
            make_directory(self.base)
            make_directory(self._temps)
            publish_format(self.base, SEGMENTS, Path(self.new_temp()))
            for directory in (self.authors, self.trash, self._epochs):
                make_directory(directory)
            # What is told durable must not hang on a name that is not.
            sync_directory(self.base)
            sync_directory(root)
        except OSError as error:
            raise unusable(root, error) from error

    def new_temp(self) -> str:
        return f"{self._temps}/{self._names.new()}"

    def namespace_directory(self, fingerprint16: bytes) -> Path:
        return self.base / fingerprint16.hex()

    def open_namespace(self, namespace: Namespace) -> None:
        """Publishes or compares the manifest. Raises `ManifestMismatch`, `StaleEpoch`, `StorageUnusable`."""
        try:
            if not (self._temps.is_dir() and self._epochs.is_dir()):
                self.make()
            check_epoch(self._epochs, namespace)
            directory = self.namespace_directory(namespace.fingerprint[:16])
            publish_manifest(directory, namespace, Path(self.new_temp()))
            raise_epoch(self._epochs, namespace)
            sync_directory(self.base)
        except OSError as error:
            raise unusable(self.base, error) from error
