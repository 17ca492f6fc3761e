"""What the scheduler holds at most, and how long it waits for whom."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvmoverd.core.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Limits:
    """All above 0, else `BadRequest`. Requests of all models together; times in nanoseconds."""

    waiting_max: int = 100_000
    """Requests that lack an engine. The next one is told when to try again."""
    live_max: int = 400_000
    """Requests that are not done: waiting ones and those that engines have."""
    ended_max: int = 100_000
    """Ended requests that are remembered, so that one that is submitted again is not done twice."""
    engines_max: int = 100_000
    nodes_max: int = 20_000
    deliveries_max: int = 1_024
    """In the answer to one pull; the rest comes with the next."""
    told_max: int = 65_536
    """Deliveries that a leader may leave unheard: one that pulls and takes none is as good as dead."""
    fences_max: int = 4_096
    """In the answer to one report of a node; the rest comes with the next."""
    attempts_max: int = 8
    """How often a request is given out: one whose engines die each time may be why."""
    wait_max_ns: int = 600_000_000_000
    """For an engine, after which a request fails."""
    group_silent_ns: int = 5_000_000_000
    """A leader that has not pulled for so long is dead, and its engines' requests are given to others."""
    node_silent_ns: int = 2_000_000_000
    """A node's numbers are not believed after so long."""
    settle_ns: int = 2_000_000_000
    """For so long after its start a scheduler waits for leaders to say what they hold, and as long for the other leader of a
    request of which one is known."""
    read_lag_ns: int = 200_000_000
    """From an assignment until a node's own queue shows its reads: a leader's pull, a `Reserve` and a report."""

    def __post_init__(self) -> None:
        for item in fields(self):
            number = getattr(self, item.name)
            if not 0 < number <= 1 << 62:
                raise BadRequest(f"{item.name} is {number}, must be 1 to {1 << 62}")
