"""A storage root that hangs, with every thread of it in the kernel: the node serves, answers, and ends in bounded time."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import SETTINGS, Node, free_ports
from engine import engine

sys.path.append(str(Path(__file__).parents[1] / "contract"))
from fuse_kit import FuseMount, fuse_mount

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DEADLINE_S = 1.0
DRAIN_S = 2.0
BLOCKS = 12
ROOT = """[[storage]]
name = "{name}"
path = "{path}"
role = "{role}"
layout = "{layout}"
kind = "{kind}"
threads = 4
ops_max = 16
create = true
io_deadline = "1s"
segment_bytes = "16MiB"

"""


@pytest.fixture
def home() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="kvme2e-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def fuse(home: Path) -> Iterator[FuseMount]:
    with fuse_mount(home / "hung", home / "backing") as mount:
        yield mount


class RootsNode(Node):
    """A daemon with roots of its own; `ends` instead of `terminate` where the kernel keeps a thread of it."""

    roots: str

    def write_config(self) -> None:
        super().write_config()
        head, _, rest = self.config.read_text().partition("[[storage]]")
        self.config.write_text(f"{head}{self.roots}{rest[rest.index('[transport]') :]}")

    async def ends(self, fuse: FuseMount) -> tuple[float, int]:
        """SIGTERM: seconds until all is said and done, and the exit code once the kernel lets the process go."""
        assert self.process is not None
        process, self.process = self.process, None
        began_s = time.monotonic()
        process.terminate()
        while "stopped" not in self.log_text():
            assert time.monotonic() < began_s + 30.0, self.log_text()
            await asyncio.sleep(0.02)
        took_s = time.monotonic() - began_s
        assert not self.sockets(), f"it left {self.sockets()}"
        fuse.resume()
        return took_s, await asyncio.to_thread(process.wait, 10.0)


def node(home: Path, *roots: dict[str, str]) -> RootsNode:
    (port,) = free_ports(1)
    made = RootsNode("n", home, port, "tcp", SETTINGS | {"drain": f"{DRAIN_S}s"})
    made.roots = "".join(ROOT.format(**({"kind": "auto", "layout": "files"} | root)) for root in roots)
    made.write_config()
    made.start()
    return made


async def quick_status(made: Node, limit_s: float = 1.0) -> dict[str, Any]:
    began_s = time.monotonic()
    found = await made.status()
    assert time.monotonic() - began_s < limit_s, "status waits for nothing"
    return {root["root"]: root for root in found["storage"]} | {"": found}


@pytest.mark.parametrize(("kind", "layout"), [("threads", "files"), ("uring", "segments")])
async def test_a_node_serves_from_its_main_root_while_its_copies_hang_in_the_kernel(
    home: Path, fuse: FuseMount, kind: str, layout: str
) -> None:
    made = node(
        home,
        {"name": "near", "path": str(fuse.place), "role": "copy", "kind": kind, "layout": layout},
        {"name": "far", "path": str(home / "far"), "role": "main", "kind": kind, "layout": layout},
    )
    async with engine(made.endpoint) as one:
        keys = one.keys("stored", BLOCKS)
        await one.store("store", keys)
        await made.settled(lambda status: int(status["storage"][0]["written_blocks"]) == BLOCKS, "copied")
        made.kill()
        made.start()
        await one.reconnect()
        fuse.hang()
        began_s = time.monotonic()
        assert len(await one.fetch_wrong("hangs", keys)) > 0
        assert time.monotonic() - began_s < 3 * DEADLINE_S, "whoever waits is told after the deadline"
        status = await quick_status(made)
        assert status["near"]["state"] == "open" and "near has not answered for 1" in status["near"]["why"]
        assert int(status["near"]["quarantined_bytes"]) > 0 and int(status["near"]["late_completions"]) > 0
        assert status["far"]["state"] == "ok"
        began_s = time.monotonic()
        assert await one.fetch_wrong("again", keys) == []
        new = one.keys("new", BLOCKS)
        await one.store("store new", new)
        assert time.monotonic() - began_s < DEADLINE_S, "nobody waits for a root that is known to hang"
        status = await quick_status(made)
        assert int(status["near"]["dropped_copies"]) > 0
        assert int(status[""]["loop_lag_us_max"]) < 500_000
        took_s, code = await made.ends(fuse)
        assert took_s < DRAIN_S + 10.0 and code == 1, "something was cut short, and said so"


async def test_a_node_whose_only_root_hangs_answers_refuses_and_ends(home: Path, fuse: FuseMount) -> None:
    made = node(
        home, {"name": "only", "path": str(fuse.place), "role": "main", "kind": "threads", "layout": "segments"}
    )
    async with engine(made.endpoint) as one:
        keys = one.keys("stored", 8)
        await one.store("store", keys)
        fuse.hang()
        call = await one.client.store_blocks(
            "hangs", 1, one.model, one.keys("new", 8), bytes(32), 0, one.region, range(8)
        )
        began_s = time.monotonic()
        states = {block.state.name for block in await call.result()}
        assert time.monotonic() - began_s < 4 * DEADLINE_S and states == {"FAILED"}
        assert await one.fetch_wrong("pooled", keys) == [], "what is in the pool needs no storage"
        status = await quick_status(made)
        assert status["only"]["state"] == "open"
        took_s, code = await made.ends(fuse)
        assert took_s < DRAIN_S + 10.0 and code == 1


async def test_a_root_that_comes_back_is_used_again_and_gives_the_pool_its_memory(home: Path, fuse: FuseMount) -> None:
    made = node(home, {"name": "only", "path": str(fuse.place), "role": "main", "layout": "files"})
    async with engine(made.endpoint) as one:
        fuse.hang("WRITE")
        call = await one.client.store_blocks(
            "hangs", 1, one.model, one.keys("a", 8), bytes(32), 0, one.region, range(8)
        )
        await call.result()
        assert int((await quick_status(made))["only"]["quarantined_bytes"]) > 0
        fuse.resume()
        await made.settled(lambda status: int(status["storage"][0]["quarantined_bytes"]) == 0, "let go")
        await made.slots_home()
        keys = one.keys("b", 8)
        await made.settled(lambda status: status["storage"][0]["state"] == "ok", "in order again")
        await one.store("store", keys)
        assert await one.fetch_wrong("fetch", keys) == []
    assert made.terminate() == 0


async def test_a_copy_that_cannot_be_opened_is_left_out_and_a_main_root_is_not(home: Path) -> None:
    (home / "near").write_text("a file, not a directory")
    made = node(
        home,
        {"name": "near", "path": str(home / "near"), "role": "copy"},
        {"name": "far", "path": str(home / "far"), "role": "main"},
    )
    async with engine(made.endpoint) as one:
        keys = one.keys("stored", 4)
        await one.store("store", keys)
        assert await one.fetch_wrong("fetch", keys) == []
        status = await quick_status(made)
        assert status["near"]["state"] == "refused" and str(home / "near") in status["near"]["why"]
    assert made.terminate() == 0
    made.roots = ROOT.format(name="near", path=home / "near", role="main", layout="files", kind="auto")
    made.write_config()
    with pytest.raises(AssertionError, match="ended with 2"):
        made.start()
    made.process = None
