"""Claims on an author's directory: files `adopt.<n>`, of which the highest counts, each made once and by one."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from kvmoverd.adapters.storage.block_io import create_file
from kvmoverd.adapters.storage.namespaces import sync_directory
from kvmoverd.adapters.storage.segments.followed import is_author
from kvmoverd.adapters.storage.segments.page_files import PageFiles
from kvmoverd.core.store.places import number_of

PREFIX = "adopt"
CLAIMS_MAX = 1 << 20
_END = b"\n"


@dataclass(frozen=True, slots=True)
class Claim:
    """`claimant`: an author's name, empty when the claim's file does not say whose it is (yet)."""

    number: int
    claimant: str


def highest(directory: Path, files: PageFiles) -> Claim | None:
    """The claim that counts, None where there is none. Raises `OSError`."""
    numbers = [number for name in os.listdir(directory) if (number := number_of(name, PREFIX)) is not None]
    # A number that nobody can outbid is damage or malice, and counts for nothing.
    number = max((number for number in numbers if 0 < number <= CLAIMS_MAX), default=0)
    if not number:
        return None
    raw = files.read_page(directory / _name(number))
    text = raw[: -len(_END)].decode(errors="replace") if raw.endswith(_END) else ""
    return Claim(number, text if is_author(text) else "")


def bid(directory: Path, number: int, claimant: str) -> bool:
    """Makes claim `number`; False when it was there already. Raises `OSError`, with no claim made."""
    if number > CLAIMS_MAX:
        return False
    path = directory / _name(number)
    try:
        fd = create_file(path)
    except FileExistsError:
        return False
    try:
        os.write(fd, claimant.encode() + _END)
        os.fsync(fd)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(fd)
    sync_directory(directory)
    return True


def _name(number: int) -> str:
    return f"{PREFIX}.{number}"
