"""Names of temporary files: they say which process owns them, so that those of dead owners can be reclaimed."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from pathlib import Path

ORPHAN_AGE_S = 60.0
"""A process of another container may share our host name and not be in our process table: only what is old goes."""
FOREIGN_AGE_S = 86_400.0


class TempNames:
    """Gives names `<host>.<pid>-<start>.<random>`; the start time tells a process from a later one of that number."""

    def __init__(self) -> None:
        self._prefix = f"{socket.gethostname()}.{os.getpid()}-{start_ticks(os.getpid())}"

    def new(self) -> str:
        return f"{self._prefix}.{secrets.token_hex(8)}"


def reclaim_orphans(directory: Path, *, now_s: float, age_s: float = ORPHAN_AGE_S) -> int:
    """Unlinks temporary files whose owner is dead; gives how many. `now_s`: wall-clock time, as in file times.

    Files of this host go when they are `age_s` old and their process has ended; those of other hosts after a day.
    """
    reclaimed = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if _is_orphan(entry.name, now_s - entry.stat(follow_symlinks=False).st_mtime, age_s):
                    os.unlink(entry.path)
                    reclaimed += 1
    return reclaimed


def _is_orphan(name: str, file_age_s: float, age_s: float) -> bool:
    host, owner = [*name.rsplit(".", 2), "", ""][:2]
    if host != socket.gethostname():
        return file_age_s >= FOREIGN_AGE_S
    pid, _, start = owner.partition("-")
    alive = pid.isdigit() and str(start_ticks(int(pid))) == start
    return not alive and file_age_s >= age_s


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; -1 when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    return int(stat.rpartition(")")[2].split()[19])
