"""Streams that nobody stops: whatever moves, dies or crosses, each comes to its end when all that is owed has come."""

from __future__ import annotations

from random import Random

import pytest
from machines_words import Event, transcript
from markers import slow_only
from stream_bench import DECODE, OWN, StreamBench
from stream_kind import NODES, STREAM

from kvmoverd.core.machines.stream import StreamState
from kvmoverd.core.status import Reason

LIVES = [250, *slow_only([1500])]
STEPS_MAX = 600


def harmless(bench: StreamBench, rng: Random) -> Event:
    """What may happen to a request that goes on all the same: blocks and rests move, third nodes die or stand still, and who
    reads a rest while somebody else can."""
    nodes = [node for node in NODES if node != DECODE or bench.machine.decode_node]
    part = rng.choice([number for number, running in bench.running.items() if running.is_open] or [1])
    running = bench.running.get(part)
    may_die = running is not None and (
        running.node not in (OWN, DECODE) or (running.rest and bench.rest_is_spared(running))
    )
    if running is None or not may_die or rng.random() < 0.7:
        count = running.blocks.count if running is not None else 1
        return "move", part, rng.randrange(0, count), rng.choice(nodes)
    return rng.choice([("part_failed", part, Reason.PEER_LOST, "it went"), ("part_stalled", part)])


def live(seed: int) -> int:
    rng = Random(f"lives {seed}")
    bench = STREAM.random(rng)
    assert isinstance(bench, StreamBench)
    try:
        return _live(bench, rng)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}\nsaid: {transcript(bench.history)}") from error


def _live(bench: StreamBench, rng: Random) -> int:
    """How many rests were read, those of rests too whose reader died."""
    bench.give(("start",))
    for _ in range(STEPS_MAX):
        if bench.machine.state is StreamState.ENDED:
            break
        owed = bench.owed()
        if owed and rng.random() < 0.55:
            bench.give(rng.choice(owed))
        elif owed and rng.random() < 0.6:
            bench.give(harmless(bench, rng))
        else:
            bench.give(("computed", bench.machine.ready.in_order))
            bench.give(("pushed", bench.computed_layers))
            assert owed or bench.owed() or bench.machine.state is StreamState.ENDED, "nothing more comes, and it waits"
    assert bench.machine.state is StreamState.ENDED, f"{bench.machine.state} after {STEPS_MAX} steps"
    assert bench.end().reason is Reason.OK, bench.end()
    bench.check_over()
    return sum(running.rest for running in bench.running.values())


@pytest.mark.parametrize("lives", LIVES)
def test_a_stream_whose_readers_live_or_are_replaced_ends_well(lives: int) -> None:
    rests = [live(seed) for seed in range(lives)]
    assert sum(map(bool, rests)) > lives // 10 and max(rests) > 2, "rests move in many of them, and their readers die"
