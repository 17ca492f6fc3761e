"""Every state of every machine x every incident: the books are closed once, whatever happens and whenever."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from machine_kind import Kind
from machines_kinds import KINDS
from machines_kit import Bench, failing
from machines_words import Event, parse, picture, say, transcript

from kvmoverd.core.errors import NotWhole, UnknownRequest
from kvmoverd.core.machines import actions as act
from kvmoverd.core.machines.part import PartMachine
from kvmoverd.core.status import Reason

CLOSING = ("DRAINING", "STORING", "UNQUIET", "ENDED", "LINGERING")
"""The caller's end is decided in these states: a later stop changes nothing."""

EVERYTHING = (
    "found 0=OK 1=MISS",
    "slots",
    "no_slots POOL_EXHAUSTED full",
    "reserved",
    "reserve_failed NO_SPACE full",
    "part_failed 1 PEER_LOST gone",
    "part_prefix 1 2 -",
    "part_layer 1 0",
    "part_ended 1",
    "part_stalled 1",
    "part_fenced 1",
    "move 1 1 de",
    "gave_up 1 1",
    "quiet",
    "prefix_set",
    "attached",
    "hits_pending",
    "helped_layer 0 0",
    "taken_over 0",
    "part_begun 1",
    "part_over 1",
    "credit 2 3",
    "give_up 0 0",
    "give_rest 0 0",
    "give_rest 0 1",
    "assemble",
    "assembled 0 OK",
    "assembled 1 IO_ERROR",
    "layer 0",
    "layer 2",
    "computed 3",
    "pushed 3",
    "blocks 0=OK 1=CORRUPT",
    "sent 0 OK",
    "sent 1 IO_ERROR",
    "sent 2 OK",
    "written 0 OK",
    "written 1 NO_SPACE",
    "stop CANCELLED",
    "stop SHUTTING_DOWN",
    "quiesce_timeout",
)


def _stop(reason: Reason) -> Callable[[Bench], None]:
    def stop(bench: Bench) -> None:
        decided = bench.state_name in CLOSING
        bench.give(("stop", reason, "for the test"))
        bench.finish_up()
        assert decided or bench.end().reason is reason

    return stop


def _fail(bench: Bench) -> None:
    for event in bench.owed():
        bench.give(failing(event))


def _fail_last(bench: Bench) -> None:
    for event in bench.owed()[-1:]:
        bench.give(failing(event))
    bench.finish_up()


def _repeat(bench: Bench, events: list[Event]) -> None:
    """Whatever was said is said again: nothing is answered, nothing is remembered."""
    for event in events:
        before = picture(bench.machine)
        try:
            assert bench.give(event) == [], f"{say(event)} again, after {transcript(bench.history)}"
        except (NotWhole, UnknownRequest):
            assert event == ("deliver",)
        assert picture(bench.machine) == before, f"{say(event)} again, after {transcript(bench.history)}"


def _duplicate(bench: Bench) -> None:
    said = [event for event in bench.history if event[0] not in ("start", "give_up", "give_rest")]
    completions = [event for event in said if event[0] in ("sent", "assembled", "written", "blocks", "slots")]
    _repeat(bench, [*said, *completions, *(failing(event) for event in completions)])


def _late(bench: Bench) -> None:
    under_way = bench.owed()
    bench.give(("stop", Reason.CANCELLED))
    bench.finish_up()
    bench.check_over()
    said = [event for event in bench.history if event[0] != "start"]
    _repeat(bench, [*under_way, *(failing(event) for event in under_way), *said])


def _quiesce_timeout(bench: Bench) -> None:
    decided = bench.state_name in CLOSING
    bench.give(("stop", Reason.DEADLINE, "10 s passed"))
    under_way = bool(bench.sends or "quiet" in bench.asked)
    told = bench.give(("quiesce_timeout",))
    if under_way and not decided and not isinstance(bench.machine, PartMachine):
        assert [action.end.pages_quiet for action in told if isinstance(action, act.Finish)] == [False]
    bench.finish_up()


INCIDENTS: dict[str, Callable[[Bench], None]] = {
    "cancel": _stop(Reason.CANCELLED),
    "deadline": _stop(Reason.DEADLINE),
    "engine gone": _stop(Reason.ENGINE_GONE),
    "shutdown": _stop(Reason.SHUTTING_DOWN),
    "all under way fails": _fail,
    "one under way fails": _fail_last,
    "late completions": _late,
    "duplicates": _duplicate,
    "quiesce timeout": _quiesce_timeout,
}


def _cases() -> Iterator[object]:
    for kind in KINDS:
        for state, scripts in kind.reach.items():
            for number, script in enumerate(scripts):
                for incident in INCIDENTS:
                    name = f"{kind.name}-{state.name.lower()}-{number}-{incident.replace(' ', '_')}"
                    yield pytest.param(kind, script, incident, id=name)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_state_has_a_way_in(kind: Kind) -> None:
    assert set(kind.reach) == set(kind.states)
    for state, scripts in kind.reach.items():
        for script in scripts:
            assert kind.bench(script).machine.state is state, script


@pytest.mark.parametrize(("kind", "script", "incident"), list(_cases()))
def test_the_books_are_closed_once(kind: Kind, script: str, incident: str) -> None:
    bench = kind.bench(script)
    INCIDENTS[incident](bench)
    bench.give(("stop", Reason.CANCELLED))
    bench.finish_up()
    bench.check_over()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_nothing_is_answered_after_the_end(kind: Kind) -> None:
    for scripts in kind.reach.values():
        for script in scripts:
            bench = kind.bench(script)
            bench.give(("stop", Reason.CANCELLED))
            bench.finish_up()
            for event in map(parse, EVERYTHING):
                if hasattr(bench.machine, f"on_{event[0]}"):
                    assert bench.give(event) == [], f"{say(event)} after {transcript(bench.history)}"
            bench.check_over()
