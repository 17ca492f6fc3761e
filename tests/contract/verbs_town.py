"""Nodes on one wire, for tests of what links do: who they are, what they have said, and an end where nothing is left."""

from __future__ import annotations

from typing import Any

from transport_kit import WAIT_S, End, own_key
from verbs_kit import FakeWire
from verbs_pair import Desk, Node, fake_node

from kvmoverd.ports.transport import Route

FAR = ("b", "boot-2")


class Town:
    """A wire, a desk, and nodes on it: `near` sends to `far`."""

    def __init__(self, wire: FakeWire) -> None:
        self.wire = wire
        self.desk = Desk()
        self.nodes: list[Node] = []
        self.ends: list[End] = []

    def node(self, sender: tuple[str, str], cnics: int = 1, **settings: Any) -> tuple[Node, End]:
        node = fake_node(self.wire, self.desk, sender, cnics=cnics, **settings)
        end = End(node.transport)
        self.nodes.append(node)
        self.ends.append(end)
        return node, end

    def close(self) -> None:
        for node in self.nodes:
            assert node.transport.close(WAIT_S), "the engine's thread did not end"


def route_of(node: Node, sender: tuple[str, str] = FAR) -> Route:
    return Route(*sender, node.transport.endpoint, own_key("boot-1"))
