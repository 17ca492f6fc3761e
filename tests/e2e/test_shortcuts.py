"""Two real daemons: KV that is there already is not read again, and no byte goes between nodes that need not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cluster import Cluster, Node
from engine import LAYOUT, Engine, engine
from test_split_reads import loaded

from kvmover_client import Path, Plan

pytestmark = pytest.mark.e2e

HITS, BLOCKS = 8, 12


async def counts(node: Node) -> tuple[int, int]:
    """Blocks that it has read from storage, KV bytes that it has sent to other nodes."""
    status = await node.slots_home()
    read_blocks = sum(int(root["read_blocks"]) for root in status["storage"])
    return read_blocks, sum(int(peer["sent_bytes"]) for peer in status["peers"])


async def moved(cluster: Cluster, pe: Engine, de: Engine, plan: Plan) -> tuple[int, float, float]:
    """A request that succeeds: blocks read from storage, blocks that went from the prefill to the decode node, and back."""
    before = [await counts(node) for node in cluster.nodes]
    assert await loaded(pe, de, plan) == []
    after = [await counts(node) for node in cluster.nodes]
    reads = sum(now[0] - then[0] for now, then in zip(after, before, strict=True))
    there, back = ((now[1] - then[1]) / LAYOUT.block_bytes for now, then in zip(after, before, strict=True))
    return reads, there, back


@pytest.mark.parametrize("pair", ["tcp", "shm"], indirect=True)
async def test_what_lies_on_a_node_is_not_read_and_goes_only_where_it_is_missing(pair: Cluster) -> None:
    async with engine(pair.pe.endpoint) as pe, engine(pair.de.endpoint) as de:
        here, there = pe.keys("in the prefill node's pool", BLOCKS), pe.keys("in the decode node's pool", BLOCKS)
        await pe.store("store here", here[:HITS])
        await de.store("store there", there[:HITS])
        assert await pe.found(there, HITS) == HITS
        plan = replace(pe.plan("here", here, hit_blocks=HITS, path=Path.AUTO), no_helpers=True)
        assert await moved(pair, pe, de, plan) == (0, BLOCKS, 0)
        plan = replace(plan, request_id="there", block_keys=there)
        assert await moved(pair, pe, de, plan) == (0, BLOCKS - HITS, HITS)
        # All is clean at the decode node now, the new blocks too.
        plan = replace(plan, request_id="resident", resident_blocks=HITS)
        assert await moved(pair, pe, de, plan) == (0, BLOCKS - HITS, 0)
        plan = replace(plan, request_id="full hit", hit_blocks=BLOCKS, resident_blocks=0)
        assert await moved(pair, pe, de, plan) == (0, 0, BLOCKS)
        plan = replace(plan, request_id="nothing to do", resident_blocks=BLOCKS)
        assert await moved(pair, pe, de, plan) == (0, 0, 0)


@pytest.mark.parametrize("path", [Path.AUTO, Path.PE, Path.DE])
async def test_engines_of_one_node_use_no_network(pair: Cluster, path: Path) -> None:
    async with engine(pair.de.endpoint) as other, engine(pair.pe.endpoint) as pe, engine(pair.pe.endpoint) as de:
        keys = pe.keys("chain", BLOCKS)
        await other.store("store", keys[:HITS])
        assert await pe.found(keys, HITS) == HITS
        plan = replace(
            pe.plan("cold", keys, hit_blocks=HITS, path=path, decode_node="pe"), no_helpers=path is Path.AUTO
        )
        assert await moved(pair, pe, de, plan) == (HITS, 0, 0)
        plan = replace(plan, request_id="clean", hit_blocks=BLOCKS)
        assert await moved(pair, pe, de, plan) == (0, 0, 0)
