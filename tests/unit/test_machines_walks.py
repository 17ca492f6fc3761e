"""Seeded walks: thousands of schedules of sensible and senseless events; completions lost, late, twice, out of order.

The bench checks every step. A failure prints the kind, the seed and all that was said; `walk(kind, seed)` repeats it.
"""

from __future__ import annotations

from random import Random

import pytest
from machine_kind import Kind
from machines_kinds import KINDS
from machines_kit import Bench, failing
from machines_words import Event, transcript
from markers import slow_only

from kvmoverd.core.errors import BadRequest, NotWhole, UnknownRequest
from kvmoverd.core.status import Reason

WALKS = [250, *slow_only([1500])]
STEPS_MAX = 60
STOPS = (Reason.CANCELLED, Reason.DEADLINE, Reason.ENGINE_GONE, Reason.PEER_LOST, Reason.SHUTTING_DOWN)


def walk(kind: Kind, seed: int) -> set[str]:
    """One schedule, from the start to the end of everything; the names of the states it went through."""
    rng = Random(f"{kind.name} {seed}")
    bench = kind.random(rng)
    seen = {bench.state_name}
    try:
        if hasattr(bench.machine, "start"):
            bench.give(("start",))
        for _ in range(rng.randint(0, STEPS_MAX)):
            _give(bench, _next(kind, bench, rng))
            seen.add(bench.state_name)
        seen |= _end(kind, bench, rng)
    except AssertionError as error:
        raise AssertionError(f"{kind.name}, seed {seed}: {error}\nsaid: {transcript(bench.history)}") from error
    return seen


def _give(bench: Bench, event: Event) -> None:
    try:
        bench.give(event)
    except (BadRequest, NotWhole, UnknownRequest):
        # Only what an engine or a peer says may be refused; the bench has checked that the machine did not change.
        assert event[0] in ("computed", "deliver", "prefix"), f"{event} was refused"


def _next(kind: Kind, bench: Bench, rng: Random) -> Event:
    dice = rng.random()
    owed = bench.owed()
    if dice < 0.45 and owed:
        event = _in_ranges(bench, rng.choice(owed), rng)
        return failing(event) if rng.random() < 0.06 else event
    if dice < 0.55:
        again = rng.choice(bench.history) if bench.history else ("stop", Reason.CANCELLED)
        return kind.words(bench, rng) if again[0] in ("start", "stop", "part_failed") else again
    if dice < 0.97:
        return kind.words(bench, rng)
    return ("stop", rng.choice(STOPS)) if rng.random() < 0.6 else ("quiesce_timeout",)


def _in_ranges(bench: Bench, event: Event, rng: Random) -> Event:
    """Blocks of parts seldom come whole: so much of them is there that others may still be asked for the rest."""
    if not bench.is_part or event[0] != "blocks" or rng.random() < 0.4:
        return event
    return "layers", tuple((block, rng.randint(1, bench.layers)) for block, _ in event[1])


def _end(kind: Kind, bench: Bench, rng: Random) -> set[str]:
    """Stops; what is under way comes back in any order, good or bad, late or after the timeout; noise goes on."""
    bench.give(("stop", rng.choice(STOPS)))
    seen = {bench.state_name}
    if rng.random() < 0.5:
        bench.give(("quiesce_timeout",))
        seen.add(bench.state_name)
    while owed := bench.owed():
        event = rng.choice(owed)
        if rng.random() < 0.2 and event != ("quiet",):
            event = failing(event)
        _give(bench, event)
        _give(bench, kind.words(bench, rng))
        seen.add(bench.state_name)
    bench.check_over()
    return seen


@pytest.mark.parametrize("walks", WALKS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_random_schedules_keep_the_books_and_reach_every_state(kind: Kind, walks: int) -> None:
    seen: set[str] = set()
    for seed in range(walks):
        seen |= walk(kind, seed)
    assert seen == {state.name for state in kind.states}
