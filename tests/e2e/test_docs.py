"""The programs in `docs/` do what the docs say they do, on real daemons."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cluster import environment, running

pytestmark = pytest.mark.e2e

DOCS = Path(__file__).resolve().parents[2] / "docs"
RUN_S = 50.0


def _said(name: str, *arguments: str) -> list[str]:
    command = [sys.executable, str(DOCS / name), *arguments]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=RUN_S, env=environment()
    ).stdout.splitlines()


def test_the_examples_run_as_they_stand_and_every_byte_is_right() -> None:
    with running() as cluster:
        pe, de = cluster.pe, cluster.de
        assert _said("first_fetch.py", str(pe.socket))[-1] == "every byte is right: True"
        stored, hinted, *turns = _said("two_nodes.py", str(pe.socket), str(de.socket), pe.name, de.name)
    assert stored == "stored: OK" and hinted.startswith("hinted at: ")
    ways = ("Path.AUTO", "Path.AUTO, no_helpers True", "Path.AUTO, resident_blocks 3", "Path.PARTS")
    assert turns == [f"path {way}: 8 blocks, OK, OK, OK, OK, every byte is right" for way in ways]
