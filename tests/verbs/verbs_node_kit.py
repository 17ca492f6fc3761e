"""Nodes whose CNICs are fakes: real daemons in one process, with links over gRPC and every fault of the fake wire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rpc_kit import HERE, LAYERS, SEGMENTS, THERE, Engine, Kit, end_of, free_port, rpc_kit
from verbs_kit import FakeFabric, FakeWire

from kvmover_proto import common_pb2
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
async def verbs_nodes(
    home: Path, tables: dict[str, dict[str, Any]], **changed: dict[str, Any]
) -> AsyncIterator[dict[str, Kit]]:
    """Nodes by name, each the others' peer, with these tables [transport]. `changed`: of all, as for `rpc_kit`."""
    ports = {name: free_port() for name in tables}
    async with AsyncExitStack() as stack:
        kits = {}
        for name, table in tables.items():
            peers = [{"name": peer, "address": f"127.0.0.1:{port}"} for peer, port in ports.items() if peer != name]
            made = rpc_kit(home, name=name, port=ports[name], peers=peers, transport=table, **changed)
            kits[name] = await stack.enter_async_context(made)
        yield kits


@asynccontextmanager
async def verbs_pair(home: Path, here: dict[str, Any], there: dict[str, Any]) -> AsyncIterator[tuple[Kit, Kit]]:
    """A prefill node `here` and a decode node `there`, each the other's peer, with these tables [transport]."""
    async with verbs_nodes(home, {HERE: here, THERE: there}) as kits:
        yield kits[HERE], kits[THERE]


def fill(engine: Engine, pages: list[int], seed: int) -> None:
    """Bytes of their own for each page, layer and segment."""
    for page, number in zip(pages, range(len(pages)), strict=True):
        for layer in range(LAYERS):
            for segment in range(len(SEGMENTS)):
                page_of(engine, layer, segment, page)[:] = expected(seed, number, layer, segment)


def expected(seed: int, number: int, layer: int, segment: int) -> Any:
    random = np.random.default_rng([seed, number, layer, segment])
    return random.integers(0, 256, SEGMENTS[segment], dtype=np.uint8)


def page_of(engine: Engine, layer: int, segment: int, page: int) -> Any:
    assert engine.geometry is not None
    return engine.memories[-1].page_view(engine.geometry, layer, segment, page)


def check(engine: Engine, pages: list[int], seeds: list[tuple[int, int]]) -> None:
    """Page i holds what `fill` wrote with seed and number i."""
    for page, (seed, number) in zip(pages, seeds, strict=True):
        for layer in range(LAYERS):
            for segment in range(len(SEGMENTS)):
                assert (page_of(engine, layer, segment, page) == expected(seed, number, layer, segment)).all(), (
                    page,
                    layer,
                    segment,
                )


async def store(engine: Engine, seed: int, blocks: int = 2) -> None:
    """The first blocks of the usual chain, durably; the last pages of the region are used for it."""
    pages = list(range(engine.pages - blocks, engine.pages))
    fill(engine, pages, seed)
    request = engine.store_request(
        f"store-{next(engine.kit.ids)}", blocks=blocks, pages=common_pb2.PageSet(pages=pages)
    )
    assert (await end_of(engine.ask("StoreBlocks", request))).status.reason == common_pb2.OK


async def everything_is_home(*kits: Kit) -> None:
    for kit in kits:
        await kit.everything_is_home()
