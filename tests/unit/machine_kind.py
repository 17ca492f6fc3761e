"""What a kind of machine is to its tests, and the random words that several kinds share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from random import Random

from machines_kit import Bench
from machines_words import Event

from kvmoverd.core.status import Reason


@dataclass(frozen=True)
class Kind:
    """`reach`: scripts into each state, a maker's name and a colon before those that don't use the plain maker.

    `words`: one random thing that could be said to the machine, sensible or not, early, late or twice.
    """

    name: str
    states: type[Enum]
    makers: Mapping[str, Callable[[], Bench]]
    reach: Mapping[Enum, tuple[str, ...]]
    random: Callable[[Random], Bench]
    words: Callable[[Bench, Random], Event]

    def bench(self, script: str) -> Bench:
        """A bench after a script."""
        maker, colon, events = script.rpartition(":")
        bench = self.makers[maker if colon else "plain"]()
        bench.run(events)
        return bench


BAD_READS = (Reason.MISS, Reason.CORRUPT, Reason.SHORT_READ, Reason.IO_ERROR)


def outcomes(bench: Bench, rng: Random) -> tuple[tuple[int, Reason], ...]:
    blocks = [block for block in range(bench.machine.blocks) if rng.random() < 0.5]
    return tuple((block, Reason.OK if rng.random() < 0.8 else rng.choice(BAD_READS)) for block in blocks)


def progress(bench: Bench, rng: Random) -> tuple[tuple[int, int], ...]:
    blocks = [block for block in range(bench.machine.blocks) if rng.random() < 0.7]
    return tuple((block, rng.randint(0, bench.machine.window.layers)) for block in blocks)


def sent(layers: int, rng: Random) -> Event:
    return ("sent", rng.randrange(layers), rng.choice((Reason.OK, Reason.OK, Reason.OK, Reason.PEER_LOST)))
