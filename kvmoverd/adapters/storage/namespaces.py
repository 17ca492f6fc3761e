"""Namespaces on disk: the manifest of each, published once and compared ever after, and the epoch of each family.

An epoch is the highest number among the empty files of the family's directory: its maximum only grows, whoever adds to
it in whatever order, so that no lock is needed and no late writer can lower it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from kvmoverd.adapters.storage.block_io import create_file
from kvmoverd.core.errors import BadManifest, ManifestMismatch, StaleEpoch, StorageUnusable
from kvmoverd.core.manifest import Namespace, first_difference, stored_manifest

DIRECTORY_MODE = 0o750
MANIFEST = "manifest.json"
_PUBLISH_TRIES = 3


def make_directory(path: Path) -> None:
    """Creates a directory with our mode whatever the umask; fine when it is there."""
    try:
        os.mkdir(path, DIRECTORY_MODE)
    except FileExistsError:
        return
    os.chmod(path, DIRECTORY_MODE)


def check_epoch(epochs: Path, namespace: Namespace) -> None:
    """Raises `StaleEpoch` when a higher epoch of this model is known here."""
    known, asked = _known_epoch(_family(epochs, namespace)), namespace.manifest.epoch
    if asked < known:
        message = f"model {namespace.manifest.model_id!r}: epoch {asked} is below epoch {known}, which the store has"
        raise StaleEpoch(message, epoch=asked, known=known)


def raise_epoch(epochs: Path, namespace: Namespace) -> None:
    """Makes the namespace's epoch known; lower ones are forgotten."""
    family, epoch = _family(epochs, namespace), namespace.manifest.epoch
    make_directory(family)
    with contextlib.suppress(FileExistsError):
        os.close(create_file(family / str(epoch)))
        sync_directory(family)
    for name in os.listdir(family):
        if name.isdigit() and int(name) < epoch:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(family / name)


def publish_manifest(directory: Path, namespace: Namespace, temp: Path) -> None:
    """Puts the manifest into a namespace's directory, which is made if need be, or compares it with the one there.

    Raises `ManifestMismatch` naming the first field that differs.
    """
    for _ in range(_PUBLISH_TRIES):
        # A purge may take the directory away between any two steps.
        with contextlib.suppress(FileNotFoundError):
            make_directory(directory)
            if not (directory / MANIFEST).exists():
                publish_file(directory / MANIFEST, namespace.manifest.canonical(), temp)
            _compare(directory / MANIFEST, namespace)
            return
    raise StorageUnusable(f"{directory} went away {_PUBLISH_TRIES} times while it was opened", directory=directory)


def stored_namespaces(base: Path) -> Iterator[Namespace]:
    """Namespaces whose manifest lies in a directory below `base`; one that can't be read is nobody's. Raises `OSError`."""
    with os.scandir(base) as entries:
        for entry in entries:
            if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError, BadManifest):
                    yield Namespace(stored_manifest((Path(entry.path) / MANIFEST).read_bytes()))


def sync_directory(directory: Path) -> None:
    """Makes new names in a directory durable, where the filesystem can."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(fd)


def link_or_rename(temp: str | Path, path: str | Path) -> None:
    """Gives a finished file its name. Raises `FileExistsError` when the name is taken, where hard links tell."""
    try:
        os.link(temp, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        os.rename(temp, path)


def publish_file(path: Path, content: bytes, temp: Path) -> None:
    """Gives the file its name when it is whole and durable; leaves the one that another node published first."""
    try:
        with open(create_file(temp), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            link_or_rename(temp, path)
        sync_directory(path.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp)


def _compare(path: Path, namespace: Namespace) -> None:
    field = first_difference(path.read_bytes(), namespace.manifest)
    if field:
        message = f"{path}: the stored manifest differs in {field} from the one registered"
        raise ManifestMismatch(message, field=field, path=path)


def _family(epochs: Path, namespace: Namespace) -> Path:
    return epochs / namespace.manifest.family()[:16].hex()


def _known_epoch(family: Path) -> int:
    try:
        return max((int(name) for name in os.listdir(family) if name.isdigit()), default=0)
    except FileNotFoundError:
        return 0
