"""What an operator, an engine and bad luck do to a store under running daemons: nobody gets wrong bytes, nothing hangs."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster, Node
from engine import Engine, engine

from kvmover_client import ROOT, BadRequest, BlockState

pytestmark = pytest.mark.e2e

BLOCKS = 8
BOUND_S = 10.0


async def author_of(node: Node) -> Path:
    """The directory of the start that runs."""
    return node.home / "store/kvm1/authors" / f"{node.name}.{(await node.status())['boot_id']}"


def replaced_by(make: Callable[[Path], object], *patterns: str) -> Callable[[Path], None]:
    def act(author: Path) -> None:
        for pattern in patterns:
            for path in list(author.glob(pattern)):
                path.unlink()
                make(path)

    return act


def emptied(author: Path) -> None:
    for path in (author / "seg").iterdir():
        os.truncate(path, 10 * 4096)


def zeroed(author: Path) -> None:
    for path in (author / "seg").iterdir():
        with path.open("r+b") as file:
            file.write(bytes(1 << 20))


def strangers(author: Path) -> None:
    os.mkfifo(author.parent / "z.fifo")
    (author.parent / "y.file").write_text("x")
    (author.parent / "x.link").symlink_to("/")
    (author.parent / "w.dir").mkdir()
    os.mkfifo(author.parent / "w.dir" / "lease")
    os.mkfifo(author.parent / "w.dir" / "log.00000001")


ATTACKS: dict[str, Callable[[Path], None]] = {
    "directory deleted": shutil.rmtree,
    "segments deleted": replaced_by(lambda path: None, "seg/*"),
    "segments that are FIFOs": replaced_by(os.mkfifo, "seg/*"),
    "segments that are links": replaced_by(lambda path: path.symlink_to("/etc/passwd"), "seg/*"),
    "segments that are directories": replaced_by(Path.mkdir, "seg/*"),
    "segments cut short": emptied,
    "segments of zeros": zeroed,
    "logs that are FIFOs": replaced_by(os.mkfifo, "log.*"),
    "a lease that is a FIFO": replaced_by(os.mkfifo, "lease"),
    "strangers beside it": strangers,
}


async def right_or_missing(made: Engine, name: str, keys: list[bytes]) -> int:
    """How many blocks a fetch finds, in bounded time; those must be right."""
    made.scrub()
    began_s = time.monotonic()
    call = await made.client.fetch_blocks(name, 1, made.model, keys, region=made.region, pages=range(len(keys)))
    blocks = (await call.result(BOUND_S)).blocks
    await call.end(BOUND_S)
    assert time.monotonic() - began_s < BOUND_S
    hits = [at for at, block in enumerate(blocks) if block.state is BlockState.HIT]
    assert not [wrong for wrong in made.wrong_blocks(keys) if wrong[0] in hits]
    return len(hits)


async def stored_at(made: Engine, keys: list[bytes], depth: int) -> None:
    call = await made.client.store_blocks(
        f"at {depth}", 1, made.model, keys, ROOT, depth, made.region, range(len(keys))
    )
    await call.result(BOUND_S)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_what_is_done_to_an_author_under_a_running_daemon_costs_blocks_and_no_more(single: Cluster) -> None:
    """One attack after another, each on the author of a new start, beside all that those before have left."""
    for attack, act in ATTACKS.items():
        print(attack)
        before, another = (f"{attack}, {when}" for when in ("before", "another"))
        async with engine(single.pe.endpoint) as made:
            keys = made.keys(before, BLOCKS)
            await made.store(before, keys)
            act(await author_of(single.pe))
            await right_or_missing(made, f"{attack}, pooled", keys)
        assert single.pe.terminate() == 0, attack
        single.pe.start()
        async with engine(single.pe.endpoint) as made:
            await right_or_missing(made, f"{attack}, again", keys)
            await made.store(another, made.keys(another, BLOCKS))
            assert await right_or_missing(made, f"{attack}, and read", made.keys(another, BLOCKS)) == BLOCKS, attack


async def test_a_store_whose_format_file_was_lost_is_still_one_of_segments(single: Cluster) -> None:
    async with engine(single.pe.endpoint) as made:
        keys = made.keys("chain", BLOCKS)
        await made.store("first", keys)
    assert single.pe.terminate() == 0
    (single.store / "kvm1/format.json").unlink()
    single.pe.start()
    async with engine(single.pe.endpoint) as made:
        assert await made.found(keys, BLOCKS) == BLOCKS
        assert await made.fetch_wrong("fetch", keys) == []
    assert (single.store / "kvm1/format.json").is_file()


async def test_absurd_numbers_are_refused_and_leave_nothing_behind(single: Cluster) -> None:
    async with engine(single.pe.endpoint) as made:
        keys = made.keys("chain", BLOCKS)
        await made.store("first", keys)
        for pin_s in (1e9, 604_801.0, -1.0, float("nan")):
            with pytest.raises(BadRequest):
                await made.client.pin(made.model, keys, pin_s=pin_s)
        assert (await made.client.lookup(made.model, [os.urandom(32) for _ in range(65_536)])).prefix_blocks == 0
        with pytest.raises(BadRequest):
            await made.client.purge_tenant("")
        assert (await made.client.purge_tenant("../../etc")).purged_blocks == 0
        for depth in ((1 << 32) - 1, 1 << 32, -1):
            with pytest.raises(BadRequest, match="first_depth"):
                await stored_at(made, keys[:2], depth)
        assert await made.fetch_wrong("fetch", keys) == []
    await single.pe.slots_home()
