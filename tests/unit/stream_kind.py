"""The stream as a kind of machine: ways into every state, with one reader and several, and everything said to it."""

from __future__ import annotations

import itertools
from random import Random

from machine_kind import Kind
from machines_kit import Bench
from machines_words import Event
from stream_bench import DECODE, OWN, StreamBench

from kvmoverd.core.machines.stream import StreamMachine, StreamState
from kvmoverd.core.runs import Runs
from kvmoverd.core.shares import Share
from kvmoverd.core.status import BlockOutcome, Reason

NODES = (OWN, DECODE, "h1", "h2")


def stream(
    layers: int = 3,
    hit_blocks: int = 2,
    decode: bool = True,
    ring_sets: int = 1,
    pushes: bool = True,
    resident_blocks: int = 0,
    plan: tuple[Share, ...] | None = None,
) -> StreamBench:
    """Without a plan the decode node reads all, or this node where there is none."""
    loaded = Runs.of((resident_blocks, hit_blocks))
    if plan is None:
        plan = (Share(DECODE if decode else OWN, loaded),) if loaded else ()
    machine = StreamMachine(
        layers=layers,
        resident_blocks=resident_blocks,
        hit_blocks=hit_blocks,
        decode_node=DECODE if decode else "",
        own_node=OWN,
        ring_sets=ring_sets,
        pushes=pushes,
        new_part=itertools.count(1).__next__,
    )
    return StreamBench(machine, plan)


def split(**options: int) -> StreamBench:
    """Six blocks: two read here, two by a third node, two by the decode node."""
    plan = (Share(OWN, Runs.of((0, 2))), Share("h1", Runs.of((2, 4))), Share(DECODE, Runs.of((4, 6))))
    return stream(hit_blocks=6, plan=plan, **options)  # type: ignore[arg-type]


def _random_stream(rng: Random) -> Bench:
    decode = rng.random() < 0.7
    resident = rng.choice((0, 0, 0, 1, 2))
    hit = resident + rng.randint(0, 5)
    nodes = [node for node in NODES if decode or node != DECODE]
    owners: dict[str, list[tuple[int, int]]] = {}
    for block in range(resident, hit):
        owners.setdefault(rng.choice(nodes), []).append((block, block + 1))
    if rng.random() < 0.3:
        owners = {rng.choice(nodes): [(resident, hit)]} if hit > resident else {}
    plan = tuple(Share(node, Runs.of(*spans)) for node, spans in owners.items())
    return stream(rng.randint(1, 5), hit, decode, rng.randint(0, 3), decode, resident, plan)


def _stream_words(bench: Bench, rng: Random) -> Event:
    assert isinstance(bench, StreamBench)
    machine = bench.machine
    part = rng.randint(1, len(bench.running) + 1)
    running = bench.running.get(part)
    count = running.blocks.count if running is not None else 1
    nodes = [node for node in NODES if node != DECODE or machine.decode_node]
    said: list[Event] = [
        ("reserved", bench.plan),
        ("computed", machine.ready.in_order),
        ("computed", rng.randint(0, machine.layers + 1)),
        ("pushed", rng.randint(0, bench.computed_layers)),
        ("pushed", bench.computed_layers),
        ("part_prefix", part, rng.randint(0, count + 1), None),
        ("part_prefix", part, rng.randint(0, count), BlockOutcome.of(Reason.MISS)),
        ("move", part, rng.randint(0, count), rng.choice(nodes)),
        ("move", part, rng.randint(0, count), rng.choice(nodes)),
        ("gave_up", part, rng.randint(0, count)),
        ("gave_rest", part, rng.randint(0, count), rng.randint(0, machine.layers)),
        ("part_stalled", part),
    ]
    if rng.random() < 0.1:
        said = [
            (
                "part_failed",
                part,
                rng.choice((Reason.PEER_LOST, Reason.POOL_EXHAUSTED, Reason.LEASE_EXPIRED)),
                "the reader went",
            )
        ]
        said += [("part_ended", part), ("reserve_failed", Reason.NO_SPACE, "full")]
    # A sink lets in only what was granted; a fence is told when it is done.
    said += [("part_layer", part, layer) for layer in (bench.may_land(part) if running is not None else [])]
    return rng.choice(said)


_STREAM = "start; reserved de=0-2; part_prefix 1 2 -"
_STREAMED = f"{_STREAM}; part_layer 1 0; computed 1; pushed 1; part_layer 1 1; computed 2; pushed 2; part_layer 1 2"
_SPLIT = "split: start; reserved pe=0-2 h1=2-4 de=4-6"
_TOLD = f"{_SPLIT}; part_prefix 1 2 -; part_prefix 2 2 -; part_prefix 3 2 -"
_LANDED = f"{_TOLD}; part_layer 1 0; part_layer 2 0; part_layer 3 0"

STREAM = Kind(
    "stream",
    StreamState,
    {
        "plain": stream,
        "alone": lambda: stream(decode=False, ring_sets=0, pushes=False),
        "cold": lambda: stream(3, 0),
        "resident": lambda: stream(resident_blocks=2),
        "split": split,
    },
    {
        StreamState.RESERVING: ("start",),
        StreamState.READING: (
            "start; reserved de=0-2",
            "start; reserved de=0-2; part_layer 1 0",
            "alone: start; reserved pe=0-2",
            _SPLIT,
            f"{_SPLIT}; part_prefix 1 2 -; part_prefix 2 1 MISS",
            f"{_SPLIT}; part_prefix 1 2 -; move 3 1 pe",
            f"{_SPLIT}; part_prefix 1 2 -; move 3 1 pe; gave_up 3 1",
            f"{_SPLIT}; part_failed 2 PEER_LOST gone",
            f"{_SPLIT}; part_stalled 2; part_fenced 2",
            f"{_SPLIT}; part_failed 1 POOL_EXHAUSTED full; part_fenced 1",
            f"{_SPLIT}; part_failed 3 POOL_EXHAUSTED full; part_fenced 3",
        ),
        StreamState.STREAMING: (
            _STREAM,
            "start; reserved de=0-2; part_prefix 1 1 MISS",
            f"{_STREAM}; part_layer 1 0; computed 1",
            "alone: start; reserved pe=0-2; part_prefix 1 2 -; part_layer 1 1",
            _TOLD,
            f"{_SPLIT}; part_prefix 1 2 -; part_prefix 2 0 MISS; part_prefix 3 2 -",
            f"{_LANDED}; computed 1; pushed 1",
            f"{_LANDED}; part_failed 2 PEER_LOST gone",
            f"{_LANDED}; part_failed 2 PEER_LOST gone; part_fenced 2",
            f"{_TOLD}; part_stalled 2",
            f"{_LANDED}; move 1 1 h1",
            f"{_LANDED}; move 1 1 h1; gave_rest 1 1 1",
            f"{_LANDED}; move 3 0 h2; gave_rest 3 0 2; part_failed 4 PEER_LOST gone",
            f"{_LANDED}; move 3 0 h2; gave_rest 3 0 2; part_failed 4 PEER_LOST gone; part_fenced 4",
            f"{_LANDED}; move 3 0 pe; gave_rest 3 2 0",
            f"{_LANDED}; part_failed 2 PEER_LOST gone; part_fenced 2; part_failed 4 LEASE_EXPIRED void; part_fenced 4",
        ),
        StreamState.DRAINING: (
            "start; reserved de=0-2; stop CANCELLED",
            f"{_STREAM}; part_layer 1 0; part_failed 1 PEER_LOST gone",
            _STREAMED,
            "start; reserved de=0-2; part_prefix 1 0 CORRUPT",
            "cold: start; reserved",
            "resident: start; reserved",
            f"{_SPLIT}; move 3 1 pe; stop CANCELLED",
            f"{_LANDED}; part_failed 2 PEER_LOST gone; stop DEADLINE",
        ),
        StreamState.UNQUIET: (
            f"{_STREAM}; stop DEADLINE; quiesce_timeout",
            f"{_STREAMED}; quiesce_timeout",
            f"{_LANDED}; part_stalled 2; part_failed 2 PEER_LOST gone; stop DEADLINE; quiesce_timeout",
        ),
        StreamState.ENDED: (
            f"{_STREAMED}; quiet",
            "start; reserve_failed NO_SPACE full",
            "start; stop CANCELLED",
            "start; reserved de=0-1",
            f"{_STREAM}; stop DEADLINE; quiesce_timeout; quiet",
        ),
    },
    _random_stream,
    _stream_words,
)
