"""Pages of index logs that are not what was written there: read page by page, whatever followers made of them."""

from __future__ import annotations

import os
from pathlib import Path

from kvmoverd.adapters.storage.segments.followed import Listing
from kvmoverd.adapters.storage.segments.log_reader import LOG_PAGES_MAX, good_pages
from kvmoverd.adapters.storage.segments.page_files import PAGES_AT_ONCE, PageFiles
from kvmoverd.core.store.places import log_name


def damaged_pages(directory: Path, files: PageFiles, *, is_dead: bool) -> dict[int, list[int]]:
    """Pages by log: bad ones with a good one behind them, and in logs that take no more pages also torn ones behind all.

    `is_dead`: the author writes no more. Raises `OSError`; a log that is gone meanwhile has none.
    """
    found: dict[int, list[int]] = {}
    logs = Listing.of(directory).logs
    begun = [number for number in logs if _is_begun(directory, number, files)]
    for number in logs:
        try:
            pages = _damaged(
                directory / log_name(number), number, files, ended=is_dead or number < max(begun, default=0)
            )
        except FileNotFoundError:
            continue
        if pages:
            found[number] = pages
    return found


def _is_begun(directory: Path, log: int, files: PageFiles) -> bool:
    """The next log is made beforehand: it is begun when there is a page behind its head."""
    try:
        fd = files.open(directory / log_name(log))
    except FileNotFoundError:
        return False
    try:
        return bool(good_pages(files.read(fd, 0, 2), log, 0)[1:].any())
    finally:
        os.close(fd)


def _damaged(path: Path, log: int, files: PageFiles, *, ended: bool) -> list[int]:
    damaged: list[int] = []
    waiting: list[int] = []
    torn: list[int] = []
    fd = files.open(path)
    try:
        for first in range(0, LOG_PAGES_MAX, PAGES_AT_ONCE):
            pages = files.read(fd, first, PAGES_AT_ONCE)
            good = good_pages(pages, log, first)
            for number in range(len(pages)):
                if good[number]:
                    damaged += waiting
                    waiting, torn = [], []
                else:
                    waiting.append(first + number)
                    if pages[number].any():
                        torn.append(first + number)
            if len(pages) < PAGES_AT_ONCE:
                break
    finally:
        os.close(fd)
    return damaged + torn if ended else damaged
