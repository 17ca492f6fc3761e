"""Rows that share a set-up are measured together: the disk's, the transports', the null devices', the wake-ups."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from dataclasses import replace

from tests.bench import notify
from tests.bench.cpu import crc_s_per_gb
from tests.bench.disk import SMALL, DiskRig, Work, disk_rig
from tests.bench.move import MoveRig, shm_rig, tcp_rig
from tests.bench.null import Load, null_rig
from tests.bench.rows import Json, fraction_row, plain_row
from tests.bench.slices import Shape
from tests.bench.suite import Aims, Family, Found, Options, compare, scratch
from tests.bench.wakeup import measure

AIMS = {
    "fetch_over_disk": Aims(1.0, 0.10),
    "whole_way_over_disk": Aims(0.90, 0.40),
    "shm_over_memcpy": Aims(0.90, 0.25),
    "tcp_over_stream": Aims(1.15, 0.60),
}
FIRST_LAYER_AIM = 0.25
BLOCK_US_AIM, SLICE_US_AIM = 10.0, 0.2
WAKEUP_US_AIMS = {50: 20.0, 99: None}
WAKEUP_STREAMS = {"idle": 1, "busy": 8}
WAKEUP_SAMPLES = 1000
"""A wake-up each; the 99th percentile is that of some 10."""


async def disk(options: Options) -> Found:
    """Rows over stored blocks."""
    found, work = Found([], []), SMALL if options.small else Work()
    with ExitStack() as stack:
        home, store = scratch(stack, None), scratch(stack, options.directory)
        rig_of = disk_rig(home, store, work, storage=options.storage, profile=options.profile)
        async with rig_of as rig:
            notes: Json = {"work": str(work), "pages": rig.page_kind}
            pids = (os.getpid(), rig.daemon.pid)
            crc = crc_s_per_gb(work.layout.block_bytes)
            rig.daemon.measure_from_here()
            for name, side in (("fetch_over_disk", rig.fetch), ("whole_way_over_disk", rig.whole_way)):
                if name in options.rows:
                    aims = AIMS[name]
                    await compare(found, options, name, rig.reference, side, aims=aims, pids=pids, crc=crc, notes=notes)
            if "first_layer_fraction" in options.rows:
                await _first_layer(found, options, rig)
    return found


async def shm(options: Options) -> Found:
    """One stream: it is compared with one core."""
    found = Found([], [])
    with ExitStack() as stack:
        rig = stack.enter_context(shm_rig(scratch(stack, None), _shape(options, streams=1), profile=options.profile))
        await _move(found, options, "shm_over_memcpy", rig)
    return found


async def tcp(options: Options) -> Found:
    """As many streams as a daemon serves at once, over one route."""
    found = Found([], [])
    with ExitStack() as stack:
        rig = stack.enter_context(tcp_rig(scratch(stack, None), _shape(options, streams=4), profile=options.profile))
        await _move(found, options, "tcp_over_stream", rig)
    return found


async def null(options: Options) -> Found:
    """A daemon over devices that move nothing."""
    load = Load(requests=4, blocks=20) if options.small else Load()
    with ExitStack() as stack:
        async with null_rig(scratch(stack, None), load, profile=options.profile) as rig:
            costs = await rig.costs(options.pairs, options.seed)
    notes: Json = {"load": str(load), "cut_block_us": [cost.cut_block_us for cost in costs]}
    per_block = [cost.block_us for cost in costs]
    per_slice = [cost.slice_us for cost in costs]
    rows = [
        plain_row("null_us_per_block", "us", per_block, aim=BLOCK_US_AIM, seed=options.seed, notes=notes),
        plain_row("null_us_per_slice", "us", per_slice, aim=SLICE_US_AIM, seed=options.seed),
    ]
    return Found([row for row in rows if row.name in options.rows], [])


async def wakeup(options: Options) -> Found:
    """From a layer's last byte to the engine that waits for it, on an idle daemon and beside other streams.

    The reference is the least that waking a process costs here: a Unix-socket notify, between the same runs.
    """
    samples = WAKEUP_SAMPLES // 20 if options.small else WAKEUP_SAMPLES
    by_load: dict[str, list[list[float]]] = {name: [] for name in WAKEUP_STREAMS}
    bare: list[list[float]] = []
    for number in range(options.pairs):
        bare.append(sorted(await asyncio.to_thread(notify.measure, samples, number)))
        for name, streams in WAKEUP_STREAMS.items():
            # A loop of its own, as an engine has one.
            by_load[name].append(sorted(await asyncio.to_thread(measure, streams, samples)))
    rows = []
    for percent, aim in WAKEUP_US_AIMS.items():
        values = {name: [_percentile(run, percent) for run in runs] for name, runs in by_load.items()}
        worse = max(values.values(), key=lambda found: sorted(found)[len(found) // 2])
        notes: Json = {"us_by_load": values, "samples": samples}
        least = sorted(_percentile(run, percent) for run in bare)
        row = plain_row(f"layer_wakeup_us_p{percent}", "us", worse, aim=aim, seed=options.seed, notes=notes)
        rows.append(replace(row, reference=least[len(least) // 2]))
    return Found([row for row in rows if row.name in options.rows], [])


FAMILIES: dict[Family, tuple[str, ...]] = {
    disk: ("fetch_over_disk", "whole_way_over_disk", "first_layer_fraction"),
    shm: ("shm_over_memcpy",),
    tcp: ("tcp_over_stream",),
    null: ("null_us_per_block", "null_us_per_slice"),
    wakeup: ("layer_wakeup_us_p50", "layer_wakeup_us_p99"),
}
"""Each with the rows it can give."""


async def _move(found: Found, options: Options, name: str, rig: MoveRig) -> None:
    await rig.check()
    rig.measure_from_here()
    await compare(
        found, options, name, rig.reference, rig.ours, aims=AIMS[name], pids=rig.pids, crc=0.0, notes=rig.notes
    )
    rig.measure_to_here()


def _shape(options: Options, *, streams: int) -> Shape:
    return Shape(streams, 8, 3) if options.small else Shape(streams, 256 // streams)


async def _first_layer(found: Found, options: Options, rig: DiskRig) -> None:
    """One request at a time, nothing else: the first is to warm up."""
    parts = [await rig.first_layer(number) for number in range(options.pairs + 1)][1:]
    found.rows.append(fraction_row("first_layer_fraction", parts, aim=FIRST_LAYER_AIM, seed=options.seed))


def _percentile(ordered: list[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
