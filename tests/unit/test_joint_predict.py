"""Predictions and plans: what is predicted is what the plan does, and plans are those that nodes make themselves."""

from __future__ import annotations

import random
from itertools import product

import pytest

from kvmoverd.core.levelling import Casting, Lane, ends_of_two
from kvmoverd.core.runs import Runs
from kvmoverd.core.scheduling.joint_pace import Pace, Rates
from kvmoverd.core.scheduling.joint_predict import (
    DecodeOption,
    Leading,
    PrefillOption,
    Ways,
    Work,
    plan,
    predict,
    soonest,
)
from kvmoverd.core.scheduling.reports import NodeReport, Role
from kvmoverd.core.scheduling.state import Engine, Group, Node
from kvmoverd.core.shares import Depth
from kvmoverd.core.split import Reader, decide
from kvmoverd.core.status import Path
from tests.unit.joint_kit import KV, MODEL, MS, SNIC

NOW_NS = 1_000 * MS
WORK = Work(10_000, KV, 0.002)


def pace(name: str, queue_tokens: int = 0, rate: int = SNIC, **more: int | bool) -> Pace:
    node = Node(name, 200 * MS)
    node.reported(NodeReport(name, "b", 1, Depth(queue_tokens * KV, rate), **more), NOW_NS)  # type: ignore[arg-type]
    return Rates(MODEL).of(node)


def engine(at: Pace) -> Engine:
    return Engine(f"{at.node.name}/0", at.node, Group(at.node.name, "m", Role.PREFILL, iter(range(9))))


def prefill(at: Pace, wait_s: float = 0.0, own_s: float = 0.1, pages: int = 0, pool: int = 0) -> PrefillOption:
    return PrefillOption(engine(at), at, at.lane_of(NOW_NS, crosses=False), wait_s, own_s, pages, pool)


def decode(at: Pace, pool: int = 0) -> DecodeOption:
    return DecodeOption(engine(at), at, at.lane_of(NOW_NS, crosses=True), pool)


def random_pace(chance: random.Random, name: str) -> Pace:
    rate, lane = chance.randrange(1, 4) * SNIC // 2, chance.choice([0, 0, SNIC // 3, 5 * SNIC])
    return pace(name, chance.randrange(30_000), rate, lane_bytes_per_s=lane, starved=chance.random() < 0.2)


@pytest.mark.parametrize("seed", range(30))
def test_the_chosen_pair_is_the_soonest_of_all_that_were_compared(seed: int) -> None:
    chance = random.Random(seed)
    shared = random_pace(chance, "both")
    prefills = [
        prefill(
            random_pace(chance, f"p{n}"),
            chance.random() * 0.4,
            0.05 + chance.random() * 0.1,
            pages=chance.choice([0, 0, 8_000]),
        )
        for n in range(4)
    ] + [prefill(shared, chance.random() * 0.4)]
    decodes = [decode(random_pace(chance, f"d{n}"), chance.choice([0, 0, 6_000])) for n in range(4)] + [decode(shared)]
    best, second = soonest(prefills, decodes, WORK)
    every = sorted(predict(p, d, WORK)[:2] for p, d in product(prefills, decodes))
    assert best[:2] == every[0]
    assert second is not None and second[:2] >= best[:2]


@pytest.mark.parametrize("seed", range(30))
def test_a_prediction_is_when_its_plan_has_read_all(seed: int) -> None:
    chance = random.Random(seed)
    side_p, side_d = random_pace(chance, "p"), random_pace(chance, "d")
    held = chance.choice([0, 0, 3_000])
    predicted = predict(prefill(side_p, pool=held), decode(side_d), WORK)
    made = plan(Ways(side_p, side_d, (), Leading(held, 0, side_p.node)), WORK, NOW_NS)
    assert made.ends_s == pytest.approx(predicted.read_s, abs=2 * KV / (SNIC / 4))
    assert sum(size for _, size in made.reads) == (WORK.hit_tokens - held) * KV


@pytest.mark.parametrize("seed", range(30))
def test_a_plan_is_the_one_that_the_nodes_themselves_would_make(seed: int) -> None:
    chance = random.Random(seed)
    names = ["p", "d", "h1", "h2"]
    depths = {name: Depth(chance.randrange(20_000) * KV, chance.randrange(1, 4) * SNIC) for name in names}
    starved = {name: chance.random() < 0.15 for name in names}
    paces = {
        name: pace(name, depths[name].queue_bytes // KV, depths[name].rate_bytes_per_s, starved=starved[name])
        for name in names
    }
    made = plan(Ways(paces["p"], paces["d"], (paces["h1"], paces["h2"])), WORK, NOW_NS)
    readers = {name: Reader(name, depths[name], starved=starved[name]) for name in names}
    nodes = decide(
        blocks=Runs.of((0, WORK.hit_tokens)),
        block_bytes=KV,
        prefill=readers["p"],
        decode=readers["d"],
        helpers=[readers["h1"], readers["h2"]],
        floor_s=WORK.floor_s,
    )
    mine = {at.node.name: size // KV for at, size in made.reads}
    theirs = {share.node: share.blocks.count for share in nodes.shares}
    assert made.word == nodes.why and mine.keys() == theirs.keys()
    assert all(abs(mine[name] - theirs[name]) <= 1 for name in mine)
    if made.choice.path is Path.PARTS:
        assert [part.node for part in made.choice.parts] == [share.node for share in nodes.shares]


@pytest.mark.parametrize("seed", range(40))
def test_two_readers_end_as_the_casting_of_whole_units_says(seed: int) -> None:
    chance = random.Random(seed)
    lanes = [Lane(chance.random() * 1e9, (0.2 + chance.random()) * 1e8) for _ in range(2)]
    units = chance.randrange(1, 100_000)
    cast = Casting(lanes, [0, 1], [], KV, 0.002).cast(units)
    assert ends_of_two(lanes[0], lanes[1], units * KV, 0.002) == pytest.approx(cast.ends_s, abs=2 * KV / 2e7)


def test_a_node_that_has_never_reported_is_as_fast_as_those_that_have() -> None:
    rates = Rates(MODEL)
    silent = Node("s", 200 * MS)
    assert rates.of(silent).rate == pytest.approx(SNIC, rel=1e-4)
    for number in range(3):
        node = Node(f"n{number}", 200 * MS)
        node.reported(NodeReport(node.name, "b", 1, Depth(0, SNIC // 2)), NOW_NS)
        rates.of(node)
    assert rates.of(silent).rate == pytest.approx(SNIC // 2, rel=0.01)
    rates.of(silent).give(SNIC, NOW_NS)
    assert rates.of(silent).free_ns == pytest.approx(NOW_NS + 2e9, rel=0.01)
    rates.keep({})
    assert rates.of(silent).free_ns == 0
