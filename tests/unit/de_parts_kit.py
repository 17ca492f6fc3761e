"""What tests of a DE buffer's parts do again and again: send all layers, and see that all ended well."""

from __future__ import annotations

from de_rig import LAYERS, DeRig, Part
from node_kit import LAYOUT, end_of, told, until

from kvmoverd.core.machines.assemble import AssembleState
from kvmoverd.core.status import Reason
from kvmoverd.ports.storage import BlockRead

OPS_MAX = 8
"""Reads that the desk of a test's node hands to its storage at once."""


def read_layers(rig: DeRig, layers: int, *blocks: int) -> None:
    """The storage reads so many leading layers of these blocks, while its gate is closed."""
    disk = rig.there.disk
    keys = {rig.keys[block] for block in blocks}
    while found := [op for op in disk.held if isinstance(op, BlockRead) and op.key in keys and op.first_layer < layers]:
        disk.held.remove(found[0])
        disk._happen(found[0])
        rig.there.node.pump()


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
    came_right(rig, part)


def came_right(rig: DeRig, part: Part) -> None:
    """All blocks of a part that is over came to the prefill node, but for what it gave away."""
    assert part.end is not None
    for layer in range(LAYERS):
        span = LAYOUT.layer_span(layer)
        for place, block in enumerate(part.blocks.head(part.end.prefix_blocks).indexes().tolist()):
            if place < part.blocks_of(layer):
                want = rig.kit.content(rig.keys[block])[span.start : span.stop]
                assert part.block(place)[span.start : span.stop] == want, f"layer {layer} of block {block} came wrong"


def gives(part: Part, kept: int) -> tuple[int, int]:
    """Of its blocks it keeps so many, or more; what it answers."""
    assert part.driver is not None
    part.driver.give_rest(kept)
    return part.rests[-1]


def goes_on(part: Part, kept: int) -> None:
    """The prefill node has heard of it: later layers come with the kept blocks alone."""
    assert part.driver is not None
    if kept:
        part.driver.credit(kept, LAYERS)


def opens(rig: DeRig) -> None:
    rig.there.disk.closed = False
    while rig.there.disk.release_one():
        pass


async def in_mid_stream(rig: DeRig, *, layers: int = 1, holds: bool = True) -> Part:
    """The decode node reads all hits; so many layers of them are there, and one more is in the device."""
    rig.there.disk.closed = True
    await rig.reserve((0, rig.hit))
    part = rig.part((0, rig.hit), holds=holds)
    read_layers(rig, layers, *range(rig.hit))
    await until(lambda: part.prefix, "the prefix")
    return part
