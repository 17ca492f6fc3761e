"""One request read by one node, by two and by four; many at once; and how even storage NICs are used. Real nodes and engines."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np

from tests.bench.cpu import CpuMeter, Neighbours
from tests.bench.daemon import BenchFailed
from tests.bench.pairs import Pair, Run, orders
from tests.bench.paths_load import TRACE, Queues, Rule, Turn, Window, arrivals, balance, read_turns, spread, windows
from tests.bench.paths_town import COLD_TRIES, Loaded, Scale, Town, town
from tests.bench.rows import Json, Row, fraction_row, plain_row, ratio_row
from tests.bench.suite import Found, Options, Suite, say, scratch

SPLIT_AIM, HELPED_AIM = 1.9, 3.5
FIRST_LAYER_AIM = 0.25
BALANCE_AIM = 1.05
ONE_SIDE = (Rule.PE, Rule.DE)
MANY_REQUESTS, MANY_BLOCKS = 64, 20
SMALL_RATE = 256 << 20
COLD_SHARE = 0.98
"""Of the bytes of many requests, which must come from storage."""
MIXED_LOAD = 0.8
"""Of what all nodes together can read."""
MIXED_AGENTS = 24
MIXED_S = 20.0
RAMP_S = 2.0
"""Of a run of mixed load: what its first moments say of balance is chance."""

MANY_RUNS, MIXED_RUNS = 8, 5
"""At most: each of them is many requests, and takes long."""

SCALE = Scale()
ALONE = replace(SCALE, rate_bytes_per_s=40 << 20, sets=12)
"""Slower: four nodes that move one request's layers at the same time, at the end, have two cores for it."""
MANY = replace(SCALE, pages=1024, sets=20)
LARGE = Scale(blocks=64, layers=61, layer_bytes=64 * 656, pages=64, sets=16)
MIXED = replace(SCALE, blocks=400, pages=800, engines=3, sets=22)


@dataclass(frozen=True, slots=True)
class Taken:
    """One run: GB/s, core-seconds per GB of all processes, and bytes read by each node."""

    run: Run
    read_bytes: dict[str, int]


async def single(options: Options) -> Found:
    """Rows of one request alone."""
    found = Found([], [])
    ways = (Rule.PE, Rule.DE, Rule.SPLIT, *((Rule.HELPED,) if "two_helpers_speedup" in options.rows else ()))
    async with _town(options, ALONE, nodes=4 if Rule.HELPED in ways else 2) as rig:
        neighbours = Neighbours(*rig.pids())
        rounds = await _rounds(options, options.pairs, ways, lambda rule: _one(rig, rule))
        for name, rule, aim in (
            ("split_speedup", Rule.SPLIT, SPLIT_AIM),
            ("two_helpers_speedup", Rule.HELPED, HELPED_AIM),
        ):
            if name in options.rows:
                notes = _notes(rig, rounds) | {"others_cores": neighbours.cores()}
                found.rows.append(_over_best(name, rounds, rule, ONE_SIDE, aim=aim, options=options, notes=notes))
    return found


async def many(options: Options) -> Found:
    """Rows of many requests at once; what they are compared with is each request's shorter side."""
    found = Found([], [])
    ways = (Rule.PE, Rule.DE, Rule.SHORTER, Rule.SPLIT, Rule.HELPED)
    async with _town(options, MANY, nodes=4) as rig:
        neighbours = Neighbours(*rig.pids())
        requests, cold_share = (8, 0.0) if options.small else (MANY_REQUESTS, COLD_SHARE)
        runs = min(options.pairs, MANY_RUNS)
        rounds = await _rounds(options, runs, ways, lambda rule: _many(rig, rule, requests, cold_share))
        for name, rule in (("split_throughput", Rule.SPLIT), ("helped_throughput", Rule.HELPED)):
            if name in options.rows:
                notes = _notes(rig, rounds) | {"others_cores": neighbours.cores()}
                row = _over_best(name, rounds, rule, (Rule.SHORTER,), aim=None, options=options, notes=notes)
                found.rows.append(row)
    return found


async def first_layer(options: Options) -> Found:
    """One request of large blocks, alone: they are read in ranges of layers."""
    async with _town(options, LARGE, nodes=2) as rig:
        neighbours = Neighbours(*rig.pids())
        parts = []
        for number in range(options.pairs):
            loaded, _ = await _cold(rig, Rule.SPLIT)
            parts.append((loaded.first_s, loaded.all_s))
            say(f"first_layer_fraction {number}: {loaded.first_s:.3f} of {loaded.all_s:.3f} s")
        notes: Json = {"scale": str(LARGE), "others_cores": neighbours.cores()}
    row = fraction_row("first_layer_fraction", parts, aim=FIRST_LAYER_AIM, seed=options.seed, notes=notes)
    return Found([row], [])


async def mixed(options: Options) -> Found:
    """Balance under a load like a trace's: one node with a prefill engine, two with decode engines."""
    names = {
        "snic_max_over_avg": Rule.HELPED,
        "snic_max_over_avg_split": Rule.SPLIT,
        "snic_max_over_avg_shorter_queue": Rule.SHORTER,
        "snic_max_over_avg_round_robin": Rule.ROUND_ROBIN,
    }
    asked = {name: rule for name, rule in names.items() if name in options.rows}
    values: dict[str, list[float]] = {name: [] for name in asked}
    counts: dict[str, int] = dict.fromkeys(asked, 0)
    enough = 0.0 if options.small else float(MIXED.rate_bytes_per_s)
    async with _town(options, MIXED, nodes=3) as rig:
        neighbours = Neighbours(*rig.pids())
        for number in range(min(options.pairs, MIXED_RUNS)):
            order = np.random.default_rng((options.seed, number)).permutation(sorted(asked))
            for name in order.tolist():
                ratio, busy = balance(await _mixed_run(rig, asked[name], (options.seed, number), options), enough)
                say(f"{name} {number}: {ratio:.3f} in {busy} busy windows")
                counts[name] += busy
                values[name] += [ratio] if busy else []
        others = neighbours.cores()
    if idle := [name for name in asked if not values[name]]:
        raise BenchFailed(f"no window had more than half load: {', '.join(idle)}")
    rows = [
        plain_row(
            name,
            "max/avg",
            values[name],
            aim=BALANCE_AIM if asked[name] is Rule.HELPED else None,
            seed=options.seed,
            runs_min=MIXED_RUNS,
            notes={"busy_windows": counts[name], "scale": str(MIXED), "load": MIXED_LOAD, "others_cores": others},
        )
        for name in asked
    ]
    return Found(list[Row](rows), [])


@asynccontextmanager
async def _town(options: Options, scale: Scale, *, nodes: int) -> AsyncIterator[Town]:
    """Warmed up: connections are made, and each node's storage has shown how fast it is."""
    if options.small:
        scale = replace(
            scale, blocks=min(scale.blocks, 64), pages=min(scale.pages, 128), sets=16, rate_bytes_per_s=SMALL_RATE
        )
    with ExitStack() as stack:
        home, store = scratch(stack, None), scratch(stack, options.directory)
        async with town(home, store, scale, nodes=nodes, transport=options.transport) as rig:
            for rule in (Rule.PE, Rule.DE, Rule.SPLIT, Rule.HELPED) if nodes > 2 else (Rule.PE, Rule.DE, Rule.SPLIT):
                for decode in range(1, scale.engines):
                    await rig.load(rule, rig.next_keys(), decode=decode)
            yield rig


async def _rounds(
    options: Options, runs: int, ways: Sequence[Rule], run: Callable[[Rule], Awaitable[Taken]]
) -> list[dict[Rule, Taken]]:
    """Each way once a round, in random order."""
    found = []
    for number in range(runs):
        order = np.random.default_rng((options.seed, number)).permutation(len(ways))
        took = {ways[index]: await run(ways[index]) for index in order.tolist()}
        said = ", ".join(f"{rule.name} {took[rule].run.amount:.3f}" for rule in ways)
        say(f"round {number}: {said} GB/s")
        found.append(took)
    return found


async def _one(rig: Town, rule: Rule) -> Taken:
    meter, before = rig.meter(), await rig.read_bytes()
    loaded, size_bytes = await _cold(rig, rule)
    after = await rig.read_bytes()
    return _taken(size_bytes, loaded.all_s, meter, before, after)


async def _cold(rig: Town, rule: Rule) -> tuple[Loaded, int]:
    """A run whose every block came from storage; sets that were still in some pool are passed over."""
    for _ in range(COLD_TRIES):
        keys = rig.next_keys()
        size_bytes = len(keys) * rig.scale.record_bytes
        loaded = await rig.load(rule, keys)
        if loaded.read_bytes == size_bytes:
            return loaded, size_bytes
    raise BenchFailed(f"{loaded.read_bytes} of {size_bytes} bytes came from storage, {COLD_TRIES} times: not cold")


async def _many(rig: Town, rule: Rule, requests: int, cold_share: float) -> Taken:
    """As `_cold`, of many requests at once."""
    total_bytes = requests * MANY_BLOCKS * rig.scale.record_bytes
    for _ in range(COLD_TRIES):
        found = await _at_once(rig, rule, requests, total_bytes)
        read_bytes = sum(found.read_bytes.values())
        if read_bytes >= cold_share * total_bytes:
            return found
    raise BenchFailed(f"{read_bytes} of {total_bytes} bytes came from storage, {COLD_TRIES} times: not cold")


async def _at_once(rig: Town, rule: Rule, requests: int, total_bytes: int) -> Taken:
    """There are pages for half of them, the others wait, as they do for room in the pools."""
    queues, meter, before, began_s = Queues(), rig.meter(), await rig.read_bytes(), time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(requests):
            group.create_task(rig.load(rule, rig.next_keys(MANY_BLOCKS), queues=queues))
    return _taken(total_bytes, time.monotonic() - began_s, meter, before, await rig.read_bytes())


async def _mixed_run(rig: Town, rule: Rule, seed: tuple[int, int], options: Options) -> list[Window]:
    """Requests at their times, however the others get on; looks at the counters each second."""
    length_s = 4.0 if options.small else MIXED_S
    scale, queues = rig.scale, Queues()
    rate_blocks = MIXED_LOAD * len(rig.daemons) * scale.rate_bytes_per_s / scale.record_bytes
    shrink = scale.blocks / MIXED.blocks
    coming = arrivals(
        [Turn(turn.gap_s, max(1, round(turn.blocks * shrink))) for turn in read_turns(TRACE)],
        agents=MIXED_AGENTS,
        decodes=len(rig.daemons) - 1,
        blocks_per_s=rate_blocks,
        length_s=length_s,
        seed=seed[0] * 1_000_003 + seed[1],
    )
    looks: list[tuple[float, list[int]]] = []
    began_s = time.monotonic()

    async def come(at_s: float, blocks: int, decode: int) -> None:
        await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
        await rig.load(rule, rig.next_keys(blocks), decode=1 + decode, queues=queues)

    async with asyncio.TaskGroup() as group:
        for arrival in coming:
            group.create_task(come(arrival.at_s, arrival.blocks, arrival.decode))
        for look in range(int(length_s - RAMP_S) + 1):
            await asyncio.sleep(max(0.0, began_s + RAMP_S + look - time.monotonic()))
            looks.append((time.monotonic(), list((await rig.read_bytes()).values())))
    return windows([at_s for at_s, _ in looks], [counters for _, counters in looks])


def _taken(size_bytes: int, took_s: float, meter: CpuMeter, before: dict[str, int], after: dict[str, int]) -> Taken:
    gigabytes = size_bytes / 1e9
    read_bytes = {name: after[name] - before[name] for name in after}
    return Taken(Run(gigabytes / took_s, meter.spent_s() / gigabytes), read_bytes)


def _over_best(
    name: str,
    rounds: Sequence[dict[Rule, Taken]],
    rule: Rule,
    references: Sequence[Rule],
    *,
    aim: float | None,
    options: Options,
    notes: Json,
) -> Row:
    """Against the best of the references of the same round."""
    pairs = []
    for took, first in zip(rounds, orders(len(rounds), options.seed), strict=True):
        best = max((took[reference].run for reference in references), key=lambda run: run.amount)
        pairs.append(Pair(best, took[rule].run, first))
    return ratio_row(name, pairs, aim=aim, seed=options.seed, notes=notes)


def _notes(rig: Town, rounds: Sequence[dict[Rule, Taken]]) -> Json:
    """Of each way, over all rounds: GB/s, core-seconds per GB, bytes read by each node, and the most of them over the average."""
    ways: Json = {}
    for rule in rounds[0]:
        taken = [took[rule] for took in rounds]
        read_bytes = {name: sum(one.read_bytes[name] for one in taken) // len(taken) for name in rig.names}
        active = {name: size for name, size in read_bytes.items() if size}
        ways[rule.name.lower()] = {
            "gb_per_s": float(np.median([one.run.amount for one in taken])),
            "cpu_s_per_gb": float(np.median([one.run.cpu_s_per_gb for one in taken])),
            "read_bytes": read_bytes,
            "max_over_avg": spread(active),
        }
    return {"scale": str(rig.scale), "ways": ways}


SUITE = Suite(
    "paths",
    doc=__doc__,
    families={
        single: ("split_speedup", "two_helpers_speedup"),
        first_layer: ("first_layer_fraction",),
        many: ("split_throughput", "helped_throughput"),
        mixed: (
            "snic_max_over_avg",
            "snic_max_over_avg_split",
            "snic_max_over_avg_shorter_queue",
            "snic_max_over_avg_round_robin",
        ),
    },
    profiled=(),
    disk_gb=4,
    has_nodes=True,
)
NAMES = SUITE.names

if __name__ == "__main__":
    sys.exit(SUITE.main())
