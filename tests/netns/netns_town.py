"""Daemons in network namespaces of their own, joined by a bridge, and ways between them that can be cut.

A way is cut as a cable is: what is sent over it goes nowhere, and nobody is told. The two nodes are given a wrong hardware
address of each other, which needs no more of the kernel than the namespaces themselves.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from cluster import NAMES
from fault_control import GatedCluster, GatedNode

NOWHERE = "02:00:00:00:00:99"
RUN_S = 10.0


class NoNamespaces(Exception):
    """This machine does not allow them."""


def ip(*words: str) -> None:
    """Raises `OSError` with what the tool says."""
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=RUN_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"ip {' '.join(words)}: {error}") from error
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Town:
    """A bridge, and one namespace for each name, with an address of a private network."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.mark = f"kv{os.getpid() % 100_000}"
        self.network = f"10.{211 + os.getpid() % 40}.{os.getpid() // 40 % 256}"
        self.bridge = f"{self.mark}b"
        self.ports = [f"{self.mark}p{number}" for number in range(len(self.names))]

    def build(self) -> None:
        """Raises `NoNamespaces` when there can be none, `OSError` for all else; `tear_down` takes away what is there."""
        try:
            ip("link", "add", self.bridge, "type", "bridge")
            for name in self.names:
                ip("netns", "add", self.space(name))
        except OSError as error:
            raise NoNamespaces(str(error)) from error
        ip("link", "set", self.bridge, "up")
        for name, port in zip(self.names, self.ports, strict=True):
            space = self.space(name)
            ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", port, "master", self.bridge, "up")
            ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")

    def tear_down(self) -> None:
        """Ports first: those of a namespace go some time after it, and would be in the way of the next town's."""
        ports = [("link", "del", port) for port in self.ports]
        spaces = [("netns", "del", self.space(name)) for name in self.names]
        for words in (*ports, *spaces, ("link", "del", self.bridge)):
            subprocess.run(["ip", *words], capture_output=True, timeout=RUN_S, check=False)

    def space(self, name: str) -> str:
        return f"{self.mark}-{name}"

    def address(self, name: str) -> str:
        return f"{self.network}.{1 + self.names.index(name)}"

    def cut(self, one: str, other: str) -> None:
        """Between these two nothing comes through, in either direction."""
        for here, there in ((one, other), (other, one)):
            at = ("to", self.address(there), "lladdr", NOWHERE, "dev", "eth0", "nud", "permanent")
            ip("-n", self.space(here), "neigh", "replace", *at)

    def heal(self, one: str, other: str) -> None:
        for here, there in ((one, other), (other, one)):
            ip("-n", self.space(here), "neigh", "del", "to", self.address(there), "dev", "eth0")


class NetNode(GatedNode):
    """A gated daemon in a namespace."""

    town: ClassVar[Town]

    def write_config(self) -> None:
        super().write_config()
        own, mark, peers = self.config.read_text().partition("\n[[peers]]")
        text = own.replace("127.0.0.1", self.town.address(self.name)) + mark + peers
        for peer in self.peers:
            text = text.replace(f"127.0.0.1:{peer.port}", f"{self.town.address(peer.name)}:{peer.port}")
        self.config.write_text(text)

    def command(self) -> list[str]:
        return ["ip", "netns", "exec", self.town.space(self.name), *super().command()]


class NetCluster(GatedCluster):
    """Three gated daemons over one store, each in a namespace."""

    node_class = NetNode


@contextmanager
def town_of_three() -> Iterator[Town]:
    """Raises `NoNamespaces`."""
    if os.geteuid():
        raise NoNamespaces("network namespaces need root")
    town = Town(NAMES[:3])
    try:
        town.build()
        NetNode.town = town
        yield town
    finally:
        town.tear_down()
