"""The kinds of machine, each with a way into every state, everything that may be said to it, and a random one."""

from __future__ import annotations

from random import Random

from machine_kind import Kind, outcomes, progress, sent
from machines_kit import Bench
from machines_part_kind import PART, READ
from machines_words import Event
from stream_kind import STREAM

from kvmoverd.core.machines.assemble import AssembleMachine, AssembleState
from kvmoverd.core.machines.fetch import FetchKind, FetchMachine, FetchState
from kvmoverd.core.machines.push import PushMachine, PushState
from kvmoverd.core.machines.store import StoreMachine, StoreState
from kvmoverd.core.status import Reason

# ---- push


def push(layers: int = 3, window_layers: int = 2) -> Bench:
    return Bench(PushMachine(layers=layers, window_layers=window_layers), send_max=window_layers)


def _push_words(bench: Bench, rng: Random) -> Event:
    layers = bench.machine.window.layers
    return rng.choice((("prefix_set",), ("computed", rng.randint(0, layers + 1)), sent(layers, rng)))


PUSH = Kind(
    "push",
    PushState,
    {"plain": push},
    {
        PushState.WAITING: ("", "computed 2"),
        PushState.PUSHING: ("prefix_set", "computed 3; prefix_set", "prefix_set; computed 1; sent 0 OK"),
        PushState.DRAINING: (
            "prefix_set; computed 3; stop CANCELLED",
            "prefix_set; computed 3; sent 0 PEER_LOST cable cut",
        ),
        PushState.UNQUIET: ("prefix_set; computed 3; sent 1 OK; stop DEADLINE; quiesce_timeout",),
        PushState.ENDED: ("prefix_set; computed 3; sent 1 OK; sent 0 OK; sent 2 OK", "stop CANCELLED"),
    },
    lambda rng: push(rng.randint(1, 6), rng.randint(1, 3)),
    _push_words,
)


# ---- assemble and deliver


def assembly(layers: int = 2, blocks: int = 3, hit_blocks: int = 1, window_layers: int = 1) -> Bench:
    machine = AssembleMachine(layers=layers, blocks=blocks, hit_blocks=hit_blocks, window_layers=window_layers)
    return Bench(machine, send_max=window_layers, holds_slots=True)


def _random_assembly(rng: Random) -> Bench:
    blocks = rng.randint(0, 4)
    return assembly(rng.randint(1, 4), blocks, rng.randint(0, blocks), rng.randint(1, 3))


def _assembly_words(bench: Bench, rng: Random) -> Event:
    machine = bench.machine
    layers, blocks = max(1, machine.pushed.layers), machine.blocks
    if rng.random() < 0.3:
        return rng.choice(_reading_words(machine, rng))
    return rng.choice(
        (
            ("attached",),
            ("prefix", rng.randint(0, blocks + 1), 0),
            ("prefix", machine.hit_blocks, rng.choice((0, 0, 1, 2)), rng.choice((0, 0, 0, layers))),
            *(("layer", min(machine.pushed.in_order + ahead, layers - 1)) for ahead in (0, 0, 0, 1)),
            ("deliver",),
            *[sent(layers, rng)] * 2,
            ("written", rng.randint(0, blocks), rng.choice((Reason.OK, Reason.NO_SPACE))),
        )
    )


def _reading_words(machine: AssembleMachine, rng: Random) -> list[Event]:
    """This node's own reads, and third nodes that send their layers, mostly in order, or whose part is taken over."""
    part = rng.randint(0, 2)
    going = machine.helped.get(part)
    layer = rng.randrange(machine.pushed.layers) if going is None else min(going.in_order, machine.pushed.layers - 1)
    rest = ("rest", rng.randint(1, machine.pushed.layers))
    seldom: list[Event] = [("hits_pending",), ("taken_over", part), ("part_begun", 0), rest]
    return [("hits_whole",), ("part_over", 0), *[("helped_layer", part, layer)] * 2, *seldom[: rng.randrange(9)]]


_WHOLE = "attached; prefix 1; layer 1; layer 0"
_HELPED = "attached; prefix 1 1; layer 1; layer 0; helped_layer 0 0"

ASSEMBLE = Kind(
    "assemble",
    AssembleState,
    {
        "plain": assembly,
        "wide": lambda: assembly(window_layers=2),
        "cached": lambda: assembly(blocks=1),
    },
    {
        AssembleState.WAITING_ENGINE: ("", "prefix 1; layer 0; layer 1"),
        AssembleState.FILLING: (
            "attached",
            "attached; prefix 1; layer 1",
            "attached; layer 0; layer 1",
            f"hits_pending; {_WHOLE}",
            "prefix 1 0 2; rest 1; attached",
            _HELPED,
            f"{_HELPED}; taken_over 0",
        ),
        AssembleState.WHOLE: (
            _WHOLE,
            f"{_HELPED}; helped_layer 0 1",
            f"{_HELPED}; taken_over 0; hits_whole",
            "prefix 1 0 2; rest 1; attached; layer 1",
            f"{_WHOLE}; written 2 OK",
            f"{_WHOLE}; written 2 OK; written 1 NO_SPACE",
        ),
        AssembleState.DELIVERING: (
            f"{_WHOLE}; deliver",
            f"{_WHOLE}; written 1 OK; written 2 OK; deliver; sent 0 OK",
            f"cached: {_WHOLE}; deliver",
        ),
        AssembleState.DELIVERED: (
            f"{_WHOLE}; deliver; sent 0 OK; sent 1 OK; written 1 OK",
            f"cached: part_begun 0; {_WHOLE}; deliver; sent 0 OK; sent 1 OK",
        ),
        AssembleState.DRAINING: (
            f"{_WHOLE}; deliver; stop CANCELLED",
            f"wide: {_WHOLE}; deliver; sent 1 IO_ERROR",
            f"cached: {_WHOLE}; deliver; stop CANCELLED",
        ),
        AssembleState.STORING: (f"{_WHOLE}; stop ENGINE_GONE", f"{_WHOLE}; deliver; sent 0 IO_ERROR; written 1 OK"),
        AssembleState.UNQUIET: (
            f"{_WHOLE}; deliver; stop DEADLINE; quiesce_timeout",
            f"{_WHOLE}; deliver; stop DEADLINE; quiesce_timeout; written 1 OK; written 2 OK",
        ),
        AssembleState.ENDED: (
            f"{_WHOLE}; deliver; sent 0 OK; written 1 OK; sent 1 OK; written 2 NO_SPACE",
            f"cached: {_WHOLE}; deliver; sent 0 OK; sent 1 OK",
            f"cached: part_begun 0; {_WHOLE}; deliver; sent 0 OK; sent 1 OK; part_over 0",
            "stop PEER_LOST",
        ),
    },
    _random_assembly,
    _assembly_words,
)


# ---- store


def store(blocks: int = 2, layers: int = 3, window_layers: int = 2) -> Bench:
    machine = StoreMachine(blocks=blocks, copies=lambda blocks: layers, window_layers=window_layers)
    return Bench(machine, send_max=window_layers)


def _store_words(bench: Bench, rng: Random) -> Event:
    blocks = bench.machine.blocks
    found = [(block, rng.choice((Reason.OK, Reason.MISS))) for block in range(blocks) if rng.random() < 0.7]
    return rng.choice(
        (
            ("found", tuple(found)),
            ("slots",),
            ("no_slots", Reason.POOL_EXHAUSTED, "full"),
            sent(bench.machine.window.layers, rng),
            ("written", rng.randrange(blocks) if blocks else 0, rng.choice((Reason.OK, Reason.NO_SPACE))),
        )
    )


_NEW = "start; found 0=MISS 1=MISS"
_COPYING = f"{_NEW}; slots"
_COPIED = f"{_COPYING}; sent 0 OK; sent 1 OK; sent 2 OK"

STORE = Kind(
    "store",
    StoreState,
    {"plain": store, "empty": lambda: store(blocks=0)},
    {
        StoreState.LOOKING: ("start",),
        StoreState.WAITING: (_NEW, "start; found 0=OK 1=MISS", "start; found 1=MISS; written 0 IO_ERROR"),
        StoreState.COPYING: (_COPYING, f"{_COPYING}; sent 1 OK", "start; found 1=MISS; slots; written 0 OK"),
        StoreState.WRITING: (
            _COPIED,
            f"{_COPIED}; written 1 NO_SPACE",
            "start; found 0=OK",
            "start; found 0=MISS; slots; sent 0 OK; sent 1 OK; sent 2 OK; written 0 OK",
        ),
        StoreState.LINGERING: (
            f"{_COPIED}; stop CANCELLED",
            f"{_COPIED}; written 0 OK; stop ENGINE_GONE",
            "start; found; stop CANCELLED",
        ),
        StoreState.DRAINING: (f"{_COPYING}; stop CANCELLED", f"{_COPYING}; sent 0 IO_ERROR"),
        StoreState.UNQUIET: (f"{_COPYING}; stop DEADLINE; quiesce_timeout",),
        StoreState.ENDED: (
            f"{_COPIED}; written 1 OK; written 0 OK",
            f"{_COPIED}; stop CANCELLED; written 0 OK; written 1 OK",
            f"{_NEW}; no_slots POOL_EXHAUSTED full",
            "start; found 0=OK 1=OK",
            "start; stop DEADLINE",
            "empty: start",
        ),
    },
    lambda rng: store(rng.randint(0, 4), rng.randint(1, 4), rng.randint(1, 3)),
    _store_words,
)


# ---- fetch


def fetch(kind: FetchKind = FetchKind.PAGES, blocks: int = 2, layers: int = 3, window_layers: int = 2) -> Bench:
    machine = FetchMachine(blocks=blocks, layers=layers, kind=kind, window_layers=window_layers)
    return Bench(machine, send_max=window_layers)


def _random_fetch(rng: Random) -> Bench:
    return fetch(rng.choice(tuple(FetchKind)), rng.randint(0, 4), rng.randint(1, 4), rng.randint(1, 3))


def _fetch_words(bench: Bench, rng: Random) -> Event:
    return rng.choice(
        (
            ("slots",),
            ("no_slots", Reason.POOL_EXHAUSTED, "full"),
            ("blocks", outcomes(bench, rng)),
            ("layers", progress(bench, rng)),
            sent(bench.machine.window.layers, rng),
        )
    )


FETCH = Kind(
    "fetch",
    FetchState,
    {
        "plain": fetch,
        "lease": lambda: fetch(FetchKind.LEASE),
        "empty": lambda: fetch(blocks=0),
    },
    {
        FetchState.WAITING: ("start", "lease: start"),
        FetchState.READING: ("start; slots", "start; slots; blocks 0=MISS", "lease: start; slots; blocks 1=OK"),
        FetchState.COPYING: (
            READ,
            f"{READ}; sent 1 OK",
            "start; slots; blocks 0=MISS 1=OK",
            "start; slots; layers 0=1 1=2",
            "start; slots; layers 0=1 1=2; blocks 1=CORRUPT",
        ),
        FetchState.DRAINING: (f"{READ}; stop CANCELLED", f"{READ}; sent 1 IO_ERROR"),
        FetchState.UNQUIET: (f"{READ}; stop DEADLINE; quiesce_timeout",),
        FetchState.ENDED: (
            f"{READ}; sent 0 OK; sent 1 OK; sent 2 OK",
            "start; slots; blocks 0=MISS 1=CORRUPT",
            f"lease: {READ}",
            "empty: start",
        ),
    },
    _random_fetch,
    _fetch_words,
)

KINDS = (PART, STREAM, PUSH, ASSEMBLE, STORE, FETCH)
