"""The storage of a node, built from the config: each root beside the others, in bounded time.

A root is, from below: a layout of records, an engine that has them read and written (a row per kind), and a place in the
set of all roots. Where there is no filesystem there is nothing to wait for, and a single root needs no set.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.storage.answers import silent_places
from kvmoverd.adapters.storage.block_files import file_blocks
from kvmoverd.adapters.storage.block_io import errno_name
from kvmoverd.adapters.storage.blocks import Blocks
from kvmoverd.adapters.storage.layout_choice import VERSION, choose_layout
from kvmoverd.adapters.storage.memory import MemoryStorage
from kvmoverd.adapters.storage.null import NullStorage
from kvmoverd.adapters.storage.root_format import SEGMENTS
from kvmoverd.adapters.storage.roots import RootSet
from kvmoverd.adapters.storage.roots_absent import AbsentStorage, left_out
from kvmoverd.adapters.storage.roots_open import Attempt, Opening, begin_each
from kvmoverd.adapters.storage.roots_root import RootSettings
from kvmoverd.adapters.storage.segments.fitting import too_small
from kvmoverd.adapters.storage.segments.open import open_segment_store
from kvmoverd.adapters.storage.threads import ThreadsStorage
from kvmoverd.adapters.storage.throttled import ThrottledStorage
from kvmoverd.adapters.storage.uring_open import open_uring
from kvmoverd.adapters.storage.uring_probe import uring_refusal
from kvmoverd.adapters.storage.usrbio_open import open_usrbio
from kvmoverd.adapters.storage.usrbio_probe import is_3fs, usrbio_refusal
from kvmoverd.config import Config
from kvmoverd.config_storage import StorageConfig
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.ports.storage import Storage, StorageFacts

log = logging.getLogger(__name__)

OPEN_ROOT_S = 45.0
"""For the main root: a trial in a child process, a cluster that is busy. One that takes longer hangs."""
OPEN_COPY_S = 5.0
"""For a copy; one that takes longer is waited for beside the work."""
CHECK_S = 2.0
"""How long `check` waits for what a filesystem has to say."""
CLOSE_S = 1.0
THREAD_3FS = "3fs"
"""The one that opens all roots of 3FS: its client forgets what was opened by a thread that is gone."""

Build: TypeAlias = Callable[[StorageConfig, Blocks, Arena, int], Storage]


def open_storage(config: Config, boot_id: str, arena: Arena, *, timeout_s: float = OPEN_ROOT_S) -> Storage:
    """All roots. A copy that can't be opened now is left out until it can, and status says why.

    Raises `KvmoverError` for the main one.
    """
    roots = config.storage
    if len(roots) == 1 and not roots[0].is_on_disk:
        return _open_root(roots[0], config, boot_id, arena)
    began_s, stay = time.monotonic(), threading.Event()
    openings = {
        root.name: Opening(
            root.name,
            partial(_open_root, root, config, boot_id, arena),
            THREAD_3FS if wants_rings_of_3fs(root) else "",
        )
        for root in sorted(roots, key=lambda root: not root.is_main)
    }
    attempts = {attempt.opening.name: attempt for attempt in begin_each(list(openings.values()), stay=stay)}
    storages: dict[str, Storage] = {}
    try:
        for root in sorted(roots, key=lambda root: not root.is_main):
            limit_s = timeout_s if root.is_main else min(timeout_s, OPEN_COPY_S)
            storages[root.name] = _opened(root, attempts[root.name], began_s, limit_s, stay)
    except BaseException:
        _give_up(storages, attempts, stay)
        raise
    in_order = [(storages[root.name], _settings(root)) for root in roots]
    return RootSet(in_order, pool_bytes=config.pool.bytes, on_quiet=stay.set)


def needs_shared_pool(config: Config) -> bool:
    """Will the pool have to be shared with a client of 3FS? Asks no filesystem."""
    return any(wants_rings_of_3fs(root) for root in config.storage)


def wants_rings_of_3fs(root: StorageConfig) -> bool:
    return root.kind == "usrbio" or (root.kind == "auto" and is_3fs(root.path))


def make_directory(path: Path) -> None:
    """Raises `StorageUnusable`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageUnusable(f"can't make {path}: {error.strerror}") from error


def all_on_this_machine(roots: Sequence[StorageConfig]) -> list[dict[str, str]]:
    """What `check` says of each root beside its settings; a filesystem that hangs costs `CHECK_S`, however many do."""
    silent = silent_places([root.path for root in roots if root.is_on_disk], CHECK_S)
    return [_says_nothing(root) if root.path in silent else on_this_machine(root) for root in roots]


def _says_nothing(root: StorageConfig) -> dict[str, str]:
    then = "serve waits, then refuses" if root.is_main else "serve leaves it out until it answers"
    return {"not here": f"{root.path} has not answered for {CHECK_S:g} s, the filesystem hangs; {then}"}


def on_this_machine(root: StorageConfig) -> dict[str, str]:
    """What `check` says of a root beside its settings: the layout, what is done another way, what is missing. Blocks."""
    try:
        layout, missing = layout_here(root), missing_root(root)
        found = {"layout here": layout, "note": storage_refusal(root), "not here": missing}
        if layout == SEGMENTS and not missing:
            found["warning"] = too_small(_existing(root.path), root.segments.segment_bytes)
    except OSError as error:
        found = {"not here": f"{root.path}: {errno_name(error)} ({error.strerror})"}
    if found.get("not here"):
        found["not here"] += "; serve refuses" if root.is_main else "; serve leaves it out until it comes"
    return {name: text for name, text in found.items() if text}


def storage_refusal(root: StorageConfig) -> str:
    """Why a root would not be read as asked, but in a slower way; empty when it would. Blocks while a child tries."""
    found = []
    if wants_rings_of_3fs(root) and (refused := usrbio_refusal(root.path)):
        found.append(f"3FS's rings can't be used: {refused}")
    if root.kind in ("uring", "auto", "usrbio") and (refused := uring_refusal()):
        found.append(f"threads will read: io_uring can't be used: {refused}")
    return "; ".join(found)


def missing_root(root: StorageConfig) -> str:
    """Why a root can't be opened on this machine as it is; empty when it can. Blocks. Raises `OSError`."""
    if not root.is_on_disk:
        return ""
    place = _existing(root.path)
    if not place.is_dir():
        return f"{place} is no directory"
    if place != root.path and not root.create:
        return f"{root.path} is no directory: create it, or mount it"
    base = root.path / VERSION
    if refused := _unwritable(base if base.is_dir() else place):
        return refused
    try:
        choose_layout(place, root.layout)
    except StorageUnusable as error:
        return str(error)
    return ""


def layout_here(root: StorageConfig) -> str:
    """The layout that the root has, or would get on this machine; what is asked for where it can't be told. Blocks."""
    if not root.is_on_disk:
        return "none: no filesystem"
    try:
        return choose_layout(_existing(root.path), root.layout)
    except StorageUnusable:
        return root.layout


def _existing(path: Path) -> Path:
    """The path, or what is there of the way to it. Raises `OSError`."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _unwritable(directory: Path) -> str:
    """Why no file can be made there, as far as it can be told without making one."""
    if os.statvfs(directory).f_flag & os.ST_RDONLY:
        return f"{directory} is on a filesystem that is mounted read-only"
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        return f"{directory} may not be written by this user"
    return ""


def _open_root(root: StorageConfig, config: Config, boot_id: str, arena: Arena) -> Storage:
    """Behind a throttle, where it has a rate."""
    storage = _open_storage(root, config, boot_id, arena)
    return ThrottledStorage(storage, root.read_rate_max) if root.read_rate_max else storage


def _open_storage(root: StorageConfig, config: Config, boot_id: str, arena: Arena) -> Storage:
    build = ENGINES.get(root.kind)
    if build is None:
        return WITHOUT_FILES[root.kind](root.name)
    if root.create:
        make_directory(root.path)
    blocks = _open_blocks(root, config.node.name, boot_id)
    try:
        return build(root, blocks, arena, config.pool.piece_bytes)
    except BaseException:
        blocks.close(CLOSE_S)
        raise


def _open_blocks(root: StorageConfig, node: str, boot_id: str) -> Blocks:
    if choose_layout(root.path, root.layout) != SEGMENTS:
        return file_blocks(root.path, direct=root.direct)
    return open_segment_store(
        root.path, node=node, boot_id=boot_id, direct=root.direct, settings=root.segments, name=root.name
    )


def _threads(root: StorageConfig, blocks: Blocks, arena: Arena, piece_bytes: int) -> Storage:
    return ThreadsStorage(blocks, name=root.name, threads=root.threads, ops_max=root.ops_max)


def _uring(root: StorageConfig, blocks: Blocks, arena: Arena, piece_bytes: int) -> Storage:
    return open_uring(blocks, arena, piece_bytes, name=root.name, threads=root.threads, ops_max=root.ops_max)


def _usrbio(root: StorageConfig, blocks: Blocks, arena: Arena, piece_bytes: int) -> Storage:
    return open_usrbio(
        root.path, blocks, arena, piece_bytes, name=root.name, threads=root.threads, ops_max=root.ops_max
    )


def _auto(root: StorageConfig, blocks: Blocks, arena: Arena, piece_bytes: int) -> Storage:
    build = _usrbio if wants_rings_of_3fs(root) else _uring
    return build(root, blocks, arena, piece_bytes)


def _settings(root: StorageConfig) -> RootSettings:
    return RootSettings(
        is_main=root.is_main,
        ops_max=root.ops_max,
        io_deadline_s=root.io_deadline_s,
        fill=root.fill,
        base=root.path / VERSION if root.is_on_disk else None,
    )


def _opened(root: StorageConfig, attempt: Attempt, began_s: float, limit_s: float, stay: threading.Event) -> Storage:
    """A copy that has not opened in time, or could not, is absent, and tried again; the main root has no substitute: raises."""
    found = attempt.result(began_s + limit_s)
    if found is None and root.is_main:
        found = attempt.give_up()
    why = f"{root.name} did not open within {limit_s:g} s, does the filesystem hang?" if found is None else str(found)
    if isinstance(found, Exception) and (root.is_main or not isinstance(found, StorageUnusable)):
        raise found
    if found is not None and not isinstance(found, Exception):
        return found
    if root.is_main:
        raise StorageUnusable(why)
    log.warning("storage %s is left out, and tried again: %s", root.name, why)
    facts = StorageFacts(root.name, root.kind, "none", "", {"role": root.role, "layout": root.layout})
    return AbsentStorage(attempt.opening, left_out(facts, why), stay=stay, attempt=attempt if found is None else None)


def _give_up(storages: dict[str, Storage], attempts: dict[str, Attempt], stay: threading.Event) -> None:
    """Nothing stays open, and what comes later is closed."""
    for name, attempt in attempts.items():
        found = storages.get(name) or attempt.give_up()
        if found is not None and not isinstance(found, Exception):
            found.close(CLOSE_S)
    stay.set()


ENGINES: dict[str, Build] = {"auto": _auto, "usrbio": _usrbio, "uring": _uring, "threads": _threads}
"""Engine over files by `storage.kind`."""

WITHOUT_FILES: dict[str, Callable[[str], Storage]] = {"memory": MemoryStorage, "null": NullStorage}
"""Storage without files by `storage.kind`."""
