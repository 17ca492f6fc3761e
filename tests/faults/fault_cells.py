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

BETWEEN_NODES = frozenset({"stream", "push", "assemble", "part"})
"""Kinds of a request that two nodes serve; the others are one node's own."""

UNREACHABLE: Mapping[tuple[str, str, str], str] = {
    ("part", "WAITING", "DE"): "a part of the decode node has the slots of its DE buffer from the beginning",
}
"""(machine, state, path) that no request can be in, and why. The other path has a cell in its place."""


class Process(Enum):
    PE_DAEMON = "PE daemon"
    DE_DAEMON = "DE daemon"
    PE_ENGINE = "PE engine"
    DE_ENGINE = "DE engine"
    PE_DEVICES = "PE devices"
    DE_DEVICES = "DE devices"

    @property
    def side(self) -> str:
        return self.value[:2].lower()

    @property
    def incidents(self) -> list[Incident]:
        """What can happen to it."""
        is_device = self.value.endswith("devices")
        return [incident for incident in Incident if (incident in DEVICE_INCIDENTS) is is_device]

    @property
    def is_daemon(self) -> bool:
        return self.value.endswith("daemon")


class Incident(Enum):
    """What happens to a process.

    CUT: an engine's companion socket, a daemon's connections. DEADLINE: the time of the requests that the daemon answers
    passes; the engine's own patience does, and it drops its calls. CANCEL: an engine says Cancel; a daemon is asked for a
    higher attempt. Of a node's devices, its storage and its transports: completions that come too late for the request's
    deadline (LOSE), late (LATE), twice (DUPLICATE), or say that less was moved (SHORT).
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


DEVICE_INCIDENTS = frozenset({Incident.LOSE, Incident.LATE, Incident.DUPLICATE, Incident.SHORT})


@dataclass(frozen=True)
class Cell:
    """`path`: which node reads the hit blocks. It alternates, so that each state of each machine meets both."""

    process: Process
    incident: Incident
    machine: str
    state: str
    path: str

    @property
    def name(self) -> str:
        path = f"/{self.path} read" if self.machine in BETWEEN_NODES else ""
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
    return found


def all_states() -> Iterator[tuple[str, str]]:
    """(kind, state) of all machines."""
    for machine, states in sorted(state_enums().items()):
        for state in states:
            yield machine, state.name


def all_cells(*, both_paths: bool = False) -> list[Cell]:
    found = []
    for number, (machine, state) in enumerate(all_states()):
        for row, process in enumerate(Process):
            for column, incident in enumerate(process.incidents):
                first = (number + row + column) % 2
                paths = sorted(("PE", "DE")[:: 1 - 2 * first], key=lambda path: (machine, state, path) in UNREACHABLE)
                count = 2 if both_paths and machine in BETWEEN_NODES else 1
                found += [Cell(process, incident, machine, state, path) for path in paths[:count]]
    return found
