"""A store of segments whose directories are deleted, or replaced, while it is used: it goes on under a fresh name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from storage_kit import OPS_MAX, UNEVEN, Driver, Slots, namespace, new_key, until

from kvmoverd.adapters.storage.segments.open import open_segment_store
from kvmoverd.adapters.storage.segments.settings import SegmentSettings
from kvmoverd.adapters.storage.segments.store import SegmentStore
from kvmoverd.adapters.storage.threads import ThreadsStorage
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.core.layout import HEADER_BYTES
from kvmoverd.core.status import Reason

pytestmark = pytest.mark.contract

SPACE = namespace()
PAYLOAD = (bytes(range(256)) * (UNEVEN.block_bytes // 256 + 1))[: UNEVEN.block_bytes]
OFTEN = SegmentSettings(
    segment_bytes=HEADER_BYTES + 8 * UNEVEN.record_bytes, log_pages=16, heartbeat_s=0.1, poll_s=0.05, dead_s=2.0
)
RARELY = replace(OFTEN, heartbeat_s=5.0, dead_s=60.0)


class Node:
    def __init__(self, root: Path, settings: SegmentSettings, *, name: str = "node-0", boot_id: str = "1") -> None:
        self.base = root / "kvm1"
        self.store: SegmentStore = open_segment_store(root, node=name, boot_id=boot_id, settings=settings)
        self.storage = ThreadsStorage(self.store, name="root", threads=4, ops_max=OPS_MAX)
        self.driver = Driver(self.storage)
        self.storage.open_namespace(SPACE)

    @property
    def directory(self) -> Path:
        return self.base / "authors" / self.store.appender.author.name

    def put(self, slots: Slots) -> tuple[bytes, Reason]:
        key = new_key()
        return key, self.driver.write(SPACE, key, slots.fill(0, PAYLOAD)).reason

    def get(self, key: bytes, slots: Slots) -> Reason:
        reason = self.driver.read(SPACE, key, slots.fill(1, b"")).reason
        assert reason is not Reason.OK or slots.payload(1) == PAYLOAD
        return reason


MakeNode = Callable[..., Node]


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[MakeNode]:
    made: list[Node] = []

    def make(settings: SegmentSettings = OFTEN, **names: str) -> Node:
        made.append(Node(tmp_path, settings, **names))
        return made[-1]

    yield make
    for node in made:
        assert node.storage.close(5.0)


def replace_by_file(node: Node) -> None:
    shutil.rmtree(node.directory)
    node.directory.write_text("a file")


def replace_by_copy(node: Node) -> None:
    shutil.copytree(node.directory, f"{node.directory}~")
    shutil.rmtree(node.directory)
    os.rename(f"{node.directory}~", node.directory)


@pytest.mark.parametrize(
    "take_away",
    [
        lambda node: shutil.rmtree(node.directory),
        replace_by_file,
        replace_by_copy,
        lambda node: shutil.rmtree(node.base / "authors"),
        lambda node: shutil.rmtree(node.base),
    ],
    ids=["author", "file", "copy", "authors", "all"],
)
def test_a_heartbeat_finds_that_the_authors_directory_is_gone_and_goes_on_in_another(
    make_node: MakeNode, take_away: Callable[[Node], None], slots: Slots
) -> None:
    node, other = make_node(), make_node(name="node-1")
    key, reason = node.put(slots)
    assert reason is Reason.OK
    until(lambda: other.get(key, slots) is Reason.OK)
    was = node.directory
    take_away(node)
    until(lambda: node.directory != was and other.directory.is_dir())
    until((node.base / SPACE.fingerprint[:16].hex() / "manifest.json").is_file)
    assert (node.base / "format.json").is_file()
    key, reason = node.put(slots)
    assert reason is Reason.OK and node.get(key, slots) is Reason.OK
    until(lambda: other.get(key, slots) is Reason.OK)
    again = make_node(boot_id="2")
    until(lambda: again.get(key, slots) is Reason.OK)


def test_a_write_that_finds_the_directory_gone_is_made_in_another(make_node: MakeNode, slots: Slots) -> None:
    node = make_node(RARELY)
    node.put(slots)
    was = node.directory
    shutil.rmtree(node.base)
    # The segment that grows is written to the end: nobody has looked since.
    for _ in range(20):
        key, reason = node.put(slots)
        assert reason is Reason.OK
    assert node.directory != was and node.get(key, slots) is Reason.OK


def test_one_that_is_made_anew_is_one_warning(
    make_node: MakeNode, slots: Slots, caplog: pytest.LogCaptureFixture
) -> None:
    node = make_node()
    was = node.directory
    shutil.rmtree(node.base)
    until(lambda: node.directory != was)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == f"{was} was adopted, deleted or replaced: this node writes as {node.directory.name} now"


def test_an_empty_directory_on_another_filesystem_is_asked_whether_it_is_mounted(
    make_node: MakeNode, tmp_path: Path, slots: Slots, caplog: pytest.LogCaptureFixture
) -> None:
    node = make_node()
    node.store._root._device += 1
    shutil.rmtree(node.base)
    until(lambda: f"{tmp_path} is empty, is it mounted?" in str(node.storage.facts.details["refusal"]))
    with pytest.raises(StorageUnusable, match="is empty, is it mounted"):
        node.storage.open_namespace(namespace(model_id="another"))
    until(lambda: len(caplog.records) > 0)
    (said,) = {record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
    assert "is lost, and no other could be begun" in said and "is it mounted" in said


def test_a_namespace_is_registered_in_a_store_that_was_deleted(make_node: MakeNode, slots: Slots) -> None:
    node = make_node(RARELY)
    shutil.rmtree(node.base)
    node.storage.open_namespace(SPACE)
    node.storage.open_namespace(namespace(model_id="another"))
    assert len(list(node.base.glob("*/manifest.json"))) == 2


def test_the_purge_number_comes_back_with_a_deleted_store(make_node: MakeNode, slots: Slots) -> None:
    node = make_node()
    for _ in range(2):
        node.put(slots)
        node.storage.purge(SPACE)
        node.storage.open_namespace(SPACE)
    was = node.directory
    shutil.rmtree(node.base)
    until(lambda: node.directory != was)
    assert (node.base / SPACE.fingerprint[:16].hex() / "purge.2").is_file()
    kept, reason = node.put(slots)
    assert reason is Reason.OK
    again = make_node(boot_id="2")
    until(lambda: again.get(kept, slots) is Reason.OK)
    again.storage.purge(SPACE)
    again.storage.open_namespace(SPACE)
    until(lambda: node.get(kept, slots) is Reason.MISS)


def test_without_its_root_a_store_says_that_nothing_can_be_written_and_recovers_with_it(
    make_node: MakeNode, tmp_path: Path, slots: Slots
) -> None:
    node = make_node()
    for path in tmp_path.iterdir():
        shutil.rmtree(path)
    (tmp_path / "kvm1").write_text("in its place")
    until(lambda: "nothing can be written" in node.storage.facts.note)
    assert node.put(slots)[1] is Reason.IO_ERROR
    with pytest.raises(StorageUnusable):
        node.storage.open_namespace(namespace(model_id="another"))
    (tmp_path / "kvm1").unlink()
    until(lambda: "nothing can be written" not in node.storage.facts.note)
    until(lambda: node.put(slots)[1] is Reason.OK)
