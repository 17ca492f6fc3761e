"""The part's kind: a way into every state, and a random word."""

from __future__ import annotations

from random import Random

from machine_kind import Kind, outcomes, progress, sent
from machines_kit import Bench
from machines_words import Event

from kvmoverd.core.machines.part import PartMachine, PartState
from kvmoverd.core.status import Reason


def part(
    blocks: int = 2,
    layers: int = 3,
    credit_layers: int = 3,
    window_layers: int = 2,
    *,
    first_layer: int = 0,
    holds: bool = False,
    assembles: bool = False,
) -> Bench:
    machine = PartMachine(
        blocks=blocks,
        layers=layers,
        credit_layers=credit_layers,
        window_layers=window_layers,
        first_layer=first_layer,
        holds=holds,
        assembles=assembles,
    )
    return Bench(machine, send_max=window_layers, credit_layers=0 if holds else credit_layers)


def helping_part() -> Bench:
    """A third node's."""
    return part(holds=True, assembles=True)


def _random_part(rng: Random) -> Bench:
    layers, holds = rng.randint(1, 5), rng.random() < 0.4
    first_layer = rng.randint(0, layers) if rng.random() < 0.3 else 0
    return part(
        rng.randint(0, 4),
        layers,
        rng.randint(0, layers),
        rng.randint(1, 3),
        first_layer=first_layer,
        holds=holds,
        assembles=holds and rng.random() < 0.5,
    )


def _part_words(bench: Bench, rng: Random) -> Event:
    layers, blocks = bench.machine.window.layers, bench.machine.blocks
    return rng.choice(
        (
            ("slots",),
            ("no_slots", Reason.POOL_EXHAUSTED, "full"),
            ("blocks", outcomes(bench, rng)),
            ("layers", progress(bench, rng)),
            ("credit", rng.randint(0, blocks), rng.randint(0, layers + 1)),
            ("credit", bench.machine.prefix_blocks, rng.randint(0, layers)),
            ("credit", (bench.given or (0, 0))[0], rng.randint(0, layers + 1)),
            ("give_up", rng.randint(0, blocks + 1), rng.randint(0, blocks)),
            ("give_rest", rng.randint(0, blocks), rng.randint(0, layers)),
            ("assemble",),
            sent(layers, rng),
            ("assembled", *sent(layers, rng)[1:]),
        )
    )


_HELD = "holds: start; slots; blocks 0=OK 1=OK"
_HELPED = "helps: start; slots; blocks 0=OK 1=OK; credit 2 3"
READ = "start; slots; blocks 0=OK 1=OK"
_BEGUN = "start; slots; layers 0=1 1=1"

PART = Kind(
    "part",
    PartState,
    {
        "plain": part,
        "empty": lambda: part(blocks=0),
        "unpaced": lambda: part(credit_layers=0),
        "holds": lambda: part(holds=True),
        "helps": helping_part,
        "later": lambda: part(first_layer=2),
        "sent": lambda: part(first_layer=3),
    },
    {
        PartState.WAITING: ("start", "start; give_up 1 0", "helps: start; assemble"),
        PartState.READING: (
            "start; slots",
            "start; slots; blocks 1=MISS",
            "start; credit 2 3; slots",
            "start; slots; layers 0=1",
            "start; slots; layers 1=1; give_up 1 0",
            "holds: start; slots; blocks 1=OK; give_up 2 1",
        ),
        PartState.HOLDING: (
            _HELD,
            f"{_HELD}; give_up 0 0",
            "holds: start; slots; blocks 0=OK 1=MISS",
            "holds: start; slots; layers 0=1 1=2; blocks 1=CORRUPT",
            "start; slots; layers 0=1; give_up 1 1",
            "helps: start; assemble; slots; blocks 0=OK 1=OK",
        ),
        PartState.SENDING: (
            READ,
            f"{READ}; sent 1 OK",
            "unpaced: start; slots; blocks 0=OK 1=OK",
            "start; slots; blocks 0=OK 1=MISS",
            "start; slots; blocks 0=OK 1=MISS; credit 1 1",
            "start; slots; layers 0=1 1=2",
            "start; slots; layers 0=1 1=2; sent 0 OK; blocks 0=OK",
            f"{_HELD}; credit 1 1",
            "holds: start; slots; layers 0=1 1=2; blocks 1=CORRUPT; credit 1 3",
            "start; slots; blocks 0=OK; give_up 1 1; credit 1 2",
            "later: start; slots; layers 0=1 1=3",
            f"{_BEGUN}; give_rest 1 1",
            f"{_BEGUN}; give_rest 0 2; sent 0 OK",
            f"{_BEGUN}; give_rest 1 1; blocks 0=OK; credit 1 3",
            f"{_BEGUN}; give_rest 1 2; give_rest 0 0; layers 1=2; blocks 0=OK; sent 0 OK",
            _HELPED,
            f"{_HELPED}; assemble; assembled 0 OK",
            f"{_HELPED}; sent 0 OK; sent 1 OK; sent 2 OK",
            f"{_HELPED}; assemble; assembled 0 OK; assembled 1 OK; assembled 2 OK",
        ),
        PartState.DRAINING: (
            f"{READ}; stop CANCELLED",
            f"{READ}; sent 0 PEER_LOST; sent 2 OK",
            "start; slots; layers 0=1 1=2; blocks 1=CORRUPT",
            f"{_HELPED}; assemble; sent 0 OK; sent 1 OK; sent 2 OK; stop CANCELLED",
            f"{_HELPED}; assemble; assembled 1 IO_ERROR",
            f"{_BEGUN}; give_rest 0 2; stop CANCELLED",
            f"{_BEGUN}; give_rest 1 2; blocks 1=CORRUPT",
            f"{_BEGUN}; give_rest 1 1; credit 1 3; blocks 0=CORRUPT",
        ),
        PartState.ENDED: (
            "holds: start; slots; layers 0=1 1=2; blocks 1=CORRUPT; credit 2 3",
            f"{_HELD}; credit 0 0",
            f"{_HELD}; stop CANCELLED",
            "start; give_up 0 0",
            "start; slots; give_up 0 0",
            "sent: start; slots; blocks 0=OK 1=OK",
            f"{_HELPED}; assemble; sent 0 OK; sent 1 OK; sent 2 OK; assembled 0 OK; assembled 1 OK; assembled 2 OK",
            f"{READ}; sent 0 OK; sent 1 OK; sent 2 OK",
            "start; slots; blocks 0=MISS 1=OK",
            "start; no_slots POOL_EXHAUSTED full",
            "empty: start; slots",
            f"{_BEGUN}; sent 0 OK; give_rest 0 1",
            f"{_BEGUN}; give_rest 0 2; sent 0 OK; layers 0=2 1=2; sent 1 OK",
        ),
    },
    _random_part,
    _part_words,
)
