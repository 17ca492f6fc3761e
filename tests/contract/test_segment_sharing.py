"""Several nodes on one directory and no server: what one writes the others read, and what one leaves behind is taken on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from storage_kit import OPS_MAX, UNEVEN, Driver, Slots, namespace, new_key

from kvmoverd.adapters.storage.segments.open import open_segment_store
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.store import SegmentStore
from kvmoverd.adapters.storage.threads import ThreadsStorage
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.status import Reason

pytestmark = pytest.mark.contract

SPACE = namespace()
RECORDS = 8
SETTINGS = SegmentSettings(
    segment_bytes=HEADER_BYTES + RECORDS * UNEVEN.record_bytes,
    log_pages=16,
    heartbeat_s=0.2,
    dead_s=2.0,
    grace_s=0.5,
)
SEEN_S = 1.0
"""Of the design: a peer's new block once its log is open."""
SLACK_S = 2.0
"""For a machine with more to do than processors."""


class Node:
    """A store with its driver."""

    def __init__(self, root: Path, node: str, boot_id: str = "boot", *, settings: SegmentSettings = SETTINGS) -> None:
        self.store: SegmentStore = open_segment_store(root, node=node, boot_id=boot_id, settings=settings)
        self.storage = ThreadsStorage(self.store, name="root", threads=2, ops_max=OPS_MAX)
        self.driver = Driver(self.storage)
        self.storage.open_namespace(SPACE)

    def write(self, slots: Slots) -> tuple[bytes, bytes]:
        """A new block; gives its key and payload."""
        key, payload = new_key(), os.urandom(UNEVEN.block_bytes)
        assert self.driver.write(SPACE, key, slots.fill(0, payload)).reason is Reason.OK
        return key, payload

    def knows(self, key: bytes) -> bool:
        return bool(self.store.index.known(SPACE, [key])[0])

    def reads(self, key: bytes, payload: bytes, slots: Slots) -> bool:
        done = self.driver.read(SPACE, key, slots.fill(1, b""))
        return done.reason is Reason.OK and slots.payload(1) == payload


def within(limit_s: float, true: Callable[[], bool]) -> float:
    """Waits until it is true; gives how long that took."""
    began_s = time.monotonic()
    while not true():
        assert time.monotonic() - began_s < limit_s, f"not true within {limit_s} s"
        time.sleep(0.005)
    return time.monotonic() - began_s


@pytest.fixture
def slots() -> Slots:
    return Slots(UNEVEN, 2)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(node: str, boot_id: str = "boot", **others: SegmentSettings) -> Node:
        made.append(Node(tmp_path, node, boot_id, **others))
        return made[-1]

    yield make
    for node in made:
        assert node.storage.close(5.0)


def test_a_block_of_one_node_is_read_by_another_within_a_second(nodes: Callable[..., Node], slots: Slots) -> None:
    first, second = nodes("node-0"), nodes("node-1")
    key, _ = first.write(slots)
    within(SEEN_S + SLACK_S + 1.0, lambda: second.knows(key))
    # From here on the log is open; it rolls over many times meanwhile.
    for _ in range(3 * RECORDS):
        key, payload = first.write(slots)
        within(SEEN_S + SLACK_S, lambda key=key: second.knows(key))  # type: ignore[misc]
        assert second.reads(key, payload, slots)


def test_a_new_node_of_which_a_peer_speaks_is_followed_at_once(nodes: Callable[..., Node], slots: Slots) -> None:
    first = nodes("node-0")
    time.sleep(1.1)
    second = nodes("node-1")
    key, payload = second.write(slots)
    first.store.heard(*second.store.signature())
    within(0.5 + SLACK_S, lambda: first.knows(key))
    assert first.reads(key, payload, slots)


def test_a_restarted_node_has_what_it_had_and_owns_it(nodes: Callable[..., Node], slots: Slots) -> None:
    first = nodes("node-0", "one")
    blocks = [first.write(slots) for _ in range(3 * RECORDS)]
    assert first.storage.close(5.0)
    second = nodes("node-0", "two")
    within(1.0 + SLACK_S, lambda: all(second.knows(key) for key, _ in blocks))
    assert all(second.reads(key, payload, slots) for key, payload in blocks)
    recovery = second.store.background.following.recovery  # type: ignore[attr-defined]
    within(2.0 + SLACK_S, lambda: recovery.owned() == ["node-0.two", "node-0.one"])
    assert int(second.store.details()["index_load_entries_per_s"]) > 0, "how fast its index was loaded"


def test_two_daemons_of_one_name_are_told_by_each_to_its_operator_and_a_former_start_is_none(
    nodes: Callable[..., Node], slots: Slots, caplog: pytest.LogCaptureFixture
) -> None:
    nodes("node-0", "zero").storage.close(5.0)
    first, second, other = nodes("node-0", "one"), nodes("node-0", "two"), nodes("node-1")
    said = "another daemon writes here as node node-0 (boot id {}): give each its own node.name"
    for node, boot_id in ((first, "two"), (second, "one")):
        within(3.0 + SLACK_S, lambda node=node, boot_id=boot_id: said.format(boot_id) in node.storage.facts.note)
    assert "another daemon" not in other.storage.facts.note
    lines = sorted(record.getMessage() for record in caplog.records if "another daemon" in record.getMessage())
    assert lines == [said.format("one"), said.format("two")]
    assert second.storage.close(5.0)
    within(3.0 + SLACK_S, lambda: "another daemon" not in first.storage.facts.note)


CHILD = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from test_segment_sharing import SPACE, Node, Slots, UNEVEN
node, slots = Node(Path(sys.argv[1]), "node-1", "killed"), Slots(UNEVEN, 2)
while True:
    key, _ = node.write(slots)
    print(key.hex(), flush=True)
"""


def killed_writer(root: Path, blocks: int) -> list[bytes]:
    """A node in a process of its own that is killed in the middle of its writes; gives the keys that it called durable."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(path=[str(Path(__file__).parent), *sys.path]), str(root)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    keys = [child.stdout.readline().strip() for _ in range(blocks)]
    child.send_signal(signal.SIGKILL)
    keys += child.stdout.read().split("\n")
    child.wait(10)
    child.stdout.close()
    return [bytes.fromhex(key) for key in keys if len(key) == 64]


def test_what_a_killed_node_called_durable_is_there_and_its_directory_is_adopted(
    nodes: Callable[..., Node], slots: Slots, tmp_path: Path
) -> None:
    survivor = nodes("node-0")
    keys = killed_writer(tmp_path, 30)
    assert len(keys) >= 30
    within(SEEN_S + SLACK_S, lambda: all(survivor.knows(key) for key in keys))
    assert all(survivor.driver.read(SPACE, key, slots.fill(1, b"")).reason is Reason.OK for key in keys)
    recovery = survivor.store.background.following.recovery  # type: ignore[attr-defined]
    within(SETTINGS.dead_s * 1.25 + 2.0 + SLACK_S, lambda: "node-1.killed" in recovery.owned())
    claims = [name for name in os.listdir(tmp_path / "kvm1" / "authors" / "node-1.killed") if name.startswith("adopt")]
    assert claims == ["adopt.1"]


def test_a_record_whose_log_page_was_never_written_is_found_by_whoever_adopts(
    nodes: Callable[..., Node], slots: Slots, tmp_path: Path
) -> None:
    first = nodes("node-1", "lost")
    blocks = [first.write(slots) for _ in range(5)]
    assert first.storage.close(5.0)
    directory = tmp_path / "kvm1" / "authors" / "node-1.lost"
    # As if it had been killed between the segment's sync and the log's page: the pages about the last two are taken back.
    with open(directory / "log.00000001", "r+b") as file:
        file.seek(4 * 4096)
        file.write(bytes(2 * 4096))
    survivor, second = nodes("node-0"), nodes("node-2")
    within(SETTINGS.dead_s * 1.25 + 3.0 + SLACK_S, lambda: all(survivor.knows(key) for key, _ in blocks))
    # Others hear of it from the adopter's log, or are the adopter.
    within(2.0 + SLACK_S, lambda: all(second.knows(key) for key, _ in blocks))
    assert all(second.reads(key, payload, slots) for key, payload in blocks)


def test_an_author_who_was_taken_for_dead_goes_on_under_another_name(
    nodes: Callable[..., Node], slots: Slots, tmp_path: Path
) -> None:
    first, second = nodes("node-0"), nodes("node-1")
    key, _ = first.write(slots)
    (tmp_path / "kvm1" / "authors" / "node-0.boot" / "adopt.1").write_text("node-1.boot\n")
    within(2.0 + SLACK_S, lambda: first.store.signature()[0] == "node-0.boot-1")
    later, payload = first.write(slots)
    within(2.0 + SLACK_S, lambda: second.knows(later))
    assert second.knows(key) and second.reads(later, payload, slots)
    recovery = second.store.background.following.recovery  # type: ignore[attr-defined]
    within(2.0 + SLACK_S, lambda: "node-0.boot" in recovery.owned())


def test_logs_that_a_snapshot_stands_for_go_and_nothing_is_lost(
    nodes: Callable[..., Node], slots: Slots, tmp_path: Path
) -> None:
    first = nodes("node-0", "one")
    blocks = [first.write(slots) for _ in range(40)]
    directory = tmp_path / "kvm1" / "authors" / "node-0.one"
    within(5.0 + SLACK_S, lambda: not (directory / "log.00000001").exists())
    assert any(name.startswith("snap.") for name in os.listdir(directory))
    second = nodes("node-1")
    within(1.0 + SLACK_S, lambda: all(second.knows(key) for key, _ in blocks))
    assert all(second.reads(key, payload, slots) for key, payload in blocks)


def test_a_peer_whose_directory_vanishes_is_a_miss_and_no_more(
    nodes: Callable[..., Node], slots: Slots, tmp_path: Path
) -> None:
    first, second = nodes("node-0", "one"), nodes("node-1")
    key, _ = first.write(slots)
    own, payload = second.write(slots)
    within(1.0 + SEEN_S + SLACK_S, lambda: second.knows(key))
    assert first.storage.close(5.0)
    shutil.rmtree(tmp_path / "kvm1" / "authors" / "node-0.one")
    within(1.0 + SLACK_S, lambda: not second.knows(key))
    assert second.driver.read(SPACE, key, slots.fill(1, b"")).reason is Reason.MISS
    assert second.reads(own, payload, slots)


def test_time_that_is_set_back_changes_nothing(
    nodes: Callable[..., Node], slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = nodes("node-0"), nodes("node-1")
    first.write(slots)
    monkeypatch.setattr(time, "time", lambda: 1.0)
    monkeypatch.setattr(time, "time_ns", lambda: 10**9)
    key, payload = first.write(slots)
    within(1.0 + SEEN_S + SLACK_S, lambda: second.knows(key))
    assert second.reads(key, payload, slots)
    time.sleep(SETTINGS.dead_s + 0.5)
    recovery = second.store.background.following.recovery  # type: ignore[attr-defined]
    assert recovery.owned() == ["node-1.boot"]
