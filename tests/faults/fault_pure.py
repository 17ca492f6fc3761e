"""The machines alone, by the thousand: every state, every way in which a request ends, every fault of a completion.

Seeded: a failure names its cell and its seed, and `walk(cell, seed)` repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from fault_gates import TWISTS
from machine_kind import Kind
from machines_kinds import KINDS
from machines_kit import Bench, failing
from machines_words import Event, picture, transcript

from kvmoverd.core.errors import BadRequest, NotWhole, UnknownRequest
from kvmoverd.core.machines.part import PartMachine
from kvmoverd.core.status import Reason

WALKS_PER_CELL = 4
NOISE_MAX = 6
REFUSALS = (BadRequest, NotWhole, UnknownRequest)
COMPLETIONS = ("sent", "written", "blocks", "slots", "layer")

STOPS: Mapping[str, Reason | None] = {
    "nothing": None,
    "cancel": Reason.CANCELLED,
    "deadline": Reason.DEADLINE,
    "engine gone": Reason.ENGINE_GONE,
    "peer lost": Reason.PEER_LOST,
    "higher attempt": Reason.STALE_ATTEMPT,
    "shutdown": Reason.SHUTTING_DOWN,
}
"""What ends the request, before the fault shows."""


@dataclass(frozen=True)
class PureCell:
    kind: Kind
    state: str
    stop: str
    fault: str

    @property
    def name(self) -> str:
        return f"pure/{self.stop}/{self.kind.name}/{self.state}/{self.fault}"


def pure_cells() -> list[PureCell]:
    return [
        PureCell(kind, state.name, stop, fault)
        for kind in KINDS
        for state in kind.states
        for stop in STOPS
        for fault in TWISTS
    ]


def walk(cell: PureCell, seed: int) -> None:
    """One schedule. Raises `AssertionError` with the cell, the seed and all that was said."""
    rng = Random(f"{cell.name} {seed}")
    scripts = next(scripts for state, scripts in cell.kind.reach.items() if state.name == cell.state)
    bench = cell.kind.bench(rng.choice(scripts))
    try:
        assert bench.state_name == cell.state, f"the way in leads to {bench.state_name}"
        _play(cell, bench, rng)
    except AssertionError as error:
        raise AssertionError(f"{cell.name}, seed {seed}: {error}\nsaid: {transcript(bench.history)}") from error


def _play(cell: PureCell, bench: Bench, rng: Random) -> None:
    reached = list(bench.history)
    if rng.random() < 0.5:
        _noise(cell, bench, rng)
    reason = STOPS[cell.stop]
    if reason is not None:
        bench.give(("stop", reason, "for the test"))
    _FAULTS[cell.fault](cell, bench, rng, reached)
    bench.give(("stop", Reason.CANCELLED))
    bench.finish_up()
    bench.check_over()


def _noise(cell: PureCell, bench: Bench, rng: Random) -> None:
    """Sensible and senseless words: what is under way goes on beside the fault."""
    for _ in range(rng.randint(1, NOISE_MAX)):
        owed = bench.owed()
        _give(bench, rng.choice(owed) if owed and rng.random() < 0.5 else cell.kind.words(bench, rng))


def _give(bench: Bench, event: Event) -> None:
    try:
        bench.give(event)
    except REFUSALS:
        assert event[0] in ("computed", "deliver", "prefix"), f"{event} was refused"


def _lose(cell: PureCell, bench: Bench, rng: Random, reached: list[Event]) -> None:
    """Some completions never come: whoever has stopped is told all the same, and the slots are kept until the device goes."""
    lost = [event for event in bench.owed() if rng.random() < 0.6]
    for event in bench.owed():
        if event not in lost and event in bench.owed():
            _give(bench, event)
    is_stopped = STOPS[cell.stop] is not None
    bench.give(("quiesce_timeout",))
    if is_stopped and not isinstance(bench.machine, PartMachine):
        bench.end()
    if bench.sends | bench.writes:
        assert not bench.ended, "ended while a device may still touch its memory"


def _late(cell: PureCell, bench: Bench, rng: Random, reached: list[Event]) -> None:
    """What was under way comes back in any order, long after it was waited for."""
    under_way = bench.owed()
    bench.give(("quiesce_timeout",))
    rng.shuffle(under_way)
    for event in under_way:
        _give(bench, event)


def _duplicate(cell: PureCell, bench: Bench, rng: Random, reached: list[Event]) -> None:
    """Every completion comes twice, and those of the way in once more: the second changes nothing."""
    for event in [*bench.owed(), *reached]:
        if event[0] not in COMPLETIONS:
            continue
        if event in bench.owed():
            _give(bench, event)
        before = picture(bench.machine)
        assert bench.give(event) == [], f"{event} came twice and was answered"
        assert picture(bench.machine) == before, f"{event} came twice and was remembered"


def _short(cell: PureCell, bench: Bench, rng: Random, reached: list[Event]) -> None:
    """Some of what is under way moved less than it should have."""
    for event in bench.owed():
        if rng.random() < 0.6:
            _give(bench, failing(event))


_FAULTS: Mapping[str, Callable[[PureCell, Bench, Random, list[Event]], None]] = {
    "lose": _lose,
    "late": _late,
    "duplicate": _duplicate,
    "short": _short,
}


def run_pure(cells: Sequence[PureCell], seed: int = 0, walks: int = WALKS_PER_CELL) -> list[tuple[str, str]]:
    """(cell, what failed) of each cell in which a walk failed."""
    found = []
    for cell in cells:
        for number in range(walks):
            try:
                walk(cell, seed + number)
            except AssertionError as error:
                found.append((cell.name, str(error)))
                break
    return found
