"""A request through two real daemons, on both paths and over both transports, every byte looked at."""

from __future__ import annotations

import pytest
from cluster import running
from engine import engine, whole_request

from kvmover_client import Path

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_every_byte_arrives_on_both_paths_and_stored_blocks_are_found_afterwards(transport: str) -> None:
    with running(transport=transport) as cluster:
        async with engine(cluster.pe.endpoint) as pe, engine(cluster.de.endpoint) as de:
            keys = pe.keys("prompt", 12)
            assert await whole_request(pe, de, pe.plan("first", keys[:6], hit_blocks=0)) == []
            assert await pe.found(keys, 6) == 6
            assert await whole_request(pe, de, pe.plan("pe", keys[:9], hit_blocks=6, path=Path.PE)) == []
            assert await whole_request(pe, de, pe.plan("de", keys, hit_blocks=9, path=Path.DE)) == []
        for node in cluster.nodes:
            status = await node.slots_home()
            assert (status["sessions"], status["regions"]) == (0, 0)
