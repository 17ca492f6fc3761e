"""Rings of 3FS are used where all of it works, and where not the note says why and another storage reads."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from storage_kit import OPS_MAX, UNEVEN, Driver, Slots, namespace, new_key
from usrbio_kit import (
    ARENA_BYTES,
    PIECE_BYTES,
    Shim,
    compile_shim,
    links,
    mounted,
    pool_names,
    same_modules,
    shared_arena,
)

from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.adapters.storage import usrbio_rings
from kvmoverd.adapters.storage.block_files import file_blocks
from kvmoverd.adapters.storage.usrbio_open import open_usrbio
from kvmoverd.adapters.storage.usrbio_probe import is_3fs
from kvmoverd.adapters.storage.usrbio_rings import URGENT_RINGS
from kvmoverd.core.errors import ConfigError, StorageUnusable
from kvmoverd.core.record import memory_view
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import Storage

SPACE = namespace()
OTHERS = ("uring", "threads")


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    return compile_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    with shared_arena(monkeypatch) as arena:
        yield arena


@pytest.fixture
def root(shim: Shim, arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with mounted(shim, tmp_path, monkeypatch) as root:
        yield root


def open_root(root: Path, arena: Arena, library: str) -> Storage:
    return open_usrbio(
        root,
        file_blocks(root, direct=True),
        arena,
        PIECE_BYTES,
        name="root",
        threads=2,
        ops_max=OPS_MAX,
        library=library,
    )


def reads_and_writes(storage: Storage) -> bool:
    """A block comes back as it was written; then the storage is closed."""
    driver, slots, key, payload = Driver(storage), Slots(UNEVEN, 2), new_key(), os.urandom(UNEVEN.block_bytes)
    storage.open_namespace(SPACE)
    wrote = driver.write(SPACE, key, slots.fill(0, payload)).reason
    read = driver.read(SPACE, key, slots.fill(1, b"")).reason
    return (wrote, read, slots.payload(1), storage.close(5.0)) == (Reason.OK, Reason.OK, payload, True)


def test_on_a_mount_of_3fs_reads_go_through_its_rings(shim: Shim, root: Path, arena: Arena) -> None:
    storage = open_root(root, arena, shim.path)
    assert (storage.facts.kind, storage.facts.note) == ("usrbio", "")
    tried = shim.count("reads")
    assert (tried, shim.count("low_reads")) == (URGENT_RINGS + 1, 1), "each ring was tried"
    assert [name for name in os.listdir(root / "kvm1" / ".tmp") if name] == []
    assert reads_and_writes(storage) and shim.count("reads") == tried + 1
    assert links(root) == []


@pytest.mark.parametrize("knobs", [{}, {"error": errno.EIO, "error_times": -1}, {"short_bytes": 4096}])
def test_a_root_that_comes_while_others_work_changes_not_a_byte_of_the_pool(
    shim: Shim, root: Path, arena: Arena, knobs: dict[str, int]
) -> None:
    pool, content = memory_view(arena.address, ARENA_BYTES), os.urandom(ARENA_BYTES)
    pool[:] = content
    shim.do(**knobs)
    storage = open_root(root, arena, shim.path)
    assert (storage.facts.kind == "usrbio") == (not knobs), storage.facts.note
    assert bytes(pool) == content
    assert arena.scratch.parts_free == arena.scratch.parts_total
    assert storage.close(5.0)


def test_daemons_that_refuse_a_depth_below_zero_take_our_rings(shim: Shim, root: Path, arena: Arena) -> None:
    shim.do(strict_depth=1)
    storage = open_root(root, arena, shim.path)
    assert storage.facts.kind == "usrbio" and reads_and_writes(storage)


def test_without_the_library_others_read_and_say_so(root: Path, arena: Arena, tmp_path: Path) -> None:
    storage = open_root(root, arena, str(tmp_path / "libmissing.so"))
    assert storage.facts.kind in OTHERS
    assert storage.facts.note.startswith("3FS's rings can't be used: the trial failed: OSError: ")
    assert "libmissing.so" in storage.facts.note and reads_and_writes(storage)


def test_a_library_of_another_version_is_refused_by_the_function_it_lacks(root: Path, arena: Arena) -> None:
    storage = open_root(root, arena, "libc.so.6")
    assert "libc.so.6 is another version" in storage.facts.note and "hf3fs_is_hf3fs" in storage.facts.note
    assert reads_and_writes(storage)


def test_a_library_that_ends_the_process_ends_a_child_only(root: Path, arena: Arena, tmp_path: Path) -> None:
    (tmp_path / "bad.c").write_text(
        "#include <stdlib.h>\n__attribute__((constructor)) static void begin(void) { abort(); }\n"
    )
    bad = tmp_path / "libbad.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", bad, tmp_path / "bad.c"], check=True)
    storage = open_root(root, arena, str(bad))
    assert "the trial was ended by signal 6" in storage.facts.note and reads_and_writes(storage)


def test_a_directory_that_is_not_on_3fs_is_read_by_others(shim: Shim, root: Path, arena: Arena, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    storage = open_root(elsewhere, arena, shim.path)
    assert f"{elsewhere} is on no mount of 3FS" in storage.facts.note and reads_and_writes(storage)


def test_a_mount_that_shares_no_memory_is_read_by_others(shim: Shim, root: Path, arena: Arena) -> None:
    virtual = root.parent / "3fs-virt" / "iovs"
    virtual.rmdir()
    storage = open_root(root, arena, shim.path)
    assert "has no 3fs-virt/iovs" in storage.facts.note and reads_and_writes(storage)
    virtual.mkdir()


def test_where_rings_are_refused_others_read_and_nothing_stays(shim: Shim, root: Path, arena: Arena) -> None:
    shim.do(refuse_ring=errno.EMFILE)
    storage = open_root(root, arena, shim.path)
    assert "its rings can't be had: EMFILE" in storage.facts.note and links(root) == []
    assert reads_and_writes(storage)


def test_a_pool_that_was_not_made_to_be_shared_is_read_into_by_others(shim: Shim, root: Path, arena: Arena) -> None:
    private = Arena(ARENA_BYTES, PIECE_BYTES)
    storage = open_root(root, private, shim.path)
    assert "the pool's memory is private" in storage.facts.note and links(root) == []
    assert reads_and_writes(storage)
    private.close()


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"error": errno.EIO, "error_times": -1}, "a read was tried and failed: EIO"),
        ({"short_bytes": 4096}, "4096 of 8192 bytes came"),
        ({"refuse_fd": errno.EBADF}, "a read was tried and failed: EBADF"),
    ],
)
def test_a_trial_that_fails_is_told_and_others_read(
    shim: Shim, root: Path, arena: Arena, knobs: dict[str, int], why: str
) -> None:
    shim.do(**knobs)
    storage = open_root(root, arena, shim.path)
    assert why in storage.facts.note and storage.facts.kind in OTHERS and links(root) == []
    assert reads_and_writes(storage)


def test_a_trial_that_hangs_makes_the_root_unusable_as_the_pool_may_still_be_written(
    shim: Shim, root: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usrbio_rings, "TRIAL_WAIT_S", 0.1)
    kept: list[usrbio_rings.UsrbioRings] = []
    begin = usrbio_rings.UsrbioRings.__init__

    def keep(rings: usrbio_rings.UsrbioRings, *arguments: Any, **named: Any) -> None:
        kept.append(rings)
        begin(rings, *arguments, **named)

    monkeypatch.setattr(usrbio_rings.UsrbioRings, "__init__", keep)
    shim.do(hang=1)
    with pytest.raises(StorageUnusable, match="through a ring hangs"):
        open_root(root, arena, shim.path)
    assert len(links(root)) == URGENT_RINGS + 2, "the daemon may still write: neither rings nor pool went away"
    assert arena.scratch.parts_free == arena.scratch.parts_total - 1, "nor is anything else read to where it writes"
    shim.do(hang=0)
    assert kept[0].urgent[0].reap(5.0) == [(1, -errno.EBADF)], "its file was taken out of the library meanwhile"
    kept[0].close()
    shim.reset()


def test_a_disk_that_is_full_is_used_as_asked(
    shim: Shim, root: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = file_blocks(root, direct=True)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(type(blocks.io), "write_new", full)
    storage = open_usrbio(root, blocks, arena, PIECE_BYTES, name="root", threads=2, ops_max=OPS_MAX, library=shim.path)
    assert (storage.facts.kind, storage.facts.note) == (
        "usrbio",
        "at the start the disk was full: reads through rings were not tried",
    )
    assert storage.close(5.0)


def test_the_table_of_mounts_says_where_3fs_is(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
        "40 22 0:51 / /mnt/3fs rw,nosuid shared:7 - fuse.hf3fs hf3fs.cluster rw,user_id=0\n"
        "41 40 8:2 / /mnt/3fs/local rw - xfs /dev/sdb rw\n"
        "42 22 0:52 / /mnt/with\\040space rw - fuse.hf3fs hf3fs.cluster rw\n"
    )
    places = ("/mnt/3fs", "/mnt/3fs/a/b", "/mnt/3fs/local/a", "/mnt/3fsx", "/", "/mnt/with space/a")
    assert [is_3fs(Path(place), str(table)) for place in places] == [True, True, False, False, False, True]
    assert not is_3fs(tmp_path)


def test_a_shared_pool_larger_than_its_filesystem_is_refused_by_the_keys_name() -> None:
    with pytest.raises(ConfigError, match=r"pool.bytes is \d+, /dev/shm has room for \d+"):
        Arena(1 << 50, 1 << 21, shared=True)


_CHILD = """
import sys
from pathlib import Path
from kvmoverd.adapters.memory.arena import Arena
from kvmoverd.config import load
from kvmoverd.devices_storage import needs_shared_pool, open_storage
config = load(Path(sys.argv[1]))
arena = Arena(config.pool.bytes, config.pool.piece_bytes, shared=needs_shared_pool(config))
arena.touch()
storage = open_storage(config, "boot", arena)
print(storage.facts.kind, storage.facts.note or "-", storage.close(5.0))
"""
_CONFIG = """
[node]
name = "node"
[engine_api]
socket = "run/engine.sock"
[node_api]
listen = "127.0.0.1:0"
[pool]
bytes = "128MiB"
[[storage]]
name = "cluster"
kind = "usrbio"
path = "{root}"
layout = "segments"
[transport]
kind = "tcp"
listen = "127.0.0.1:0"
"""


def test_the_config_builds_a_shared_pool_and_rings(shim: Shim, root: Path, tmp_path: Path) -> None:
    """The whole way, in a process whose loader finds the library by its name."""
    config = tmp_path / "node.toml"
    config.write_text(_CONFIG.format(root=root))
    environment = {**same_modules(), "LD_LIBRARY_PATH": str(Path(shim.path).parent)}
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, config], env=environment, capture_output=True, text=True, check=False, timeout=50
    )
    assert (child.stdout, child.returncode) == ("usrbio - True\n", 0), child.stderr
    assert links(root) == [] and pool_names() == []
