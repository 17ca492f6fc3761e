"""The cells of the matrix: every process x every incident x every state of every kind of machine.

The kinds and their states are found in `kvmoverd.core.machines`, so that a new one has cells before it has a recipe.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from kvmoverd.core import machines

HELPER = "h0"
"""The side of the third node: its name in the cluster."""
PATHS = ("PE", "DE", "split", "helped")
"""Who reads the hit blocks: the prefill node, the decode node, both, or a third node beside them.

With several readers the cell is about the part of the last one: the decode node's, the third node's.
"""


class MoveState(Enum):
    """A part that changes its reader, or whose last layers do. No machine has these states: a stream's books of parts have."""

    GIVING_UP = "giving up"
    FENCING = "fencing"
    GIVING_REST = "giving the layers that it has not begun"
    RESTING = "those are read by another"


BETWEEN_NODES = frozenset({"stream", "push", "assemble", "part", "move"})
"""Kinds of a request that several nodes serve; the others are one node's own."""

ALONE, AT_ONCE = "a part that is the only one does not hold", "a part of this very node answers at once"
BUFFER = "a part of the decode node has the slots of its DE buffer from the beginning"
OWN = "only a third node's part is fenced while its request goes on, or one that its node had no room for"
UNREACHABLE: Mapping[tuple[str, str, str], str] = {
    ("part", "WAITING", "DE"): BUFFER,
    ("part", "WAITING", "split"): BUFFER,
    ("part", "HOLDING", "PE"): ALONE,
    ("part", "HOLDING", "DE"): ALONE,
    ("move", "GIVING_UP", "PE"): AT_ONCE,
    ("move", "GIVING_REST", "PE"): AT_ONCE,
    ("move", "FENCING", "PE"): OWN,
    ("move", "FENCING", "DE"): OWN,
    ("move", "FENCING", "split"): OWN,
}
"""(machine, state, path) that no request can be in, and why. Another path has a cell in its place."""


class Process(Enum):
    PE_DAEMON = "PE daemon"
    DE_DAEMON = "DE daemon"
    PE_ENGINE = "PE engine"
    DE_ENGINE = "DE engine"
    PE_DEVICES = "PE devices"
    DE_DEVICES = "DE devices"
    HELPER_DAEMON = "helper daemon"
    HELPER_DEVICES = "helper devices"

    @property
    def side(self) -> str:
        return {"PE": "pe", "DE": "de"}.get(self.value[:2], HELPER)

    @property
    def incidents(self) -> list[Incident]:
        """What can happen to it."""
        if self is Process.HELPER_DAEMON:
            return [Incident.KILL, Incident.STOP, Incident.CUT]
        if self.value.endswith("devices"):
            return [incident for incident in Incident if incident in DEVICE_INCIDENTS]
        return [incident for incident in Incident if incident not in DEVICE_INCIDENTS or self._may_be_slow(incident)]

    def _may_be_slow(self, incident: Incident) -> bool:
        return incident is Incident.SLOW and self.value.endswith("engine")

    def paths(self, machine: str) -> tuple[str, ...]:
        """The paths on which it has to do with machines of this kind; none: it has nothing to do with them."""
        if self.side != HELPER:
            return PATHS if machine in BETWEEN_NODES else PATHS[:1]
        return PATHS[-1:] if machine in BETWEEN_NODES else ()

    @property
    def is_daemon(self) -> bool:
        return self.value.endswith("daemon")


class Incident(Enum):
    """What happens to a process.

    CUT: an engine's companion socket, a daemon's connections. DEADLINE: the time of the requests that the daemon answers
    passes; the engine's own patience does, and it drops its calls. CANCEL: an engine says Cancel; a daemon is asked for a
    higher attempt. Of a node's devices, its storage and its transports: completions that come too late for the request's
    deadline (LOSE), late (LATE), twice (DUPLICATE), or say that less was moved (SHORT). SLOW: storage at a hundredth of its
    rate, an engine that takes its time with every layer.
    """

    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    CUT = "socket cut"
    DEADLINE = "deadline"
    CANCEL = "cancel"
    LOSE = "lose"
    LATE = "late"
    DUPLICATE = "duplicate"
    SHORT = "short"
    SLOW = "slow"


DEVICE_INCIDENTS = frozenset({Incident.LOSE, Incident.LATE, Incident.DUPLICATE, Incident.SHORT, Incident.SLOW})


@dataclass(frozen=True)
class Cell:
    """`path`: who reads the hit blocks. It alternates, so that each state of each machine meets all."""

    process: Process
    incident: Incident
    machine: str
    state: str
    path: str

    @property
    def name(self) -> str:
        path = f"/{self.path}{' read' * self.path.isupper()}" if self.machine in BETWEEN_NODES else ""
        return f"{self.process.value}/{self.incident.value}/{self.machine}/{self.state}{path}"


def state_enums() -> dict[str, type[Enum]]:
    """Kind of machine -> its states, of every module of machines."""
    found: dict[str, type[Enum]] = {}
    for module in pkgutil.iter_modules(machines.__path__):
        loaded = importlib.import_module(f"{machines.__name__}.{module.name}")
        for name, value in vars(loaded).items():
            is_enum = isinstance(value, type) and issubclass(value, Enum) and value.__module__ == loaded.__name__
            if is_enum and name.endswith("State"):
                found[name.removesuffix("State").lower()] = value
    return found | {"move": MoveState}


def all_states() -> Iterator[tuple[str, str]]:
    """(kind, state) of all machines, and of what moves between them."""
    for machine, states in sorted(state_enums().items()):
        for state in states:
            yield machine, state.name


def all_cells(*, all_paths: bool = False) -> list[Cell]:
    found = []
    for number, (machine, state) in enumerate(all_states()):
        for row, process in enumerate(Process):
            for column, incident in enumerate(process.incidents):
                paths = process.paths(machine)
                first = (number + row + column) % max(1, len(paths))
                turned = sorted(paths[first:] + paths[:first], key=lambda path: (machine, state, path) in UNREACHABLE)
                count = len(paths) if all_paths else 1
                found += [Cell(process, incident, machine, state, path) for path in turned[:count]]
    return found
