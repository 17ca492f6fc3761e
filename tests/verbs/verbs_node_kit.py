"""Nodes whose CNICs are fakes: real daemons in one process, with links over gRPC and every fault of the fake wire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rpc_kit import HERE, THERE, Kit, free_port, rpc_kit
from verbs_kit import FakeFabric, FakeWire

from kvmoverd import devices_verbs
from kvmoverd.adapters.transport.verbs.gids import Gid
from kvmoverd.adapters.transport.verbs.ports import LinkLayer, PortFacts

DEVICES = ("fake0", "fake1", "fake2")


def port_of(device: str, state: str = "active") -> PortFacts:
    return PortFacts(
        device=device,
        port=1,
        state=state,
        link_layer=LinkLayer.ETHERNET,
        lid=0,
        mtu_bytes=4096,
        gids=(Gid(1, bytes(10) + b"\xff\xff\x0a\x4d\x00\x01", "RoCE v2", "veth0"),),
        netdev="veth0",
        numa_node=-1,
        region_bytes_max=1 << 40,
        regions_max=1 << 20,
        requests_max=1 << 15,
        elements_max=32,
        completions_max=1 << 20,
        pairs_max=1 << 16,
        vendor_id=0,
        firmware="",
    )


class NodeFabric(FakeFabric):
    """A fake that says of itself what a real one does."""

    def __init__(self, wire: FakeWire, device: str, cnic: int) -> None:
        super().__init__(wire, f"{device}:1", cnic=cnic)
        self.facts = port_of(device)
        self.choice = SimpleNamespace(words="GID 1 of 2: ::ffff:10.77.0.1, RoCE v2, veth0")


class Fakes:
    """All CNICs that the daemons have opened, by name."""

    def __init__(self, wire: FakeWire) -> None:
        self.wire = wire
        self.opened: dict[str, NodeFabric] = {}

    def open(self, device: str, port: int, gid_index: int, *, cnic: int, retries: Any) -> NodeFabric:
        self.opened[f"{device}:{port}"] = fabric = NodeFabric(self.wire, device, cnic)
        return fabric


@contextmanager
def fake_cnics(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    """This machine has three ports, whose queue pairs are fakes on one wire."""
    with FakeWire() as wire:
        fakes = Fakes(wire)
        monkeypatch.setattr(devices_verbs, "list_ports", lambda: [port_of(device) for device in DEVICES])
        monkeypatch.setattr(devices_verbs, "open_fabric", fakes.open)
        monkeypatch.setattr(devices_verbs, "library", SimpleNamespace(load=lambda: SimpleNamespace(words="no pyverbs")))
        yield fakes


def transport(*devices: str, local: str = "shm", **more: Any) -> dict[str, Any]:
    return {"kind": "verbs", "local": local, "verbs": {"devices": list(devices), **more}}


@asynccontextmanager
async def verbs_pair(home: Path, here: dict[str, Any], there: dict[str, Any]) -> AsyncIterator[tuple[Kit, Kit]]:
    """A prefill node `here` and a decode node `there`, each the other's peer, with these tables [transport]."""
    ports = free_port(), free_port()
    peers = [
        [{"name": name, "address": f"127.0.0.1:{port}"}] for name, port in zip((THERE, HERE), ports[::-1], strict=True)
    ]
    async with (
        rpc_kit(home, name=HERE, port=ports[0], peers=peers[0], transport=here) as one,
        rpc_kit(home, name=THERE, port=ports[1], peers=peers[1], transport=there) as other,
    ):
        yield one, other
