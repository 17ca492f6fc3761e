"""What tests of a DE buffer's parts do again and again: send all layers, and see that all ended well."""

from __future__ import annotations

from de_rig import LAYERS, DeRig, Part
from node_kit import end_of, told, until

from kvmoverd.core.machines.assemble import AssembleState
from kvmoverd.core.status import Reason

OPS_MAX = 8
"""Reads that the desk of a test's node hands to its storage at once."""


async def whole_and_delivered(rig: DeRig) -> None:
    assembled = rig.attach()
    await until(lambda: rig.assembly.machine.state is AssembleState.WHOLE, "the buffer is whole")
    assert end_of(await told(rig.deliver())).reason is Reason.OK
    assert end_of(await told(assembled)).reason is Reason.OK
    rig.delivered_right()
    await rig.over()


def sends_all(part: Part, prefix: int) -> None:
    assert part.driver is not None
    part.driver.credit(prefix, LAYERS)


async def ended_well(rig: DeRig, part: Part) -> None:
    await until(lambda: part.end is not None, "the part ends")
    assert part.end is not None and part.end.reason is Reason.OK, part.end
    for place, block in enumerate(part.blocks.head(part.end.prefix_blocks).indexes().tolist()):
        assert part.block(place) == rig.kit.content(rig.keys[block]), f"block {block} came wrong"
