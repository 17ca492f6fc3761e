"""Reads a decision log, with the file before it where it was moved away, for those who play it again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from kvmoverd.adapters.journal_file import CONTINUES, DROPPED, former_of
from kvmoverd.core.scheduling.journal import BadJournal

HEAD_CHARS_MAX = 4096


def lines_of(path: Path) -> Iterator[str]:
    """All lines of the log that ends in `path`, from its beginning.

    Raises `BadJournal` where lines are missing: dropped by the scheduler, or in files that are gone. A last line without an
    end is left out: the scheduler was killed while it wrote it.
    """
    pieces = _pieces_before(path)
    if pieces > 1 or (pieces and _pieces_before(former_of(path))):
        raise BadJournal(
            f"{path} goes on where {pieces} files before it ended, and only the last of those is kept: it can't be played "
            "without its beginning; raise scheduler.journal.bytes_max"
        )
    if pieces:
        yield from _lines(former_of(path), skip=0)
    yield from _lines(path, skip=min(pieces, 1))


def _pieces_before(path: Path) -> int:
    """How many files of the log came before this one. Raises `BadJournal`."""
    try:
        with path.open(encoding="utf-8") as file:
            head = json.loads(file.readline(HEAD_CHARS_MAX))
    except OSError as error:
        raise BadJournal(f"{path} can't be read: {error.strerror}") from error
    except ValueError:
        return 0  # whoever plays it says what is wrong with its first line
    found = head.get(CONTINUES, 0) if isinstance(head, dict) else 0
    if not isinstance(found, int) or found < 0:
        raise BadJournal(f"{path}: {CONTINUES} is {found!r}, must be a number of files")
    return found


def _lines(path: Path, skip: int) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                if number <= skip or not line.endswith("\n"):
                    continue
                if line.startswith(f'{{"{DROPPED}"'):
                    raise BadJournal(
                        f"{path}, line {number}: {line.strip()[:80]}: the scheduler dropped so many lines here, because the "
                        "disk was too slow; what follows can't be played"
                    )
                yield line
    except OSError as error:
        raise BadJournal(f"{path} can't be read: {error.strerror}") from error
