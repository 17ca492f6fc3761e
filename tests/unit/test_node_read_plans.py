"""Who reads a request when the nodes decide: what the prefill node tells, what it decides alone, what it counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from node_kit import LAYOUT, as_pages, until
from node_net import Net, node_net
from node_world import World

from kvmoverd.core.admission import Purpose
from kvmoverd.core.errors import BadPlan
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Share
from kvmoverd.core.status import Path, Reason
from kvmoverd.node import helper_book
from kvmoverd.node.driver import Call
from kvmoverd.node.plan_checks import checked_plan
from kvmoverd.node.prefill import Plan
from kvmoverd.node.read_plans import ReadPlanner
from kvmoverd.node.services import SplitSettings
from kvmoverd.node.streaming import StreamDriver
from kvmoverd.ports.memory import GpuRegion

KEEN = SplitSettings(floor_s=0.0, rebalances=False)


def planner_of(net: Net, plan: Plan) -> ReadPlanner:
    node = net["p"].node
    return ReadPlanner(net["p"].services, plan, node.peers, node.helper_book)


def auto_plan(net: Net, *, hit: int = 8, resident: int = 0, **more: object) -> Plan:
    kit = net["p"]
    engine, keys = kit.engine(16), kit.chain(hit + 1)
    more = {"path": Path.AUTO, "decode_node": "d"} | more
    return kit.plan(engine, kit.call(engine), keys, hit=hit, resident_blocks=resident, **more)  # type: ignore[arg-type]


async def know_helpers(net: Net, plan: Plan) -> None:
    """The book of helpers asks in the background when somebody wants one."""
    await until(lambda: len(planner_of(net, plan).helpers(())) == len(net.kits) - 2, "the third nodes are known")


async def test_the_decode_node_is_told_what_bears_on_who_reads() -> None:
    async with node_net(4, split=KEEN) as net:
        plan = auto_plan(net, hit=6, resident=1)
        await net["p"].store(net["p"].engine(16), plan.keys[:4])
        await know_helpers(net, plan)
        net.peers["p"].starved = {"d", "i"}
        facts = planner_of(net, plan).reservation(0.5).facts
        assert facts is not None
        assert facts.pooled == Runs.of((1, 4)), "clean here, and not in the pages"
        assert [node for node, _ in facts.helpers] == ["h"], "KV from the other one starves"
        assert (facts.starved_from_decode, facts.starved_to_decode, facts.floor_s) == (True, False, 0.0)


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({}, {"h", "i"}),
        ({"helpers": ("i",)}, {"i"}),
        ({"no_helpers": True}, set()),
        ({"path": Path.PE}, set()),
        ({"decode_node": "h"}, {"d", "i"}),
    ],
)
async def test_who_may_help_is_the_callers_choice(more: dict[str, object], found: set[str]) -> None:
    async with node_net(4, split=KEEN) as net:
        await know_helpers(net, auto_plan(net))
        planner = planner_of(net, auto_plan(net, **more))
        await until(lambda: {node for node, _ in planner.helpers(())} == found, "these, and no others")


async def test_a_request_has_no_more_helpers_than_it_may() -> None:
    async with node_net(4, split=KEEN) as net:
        plan = auto_plan(net)
        await know_helpers(net, plan)
        planner = planner_of(net, plan)
        assert len(planner.helpers(("h",))) == 1
        assert planner.helpers(("h", "i")) == ()


@pytest.mark.parametrize("path", [Path.PE, Path.PARTS, Path.AUTO])
async def test_without_a_decode_node_this_node_decides_alone(path: Path) -> None:
    async with node_net(2, split=KEEN) as net:
        plan = auto_plan(net, hit=4, path=path, decode_node="", shares=(Share("d", Runs.of((0, 4))),))
        reads = planner_of(net, plan).alone()
        assert [(share.node, share.blocks) for share in reads.shares] == [
            ("d" if path is Path.PARTS else "p", Runs.of((0, 4)))
        ]


async def test_plans_are_counted_by_why() -> None:
    async with node_net(2, split=KEEN) as net:
        world = World(net["p"], hit=8, blocks=9, net=net)
        await world.prepare()
        world.turn_auto()
        await world.finish()
        assert {heard.end.reason for heard in world.heard if heard.end} == {Reason.OK}
        assert net["p"].services.counts.plans == {"split": 1}
        assert net.read_blocks() == {"p": 4, "d": 4}


async def test_with_idle_helpers_all_read_a_share() -> None:
    async with node_net(4, split=KEEN) as net:
        plan = auto_plan(net)
        await know_helpers(net, plan)
        world = World(net["p"], hit=16, blocks=17, net=net)
        await world.prepare()
        world.turn_auto()
        await world.finish()
        assert {heard.end.reason for heard in world.heard if heard.end} == {Reason.OK}
        assert net["p"].services.counts.plans == {"helped": 1}
        assert set(net.read_blocks().values()) == {4}


async def test_what_a_plan_or_a_move_gives_to_a_third_node_counts_as_its_queue_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with node_net(3, split=KEEN) as net:
        plan = auto_plan(net)
        await know_helpers(net, plan)
        # It is not asked again meanwhile: what it says of itself is not looked at here.
        monkeypatch.setattr(helper_book, "FRESH_NS", 1 << 62)
        monkeypatch.setattr(helper_book, "TRUSTED_NS", 1 << 62)
        world = World(net["p"], hit=36, blocks=37, net=net)
        await world.prepare()
        before = dict(planner_of(net, plan).helpers(()))["h"].queue_bytes
        world.turn_auto()
        await until(lambda: net["p"].services.counts.plans == {"helped": 1}, "it is decided")
        planned = dict(planner_of(net, plan).helpers(()))["h"].queue_bytes
        assert planned - before == 12 * LAYOUT.record_bytes
        (stream,) = [one for one in net["p"].node.requests.live() if isinstance(one, StreamDriver)]
        part = next(part for part, known in stream.machine.parts.items() if known.share.node == "d")
        await world.settle()
        stream.run(stream.machine.on_move(part, 0, "h"))
        await world.settle()
        assert stream.machine.parts[part].count == 8, "a device has them already"
        moved = dict(planner_of(net, plan).helpers(()))["h"].queue_bytes
        assert moved - planned == 4 * LAYOUT.record_bytes
        await world.finish()


async def test_third_nodes_read_for_a_request_without_a_decode_node() -> None:
    async with node_net(3) as net:
        world = World(net["p"], hit=4, blocks=4, net=net)
        await world.prepare()
        shares = (Share("p", Runs.of((0, 1))), Share("h", Runs.of((1, 3))), Share("d", Runs.of((3, 4))))
        plan = world.plan(Path.PARTS, 4, tail=0, decode_node="", shares=shares)
        heard = world.stream(plan, lambda layers: None)
        world.uses(world.prefill, range(4), heard)
        await world.finish()
        assert heard.end is not None and (heard.end.reason, heard.end.prefix_blocks) == (Reason.OK, 4)
        assert net.read_blocks() == {"p": 1, "d": 1, "h": 2}


@pytest.mark.parametrize("steps", range(0, 16, 3))
async def test_this_node_reads_what_a_third_one_could_not_where_there_is_no_decode_node(steps: int) -> None:
    async with node_net(3) as net:
        world = World(net["p"], hit=4, blocks=4, net=net)
        await world.prepare()
        shares = (Share("p", Runs.of((0, 1))), Share("h", Runs.of((1, 4))))
        plan = world.plan(Path.PARTS, 4, tail=0, decode_node="", shares=shares)
        heard = world.stream(plan, lambda layers: None)
        world.uses(world.prefill, range(4), heard)
        await world.settle()
        for _ in range(steps):
            await world.step()
        net.kill("h")
        await world.finish()
        assert heard.end is not None and heard.end.reason is Reason.OK, heard.end


@pytest.mark.parametrize("sets", [1, 2])
async def test_a_ring_is_filled_by_several_readers_at_once_and_goes_on_when_one_dies(sets: int) -> None:
    """Each layer is looked at when it is ready, before its pages are used for another one."""
    async with node_net(3) as net:
        kit = net["p"]
        keys = kit.chain(4)
        await kit.store(kit.engine(8), keys)
        kit.forget_clean()
        ring, call = kit.engine(16, ring=True), kit.call(kit.engines[0])
        call = Call("ring", 1, ring.session.session_id, call.timeout_s)
        page_sets = tuple(as_pages(list(range(4 * n, 4 * n + 4))) for n in range(sets))
        shares = (Share("p", Runs.of((0, 1))), Share("h", Runs.of((1, 3))), Share("p", Runs.of((3, 4))))
        plan = Plan(call, kit.namespace, keys, 0, 4, "", Path.PARTS, ring.region, page_sets, shares=shares)
        stream = kit.node.stream(plan)
        for layer in range(LAYOUT.layer_count):
            await until(lambda layer=layer: stream.machine.ready.in_order > layer, "the layer is ready")  # type: ignore[misc]
            span = LAYOUT.layer_span(layer)
            found = [ring.block(4 * (layer % sets) + block) for block in range(4)]
            assert found == [kit.content(key)[span.start : span.stop] for key in keys]
            if layer == 0:
                net.kill("h")
            stream.request.computed(layer + 1)
        await until(lambda: stream.ended is not None, "the stream ends")
        assert stream.ended is not None and stream.ended.reason is Reason.OK
        await net.everything_is_home()


async def test_room_at_home_is_taken_for_this_nodes_share_only() -> None:
    async with node_net(2, room_slots={Purpose.READ: 2}) as net:
        world = World(net["p"], hit=6, blocks=7, net=net)
        await world.prepare()
        world.turn_parts(("p", (0, 2)), ("d", (2, 6)))
        await world.finish()
        assert {heard.name: heard.end.reason for heard in world.heard if heard.end}["stream"] is Reason.OK


class OnGpu(GpuRegion):
    """As far as plans are concerned."""

    page_kind = "GPU 0"

    def __init__(self) -> None:
        """Nothing is opened."""


@pytest.mark.parametrize("gpus_over_network", [False, True])
async def test_third_nodes_send_into_gpu_memory_where_the_network_reaches_it(gpus_over_network: bool) -> None:
    async with node_net(2) as net:
        plan = auto_plan(net, decode_node="p")
        host, plan.region.memory = plan.region.memory, OnGpu()
        parts = replace(plan, path=Path.PARTS, shares=(Share("p", Runs.of((0, 4))), Share("d", Runs.of((4, 8)))))
        limits = {"own_node": "p", "knows": lambda node: True, "gpus_over_network": gpus_over_network}
        assert checked_plan(plan, **limits).no_helpers is not gpus_over_network
        if gpus_over_network:
            assert checked_plan(parts, **limits) == parts
        else:
            with pytest.raises(BadPlan, match=r"only transport\.kind = verbs moves that to and from d"):
                checked_plan(parts, **limits)
        plan.region.memory = host
        assert checked_plan(parts, **limits) == parts and not checked_plan(plan, **limits).no_helpers
