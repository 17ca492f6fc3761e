"""What is deleted is free: no node keeps segments open that nobody will read any more, its own or others'."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from storage_kit import UNEVEN, Slots
from test_segment_sharing import RECORDS, SLACK_S, SPACE, Node, within

from kvmoverd.adapters.storage.segments.dead_files import STEP_S

pytestmark = pytest.mark.contract

WAIT_S = 5.0
CLOSED_S = 0.5 + 2 * STEP_S + SLACK_S
"""The grace, a step that sees that it is dead, and one that closes it."""


def open_segments(root: Path) -> list[str]:
    """Files of segments below the root that this process has open, deleted ones too."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            place = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        if place.startswith(str(root)) and ".seg" in place:
            found.append(place)
    return found


@pytest.fixture
def slots() -> Slots:
    return Slots(UNEVEN, 2)


def test_segments_of_others_are_closed_when_they_are_dead_and_the_device_is_told(tmp_path: Path, slots: Slots) -> None:
    writer, reader = Node(tmp_path, "writer"), Node(tmp_path, "reader")
    closed: list[int] = []
    reader.store.on_close = closed.append
    try:
        blocks = [writer.write(slots) for _ in range(2 * RECORDS)]
        for key, payload in blocks:
            within(WAIT_S, lambda key=key: reader.knows(key))
            assert reader.reads(key, payload, slots)
        held = len(reader.store.files)
        assert held >= 2 and not closed
        writer.storage.purge(SPACE)
        within(CLOSED_S, lambda: len(reader.store.files) == 0)
        assert len(closed) == held
        within(CLOSED_S + WAIT_S, lambda: open_segments(tmp_path) == [])
    finally:
        assert writer.storage.close(WAIT_S) and reader.storage.close(WAIT_S)


def test_segments_whose_author_is_gone_are_closed(tmp_path: Path, slots: Slots) -> None:
    writer, reader = Node(tmp_path, "writer"), Node(tmp_path, "reader")
    try:
        key, payload = writer.write(slots)
        within(WAIT_S, lambda: reader.knows(key))
        assert reader.reads(key, payload, slots) and len(reader.store.files) == 1
        assert writer.storage.close(WAIT_S)
        shutil.rmtree(writer.store.appender.author.directory)
        within(CLOSED_S, lambda: len(reader.store.files) == 0)
        within(WAIT_S, lambda: open_segments(tmp_path) == [])
    finally:
        assert reader.storage.close(WAIT_S)


def test_a_segment_that_is_read_is_closed_by_whoever_reads_it_last(tmp_path: Path, slots: Slots) -> None:
    writer, reader = Node(tmp_path, "writer"), Node(tmp_path, "reader")
    try:
        key, _ = writer.write(slots)
        within(WAIT_S, lambda: reader.knows(key))
        opened = reader.store.open(reader.driver.read_op(SPACE, key, slots.fill(1, b"")))
        writer.storage.purge(SPACE)
        within(CLOSED_S, lambda: reader.store.files.names() == [])
        assert os.fstat(opened.fd).st_size > 0, "it may be read to its end"
        reader.store.let_go(opened)
        assert len(reader.store.files) == 0
    finally:
        assert writer.storage.close(WAIT_S) and reader.storage.close(WAIT_S)
