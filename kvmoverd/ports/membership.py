"""Membership port: which nodes there are, where their node-to-node API listens, and which scheduler leads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Member:
    """A start of a node's daemon. `address`: `host:port` of its node-to-node API. `boot_id`: empty where nobody knows it; another
    one under the same name, or at the same address, is another member."""

    node: str
    address: str
    boot_id: str = ""


@dataclass(frozen=True, slots=True)
class MembershipState:
    """How well the members are known. `silent_s`: for so long nothing can be known of changes, 0 while they are seen. `is_told`:
    the others can see this process, where it is to be seen. `why`: of what is not as it should be, else empty."""

    kind: str
    members: int
    silent_s: float = 0.0
    is_told: bool = True
    why: str = ""


Told = Callable[[Member, bool], None]
"""Of a member that is there (True) or gone. One that starts anew is gone first, and then there."""


class Membership(Protocol):
    async def start(self, own: Member | None) -> None:
        """The others are known after it, and know of `own`, which is this daemon; None: of nobody. Raises `ConfigError`."""

    def address_of(self, node: str) -> str | None:
        """`host:port` of a node's node-to-node API, None when there is no such node."""

    def nodes(self) -> list[str]: ...

    def member(self, node: str) -> Member | None:
        """None when there is no such node."""

    def watch(self, told: Told) -> None:
        """Told of every change from here on, on the loop that it was made on."""

    def scheduler(self) -> str:
        """Address of the scheduler that leads; empty: not known."""

    def state(self) -> MembershipState: ...

    async def close(self) -> None:
        """In bounded time; the node that it was told of is gone for the others."""
