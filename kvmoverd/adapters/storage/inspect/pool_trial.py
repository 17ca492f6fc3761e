"""The pool that a config asks for, as a daemon would have it: is there memory for it, and what does the kernel do with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvmoverd.adapters.memory.arena import HUGE_PAGE_BYTES, Arena
from kvmoverd.adapters.storage.block_io import BlockIo, errno_name
from kvmoverd.core.errors import ConfigError, StorageUnusable


@dataclass(frozen=True, slots=True)
class PoolAsked:
    """Of a config: `kind`, `ops_max` and `segment_bytes` of the root, `shared` as the pool would have to be for 3FS."""

    size_bytes: int
    piece_bytes: int
    shared: bool
    kind: str
    ops_max: int
    segment_bytes: int


@contextlib.contextmanager
def memory_of(asked: PoolAsked | None) -> Iterator[tuple[Arena, str]]:
    """The pool with all its pages, else a small piece of such memory, and why it is only that. Some 0.3 s a GiB."""
    refused = ""
    if asked is not None:
        try:
            with contextlib.closing(Arena(asked.size_bytes, asked.piece_bytes, shared=asked.shared)) as arena:
                arena.touch()
                yield arena, ""
                return
        except ConfigError as error:
            refused = str(error)
    with contextlib.closing(Arena(HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)) as arena:
        arena.touch()
        yield arena, refused


def described(asked: PoolAsked, arena: Arena, refused: str, registered: str) -> dict[str, object]:
    """`registered`: as `try_registered` says it."""
    if refused:
        return {"bytes": asked.size_bytes, "memory": refused, "pages": None, "registered": "not tried"}
    return {"bytes": asked.size_bytes, "memory": "ok", "pages": arena.page_kind, "registered": registered}


def try_registered(asked: PoolAsked, arena: Arena, io: BlockIo | None, uring_refusal: str, path: Path) -> str:
    """What reads would do here: "registered pool", or why they do without that. Only scratch memory is written."""
    if asked.kind not in ("auto", "uring"):
        return f"not tried: storage.kind is {asked.kind!r}"
    if uring_refusal or io is None:
        return (
            f"not tried: io_uring can't be used: {uring_refusal}"
            if uring_refusal
            else "not tried: nothing can be written"
        )
    # Not before the trial in another process: the package may be missing, or hold instructions that this CPU lacks.
    from kvmoverd.adapters.storage.uring_pool import register_pool  # noqa: PLC0415
    from kvmoverd.adapters.storage.uring_ring import Ring  # noqa: PLC0415

    try:
        ring = Ring(asked.ops_max)
    except OSError as error:
        return f"no ring can be had: {errno_name(error)}"
    try:
        return register_pool(ring, arena, asked.piece_bytes, io, str(path))
    except StorageUnusable as error:
        return str(error)
    finally:
        if ring.idle:
            ring.close()
