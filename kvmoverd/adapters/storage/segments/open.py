"""Builds a segment store from its parts, in the one place that knows them all."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kvmoverd.adapters.storage.block_io import DISK_FULL, BlockIo, choose_io
from kvmoverd.adapters.storage.root_place import unusable
from kvmoverd.adapters.storage.segments.appender import Appender
from kvmoverd.adapters.storage.segments.author import Author, machine_name
from kvmoverd.adapters.storage.segments.background import StoreBackground
from kvmoverd.adapters.storage.segments.collecting import Collecting, StoreParts
from kvmoverd.adapters.storage.segments.fitting import too_small
from kvmoverd.adapters.storage.segments.followed import FSCK_NODE
from kvmoverd.adapters.storage.segments.followers import Followers
from kvmoverd.adapters.storage.segments.following import Following
from kvmoverd.adapters.storage.segments.index import SegmentIndex
from kvmoverd.adapters.storage.segments.keeper import Keeper
from kvmoverd.adapters.storage.segments.purges import Purges
from kvmoverd.adapters.storage.segments.root import SegmentRoot
from kvmoverd.adapters.storage.segments.segment_files import SegmentFiles
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.store import SegmentStore
from kvmoverd.adapters.storage.segments.touches import Touches
from kvmoverd.adapters.storage.segments.usage import Usage
from kvmoverd.adapters.storage.segments.writes_io import WriteIo
from kvmoverd.core.errors import StorageUnusable

log = logging.getLogger(__name__)

CLOSE_S = 1.0
READY_S = 1.0
"""How long a start waits until it is known what this node keeps already; it serves reads meanwhile, and soon all else."""
FILES_SHARE = 4
"""One in so many of the descriptors that this process may have is for segments to read."""
FILES_MAX = 4096


def open_segment_store(
    root: Path,
    *,
    node: str,
    boot_id: str,
    direct: bool = True,
    settings: SegmentSettings | None = None,
    name: str = "",
    now_ns: Callable[[], int] = time.monotonic_ns,
    write_io: Callable[[bool], WriteIo] = lambda direct: WriteIo(direct=direct),
) -> SegmentStore:
    """A store that writes as `<node>.<boot_id>`, with its threads running; `close` it in the end.

    Raises `StorageUnusable` for a node's name that is kept for checks, and for a root that can't be written, or is of another
    layout or version; one that is full is read, and written to as soon as there is room. `name`: of its threads.
    """
    _refuse_name_of_checks(node)
    settings, place = settings or SegmentSettings(), SegmentRoot(root)
    with ExitStack() as undo:
        try:
            io = _noted(choose_io(place.new_temp(), direct=direct), too_small(root, settings.segment_bytes), root)
            touches = Touches(now_ns=now_ns)
            index = SegmentIndex(ram_bytes_max=settings.index_ram_bytes_max, touches=touches, now_ns=now_ns)
            purges = Purges(place.base, index)
            writing = write_io(io.direct)
            make = partial(Author, place.authors, node=node, boot_id=boot_id, io=writing, dead_s=settings.dead_s)
            author = _author(make)
            undo.callback(author.end)
            appender = Appender(author, writing, index, settings, purge_of=purges.number, name=name)
            undo.callback(appender.close, CLOSE_S)
            files = SegmentFiles(place.authors, io, files_max=_files_max())
            built = Built(place, io, settings, appender, files, index, touches, purges)
            background = _background(built, name or node, now_ns)
        except OSError as error:
            raise unusable(root, error) from error
        store = SegmentStore(place, io, index, files, purges, appender, background)
        background.start()
        background.wait_ready(READY_S)
        undo.pop_all()
    return store


def _refuse_name_of_checks(node: str) -> None:
    if node == FSCK_NODE:
        raise StorageUnusable(f"no node may be called {node!r}: authors of that name are checks', and are taken away")


def _noted(io: BlockIo, warning: str, root: Path) -> BlockIo:
    """With what an operator should know in its note, and in the log."""
    if not warning:
        return io
    log.warning("%s: %s", root, warning)
    return replace(io, note="; ".join(filter(None, (io.note, warning))))


def _files_max() -> int:
    return min(FILES_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // FILES_SHARE)


def _author(make: Callable[..., Author]) -> Author:
    """On a full disk one who will write when there is room."""
    try:
        return make()
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        return make(born=False)


@dataclass(frozen=True, slots=True)
class Built:
    """What a store is made of before its background is."""

    root: SegmentRoot
    io: BlockIo
    settings: SegmentSettings
    appender: Appender
    files: SegmentFiles
    index: SegmentIndex
    touches: Touches
    purges: Purges


def _background(built: Built, name: str, now_ns: Callable[[], int]) -> StoreBackground:
    """What follows others and what collects need each other: one asks whose segments are ours, the other throws files away."""
    root, io, settings = built.root, built.io, built.settings
    followers = _followers(built, now_ns)
    usage = Usage(root.authors, io)

    def throw(path: Path, name: str) -> None:
        collecting.trash.throw(path, name)

    following = Following(
        root.authors,
        built.appender,
        followers,
        built.index,
        usage,
        settings,
        machine=machine_name(),
        throw=throw,
        direct=io.direct,
        now_ns=now_ns,
    )
    written = (built.appender, built.files, built.index, built.touches, built.purges)
    parts = StoreParts(
        root, io, settings, *written, following.recovery, following.live, followers.dropped, followers.told_dead
    )
    collecting = Collecting(parts, usage=usage, now_ns=now_ns)
    return StoreBackground(
        Keeper(name, now_ns=now_ns),
        Keeper(f"{name}-pulse", now_ns=now_ns),
        Keeper(f"{name}-collect", now_ns=now_ns),
        settings,
        appender=built.appender,
        followers=followers,
        following=following,
        collecting=collecting,
        purges=built.purges,
        index=built.index,
    )


def _followers(built: Built, now_ns: Callable[[], int]) -> Followers:
    followers = Followers(
        built.root.authors,
        built.index,
        own=lambda: built.appender.author.name,
        machine=machine_name(),
        settings=built.settings,
        now_ns=now_ns,
        direct=built.io.direct,
        on_namespace=partial(_watch, built.purges),
    )
    built.index.on_wanted = followers.wanted
    return followers


def _watch(purges: Purges, fingerprint16: bytes) -> None:
    """A namespace that only its segments tell of may have no directory any more: then nothing purges it."""
    with suppress(OSError):
        purges.watch(fingerprint16)
