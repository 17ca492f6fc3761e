"""An engine in a process of its own: `endpoint`. Holds leases, streams, stores, says "busy", and lives until it is killed."""

from __future__ import annotations

import asyncio
import sys

from engine import LAYERS, engine

from kvmover_client import ROOT, Path

LIFETIME_S = 60.0


async def main() -> None:
    async with engine(sys.argv[1]) as made:
        keys = made.keys("child", 12)
        await made.store("store", keys)
        lease = await made.client.fetch_blocks("lease", 1, made.model, keys[:4], lease_s=60.0)
        await lease.result()
        plan = made.plan("ring", keys, hit_blocks=12, path=Path.PE, decode_node="", ring_sets=2, timeout_s=60.0)
        ring = await made.client.stream_layers(plan)
        await ring.wait_layer(1)
        plan = made.plan("push", keys, hit_blocks=12, first_page=24, timeout_s=60.0)
        streams = [await made.client.stream_layers(plan), await made.client.push_layers(plan)]
        await streams[0].wait_layer(LAYERS - 1)
        await streams[1].computed(2)
        await made.client.store_blocks(
            "late", 1, made.model, made.keys("late", 20), ROOT, 0, made.region, range(40, 60)
        )
        print("busy", flush=True)
        await asyncio.sleep(LIFETIME_S)


asyncio.run(main())
