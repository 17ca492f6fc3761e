"""Membership port over a fixed list, that of `[[peers]]`."""

from __future__ import annotations

from collections.abc import Mapping

from kvmoverd.ports.membership import Member, MembershipState, Told


class StaticMembership:
    """Nodes by name, each at one `host:port`; nothing changes after the start, so that nobody is told of anything."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._addresses = dict(addresses)

    async def start(self, own: Member | None) -> None:
        pass

    def address_of(self, node: str) -> str | None:
        return self._addresses.get(node)

    def nodes(self) -> list[str]:
        """In the order of the list."""
        return list(self._addresses)

    def member(self, node: str) -> Member | None:
        address = self._addresses.get(node)
        return None if address is None else Member(node, address)

    def watch(self, told: Told) -> None:
        pass

    def scheduler(self) -> str:
        return ""

    def state(self) -> MembershipState:
        return MembershipState("static", len(self._addresses))

    async def close(self) -> None:
        pass
