"""Storages in child processes under hard conditions, and what they said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from storage_kit import SMALL_SEGMENTS

from kvmoverd.adapters.storage.block_files import file_blocks
from kvmoverd.adapters.storage.blocks import Blocks
from kvmoverd.adapters.storage.segments.open import open_segment_store

LAYOUTS: dict[str, Callable[[Path], Blocks]] = {
    "files": file_blocks,
    "segments": lambda root: open_segment_store(root, node="node", boot_id="boot", settings=SMALL_SEGMENTS),
}
"""How the records of a root lie; each is run with every engine."""
ENGINES = ("threads", "uring")
_SCRIPT = Path(__file__).with_name("storage_ordeal.py")
_DEADLINE_S = 50.0


def undergo(ordeal: str, layout: str, engine: str, root: Path, *, through: Sequence[str] = ()) -> dict[str, Any]:
    """What the child said; `through`: a command that starts it. Skips the test where the ordeal can't be had."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [*through, sys.executable, str(_SCRIPT), ordeal, layout, engine, str(root)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        timeout=_DEADLINE_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "skipped" in said:
        pytest.skip(said["skipped"])
    return said
