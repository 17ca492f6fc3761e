"""Does a filesystem answer at all? Found out by other processes: one that is stuck in the kernel can't even be ended."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)

_LOOK = """
import os, sys
for place in sys.argv[1:]:
    try:
        os.statvfs(place)
        os.listdir(place)
    except OSError:
        pass
"""
_left: list[subprocess.Popen[bytes]] = []
"""Children that did not answer; they end when the filesystem lets them."""


def silent_places(places: Sequence[Path], timeout_s: float) -> set[Path]:
    """Those of these directories that do not answer within so many seconds, all asked at once.

    An error is an answer, too.
    """
    until_s = time.monotonic() + timeout_s
    children = {place: _begin(place) for place in dict.fromkeys(places)}
    return {place for place, child in children.items() if not _ends(child, until_s)}


def _begin(place: Path) -> subprocess.Popen[bytes] | threading.Thread:
    """A child; where none can be started, a thread: if that hangs, this process can't be ended until the filesystem lets it."""
    command = (sys.executable, "-I", "-S", "-c", _LOOK, str(place), str(place / "kvm1"))
    nothing = subprocess.DEVNULL
    try:
        return subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing)
    except OSError as error:
        log.warning("%s is asked by a thread, as no process can be started: %s", place, error)
        thread = threading.Thread(target=_look, args=(place,), name="kvmover-answers", daemon=True)
        thread.start()
        return thread


def _look(place: Path) -> None:
    for path in (place, place / "kvm1"):
        with contextlib.suppress(OSError):
            os.statvfs(path)
            os.listdir(path)


def _ends(child: subprocess.Popen[bytes] | threading.Thread, until_s: float) -> bool:
    left_s = max(0.0, until_s - time.monotonic())
    if isinstance(child, threading.Thread):
        child.join(left_s)
        return not child.is_alive()
    try:
        child.wait(left_s)
    except subprocess.TimeoutExpired:
        child.kill()
        _left.append(child)
        return False
    return True
