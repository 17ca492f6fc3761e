"""Does a filesystem answer at all? Found out by other processes: one that is stuck in the kernel can't even be ended."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

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


def _begin(place: Path) -> subprocess.Popen[bytes]:
    command = (sys.executable, "-I", "-S", "-c", _LOOK, str(place), str(place / "kvm1"))
    nothing = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing)


def _ends(child: subprocess.Popen[bytes], until_s: float) -> bool:
    try:
        child.wait(max(0.0, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.kill()
        _left.append(child)
        return False
    return True
