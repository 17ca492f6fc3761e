"""What reading the split reads again has found: each of these was wrong once, or nobody had asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from node_kit import node_kit

from kvmoverd.core.errors import BadPlan
from kvmoverd.core.status import Path
from kvmoverd.node.sessions import as_pages


@pytest.mark.parametrize("ring", ["one layer's pages", "two sets"])
async def test_nothing_can_lie_in_the_pages_of_a_ring_for_all_layers(ring: str) -> None:
    """It would be pushed on to the decode node with the bytes of whichever layer had the pages last."""
    async with node_kit() as kit:
        engine, keys = kit.engine(ring=ring == "one layer's pages"), kit.chain(3)
        call = kit.call(engine)
        plan = kit.plan(engine, call, keys, hit=2, path=Path.PE, resident_blocks=1)
        if not engine.region.geometry.is_ring:
            plan = replace(plan, page_sets=(*plan.page_sets, as_pages([4, 5, 6])))
        with pytest.raises(BadPlan, match="resident_blocks is 1"):
            kit.node.stream(plan)
        with pytest.raises(BadPlan, match="resident_blocks is 1"):
            kit.node.push(plan)
        kit.node.session_closed(engine.session.session_id, "done")
        await kit.everything_is_home()
