"""Copies of a store on a node's own disk: absent at the start, filled by what is read, and purged though they were away."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import environment
from engine import PAGES, Engine, engine
from test_hung_storage import RootsNode, node, quick_status

sys.path.append(str(Path(__file__).parents[1] / "contract"))
from fuse_kit import FuseMount, fuse_mount

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BLOCKS = 8
"""As many as are copied at once."""
PUSH_OUT = 3
"""So many times all pages: more blocks than the pool has slots."""
START_S = 12.0
"""For a daemon that leaves out a copy after five seconds, on a busy machine."""
WAIT_S = 20.0


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kvm")


@pytest.fixture
def fuse(home: Path) -> Iterator[FuseMount]:
    with fuse_mount(home / "near", home / "backing") as mount:
        yield mount


@pytest.mark.parametrize("layout", ["files", "segments"])
async def test_blocks_that_others_stored_come_from_the_copy_once_they_were_read(home: Path, layout: str) -> None:
    far = {"name": "far", "path": str(home / "far"), "role": "main", "layout": layout}
    near = {"name": "near", "path": str(home / "near"), "role": "copy", "layout": layout}
    made = node(home, far)
    async with engine(made.endpoint) as one:
        keys = one.keys("stored", BLOCKS)
        await one.store("store", keys)
        assert made.terminate() == 0
        for read_blocks in ({"near": 0, "far": BLOCKS}, {"near": BLOCKS, "far": 0}):
            made = node(home, near, far)
            await one.reconnect()
            assert await one.fetch_wrong("fetch", keys) == []
            status = await quick_status(made)
            assert {name: int(status[name]["read_blocks"]) for name in ("near", "far")} == read_blocks
            if not read_blocks["near"]:
                await filled(made)
            await made.slots_home()
            assert made.terminate() == 0


async def filled(made: RootsNode) -> None:
    await made.settled(lambda status: int(status["storage"][0]["filled_blocks"]) == BLOCKS, "copied")
    assert int((await quick_status(made))["near"]["skipped_fills"]) == 0


async def test_a_copy_that_hangs_at_the_start_is_left_out_and_purged_and_used_when_it_comes(
    home: Path, fuse: FuseMount
) -> None:
    near = {"name": "near", "path": str(fuse.place), "role": "copy"}
    far = {"name": "far", "path": str(home / "far"), "role": "main"}
    made = node(home, near, far)
    async with engine(made.endpoint) as one:
        keys = one.keys("stored", BLOCKS)
        await one.store("store", keys)
        await made.settled(lambda status: int(status["storage"][0]["written_blocks"]) == BLOCKS, "copied")
        made.kill()
        fuse.hang()
        began_s = time.monotonic()
        done = await asyncio.to_thread(checked, made.config)
        assert time.monotonic() - began_s < 8.0
        told = {root["name"]: root for root in json.loads(done)["storage"]}
        assert "has not answered for 2 s" in told["near"]["not here"] and "not here" not in told["far"]
        began_s = time.monotonic()
        made.start()
        assert time.monotonic() - began_s < START_S
        await one.reconnect()
        status = await quick_status(made)
        assert status["near"]["state"] == "refused" and "near did not open within 5 s" in status["near"]["why"]
        assert await one.fetch_wrong("fetch", keys) == []
        await one.client.purge_namespace(one.model)
        fuse.resume()
        fuse.clear()
        await made.settled(lambda status: status["storage"][0]["state"] == "ok", "the copy has come")
        await copies_again(made, one)
        assert len(await one.fetch_wrong("purged", keys)) > 0, "nothing of what was purged comes back"
        assert made.terminate() == 0


async def copies_again(made: RootsNode, one: Engine) -> int:
    """Stores a block at a time until one reaches the copy; gives how many have."""
    began_s = time.monotonic()
    while not (copied := int((await quick_status(made))["near"]["written_blocks"])):
        assert time.monotonic() - began_s < WAIT_S, "copies are made again"
        await one.store(f"store {time.monotonic()}", one.keys(f"new {time.monotonic()}", 1))
        await asyncio.sleep(0.2)
    return copied


async def test_a_copy_whose_disk_comes_late_spoils_no_block_in_memory_and_serves(home: Path) -> None:
    disk = home / "disk"
    disk.touch()
    near = {"name": "near", "path": str(disk / "near"), "role": "copy", "layout": "files"}
    made = node(home, near, {"name": "far", "path": str(home / "far"), "role": "main", "layout": "segments"})
    async with engine(made.endpoint) as one:
        assert (await quick_status(made))["near"]["state"] == "refused"
        keys = one.keys("stored", BLOCKS)
        await one.store("store", keys)
        disk.unlink()
        disk.mkdir()
        await made.settled(lambda status: status["storage"][0]["state"] == "ok", "the copy has come")
        assert await one.fetch_wrong("from memory", keys) == []
        status = await quick_status(made)
        assert int(status["near"]["read_blocks"]) == int(status["far"]["read_blocks"]) == 0, "they lay in slots"
        copied = await copies_again(made, one)
        late = one.keys("late", BLOCKS)
        await one.store("late", late)
        await made.settled(lambda status: int(status["storage"][0]["written_blocks"]) >= copied + BLOCKS, "copied")
        for turn in range(PUSH_OUT):
            await one.store(f"push out {turn}", one.keys(f"other {turn}", PAGES))
        assert await one.fetch_wrong("from the copy", late) == []
        status = await quick_status(made)
        assert (int(status["near"]["read_blocks"]), int(status["far"]["read_blocks"])) == (BLOCKS, 0)
        assert await one.fetch_wrong("from the main root", keys) == []
        await made.slots_home()
        assert made.terminate() == 0


def checked(config: Path) -> str:
    command = [sys.executable, "-m", "kvmoverd", "check", "--config", str(config), "--json"]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=WAIT_S, check=True).stdout
