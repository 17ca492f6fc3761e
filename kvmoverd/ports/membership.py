"""Membership port: which nodes there are and where their node-to-node API listens."""

from __future__ import annotations

from typing import Protocol


class Membership(Protocol):
    def address_of(self, node: str) -> str | None:
        """`host:port` of a node's node-to-node API, None when there is no such node."""

    def nodes(self) -> list[str]: ...
