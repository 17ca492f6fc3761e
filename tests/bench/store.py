"""The block store's figures, where there is a reference beside it of the same round: docs/benchmarks.md says how to read them."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path

from kvmoverd.core.layout import Layout
from kvmoverd.core.manifest import Manifest, Namespace
from tests.bench.cpu import crc_s_per_gb
from tests.bench.daemon import BenchFailed
from tests.bench.disk import SMALL, Work, check_space, disk_rig, put_rig
from tests.bench.pairs import Run
from tests.bench.records import load_logs, new_index
from tests.bench.rows import Json, plain_row
from tests.bench.store_index import Looks, in_a_process
from tests.bench.store_logs import log_files, make_store
from tests.bench.store_port import port_rig
from tests.bench.store_restart import Restarts
from tests.bench.suite import Aims, Family, Found, Options, Suite, compare, scratch

GETS = Work(requests=24, blocks=64, at_once=8)
"""Two sets are four times what the pool keeps. A second here: in half of it the calls' begins and ends are some hundredths."""
PUTS = Work(requests=20, blocks=32, at_once=4)
PORT = Work(requests=20, blocks=32, at_once=3)
SMALL_PUTS = Work(requests=4, blocks=4, at_once=2, layers=13, piece_bytes=2 << 20)
GET_AIMS = Aims(1.0, 0.10)
PUT_AIMS = Aims(1.1, 0.15)
LOOKUP_AIM_US, RAM_AIM_BYTES, RESTART_AIM_S = 100.0, 32.0, 5.0
KEYS, SMALL_KEYS = (1_000_000, 50_000_000), (5_000, 20_000)
LOOKS, SMALL_LOOKS = 300, 20
"""Of each kind of chain, in each round."""
INDEX_ROWS: tuple[tuple[str, str, float, Callable[[Looks], float]], ...] = (
    ("lookup_500_us", "us", LOOKUP_AIM_US, attrgetter("worst")),
    ("ram_bytes_per_key", "bytes", RAM_AIM_BYTES, attrgetter("ram_bytes_per_key")),
)
BLOCKS, SMALL_BLOCKS = 400_000, 4_000


async def cold_get(options: Options) -> Found:
    """Blocks into the pool of a real daemon, out of segments."""
    return await _get(options, "cold_get_over_disk", "segments")


async def cold_get_files(options: Options) -> Found:
    """The same out of files."""
    return await _get(options, "cold_get_over_disk_files", "files")


async def durable_put(options: Options) -> Found:
    """Blocks out of an engine's pages through a real daemon into segments."""
    return await _put(options, "durable_put_over_disk", "segments")


async def durable_put_files(options: Options) -> Found:
    """The same into files."""
    return await _put(options, "durable_put_over_disk_files", "files")


async def at_the_port(options: Options) -> Found:
    """Both ways in this process, without a daemon."""
    found, work = Found([], []), SMALL_PUTS if options.small else PORT
    with ExitStack() as stack:
        root = scratch(stack, options.directory)
        check_space(root, (options.pairs + 3) * work.total_bytes)
        rig = stack.enter_context(port_rig(root, work))
        notes: Json = {"work": str(work), "pages": rig.plain.page_kind, "storage": rig.note}
        rig.fill()
        sides = (
            ("cold_get_over_disk_port", rig.plain_get, rig.get, GET_AIMS),
            ("durable_put_over_disk_port", rig.plain_put, rig.put, PUT_AIMS),
        )
        crc = crc_s_per_gb(work.layout.block_bytes)
        for name, reference, ours, aims in sides:
            if name in options.rows:
                pids = (os.getpid(),)
                await compare(found, options, name, reference, ours, aims=aims, pids=pids, crc=crc, notes=notes)
    return found


async def index(options: Options) -> Found:
    """Each number of keys in a process of its own; the figure is that of the worse one."""
    sizes, looks = (SMALL_KEYS, SMALL_LOOKS) if options.small else (KEYS, LOOKS)
    measured = {size: await asyncio.to_thread(in_a_process, size, options.pairs, looks) for size in sizes}
    rows = []
    for name, unit, aim, value in INDEX_ROWS:
        by_keys = {size: [value(looks) for looks in found.rounds] for size, found in measured.items()}
        worse = max(by_keys.values(), key=lambda found: sorted(found)[len(found) // 2])
        notes: Json = {"by_keys": by_keys, "rounds": {size: asdict(found) for size, found in measured.items()}}
        rows.append(plain_row(name, unit, worse, aim=aim, seed=options.seed, notes=notes))
    return Found([row for row in rows if row.name in options.rows], [])


async def load(options: Options) -> Found:
    """Real logs from the disk into an index; before it, their pages are thrown out of the page cache, or brought into it."""
    blocks = SMALL_BLOCKS if options.small else BLOCKS
    values: dict[str, list[float]] = {"index_entries_per_s": [], "index_entries_per_s_warm": []}
    with ExitStack() as stack:
        root = scratch(stack, options.directory)
        await asyncio.to_thread(make_store, root, _space(Work()), blocks)
        for _ in range(options.pairs):
            for name, is_warm in zip(values, (False, True), strict=True):
                values[name].append(await asyncio.to_thread(_entries_per_s, root, blocks, is_warm=is_warm))
    rows = [
        plain_row(name, "1/s", found, aim=None, seed=options.seed, lower_is_better=False, notes={"blocks": blocks})
        for name, found in values.items()
    ]
    return Found([row for row in rows if row.name in options.rows], [])


async def restart(options: Options) -> Found:
    """A real daemon, killed and started again over a large store."""
    blocks = SMALL_BLOCKS if options.small else BLOCKS
    with ExitStack() as stack:
        home, store = scratch(stack, None), scratch(stack, options.directory)
        restarts = Restarts(home, store, blocks=blocks, storage=options.storage)
        # The first finds nobody who was killed.
        found = [await restarts.restart(number) for number in range(options.pairs + 1)][1:]
    notes: Json = {
        "blocks": blocks,
        "kills": len(found),
        "listens_s": [one.listens_s for one in found],
        "asks": [one.asks for one in found],
    }
    values = [one.first_hit_s for one in found]
    return Found(
        [plain_row("restart_to_first_hit_s", "s", values, aim=RESTART_AIM_S, seed=options.seed, notes=notes)], []
    )


FAMILIES: dict[Family, tuple[str, ...]] = {
    cold_get: ("cold_get_over_disk",),
    cold_get_files: ("cold_get_over_disk_files",),
    durable_put: ("durable_put_over_disk",),
    durable_put_files: ("durable_put_over_disk_files",),
    at_the_port: ("cold_get_over_disk_port", "durable_put_over_disk_port"),
    index: ("lookup_500_us", "ram_bytes_per_key"),
    load: ("index_entries_per_s", "index_entries_per_s_warm"),
    restart: ("restart_to_first_hit_s",),
}
"""Each with the rows it can give."""
PROFILED = tuple(
    name for family in (cold_get, cold_get_files, durable_put, durable_put_files) for name in FAMILIES[family]
)


async def _get(options: Options, name: str, layout: str) -> Found:
    found, work = Found([], []), SMALL if options.small else GETS
    with ExitStack() as stack:
        home, store = scratch(stack, None), scratch(stack, options.directory)
        rig_of = disk_rig(home, store, work, storage=options.storage, layout=layout, profile=options.profile)
        async with rig_of as rig:
            notes: Json = {"work": str(work), "pages": rig.page_kind, "layout": layout}
            pids, crc = (os.getpid(), rig.daemon.pid), crc_s_per_gb(work.layout.block_bytes)
            rig.daemon.measure_from_here()
            await compare(
                found, options, name, rig.reference, rig.fetch, aims=GET_AIMS, pids=pids, crc=crc, notes=notes
            )
    return found


async def _put(options: Options, name: str, layout: str) -> Found:
    found, work = Found([], []), SMALL_PUTS if options.small else PUTS
    with ExitStack() as stack:
        home, store = scratch(stack, None), scratch(stack, options.directory)
        check_space(store, (options.pairs + 2) * work.total_bytes)
        rig_of = put_rig(home, store, work, storage=options.storage, layout=layout, profile=options.profile)
        async with rig_of as rig:
            notes: Json = {"work": str(work), "pages": rig.page_kind, "layout": layout}
            pids, crc = (os.getpid(), rig.daemon.pid), crc_s_per_gb(work.layout.block_bytes)
            rig.daemon.measure_from_here()

            async def reference(number: int) -> Run:
                return rig.plain_put(store)

            await compare(found, options, name, reference, rig.put, aims=PUT_AIMS, pids=pids, crc=crc, notes=notes)
    return found


def _entries_per_s(root: Path, blocks: int, *, is_warm: bool) -> float:
    for path in log_files(root):
        _cache(path, is_warm=is_warm)
    made = new_index()
    began_s = time.perf_counter()
    entries = load_logs(root / "kvm1" / "authors", made)
    took_s = time.perf_counter() - began_s
    if entries != blocks or made.load_state().keys != blocks:
        raise BenchFailed(f"{entries} entries were read, {made.load_state().keys} keys are known, of {blocks} blocks")
    return entries / took_s


def _cache(path: Path, *, is_warm: bool) -> None:
    with path.open("rb") as file:
        if is_warm:
            file.read()
        else:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _space(work: Work) -> Namespace:
    layout = Layout(work.layout.block_tokens, work.layout.layers)
    return Namespace(Manifest("bench", secrets.token_bytes(32), secrets.token_bytes(32), layout, "u8"))


SUITE = Suite("store", doc=__doc__, families=FAMILIES, profiled=PROFILED, disk_gb=40)
NAMES = SUITE.names

if __name__ == "__main__":
    sys.exit(SUITE.main())
