"""`store probe`, `ls`, `tree` and `gc --dry-run` over real stores, and beside a daemon's own parts that are running."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from kvmoverd.adapters.storage.inspect import probe as probe_module
from kvmoverd.adapters.storage.inspect import trials
from kvmoverd.adapters.storage.inspect.fsck import fsck
from kvmoverd.adapters.storage.inspect.listing import ls
from kvmoverd.adapters.storage.inspect.planning import plan
from kvmoverd.adapters.storage.inspect.pool_trial import PoolAsked
from kvmoverd.adapters.storage.inspect.probe import probe
from kvmoverd.adapters.storage.inspect.tree import tree
from kvmoverd.adapters.storage.segments.settings import Limit, SegmentSettings
from kvmoverd.core.errors import StorageUnusable
from kvmoverd.core.layout import HEADER_BYTES
from tests.contract.storage_kit import mounted, until
from tests.contract.tools_kit import (
    FILES,
    RECORD_BYTES,
    RECORDS,
    SEGMENTS,
    SETTINGS,
    SPACE,
    Store,
    flip,
    names_below,
    namespace,
    same_but_leases,
    store,
)

pytestmark = pytest.mark.contract
BOTH = pytest.mark.parametrize("layout", [FILES, SEGMENTS])


def spaces_of(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["namespace"]: one for one in found["namespaces"]}


def fingerprint(space: Any = SPACE) -> str:
    return str(space.fingerprint[:16].hex())


@BOTH
def test_ls_tells_what_each_namespace_is_and_holds(tmp_path: Path, layout: str) -> None:
    other = namespace("another", tenant="acme", epoch=3)
    with store(tmp_path, layout) as one:
        one.chain(20)
        one.chain(3, other)
        before = names_below(tmp_path)
        found = ls(tmp_path)
        assert same_but_leases(before, names_below(tmp_path))
    mine, theirs = spaces_of(found)[fingerprint()], spaces_of(found)[fingerprint(other)]
    assert (mine["model_id"], mine["tenant"], mine["epoch"]) == ("model", "", 0)
    assert (theirs["model_id"], theirs["tenant"], theirs["epoch"]) == ("another", "acme", 3)
    assert (mine["layers"], mine["block_tokens"], mine["record_bytes"]) == (3, 16, RECORD_BYTES)
    assert (mine["blocks"], mine["bytes"], theirs["blocks"]) == (20, 20 * RECORD_BYTES, 3)
    if layout == SEGMENTS:
        assert (mine["segments"], mine["authors"], mine["purge"]) == (3, 1, 0)


def test_ls_tells_of_purges_and_of_manifests_that_are_wrong(tmp_path: Path) -> None:
    with store(tmp_path, SEGMENTS) as one:
        one.chain(3)
        one.blocks.purge(SPACE)
        one.chain(2, namespace("another"))
    (tmp_path / "kvm1" / fingerprint(namespace("another")) / "manifest.json").unlink()
    found = spaces_of(ls(tmp_path))
    assert (found[fingerprint()]["blocks"], found[fingerprint()]["purge"]) == (0, 1)
    lost = found[fingerprint(namespace("another"))]
    assert (lost["model_id"], lost["blocks"]) == (None, 2) and "there is none" in lost["why"]


def test_ls_tells_who_lives_who_ended_and_who_adopted_whom(tmp_path: Path) -> None:
    with store(tmp_path, SEGMENTS) as former:
        former.chain(9)
    assert [(one["author"], one["state"], one["adopted_by"]) for one in listed(tmp_path)] == [
        (former.author, "ended", "")
    ]
    with store(tmp_path, SEGMENTS) as now:
        until(lambda: any(one["adopted_by"] for one in listed(tmp_path)))
        found = {one["author"]: one for one in listed(tmp_path)}
        assert found[former.author]["adopted_by"] == now.author and found[former.author]["state"] == "ended"
        assert (found[now.author]["state"], found[now.author]["node"]) == ("alive", "node")
        assert found[former.author]["segments"] == 2 and found[former.author]["bytes"] >= 9 * RECORD_BYTES
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert killed.returncode == -9, killed.stderr
    assert {one["node"]: one["state"] for one in listed(tmp_path)}["killed"] == "dead"
    assert fsck(tmp_path).blocks == 9 + 5


KILLED = """
import os, sys
from pathlib import Path
from tests.contract.tools_kit import SEGMENTS, Store
Store(Path(sys.argv[1]), SEGMENTS, node="killed").chain(5)
os.kill(os.getpid(), 9)
"""


def listed(root: Path) -> list[dict[str, Any]]:
    found = ls(root, authors=True)["authors"]
    assert isinstance(found, list)
    return found


def test_ls_tells_of_each_segment(tmp_path: Path) -> None:
    with store(tmp_path, SEGMENTS) as one:
        one.chain(RECORDS + 2)
        path, at = one.path(one.keys[0])
    flip(path, at + HEADER_BYTES)
    fsck(tmp_path, repair=True)
    found: Any = ls(tmp_path, segments=True)["segments"]
    assert [(row["author"], row["records"], row["bad"]) for row in found] == [
        (one.author, RECORDS - 1, 1),
        (one.author, 2, 0),
    ]


def forest(one: Store) -> tuple[list[bytes], list[bytes]]:
    """A trunk of 6 with two branches of 3 and 2 at its third block, and a stray chain without its first 4 blocks."""
    trunk = one.chain(6)
    for count in (3, 2):
        one.chain(count, parent=trunk[2], depth=3)
    return trunk, one.chain(2, parent=os.urandom(32), depth=4)


@BOTH
def test_tree_shows_chains_branches_and_orphans(tmp_path: Path, layout: str) -> None:
    with store(tmp_path, layout) as one:
        trunk, stray = forest(one)
    found: Any = tree(tmp_path)
    (space,) = found["namespaces"]
    assert (space["namespace"], space["model_id"], space["blocks"], space["copies"]) == (fingerprint(), "model", 13, 0)
    assert (space["chains"], space["firsts"], space["branching_points"]) == (4, 1, 1)
    assert (space["orphans"], space["unreachable"], space["unread"], space["depth_max"]) == (1, 2, 0, 5)
    assert space["per_depth"] == [[0, 1], [1, 1], [2, 1], [3, 3], [4, 4], [5, 3]]
    longest = space["longest"][0]
    assert (longest["blocks"], longest["first"], longest["reachable"]) == (6, trunk[0][:8].hex(), True)
    runs = [(run["depth"], run["blocks"], run["level"], run["orphan"]) for run in space["runs"]]
    assert sorted(runs) == sorted(
        [(0, 3, 0, False), (3, 3, 1, False), (3, 3, 1, False), (3, 2, 1, False), (4, 2, 0, True)]
    )
    assert next(run["first"] for run in space["runs"] if run["orphan"]) == stray[0][:8].hex()
    shallow: Any = tree(tmp_path, namespace=fingerprint()[:6], depth=1)["namespaces"]
    assert [run["blocks"] for run in shallow[0]["runs"]] == [3]
    with pytest.raises(StorageUnusable, match="store ls"):
        tree(tmp_path, namespace="zz")


def test_tree_reads_headers_where_only_a_snapshot_still_tells_of_a_block(tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, log_pages=4, grace_s=0.01)
    with store(tmp_path, SEGMENTS, settings=settings) as one:
        trunk, _ = forest(one)
        one.chain(20, parent=trunk[5], depth=6)
        directory = tmp_path / "kvm1/authors" / one.author
        until(lambda: not (directory / "log.00000004").exists())
        assert any(name.startswith("snap.") for name in os.listdir(directory))
    (space,) = tree(tmp_path)["namespaces"]  # type: ignore[misc]
    assert (space["blocks"], space["chains"], space["orphans"], space["unread"]) == (33, 4, 1, 0)
    assert space["longest"][0]["blocks"] == 26
    assert fsck(tmp_path).blocks == 33


def test_gc_tells_what_would_go_and_why(tmp_path: Path) -> None:
    with store(tmp_path, SEGMENTS) as one:
        one.chain(5 * RECORDS)
        before = names_below(tmp_path)
        nothing = planned(tmp_path, SegmentSettings())
        assert (nothing["drop"], nothing["freed_bytes"], nothing["segments"]) == ([], 0, 5)
        budget = dataclasses.replace(SETTINGS, bytes_max=nothing["bytes"] - 2 * RECORDS * RECORD_BYTES)
        found = planned(tmp_path, budget)
        assert same_but_leases(before, names_below(tmp_path))
    assert found["budget_used"] > 1.0 and found["node"] == "node"
    # Nothing was used: the deeper blocks go first, but for those of the segment that is being written.
    assert [(row["number"], row["why"]) for row in found["drop"]] == [
        (number, "watermark") for number in (4, 3, 2, 1)[: len(found["drop"])]
    ]
    assert found["bytes"] - found["freed_bytes"] <= 0.8 * budget.bytes_max or len(found["drop"]) == 4


def test_gc_spares_what_is_hot_pinned_or_being_written(tmp_path: Path) -> None:
    with store(tmp_path, SEGMENTS) as one, store(tmp_path, SEGMENTS, node="other") as other:
        one.chain(4 * RECORDS)
        other.blocks.open_namespace(SPACE)
        until(lambda: bool(other.blocks.index.known(SPACE, one.keys).all()))
        hot = [key for key in one.keys if one.place(key).segment == 1]
        for _ in range(5):
            other.blocks.index.touch(SPACE, hot)
        other.blocks.index.pin(SPACE, [one.keys[RECORDS]], 3600.0)
        other.blocks.background.collecting.teller.step()  # type: ignore[union-attr]
        found = planned(tmp_path, dataclasses.replace(SETTINGS, bytes_max=1 << 16), node="node")
    assert [(row["number"], row["hottest"]) for row in found["drop"]] == [(3, 0), (1, 5)]


def test_gc_goes_by_node_and_counts_what_a_node_has_adopted(tmp_path: Path) -> None:
    with store(tmp_path, SEGMENTS) as former:
        former.chain(2 * RECORDS)
    with store(tmp_path, SEGMENTS) as now, store(tmp_path, SEGMENTS, node="other") as other:
        now.chain(RECORDS)
        other.chain(RECORDS, namespace("another"))
        until(lambda: any(one["adopted_by"] for one in listed(tmp_path)))
        both: Any = plan(tmp_path, SETTINGS)["nodes"]
        assert [(row["node"], row["authors"], row["segments"]) for row in both] == [("node", 2, 3), ("other", 1, 1)]
        with pytest.raises(StorageUnusable, match="ls --authors"):
            plan(tmp_path, SETTINGS, node="nobody")


def test_gc_tells_of_limits_and_purges(tmp_path: Path) -> None:
    with store(tmp_path, SEGMENTS) as one:
        one.chain(2 * RECORDS)
        one.chain(2 * RECORDS, namespace("another"))
    limited = dataclasses.replace(SETTINGS, limits=(Limit(model_id="another", bytes_max=1),))
    assert {(row["number"], row["why"]) for row in planned(tmp_path, limited)["drop"]} == {(4, "limit"), (5, "limit")}
    time.sleep(0.02)
    expired = dataclasses.replace(SETTINGS, limits=(Limit(model_id="model", ttl_s=0.01),))
    assert [row["why"] for row in planned(tmp_path, expired)["drop"]] == ["expired"] * 2
    (tmp_path / "kvm1" / fingerprint() / "purge.1").touch()
    assert [row["why"] for row in planned(tmp_path, SETTINGS)["drop"]] == ["purged"] * 2


def test_gc_has_nothing_to_say_of_files(tmp_path: Path) -> None:
    with store(tmp_path, FILES) as one:
        one.chain(1)
    with pytest.raises(StorageUnusable, match="one file per block"):
        plan(tmp_path, SETTINGS)


def planned(root: Path, settings: SegmentSettings, node: str = "") -> dict[str, Any]:
    (found,) = plan(root, settings, node=node)["nodes"]  # type: ignore[misc]
    return dict(found)


def test_probe_says_what_a_daemon_would_do_and_leaves_nothing_behind(tmp_path: Path) -> None:
    found = probe(tmp_path)
    assert os.listdir(tmp_path) == []
    assert found["usable"] is True and found["why"] == "" and found["holds"] is None
    assert found["layout"] in (SEGMENTS, FILES) and found["engine"] in ("uring", "threads") and found["mode"]
    assert {"link", "rename", "flock", "fallocate", "exclusive_create", "fdatasync", "hole_reads"} <= set(
        found["names"]
    )  # type: ignore[call-overload]
    assert 0 < found["bytes_free"] <= found["bytes_total"]  # type: ignore[operator]
    assert json.loads(json.dumps(found)) == found


@BOTH
def test_probe_says_what_lies_there_and_disturbs_nobody(tmp_path: Path, layout: str) -> None:
    with store(tmp_path, layout) as one:
        one.chain(3)
        before = names_below(tmp_path)
        found = probe(tmp_path)
        assert same_but_leases(before, names_below(tmp_path))
        assert (found["holds"], found["layout"], found["usable"]) == ({"layout": layout, "version": 1}, layout, True)


def test_probe_tells_512_from_4096_by_doing_it(tmp_path: Path) -> None:
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=8m,nr_inodes=100", "tmpfs"):
        found: Any = probe(tmp_path)
        assert (found["filesystem"], found["inodes_total"], found["bytes_total"]) == ("tmpfs", 100, 8 << 20)
        assert os.listdir(tmp_path) == []
    assert found["names"]["link"] == "ok" and found["direct"]["aligned_4096"] in ("ok", "EINVAL")


def test_probe_finds_a_root_that_can_only_be_read(tmp_path: Path) -> None:
    with mounted(tmp_path, "-t", "tmpfs", "-o", "ro", "tmpfs"):
        found = probe(tmp_path)
    assert found["usable"] is False and "EROFS; it can only be read" in str(found["why"])


@pytest.mark.parametrize(
    ("layout", "said"), [(SEGMENTS, "makes room of its node's segments"), (FILES, "until somebody makes room")]
)
@pytest.mark.parametrize("inodes_too", [False, True])
def test_probe_says_what_a_daemon_does_on_a_full_disk(tmp_path: Path, layout: str, said: str, inodes_too: bool) -> None:
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=8m,nr_inodes=60", "tmpfs"):
        with store(tmp_path, layout) as one:
            one.chain(3)
        filled(tmp_path, inodes_too=inodes_too)
        found: Any = probe(tmp_path)
        assert (found["usable"], found["why"]) == (True, ""), found
        assert "the disk is full" in found["notes"][-1] and said in found["notes"][-1]


def test_probe_asks_for_room_on_a_full_disk_without_a_store(tmp_path: Path) -> None:
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=8m", "tmpfs"):
        filled(tmp_path)
        found = probe(tmp_path)
    assert found["usable"] is False and "a new store needs room" in str(found["why"])


def filled(root: Path, *, inodes_too: bool = False) -> None:
    with contextlib.suppress(OSError), open(root / "ballast", "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    with contextlib.suppress(OSError):
        for number in range(100 if inodes_too else 0):
            (root / f"file.{number}").touch()


def test_probe_warns_of_a_filesystem_that_is_too_small_for_segments(tmp_path: Path) -> None:
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=64m", "tmpfs"):
        found: Any = probe(tmp_path)
        assert found["usable"] and any("64 MiB, less than 3 segments of 1024 MiB" in note for note in found["notes"])
        asked = PoolAsked(8 << 20, 2 << 20, False, "threads", 8, 4 << 20)
        assert not any("3 segments" in str(note) for note in cast(list[str], probe(tmp_path, asked=asked)["notes"]))


def test_probe_says_what_does_not_work_and_why_a_root_is_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(trials.Trials, "_flock", cannot)
    found: Any = probe(tmp_path)
    assert found["names"]["flock"] == "ENOTSUP" and found["usable"] is True
    monkeypatch.setattr(trials.Trials, "_rename", cannot)
    found = probe(tmp_path)
    assert found["usable"] is False and found["why"] == "rename: ENOTSUP"


def test_probe_says_why_io_uring_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "uring_refusal", lambda: "of the weather")
    found = probe(tmp_path)
    assert (found["engine"], found["io_uring"]) == ("threads", "of the weather")
    assert found["notes"] == ["io_uring can't be used: of the weather"]


def test_probe_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*_: object) -> dict[str, object]:
        time.sleep(0.5)
        return {}

    monkeypatch.setattr(probe_module, "_probe", hangs)
    with pytest.raises(StorageUnusable, match=r"not answered within 0\.05 s"):
        probe(tmp_path, answer_s=0.05)
    time.sleep(0.5)
