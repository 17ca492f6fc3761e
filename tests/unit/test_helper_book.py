"""Which third nodes may help: asked in the background, counted with what they were given, left alone when they do not answer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from node_kit import NodeKit, running
from node_net import node_net

from kvmoverd.core.errors import KvmoverError, PeerUnreachable
from kvmoverd.core.shares import Depth
from kvmoverd.node.helper_book import FRESH_NS, NODES_MAX, PAUSE_S, SETTLE_NS, TRUSTED_NS, HelperBook
from kvmoverd.node.peer import PeerDepth
from kvmoverd.node.services import Services, SplitSettings

RATE = 1_000_000_000
MB = 1_000_000


@dataclass
class Clock:
    now: int = 5_000_000_000

    def now_ns(self) -> int:
        return self.now


@dataclass
class Far:
    """A node that answers `depth`, and nothing else, as it is told to."""

    told: PeerDepth = field(default_factory=lambda: PeerDepth(Depth(0, RATE), True, 100 * MB, "boot"))
    error: KvmoverError | None = None
    silent: bool = False
    asked: int = 0

    async def depth(self) -> PeerDepth:
        self.asked += 1
        if self.silent:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return self.told


class Fars:
    """The membership of a test."""

    def __init__(self, *names: str) -> None:
        self.nodes = {name: Far() for name in names}

    def peer(self, node: str) -> Any:
        return self.nodes.get(node)

    def describe(self) -> list[dict[str, Any]]:
        return [{"node": node} for node in self.nodes]


@dataclass
class Rig:
    services: Services
    clock: Clock
    fars: Fars
    book: HelperBook

    async def known(self, exclude: tuple[str, ...] = (), wanted: list[str] | None = None) -> dict[str, int]:
        """Bytes ahead of each candidate, once all answers are in."""
        self.book.candidates(exclude, wanted)
        for _ in range(5):
            await asyncio.sleep(0)
        return {node: depth.queue_bytes for node, depth in self.book.candidates(exclude, wanted)}


@pytest.fixture
async def kit() -> Any:
    kit = NodeKit()
    async with running([kit]):
        yield kit


def rig(kit: NodeKit, *names: str, **split: Any) -> Rig:
    clock = Clock()
    services = replace(kit.services, clock=clock, split=SplitSettings(**{"helpers_max": 8, **split}))
    fars = Fars(*names)
    return Rig(services, clock, fars, HelperBook(services, fars))  # type: ignore[arg-type]


async def test_the_first_request_asks_and_the_next_one_knows(kit: NodeKit) -> None:
    r = rig(kit, "a", "b")
    assert r.book.candidates(()) == ()
    assert await r.known() == {"a": 0, "b": 0}
    assert [far.asked for far in r.fars.nodes.values()] == [1, 1]


async def test_a_node_is_asked_again_when_its_word_is_old_and_not_before(kit: NodeKit) -> None:
    r = rig(kit, "a")
    await r.known()
    r.clock.now += FRESH_NS - 1
    await r.known()
    assert r.fars.nodes["a"].asked == 1
    r.clock.now += 1
    r.fars.nodes["a"].told = PeerDepth(Depth(7, RATE), True, MB, "boot")
    assert r.book.candidates(())[0][1].queue_bytes == 0, "a request is not made to wait for the answer"
    assert await r.known() == {"a": 7}
    assert r.fars.nodes["a"].asked == 2


async def test_what_was_heard_long_ago_counts_for_nothing(kit: NodeKit) -> None:
    r = rig(kit, "a")
    await r.known()
    r.clock.now += TRUSTED_NS
    assert r.book.candidates(()), "an idle node that was asked seconds ago may help at once"
    r.clock.now += 1
    assert r.book.candidates(()) == (), "its answer has not come yet"
    assert await r.known() == {"a": 0}


async def test_the_least_busy_come_first_and_only_as_many_as_may_help(kit: NodeKit) -> None:
    r = rig(kit, "a", "b", "c", "d", helpers_max=2)
    for node, queue, rate in (("a", 30, RATE), ("b", 10, RATE), ("c", 40, 5 * RATE), ("d", 20, 0)):
        r.fars.nodes[node].told = PeerDepth(Depth(queue * MB, rate), True, 100 * MB, "boot")
    await r.known()
    assert [node for node, _ in r.book.candidates(())] == ["d", "c"], "an unknown rate is the fastest known one"
    assert [node for node, _ in r.book.candidates(("d",))] == ["c", "b"]


async def test_who_does_not_help_or_has_no_room_is_no_candidate(kit: NodeKit) -> None:
    r = rig(kit, "a", "b", "c")
    r.fars.nodes["a"].told = PeerDepth(Depth(0, RATE), False, 100 * MB, "boot")
    r.fars.nodes["b"].told = PeerDepth(Depth(0, RATE), True, 0, "boot")
    assert await r.known() == {"c": 0}


async def test_what_a_node_was_given_counts_until_it_says_so_itself(kit: NodeKit) -> None:
    r = rig(kit, "a", "b")
    await r.known()
    r.book.assigned("a", 5 * MB)
    r.book.assigned("a", 2 * MB)
    r.book.assigned("nobody", 2 * MB)
    assert dict(r.book.candidates(())) == {"a": Depth(7 * MB, RATE), "b": Depth(0, RATE)}
    assert r.book.candidates(())[0][0] == "b"
    r.clock.now += FRESH_NS
    r.book.assigned("a", MB)
    r.fars.nodes["a"].told = PeerDepth(Depth(6 * MB, RATE), True, 100 * MB, "boot")
    assert await r.known() == {"a": 7 * MB, "b": 0}, "what was given a moment ago may not have come there yet"
    r.clock.now += FRESH_NS + SETTLE_NS
    assert (await r.known())["a"] == 6 * MB


async def test_what_a_node_was_given_fades_as_it_reads(kit: NodeKit) -> None:
    """After a pause the last request's part is no queue any more, though nobody has asked meanwhile."""
    r = rig(kit, "a", "b")
    r.fars.nodes["a"].told = PeerDepth(Depth(10 * MB, RATE), True, 100 * MB, "boot")
    r.fars.nodes["b"].told = PeerDepth(Depth(), True, 100 * MB, "boot")
    await r.known()
    for node in "ab":
        r.book.assigned(node, 40 * MB)
    r.fars.nodes["a"].silent = r.fars.nodes["b"].silent = True
    r.clock.now += 30 * MB
    assert await r.known() == {"a": 20 * MB, "b": 40 * MB}, "a gigabyte a second, and of b nobody knows how fast it is"
    r.book.assigned("a", 5 * MB)
    r.clock.now += 1_000 * MB
    assert await r.known() == {"a": 0, "b": 40 * MB}
    r.book.close()


async def test_a_node_that_was_given_all_it_has_room_for_gets_no_more(kit: NodeKit) -> None:
    r = rig(kit, "a")
    await r.known()
    r.book.assigned("a", 100 * MB)
    assert r.book.candidates(()) == ()


async def test_who_does_not_answer_is_left_alone_for_a_while_and_longer_each_time(kit: NodeKit) -> None:
    r = rig(kit, "a")
    await r.known()
    far = r.fars.nodes["a"]
    far.error = PeerUnreachable("a is away")
    r.clock.now += FRESH_NS
    assert await r.known() == {} and far.asked == 2
    r.clock.now += int(PAUSE_S * 1e9) - 1
    assert await r.known() == {} and far.asked == 2
    r.clock.now += 1
    assert await r.known() == {} and far.asked == 3
    r.clock.now += int(PAUSE_S * 1e9)
    await r.known()
    assert far.asked == 3
    far.error = None
    r.clock.now += int(PAUSE_S * 1e9)
    assert await r.known() == {"a": 0}


async def test_a_node_that_is_silent_costs_one_call_that_ends(kit: NodeKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmoverd.node.helper_book.CALL_S", 0.02)
    r = rig(kit, "a")
    r.fars.nodes["a"].silent = True
    began = time.monotonic()
    for _ in range(50):
        assert r.book.candidates(()) == ()
    assert time.monotonic() - began < 0.5
    await asyncio.sleep(0.05)
    assert r.book.candidates(()) == () and r.fars.nodes["a"].asked == 1, "and then a pause"


async def test_only_nodes_that_are_wanted_or_allowed_are_looked_at(kit: NodeKit) -> None:
    r = rig(kit, "a", "b", "c", "here", helper_nodes=("b", "c", "gone"))
    assert await r.known() == {"b": 0, "c": 0}
    assert await r.known(wanted=["a", "a", "gone"]) == {"a": 0}
    assert await r.known(wanted=["a", "here"], exclude=("a",)) == {}, "never this node itself"
    assert r.fars.nodes["here"].asked == 0


async def test_of_many_nodes_a_few_are_asked_and_by_each_node_others(kit: NodeKit) -> None:
    names = [f"n{index}" for index in range(40)]
    looked_at = set()
    for own in ("x", "y", "z"):
        r = rig(kit, *names)
        r.services.node = own
        await r.known()
        asked = {node for node, far in r.fars.nodes.items() if far.asked}
        assert len(asked) == NODES_MAX
        looked_at |= asked
    assert len(looked_at) > NODES_MAX


async def test_without_helpers_nobody_is_asked(kit: NodeKit) -> None:
    r = rig(kit, "a", helpers_max=0)
    assert await r.known() == {} and r.fars.nodes["a"].asked == 0


async def test_a_book_that_is_closed_leaves_no_call_behind(kit: NodeKit) -> None:
    r = rig(kit, "a", "b")
    for far in r.fars.nodes.values():
        far.silent = True
    r.book.candidates(())
    await asyncio.sleep(0)
    before = len(asyncio.all_tasks())
    r.book.close()
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == before - 2


async def test_nodes_tell_each_other_how_busy_they_are() -> None:
    async with node_net(nodes=4) as net:
        book = HelperBook(net["p"].services, net["p"].node.peers)
        for _ in range(400):
            found = book.candidates(("d",), ["d", "h", "i"])
            if len(found) == 2:
                break
            await asyncio.sleep(0.005)
        assert {node for node, _ in found} == {"h", "i"}
        book.close()
