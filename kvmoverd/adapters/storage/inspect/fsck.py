"""Checks a whole store: every record that a daemon would find is read, every layer of it compared."""

from __future__ import annotations

import time
from pathlib import Path

from kvmoverd.adapters.storage.inspect.catalog import Progress, no_progress
from kvmoverd.adapters.storage.inspect.fsck_files import check_files
from kvmoverd.adapters.storage.inspect.fsck_segments import check_segments
from kvmoverd.adapters.storage.inspect.parallel import threads_here
from kvmoverd.adapters.storage.inspect.place import check_owner, find_store
from kvmoverd.adapters.storage.inspect.report import FsckReport
from kvmoverd.adapters.storage.root_format import SEGMENTS


def fsck(root: Path, *, repair: bool = False, threads: int = 0, progress: Progress = no_progress) -> FsckReport:
    """Writes nothing unless `repair`: then what is damaged is found by nobody any more, and what no log names is.

    `threads` 0: as many as fit this machine. Raises `StorageUnusable`, `OSError`.
    """
    began_s = time.monotonic()
    place = find_store(root)
    if repair:
        check_owner(place)
    report = FsckReport(str(root), place.layout)
    check = check_segments if place.layout == SEGMENTS else check_files
    check(place, report, repair=repair, threads=threads or threads_here(), progress=progress)
    report.seconds = round(time.monotonic() - began_s, 3)
    return report
