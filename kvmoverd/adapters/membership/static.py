"""Membership port over a fixed list, that of `[[peers]]`."""

from __future__ import annotations

from collections.abc import Mapping


class StaticMembership:
    """Nodes by name, each at one `host:port`; nothing changes after the start."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._addresses = dict(addresses)

    def address_of(self, node: str) -> str | None:
        return self._addresses.get(node)

    def nodes(self) -> list[str]:
        """In the order of the list."""
        return list(self._addresses)
