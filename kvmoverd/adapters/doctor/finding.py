"""What a check sees, and what it says."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from kvmoverd.adapters.sysfs.tree import Tree
from kvmoverd.core.qos import KV_LANE, Marks

CHECK_S = 5.0
"""How long a check may take that does not say otherwise."""


class Status(enum.Enum):
    """The values are those of the JSON."""

    OK = "ok"
    WARN = "warn"
    """It works, but slower or less safely than it could."""
    FAIL = "fail"
    """What the config asks for does not work, or the lane does not act."""
    SKIP = "skip"
    """Not there, not needed, or not readable for this user: `found` says which."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`remedy` is empty only where there is nothing to do."""

    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the node is to do, out of its config. Without one `transport` is empty, and nothing is asked for.

    `listen_hosts`: where TCP data channels are to be had, or are told to others. `marks`: of every class, by its name;
    `storage_kinds` and `storage_paths`: of each root.
    """

    transport: str = ""
    local: str = ""
    pool_bytes: int = 0
    shared_pool: bool = False
    listen_hosts: tuple[str, ...] = ()
    dscp: int = 8
    so_priority: int = 1
    marks: Mapping[str, Marks] = field(default_factory=lambda: {"all": KV_LANE})
    devices: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    gid_index: int = -1
    gpus: Mapping[str, str] = field(default_factory=dict)
    storage_kinds: tuple[str, ...] = ()
    storage_paths: tuple[str, ...] = ()

    @property
    def verbs(self) -> bool:
        return "verbs" in (self.transport, self.local)

    @property
    def tcp(self) -> bool:
        """Asked for, or what would be if nothing is said."""
        return self.transport in ("", "tcp")

    def takes(self, device: str, port: int) -> bool:
        """Is this port one of the CNICs?"""
        names = {device, f"{device}:{port}"}
        return not names & set(self.exclude) and (not self.devices or bool(names & set(self.devices)))


@dataclass(frozen=True, slots=True)
class Look:
    """`tree`: the machine; `watch_s`: how long counters are watched, 0: read once."""

    tree: Tree
    wanted: Wanted
    watch_s: float = 0.0


Findings: TypeAlias = Iterable[Finding]


@dataclass(frozen=True, slots=True)
class Check:
    """`run` gives at least one finding; it may raise, which is a failure in the error's words, and may take `limit_s`.

    `watches`: it waits for `Look.watch_s` besides.
    """

    name: str
    run: Callable[[Look], Findings]
    limit_s: float = CHECK_S
    watches: bool = False


def ok(found: str) -> Finding:
    return Finding(Status.OK, found)


def warn(found: str, remedy: str) -> Finding:
    return Finding(Status.WARN, found, remedy)


def fail(found: str, remedy: str) -> Finding:
    return Finding(Status.FAIL, found, remedy)


def skip(found: str, remedy: str = "") -> Finding:
    return Finding(Status.SKIP, found, remedy)


def fail_if(wanted: bool, found: str, remedy: str) -> Finding:
    """A failure where the config asks for it, else a warning."""
    return fail(found, remedy) if wanted else warn(found, remedy)
