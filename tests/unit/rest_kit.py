"""Requests whose prefix is known and whose later layers are still to be read: where a part can be asked for its rest."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from node_kit import LAYOUT, Engine
from node_net import Net
from node_world import TAIL, World

from kvmoverd.core.machines.stream import StreamState
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Share
from kvmoverd.core.status import Path, Reason
from kvmoverd.node.services import SplitSettings
from kvmoverd.node.streaming import StreamDriver

PATIENT = SplitSettings(stall_s=30.0)
IMPATIENT = SplitSettings(stall_s=0.06)
STEPS_MAX = 300
EVERY = [7, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
"""Of the steps, which are tried: enough for the quick tests, and all."""
SPLIT = (("p", (0, 12)), ("d", (12, 24)))
MOVES = [("p", "d"), ("p", "h"), ("d", "p"), ("d", "h")]
"""From whom to whom a rest goes."""
IDLE_MAX = 20
"""Looks at gates where nothing waits, before nothing more is expected of them."""
ALL = ("assemble", "stream", "push", "deliver")


def ends(world: World) -> dict[str, Reason]:
    return {heard.name: heard.end.reason for heard in world.heard if heard.end is not None}


def all_ok(world: World) -> None:
    assert ends(world) == dict.fromkeys(ALL, Reason.OK), [(heard.name, heard.end) for heard in world.heard]


def streams_of(net: Net, node: str = "p") -> list[StreamDriver]:
    return [driver for driver in net[node].node.requests.live() if isinstance(driver, StreamDriver)]


def stream_of(net: Net) -> StreamDriver:
    (found,) = streams_of(net)
    return found


class RingWorld(World):
    """All layers take turns in the prefill engine's pages: each is computed and pushed before the next may come."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.prefill = self.kit.engine(self.prefill.pages, ring=True)

    def fill_new(self, layer: int, prefix: int, tail: int = 3) -> None:
        contents = dict(enumerate(map(self.kit.content, self.keys)))
        if tail:
            contents[len(self.keys)] = self.kit.content(TAIL)
        for page in range(prefix, len(contents)):
            self.prefill.fill(page, contents[page][LAYOUT.layer_span(layer).start :])

    def _check_layer(self, engine: Engine, layer: int, blocks: int) -> None:
        if engine is not self.prefill:
            super()._check_layer(engine, layer, blocks)
            return
        span = LAYOUT.layer_span(layer)
        for page, key in enumerate(self.keys[:blocks]):
            want = self.kit.content(key)[span.start : span.stop]
            assert engine.block(page) == want, f"layer {layer} of block {page} is wrong"


@dataclass(eq=False)
class Rest:
    """One request in mid-stream. `moved` is filled by `move`: who was asked, and for whom."""

    net: Net
    world: World
    moved: list[tuple[str, str]] = field(default_factory=list)

    def move(self, giver: str, taker: str, kept_blocks: int = 0) -> bool:
        """What the balancing does in its own time. Was anybody asked?"""
        stream = stream_of(self.net)
        for part in [part for part, known in stream.machine.parts.items() if known.share.node == giver]:
            actions = stream.machine.on_move(part, kept_blocks, taker)
            if actions:
                stream.run(actions)
                self.moved.append((giver, taker))
                return True
        return False

    def layers_read(self) -> dict[str, int]:
        """Layer Blocks that each node began to read."""
        return {name: sum(kit.disk.layer_reads.values()) for name, kit in self.net.kits.items()}

    def rest_reads(self, node: str) -> int:
        """Blocks of which the node read later layers and not the first."""
        disk = self.net[node].disk
        return len({key for key, layer in disk.layer_reads if layer and not disk.layer_reads[key, 0]})

    def nothing_was_read_twice(self) -> None:
        twice = {(key.hex()[:8], layer): count for (key, layer), count in self.net.layer_reads().items() if count > 1}
        assert not twice, f"read twice: {twice}"


async def begun(
    net: Net,
    *shares: tuple[str, tuple[int, int]],
    blocks: int | None = None,
    timeout_s: float = 8.0,
    world_class: type[World] = World,
    to: str = "d",
    resident: int = 0,
) -> Rest:
    """All gates are closed, and every reader has just begun. `blocks`: of the prompt, one more than are stored else.

    A node may have several ranges of blocks. `to`: the decode node.
    """
    hit = max(stop for _, (_, stop) in shares)
    total = hit + 1 if blocks is None else blocks
    world = world_class(net["p"], hit=hit, blocks=total, net=net, timeout_s=timeout_s, to=to, resident=resident)
    await world.prepare()
    spans: dict[str, list[tuple[int, int]]] = {}
    for node, span in shares:
        spans.setdefault(node, []).append(span)
    parts = tuple(Share(node, Runs.of(*found)) for node, found in spans.items())
    world._turn(Path.PARTS, hit, tail=3, shares=parts)
    await world.settle()
    return Rest(net, world)


async def streaming(net: Net, *shares: tuple[str, tuple[int, int]], **options: object) -> Rest:
    """As `begun`, and the prefix was just told: of all blocks the first layers were read, and little more of any."""
    rest = await begun(net, *shares, **options)  # type: ignore[arg-type]
    await until_streaming(rest)
    return rest


async def until_streaming(rest: Rest) -> None:
    """Of every block the first range is read, until the prefix is told."""
    idle = 0
    while stream_of(rest.net).machine.state is not StreamState.STREAMING:
        came = [kit.disk.release_first_range() for kit in rest.net.alive]
        idle = 0 if any(came) else idle + 1
        assert idle < IDLE_MAX, "nothing more happens"
        await rest.world.settle()


async def steps_of(rest: Rest, steps: int) -> bool:
    """So many steps; did the last one do anything?"""
    went_on = True
    for _ in range(steps):
        went_on = await rest.world.step()
    return went_on
