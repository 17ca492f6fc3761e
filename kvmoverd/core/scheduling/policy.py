"""What a policy is asked: it keeps the queues, and gives requests to engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from kvmoverd.core.scheduling.explain import EngineWhy, PathWhy
from kvmoverd.core.scheduling.reports import Role
from kvmoverd.core.scheduling.requests import Entry, ReadChoice
from kvmoverd.core.scheduling.state import Engine, Group, Model, Node

GIVEN_MAX = 1_024
"""Requests that one call gives out at most, so that others are heard in between; the rest goes with the next pull."""


class Desk(Protocol):
    """What a policy works on: the engines of one model, and the books that note what it gives to whom."""

    model: Model
    nodes: dict[str, Node]
    """All of the cluster, by name."""

    def engines(self, role: Role) -> list[Engine]:
        """All: of each group the first, by the groups' names, then of each the second. The list is the desk's own."""

    def groups(self, role: Role) -> Iterable[Group]:
        """All, in no order that means anything."""

    def give_prefill(self, entry: Entry, engine: Engine, why: EngineWhy, now_ns: int) -> None:
        """This engine prefills it. With both engines known it is assigned, and the policy's `read` is asked."""

    def give_decode(self, entry: Entry, engine: Engine, why: EngineWhy, now_ns: int) -> None:
        """This engine decodes it."""


class Policy(Protocol):
    """Chooses engines for the requests of one model, and who reads. Pure: the same calls in the same order choose the same."""

    name: str

    def submitted(self, entry: Entry, now_ns: int, *, again: bool) -> None:
        """It waits from now on; `again`: it was given to an engine that is lost, and goes before those that have waited less."""

    def withdrawn(self, entry: Entry) -> None:
        """It waits no longer: its client has left it, it waited too long, or one of its engines is lost."""

    def prefill_ended(self, entry: Entry) -> None:
        """Its prefill is done, or no more that engine's."""

    def pulled(self, group: Group, now_ns: int) -> None:
        """The group's numbers are new, and its leader waits for what it gets."""

    def lost(self, group: Group) -> None:
        """The group is gone, or one of its engines. What was given to it is submitted again, or withdrawn, after this."""

    def read(
        self, prefill: Node, decode: Node, hit_bytes: int, now_ns: int, entry: Entry | None
    ) -> tuple[ReadChoice, PathWhy]:
        """Both nodes are known: who reads so many bytes. `entry`: of which request; None for one that others have placed."""


PolicyMaker = Callable[[Desk], Policy]
