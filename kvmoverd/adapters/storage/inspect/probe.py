"""What a daemon would make of a directory: how it would read and write there, and whether it can at all."""

from __future__ import annotations

import os
import resource
import secrets
import shutil
import threading
from contextlib import ExitStack
from pathlib import Path

from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.storage.block_io import choose_io, errno_name
from kvmoverd.adapters.storage.inspect.place import check_directory, check_not_inside
from kvmoverd.adapters.storage.inspect.pool_trial import PoolAsked, described, memory_of, try_registered
from kvmoverd.adapters.storage.inspect.trials import Trials
from kvmoverd.adapters.storage.layout_choice import VERSION, choose_layout, filesystem_type, layout_for
from kvmoverd.adapters.storage.root_format import stored_format
from kvmoverd.adapters.storage.segments.fitting import too_small
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.usage import room_of
from kvmoverd.adapters.storage.uring_probe import uring_refusal
from kvmoverd.adapters.storage.usrbio_probe import is_3fs, usrbio_refusal
from kvmoverd.core.errors import StorageUnusable

ANSWER_S = 30.0
"""A filesystem that has not answered by then hangs."""
_NAMES = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x01021994: "tmpfs",
    0x794C7630: "overlayfs",
    0x6969: "nfs",
    0x517B: "smb",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x65735546: "fuse",
    0x2FC12FC1: "zfs",
    0x0BD00BD0: "lustre",
    0x00C36400: "ceph",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
    0xF2F52010: "f2fs",
    0x4D44: "vfat",
    0x2011BAB0: "exfat",
    0xCA451A4E: "bcachefs",
    0x858458F6: "ramfs",
    0x958458F6: "hugetlbfs",
}
_CAP_IPC_LOCK = 14
_FULL = frozenset({"ENOSPC", "EDQUOT"})


def probe(root: Path, *, asked: PoolAsked | None = None, answer_s: float = ANSWER_S) -> dict[str, object]:
    """As one JSON object; "usable" says whether a daemon would take the root, "why" why not.

    `asked`: a config's pool, with which all is tried then, if there is so much memory; a daemon that runs has it already.
    Writes into a directory of its own below `root`, which is removed. Raises `StorageUnusable` for what is no directory, and
    where the filesystem does not answer; then the thread that asked is left behind.
    """
    memory = ExitStack()
    arena, refused = memory.enter_context(memory_of(asked))
    found: dict[str, object] = {}
    failed: list[Exception] = []

    def ask() -> None:
        # The memory is this thread's: what hangs may still read into it when nobody waits any more.
        with memory:
            try:
                found.update(_probe(root, arena, asked, refused))
            except (OSError, StorageUnusable) as error:
                failed.append(error)

    asking = threading.Thread(target=ask, name="kvmover-probe", daemon=True)
    asking.start()
    asking.join(answer_s)
    if asking.is_alive():
        raise StorageUnusable(f"{root}: the filesystem has not answered within {answer_s:g} s")
    if failed:
        raise failed[0]
    return found


def _probe(root: Path, arena: Arena, asked: PoolAsked | None, refused: str) -> dict[str, object]:
    check_directory(root)
    check_not_inside(root)
    found: dict[str, object] = {"path": str(root), **_filesystem(root), **_store(root), **_memory()}
    directory = root / f".kvmover-probe.{secrets.token_hex(8)}"
    try:
        os.mkdir(directory, 0o700)
    except OSError as error:
        return {**found, **_nothing_made(found, error)}
    try:
        trials = Trials(directory)
        found["names"] = trials.names()
        found["direct"] = trials.direct(arena)
        found.update(_effective(root, directory))
        if asked is not None:
            found["pool"] = _pool(found, directory, arena, asked, refused)
        found["notes"] = [*_notes_of(found), *_too_small(root, found, asked)]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return {**found, **_verdict(found)}


def _filesystem(root: Path) -> dict[str, object]:
    number, room = filesystem_type(root), room_of(root)
    name = "3fs" if is_3fs(root) else _NAMES.get(number, "unknown")
    return {
        "filesystem": name,
        "filesystem_type": f"0x{number:x}",
        "bytes_total": room.bytes_total,
        "bytes_free": room.bytes_free,
        "inodes_total": room.inodes_total,
        "inodes_free": room.inodes_free,
    }


def _store(root: Path) -> dict[str, object]:
    """What lies there, and which layout a daemon would use that leaves the choice open."""
    found: dict[str, object] = {"holds": None, "layout": None, "layout_of_an_empty_root": layout_for(root)}
    try:
        stored = stored_format(root / VERSION)
        found["holds"] = {"layout": stored[0], "version": stored[1]} if stored else None
        found["layout"] = choose_layout(root)
    except StorageUnusable as error:
        found["why"] = str(error)
    return found


def _memory() -> dict[str, object]:
    """How much may be registered with the kernel: io_uring and RDMA lock what they are given."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    exempt = bool(_capabilities() >> _CAP_IPC_LOCK & 1)
    unlimited = exempt or limit == resource.RLIM_INFINITY
    note = "" if unlimited else "raise it: ulimit -l, LimitMEMLOCK= of systemd, or the capability IPC_LOCK"
    return {
        "memlock_bytes": None if limit == resource.RLIM_INFINITY else limit,
        "memlock_exempt": exempt,
        "may_register": "a pool of any size" if unlimited else f"{limit} bytes at most; {note}",
    }


def _capabilities() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def _effective(root: Path, directory: Path) -> dict[str, object]:
    """How a daemon would read and write here, by its own trial."""
    uring = uring_refusal()
    rings = usrbio_refusal(root) if is_3fs(root) else "it is not 3FS"
    notes = [f"io_uring can't be used: {uring}"] if uring else []
    if is_3fs(root) and rings:
        notes.append(f"3FS's rings can't be used: {rings}")
    try:
        io = choose_io(str(directory / "io"), direct=True)
    except OSError:
        return {"mode": None, "engine": None, "io_uring": uring or "ok", "usrbio": rings or "ok", "notes": notes}
    notes += [io.note] if io.note else []
    engine = "usrbio" if not rings else "threads" if uring else "uring"
    return {"mode": io.mode, "engine": engine, "io_uring": uring or "ok", "usrbio": rings or "ok", "notes": notes}


def _pool(found: dict[str, object], directory: Path, arena: Arena, asked: PoolAsked, refused: str) -> dict[str, object]:
    if refused:
        return described(asked, arena, refused, "")
    io = None if found["mode"] is None else choose_io(str(directory / "pool"), direct=True)
    uring = "" if found["io_uring"] == "ok" else str(found["io_uring"])
    return described(asked, arena, refused, try_registered(asked, arena, io, uring, directory / "registered"))


def _nothing_made(found: dict[str, object], error: OSError) -> dict[str, object]:
    """The verdict where not even a directory can be made."""
    name = errno_name(error)
    if name in _FULL:
        return _full(found)
    advice = {
        "EROFS": "; it can only be read, and a daemon must write: mount it for writing, or name another root",
        "EACCES": "; run this as the daemon's user",
    }
    return {"usable": False, "why": f"nothing can be made here: {name}{advice.get(name, '')}"}


def _full(found: dict[str, object]) -> dict[str, object]:
    """The verdict on a full disk, where the trials say nothing else of the filesystem."""
    whys = [str(found["why"])] if "why" in found else []
    note = "the disk is full, so little could be tried"
    if found["holds"] is None:
        whys.append("the disk is full, and a new store needs room: make some, or name another root")
    elif found["layout"] == "segments":
        note += (
            "; what is stored can be read, a daemon makes room of its node's segments, and writes when there is some"
        )
    else:
        note += "; what is stored can be read, and nothing is written until somebody makes room"
    return {"notes": [*_notes_of(found), note], "usable": not whys, "why": "; ".join(whys)}


def _notes_of(found: dict[str, object]) -> list[str]:
    notes = found.get("notes", [])
    assert isinstance(notes, list), "notes are lines"
    return notes


def _too_small(root: Path, found: dict[str, object], asked: PoolAsked | None) -> list[str]:
    """What a daemon would say at its start of segments that hardly fit here; without a config, of those of the default size."""
    if found["layout"] != "segments":
        return []
    note = too_small(root, asked.segment_bytes if asked else SegmentSettings().segment_bytes)
    return [note] if note else []


def _verdict(found: dict[str, object]) -> dict[str, object]:
    names = found["names"]
    assert isinstance(names, dict), "the trials were made"
    if _FULL.intersection(names.values()):
        return _full(found)
    whys = [str(found["why"])] if "why" in found else []
    if found["mode"] is None:
        whys.append("what is written does not come back")
    whys += [f"{name}: {names[name]}" for name in ("exclusive_create", "rename", "fdatasync") if names[name] != "ok"]
    if found["layout"] == "segments" and names["hole_reads"] != "ok":
        whys.append(f"hole_reads: {names['hole_reads']}; use layout files")
    return {"usable": not whys, "why": "; ".join(whys)}
